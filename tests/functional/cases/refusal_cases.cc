// Mistakes and mishaps that a caller must be told of: with the argument, the value or the rank, and
// never by a crash.
#include <unistd.h>

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
