// Mistakes and mishaps that a caller must be told of: with the argument, the value or the rank, and
// never by a crash.
#include <unistd.h>

#include <cmath>
#include <cstdlib>
#include <string>
#include <vector>

#include "tests/functional/cases/case.h"

namespace scape::cases {
namespace {

bool error_names(const std::string& what) {
  return std::string(scape_last_error()).find(what) != std::string::npos;
}

RANKED_CASE(null_results_are_refused, 1) {
  ncclComm_t comm = self.init();
  std::vector<float> buffer(256, 1.0f);
  add(buffer.data(), 256, "read", 0.25);
  all_reduce(buffer, comm);
  CHECK(scape_read_mask(buffer.data(), 256, nullptr, 4) == SCAPE_ERR_ARGUMENT);
  CHECK_SAYING(error_names("words is null"), scape_last_error());
  CHECK(scape_read_ages(buffer.data(), 256, nullptr, 256) == SCAPE_ERR_ARGUMENT);
  CHECK_SAYING(error_names("ages is null"), scape_last_error());
  CHECK(scape_read_residual(buffer.data(), 256, nullptr, 256) == SCAPE_ERR_ARGUMENT);
  CHECK_SAYING(error_names("out is null"), scape_last_error());
  CHECK(scape_read_moment(buffer.data(), 256, nullptr, 256) == SCAPE_ERR_ARGUMENT);
  CHECK_SAYING(error_names("out is null"), scape_last_error());
  std::vector<uint64_t> mask(4);
  SCAPE(scape_read_mask(buffer.data(), 256, mask.data(), mask.size()));
}

// Rank 1 is there, but does not call.
RANKED_CASE(a_rank_that_stays_away_is_named, 3) {
  ::setenv("SCAPE_TIMEOUT", "1", 1);  // before the first call, which reads it
  ncclComm_t comm = self.init();
  std::vector<float> buffer(1000, 1.0f);
  all_reduce(buffer, comm);
  if (self.rank != 1) {
    CHECK(ncclAllReduce(buffer.data(), buffer.data(), 1000, ncclFloat32, ncclSum, comm, nullptr) ==
          ncclRemoteError);
    const std::string why = ncclGetLastError(comm);
    CHECK_SAYING(why.find("SCAPE_TIMEOUT") != std::string::npos, why);
    CHECK_SAYING(why.find("; rank 1 gave no sign of life") != std::string::npos, why);
  }
  self.meet("over");
  NCCL(ncclCommAbort(comm));
}

// Replicas that step differently would drift apart; the next call tells.
RANKED_CASE(rates_that_differ_are_named, 3) {
  const ncclComm_t comm = self.init();
  constexpr size_t kCount = 5000;
  std::vector<float> gradient(kCount), param(kCount, 1);
  scape_config config = gradient_config("weights", 0.1);
  config.role = SCAPE_ROLE_FUSED;
  scape_registration registration = nullptr;
  SCAPE(scape_register(gradient.data(), kCount, SCAPE_FLOAT32, &config, &registration));
  ncclResult_t result = ncclSuccess;
  int step = 0;
  for (; step < 10 && result == ncclSuccess; ++step) {
    fill(gradient, values_of(self, step, kCount));
    result = ncclAllReduce(gradient.data(), gradient.data(), kCount, ncclFloat32, ncclAvg, comm,
                           nullptr);
    if (result != ncclSuccess) break;
    const double rate = self.rank == 1 && step == 4 ? 0.002 : 0.001;
    SCAPE(scape_adams_step(gradient.data(), kCount, param.data(), rate, 0.1, nullptr));
  }
  CHECK(step == 5);
  const std::string why = ncclGetLastError(comm);
  CHECK_SAYING(contains(why, "lr 0.001") && contains(why, "lr 0.002") && contains(why, "weights"),
               why);
  NCCL(ncclCommAbort(comm));
}

// Names say which buffer is meant to other ranks and in a saved state.
RANKED_CASE(two_buffers_of_one_name_are_refused, 2) {
  const ncclComm_t comm = self.init();
  std::vector<float> first(100, 1), second(100, 1), longer(101, 1);
  add(first.data(), 100, "twin", 0.5);
  const scape_registration twin = add(second.data(), 100, "twin", 0.5);
  add(longer.data(), 101, "twin", 0.5);
  const auto call = [&](std::vector<float>& buffer) {
    return ncclAllReduce(buffer.data(), buffer.data(), buffer.size(), ncclFloat32, ncclSum, comm,
                         nullptr);
  };
  for (int step = 0; step < 3; ++step) {
    NCCL(call(first));
    CHECK(call(second) == ncclInvalidUsage);
    const std::string why = ncclGetLastError(comm);
    CHECK_SAYING(contains(why, "\"twin\"") && contains(why, "100 elements") &&
                     contains(why, "a name of its own"),
                 why);
    NCCL(call(longer));  // told apart by its count
  }
  SCAPE(scape_unregister(twin));
  add(second.data(), 100, "other", 0.5);
  NCCL(call(second));
  NCCL(ncclCommDestroy(comm));
}

// What is wrong with a step is said before anything has moved.
RANKED_CASE(a_refused_flush_leaves_the_state, 2) {
  const ncclComm_t comm = self.init();
  std::vector<float> gradient(100, 1), param(100, 1), plain(50, 1);
  scape_config config = gradient_config("fused", 0.5);
  config.role = SCAPE_ROLE_FUSED;
  scape_registration registration = nullptr;
  SCAPE(scape_register(gradient.data(), 100, SCAPE_FLOAT32, &config, &registration));
  add(plain.data(), 50, "plain", 0.5);
  for (int step = 0; step < 3; ++step) {
    all_reduce(plain, comm);
    all_reduce(gradient, comm);
    for (float* bad : {static_cast<float*>(nullptr), gradient.data(), gradient.data() + 99})
      CHECK(scape_adams_step(gradient.data(), 100, bad, 0.1, 0, nullptr) == SCAPE_ERR_ARGUMENT);
    CHECK_SAYING(error_names("overlaps"), scape_last_error());
    SCAPE(scape_adams_step(gradient.data(), 100, param.data(), 0.1, 0, nullptr));
  }
  const double nan = std::nan("");
  const std::vector<float> before = param;
  const auto flush = [&](float* to, double lr, double decay) {
    return scape_flush(gradient.data(), 100, to, lr, decay, nullptr);
  };
  CHECK(flush(param.data(), nan, 0) == SCAPE_ERR_ARGUMENT && error_names("lr is nan"));
  CHECK(flush(param.data(), 0.1, -1) == SCAPE_ERR_ARGUMENT && error_names("weight_decay -1"));
  CHECK(flush(nullptr, 0.1, 0) == SCAPE_ERR_ARGUMENT && error_names("param is null"));
  CHECK(flush(gradient.data(), 0.1, 0) == SCAPE_ERR_ARGUMENT && error_names("overlaps"));
  CHECK(scape_flush(plain.data(), 50, param.data(), 0, 0, nullptr) == SCAPE_ERR_ARGUMENT &&
        error_names("pass null"));
  CHECK(param == before);
  SCAPE(scape_flush(plain.data(), 50, nullptr, 0, 0, nullptr));
  SCAPE(flush(param.data(), 0.1, 0));
  CHECK(param != before);
  size_t size = 0;
  SCAPE(scape_save_state(nullptr, 0, &size));
  std::vector<char> saved(size);
  SCAPE(scape_save_state(saved.data(), size, &size));
  for (int step = 0; step < 3; ++step) {
    all_reduce(gradient, comm);
    if (step == 2) {  // what is loaded waits until the step has been taken
      SCAPE(scape_load_state(saved.data(), size));
      CHECK(flush(param.data(), 0.1, 0) == SCAPE_ERR_USAGE && error_names("scape_adams_step()"));
    }
    SCAPE(scape_adams_step(gradient.data(), 100, param.data(), 0.1, 0, nullptr));
  }
  SCAPE(flush(param.data(), 0.1, 0));
  CHECK(stats_of(gradient.data(), 100).step == 5);  // of the state: three steps and a flush
  check_agreement(self, comm, param.data(), 400);
  NCCL(ncclCommDestroy(comm));
}

// Each reason is said once, and an empty saved state is not taken for a full one.
LAUNCHED_CASE(what_goes_dense_and_what_is_lost_is_said) {
  std::vector<Run> runs = rank_runs("what_goes_dense_and_what_is_lost_is_said", 2);
  for (Run& one : runs) one.environment["SCAPE_LOG"] = "info";
  for (const Outcome& outcome : expect(runs, {0, 0})) {
    for (const char* reason : {"int32", "min is neither", "max is neither"}) {
      const size_t at = outcome.err.find(reason);
      CHECK_SAYING(at != std::string::npos, outcome.err);
      CHECK_SAYING(outcome.err.find(reason, at + 1) == std::string::npos, outcome.err);
    }
    CHECK_SAYING(contains(outcome.err, "its communicator ends, and its state with it"),
                 outcome.err);
    CHECK_SAYING(contains(outcome.err, "the saved state is empty"), outcome.err);
  }
}
RANK_PART(what_goes_dense_and_what_is_lost_is_said) {
  const ncclComm_t comm = self.init();
  std::vector<float> buffer(100, 1);
  add(buffer.data(), 100, "lost", 0.5);
  for (int step = 0; step < 3; ++step) {
    all_reduce(buffer, comm);
    NCCL(ncclAllReduce(buffer.data(), buffer.data(), 100, ncclInt32, ncclSum, comm, nullptr));
    all_reduce(buffer, comm, ncclMin);
    all_reduce(buffer, comm, ncclMax);
  }
  size_t needed = 0;
  SCAPE(scape_save_state(nullptr, 0, &needed));
  const size_t full = needed;
  NCCL(ncclCommDestroy(comm));
  SCAPE(scape_save_state(nullptr, 0, &needed));
  CHECK(needed < full);
  CHECK(scape_save_state_file("") == SCAPE_ERR_ARGUMENT && error_names("path is empty"));
  CHECK(scape_load_state_file("") == SCAPE_ERR_ARGUMENT && error_names("path is empty"));
}

// State waits for a buffer of its count; one of its name with another count does not pass it by in
// silence.
LAUNCHED_CASE(state_of_another_count_is_said_to_wait) {
  std::vector<Run> runs = rank_runs("state_of_another_count_is_said_to_wait", 2);
  for (const Outcome& outcome : expect(runs, {0, 0})) {
    const std::string line =
        "buffer \"changed\" has 60 elements and begins anew, while the loaded state of that name "
        "has "
        "100";
    const size_t at = outcome.err.find(line);
    CHECK_SAYING(at != std::string::npos, outcome.err);
    CHECK_SAYING(outcome.err.find(line, at + 1) == std::string::npos, outcome.err);
  }
}
RANK_PART(state_of_another_count_is_said_to_wait) {
  const ncclComm_t comm = self.init();
  std::vector<float> buffer(100, 1);
  const scape_registration first = add(buffer.data(), 100, "changed", 0.5);
  all_reduce(buffer, comm);
  size_t needed = 0;
  SCAPE(scape_save_state(nullptr, 0, &needed));
  std::vector<char> state(needed);
  SCAPE(scape_save_state(state.data(), needed, &needed));
  SCAPE(scape_unregister(first));
  buffer.resize(60);
  add(buffer.data(), 60, "changed", 0.5);
  SCAPE(scape_load_state(state.data(), state.size()));
  for (int step = 0; step < 3; ++step) all_reduce(buffer, comm);
}

// Lines are not lost where their file cannot be opened, and the reason is the first of them.
LAUNCHED_CASE(a_log_file_that_cannot_be_opened_is_named) {
  std::vector<Run> runs = rank_runs("a_log_file_that_cannot_be_opened_is_named", 1);
  runs[0].environment["SCAPE_LOG"] = "info";
  runs[0].environment["SCAPE_LOG_FILE"] = "/no/such/folder/log";
  const Outcome outcome = expect(runs, {0}).front();
  const size_t reason = outcome.err.find("SCAPE_LOG_FILE=\"/no/such/folder/log\"");
  const size_t line = outcome.err.find("SCAPE INFO");
  CHECK_SAYING(line != std::string::npos && reason < line, outcome.err);
}
RANK_PART(a_log_file_that_cannot_be_opened_is_named) { self.init(); }

}  // namespace
}  // namespace scape::cases
