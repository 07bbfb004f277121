// Registration and saved state: F22 to F24, F26.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <map>
#include <utility>

#include "tests/functional/cases/case.h"

namespace scape::cases {
namespace {

// ---- F22 ----

LAUNCHED_CASE(F22_registration_without_a_match) {
  for (const char* variant : {"pointer", "bytes", "late", "slice", "two slices", "moved"}) {
    const std::string name = variant;
    for (const Outcome& outcome :
         expect(rank_runs("F22_registration_without_a_match", 2, variant), {0, 0})) {
      const size_t warned = outcome.err.find("registration \"watched\"");
      const bool healthy = name == "late" || name == "two slices";
      CHECK_SAYING((warned == std::string::npos) == healthy, name + ": " + outcome.err);
      // Where no call ever fitted, the tenth is the last that goes by without a word.
      if (healthy || name == "moved") continue;
      CHECK_SAYING(warned < outcome.err.find("ten calls are over"), name + ": " + outcome.err);
    }
  }
}
RANK_PART(F22_registration_without_a_match) {
  ncclComm_t comm = self.init();
  const std::string variant = argument();
  std::vector<float> buffer(1000), moved(1000);
  float* pointer = buffer.data();
  scape_registration registration = nullptr;
  if (variant == "pointer") registration = add(&pointer, 1000, "watched", 0.1);
  if (variant == "bytes") registration = add(buffer.data(), 4000, "watched", 0.1);
  if (variant == "slice" || variant == "two slices" || variant == "moved") {
    registration = add(buffer.data(), 1000, "watched", 0.1);
  }
  // Of the calls that met the registration.
  std::map<std::pair<size_t, size_t>, Conservation> sums;
  const auto masked_call = [&](size_t first, size_t count) {
    Conservation& sum = sums.try_emplace({first, count}, count).first->second;
    float* at = buffer.data() + first;
    sum.input({at, at + count});
    NCCL(ncclAllReduce(at, at, count, ncclFloat32, ncclSum, comm, nullptr));
    sum.output({at, at + count});
  };
  const auto plain_call = [&](std::vector<float>& values) {
    all_reduce(values, comm);
    for (float value : values) CHECK(value == 2);
  };
  for (int step = 0; step < 20; ++step) {
    if (variant == "late" && step == 10) registration = add(buffer.data(), 1000, "watched", 0.1);
    fill(buffer, values_of(self, step, 1000));
    if (variant == "slice") {
      masked_call(128, 500);
    } else if (variant == "two slices") {
      masked_call(0, 500);
      masked_call(500, 500);
    } else if (variant == "moved" && step >= 3) {
      moved.assign(1000, 1);
      plain_call(moved);
    } else if (variant == "pointer" || (variant == "late" && step < 10)) {
      buffer.assign(buffer.size(), 1);
      plain_call(buffer);
    } else {
      masked_call(0, 1000);
    }
    if (step == 9) std::fprintf(stderr, "ten calls are over\n");
    check_agreement(self, comm, moved.data(), 4000);
    const bool reduced = variant != "slice" && (variant != "moved" || step < 3);
    if (reduced) check_agreement(self, comm, buffer.data(), 4000);
  }
  for (const auto& [range, sum] : sums) sum.check(self, comm, buffer.data() + range.first);
  const scape_status status = scape_self_check(registration);
  const bool healthy = variant == "late" || variant == "two slices";
  CHECK_SAYING((status == SCAPE_OK) == healthy, scape_last_error());
  if (!healthy) CHECK(contains(scape_last_error(), "\"watched\""));
  NCCL(ncclCommDestroy(comm));
}

// ---- F23 ----

// What went into each position of some memory and came out of it: every value is a multiple of its
// position's number, so that one that strays is seen.
class Positions {
 public:
  explicit Positions(size_t count) : in_(count), out_(count), kept_(count) {}

  // An all-reduce of `count` elements at `at`, which stand for positions `first` and on.
  void call(Rank& self, ncclComm_t comm, float* at, size_t first, size_t count, int step) {
    for (size_t i = 0; i < count; ++i) {
      at[i] = static_cast<float>(number(first + i) * (1 + (step + self.rank) % 3));
      in_[first + i] += at[i];
    }
    NCCL(ncclAllReduce(at, at, count, ncclFloat32, ncclSum, comm, nullptr));
    for (size_t i = 0; i < count; ++i) {
      CHECK_SAYING(std::fmod(at[i], number(first + i)) == 0,
                   "position " + std::to_string(first + i) + " got " + std::to_string(at[i]));
      out_[first + i] += at[i];
    }
    check_agreement(self, comm, at, count * sizeof(float));
  }
  // The residual of the buffer (at, count): dropped next, or what is left at the end.
  void keep(const float* at, size_t first, size_t count) {
    std::vector<float> residual(count);
    SCAPE(scape_read_residual(at, count, residual.data(), count));
    for (size_t i = 0; i < count; ++i) kept_[first + i] += residual[i];
  }
  void check(ncclComm_t comm) {
    for (std::vector<double>* values : {&in_, &kept_}) {
      NCCL(ncclAllReduce(values->data(), values->data(), values->size(), ncclFloat64, ncclSum, comm,
                         nullptr));
    }
    for (size_t i = 0; i < in_.size(); ++i) {
      CHECK_SAYING(in_[i] == out_[i] + kept_[i], "position " + std::to_string(i) + ": given " +
                                                     std::to_string(in_[i]) + ", returned " +
                                                     std::to_string(out_[i]) + ", kept " +
                                                     std::to_string(kept_[i]));
    }
  }

 private:
  static int number(size_t position) { return static_cast<int>(position) + 1; }
  std::vector<double> in_, out_, kept_;
};

LAUNCHED_CASE(F23_buffers_that_change) {
  for (const char* variant : {"regrouped", "registered anew", "longer", "third", "moved"}) {
    const std::string name = variant;
    for (const Outcome& outcome :
         expect(rank_runs("F23_buffers_that_change", 2, variant), {0, 0})) {
      const bool overlap = contains(outcome.err, "overlap the buffer of elements");
      CHECK_SAYING(overlap == (name == "regrouped"), name + ": " + outcome.err);
      const bool dropped = contains(outcome.err, "with a residual of");
      CHECK_SAYING(dropped == (name != "regrouped" && name != "third"), name + ": " + outcome.err);
    }
  }
}
RANK_PART(F23_buffers_that_change) {
  ncclComm_t comm = self.init();
  const std::string variant = argument();
  std::vector<float> memory(1500), elsewhere(1500);
  float* const at = memory.data();
  Positions positions(1500);
  const auto call = [&](float* from, size_t first, size_t count, int step) {
    positions.call(self, comm, from, first, count, step);
  };
  if (variant == "regrouped") {
    // One registration, whose parts are called as 600 + 400, then as 500 + 500: the new parts are
    // not what the state was kept for, and go dense.
    add(at, 1000, "buckets", 0.1);
    for (int step = 0; step < 3; ++step) call(at, 0, 600, step), call(at + 600, 600, 400, step);
    for (int step = 3; step < 8; ++step) call(at, 0, 500, step), call(at + 500, 500, 500, step);
    CHECK(stats_of(at, 0).fallback_calls == 10);
    positions.keep(at, 0, 600);
    positions.keep(at + 600, 600, 400);
  } else if (variant == "registered anew") {
    scape_registration a = add(at, 600, "bucket 0", 0.1);
    scape_registration b = add(at + 600, 400, "bucket 1", 0.1);
    for (int step = 0; step < 3; ++step) call(at, 0, 600, step), call(at + 600, 600, 400, step);
    positions.keep(at, 0, 600);
    positions.keep(at + 600, 600, 400);
    SCAPE(scape_unregister(a));
    SCAPE(scape_unregister(b));
    add(at, 500, "bucket 0", 0.1);
    add(at + 500, 500, "bucket 1", 0.1);
    for (int step = 3; step < 8; ++step) call(at, 0, 500, step), call(at + 500, 500, 500, step);
    CHECK(stats_of(at, 500).sparse_calls == 4);
    positions.keep(at, 0, 500);
    positions.keep(at + 500, 500, 500);
  } else if (variant == "longer") {
    scape_registration shorter = add(at, 1000, "growing", 0.1);
    for (int step = 0; step < 3; ++step) call(at, 0, 1000, step);
    const scape_config config = gradient_config("growing", 0.1);
    scape_registration longer = nullptr;
    CHECK(scape_register(at, 1500, SCAPE_FLOAT32, &config, &longer) == SCAPE_ERR_ARGUMENT);
    CHECK(contains(scape_last_error(), "overlaps the registration \"growing\""));
    positions.keep(at, 0, 1000);
    SCAPE(scape_unregister(shorter));
    SCAPE(scape_register(at, 1500, SCAPE_FLOAT32, &config, &longer));
    for (int step = 3; step < 8; ++step) call(at, 0, 1500, step);
    positions.keep(at, 0, 1500);
  } else if (variant == "third") {
    add(at, 500, "first", 0.1);
    add(at + 500, 500, "second", 0.1);
    for (int step = 0; step < 10; ++step) {
      if (step == 5) add(at + 1000, 500, "third", 0.1);
      call(at, 0, 500, step);
      call(at + 500, 500, 500, step);
      if (step >= 5) call(at + 1000, 1000, 500, step);
    }
    for (size_t first : {0, 500, 1000}) positions.keep(at + first, first, 500);
    CHECK(stats_of(at + 1000, 500).sparse_calls == 4);
  } else {
    // As after loading state: the same names at new addresses. What was saved goes on there, and
    // as if nothing had been.
    std::vector<float> twin(1000);
    Positions of_twin(1000);
    add(twin.data(), 1000, "twin", 0.1);
    std::vector<scape_registration> old = {add(at, 1000, "one", 0.1),
                                           add(at + 1000, 500, "two", 0.1)};
    float* now = at;
    for (int step = 0; step < 10; ++step) {
      if (step == 5) {
        size_t needed = 0;
        SCAPE(scape_save_state(nullptr, 0, &needed));
        std::vector<char> state(needed);
        SCAPE(scape_save_state(state.data(), needed, &needed));
        for (scape_registration each : old) SCAPE(scape_unregister(each));
        now = elsewhere.data();
        add(now, 1000, "one", 0.1);
        add(now + 1000, 500, "two", 0.1);
        SCAPE(scape_load_state(state.data(), state.size()));
      }
      call(now, 0, 1000, step);
      call(now + 1000, 1000, 500, step);
      of_twin.call(self, comm, twin.data(), 0, 1000, step);
      CHECK(std::equal(twin.begin(), twin.end(), now));
    }
    positions.keep(now, 0, 1000);
    positions.keep(now + 1000, 1000, 500);
  }
  positions.check(comm);
  NCCL(ncclCommDestroy(comm));
}

// ---- F24 ----

std::string state_file(const std::string& folder, int rank) {
  return folder + "/state." + std::to_string(rank);
}

// Ten steps, saved after the fifth; or, where a state is loaded, the last five of them. Each writes
// its outputs. Three ranks, since two have but one order to sum in.
LAUNCHED_CASE(F24_save_and_resume) {
  std::vector<Run> runs = rank_runs("F24_save_and_resume", 3, "whole");
  const std::string folder = runs[0].environment["FIELD_CASE_FOLDER"];
  const auto go = [&](const char* part) {
    for (Run& one : runs) one.environment["FIELD_CASE_ARGUMENT"] = part;
    for (int id = 0; id < 4; ++id) std::filesystem::remove(folder + "/id." + std::to_string(id));
    const std::vector<Outcome> outcomes = run(runs);
    for (const Outcome& outcome : outcomes)
      CHECK_SAYING(outcome.status == 0, std::string(part) + ":\n" + outcome.err);
    return outcomes;
  };
  go("whole");
  go("resumed");
  go("flushed");
  go("one loads");
  go("swapped");
  go("cut");
  go("damaged");
  std::filesystem::remove_all(folder);
}
RANK_PART(F24_save_and_resume) {
  constexpr size_t kCount = 40000;
  const std::string part = argument();
  const std::string mine = state_file(self.folder, self.rank);
  const std::string outputs = self.folder + "/outputs." + std::to_string(self.rank);
  ncclComm_t comm = self.init();
  std::vector<float> buffer(kCount);
  add(buffer.data(), kCount, "grads", 0.1);
  const auto steps = [&](int first, int last, std::vector<float>* out) {
    for (int step = first; step < last; ++step) {
      fill(buffer, values_of(self, step, kCount));
      for (float& value : buffer) value = std::sin(value);  // whose sums depend on the order
      all_reduce(buffer, comm);
      out->insert(out->end(), buffer.begin(), buffer.end());
    }
  };
  std::vector<float> results;
  if (part == "whole") {
    steps(0, 5, &results);
    SCAPE(scape_save_state_file(mine.c_str()));
    // The same through memory.
    size_t needed = 0, again = 0;
    SCAPE(scape_save_state(nullptr, 0, &needed));
    std::vector<char> bytes(needed);
    CHECK(scape_save_state(bytes.data(), needed - 1, &again) == SCAPE_ERR_MEMORY &&
          again == needed);
    SCAPE(scape_save_state(bytes.data(), needed, &again));
    std::ifstream file(mine, std::ios::binary);
    CHECK(std::equal(bytes.begin(), bytes.end(), std::istreambuf_iterator<char>(file), {}));
    results.clear();
    steps(5, 10, &results);
    std::ofstream(outputs, std::ios::binary)
        .write(reinterpret_cast<const char*>(results.data()),
               static_cast<std::streamsize>(results.size() * 4));
  } else if (part == "resumed") {
    SCAPE(scape_load_state_file(mine.c_str()));
    steps(5, 10, &results);
    std::vector<float> expected(results.size());
    std::ifstream(outputs, std::ios::binary)
        .read(reinterpret_cast<char*>(expected.data()),
              static_cast<std::streamsize>(expected.size() * 4));
    CHECK(results == expected);
  } else if (part == "flushed") {
    const auto flush = [&] { return scape_flush(buffer.data(), kCount, nullptr, 0, 0, nullptr); };
    const auto residual = [&] {
      std::vector<float> held(kCount);
      SCAPE(scape_read_residual(buffer.data(), kCount, held.data(), kCount));
      return held;
    };
    const std::vector<float> nothing(kCount);
    SCAPE(flush());
    CHECK(buffer == nothing);
    SCAPE(scape_load_state_file(mine.c_str()));
    CHECK(flush() == SCAPE_ERR_USAGE);
    CHECK_SAYING(contains(scape_last_error(), "the state loaded for buffer \"grads\" waits"),
                 scape_last_error());
    steps(5, 7, &results);
    SCAPE(scape_load_state_file(mine.c_str()));
    SCAPE(flush());
    CHECK(stats_of(buffer.data(), kCount).step == 6);
    CHECK(residual() == nothing && buffer != nothing);
    check_agreement(self, comm, buffer.data(), kCount * 4);
    steps(6, 8, &results);
    CHECK(stats_of(buffer.data(), kCount).step == 8);
  } else if (part == "one loads") {
    if (self.rank == 0) SCAPE(scape_load_state_file(mine.c_str()));
    buffer.assign(kCount, 1);
    CHECK(ncclAllReduce(buffer.data(), buffer.data(), kCount, ncclFloat32, ncclSum, comm,
                        nullptr) != ncclSuccess);
    const char* const mine_is = self.rank == 0 ? "goes on here at step 5" : "begins here at step 0";
    CHECK_SAYING(contains(ncclGetLastError(comm), mine_is), ncclGetLastError(comm));
    NCCL(ncclCommAbort(comm));
    return;
  } else if (part == "swapped") {
    const int other = (self.rank + 1) % self.ranks;
    CHECK(scape_load_state_file(state_file(self.folder, other).c_str()) == SCAPE_ERR_DATA);
    CHECK_SAYING(contains(scape_last_error(), "rank " + std::to_string(other) + "'s of 3"),
                 scape_last_error());
    steps(0, 3, &results);
    CHECK(stats_of(buffer.data(), kCount).step == 3);
  } else {
    std::ifstream file(mine, std::ios::binary);
    std::string bytes((std::istreambuf_iterator<char>(file)), {});
    if (part == "cut") bytes.resize(bytes.size() / 2);
    if (part == "damaged") bytes[bytes.size() - 40] ^= 1;
    steps(0, 2, &results);
    CHECK(scape_load_state(bytes.data(), bytes.size()) == SCAPE_ERR_DATA);
    steps(2, 4, &results);
    CHECK(stats_of(buffer.data(), kCount).step == 4);  // untouched
    check_agreement(self, comm, buffer.data(), kCount * 4);
  }
  NCCL(ncclCommDestroy(comm));
}

// ---- F26 ----

RANKED_CASE(F26_accumulation_and_clipping, 2) {
  ncclComm_t comm = self.init();
  std::vector<float> windowed(100), each(100), scaled(100), window(100);
  Conservation of_windowed(100), of_each(100), of_scaled(100);
  add(windowed.data(), 100, "windowed", 0.2);
  add(each.data(), 100, "each", 0.2);
  add(scaled.data(), 100, "scaled", 0.2);
  const auto call = [&](std::vector<float>& buffer, Conservation& sums) {
    sums.input(buffer);
    all_reduce(buffer, comm);
    sums.output(buffer);
    double norm = 0;
    for (float value : buffer) norm += static_cast<double>(value) * value;
    check_agreement(self, comm, &norm, sizeof norm);
  };
  for (int step = 0; step < 10; ++step) {
    const std::vector<float> gradient = values_of(self, step, 100);
    for (size_t i = 0; i < 100; ++i) window[i] += gradient[i];
    if (step % 4 == 3 || step == 9) {
      fill(windowed, window);
      window.assign(100, 0.0f);
      call(windowed, of_windowed);
    }
    fill(each, gradient);
    fill(scaled, gradient);
    call(each, of_each);
    call(scaled, of_scaled);
    CHECK(scaled == each);
    for (float& value : scaled) value *= 0.01f;  // as a clipping optimizer does
  }
  CHECK(stats_of(windowed.data(), 100).step == 3);
  of_windowed.check(self, comm, windowed.data());
  of_each.check(self, comm, each.data());
  of_scaled.check(self, comm, scaled.data());
  NCCL(ncclCommDestroy(comm));
}

// A buffer that is gone keeps its counters in the process's totals, and what it held back is told.
LAUNCHED_CASE(unregister_tells_what_is_dropped) {
  const std::vector<Run> runs = rank_runs("unregister_tells_what_is_dropped", 2);
  for (const Outcome& outcome : run(runs)) {
    CHECK_SAYING(outcome.status == 0, outcome.err);
    CHECK_SAYING(
        contains(outcome.err, "registration \"dropped\"") && contains(outcome.err, "residual"),
        outcome.err);
  }
  std::filesystem::remove_all(runs[0].environment.at("FIELD_CASE_FOLDER"));
}
RANK_PART(unregister_tells_what_is_dropped) {
  ncclComm_t comm = self.init();
  std::vector<float> buffer(256);
  const scape_registration registration = add(buffer.data(), 256, "dropped", 0.1);
  for (int step = 0; step < 4; ++step) {
    fill(buffer, values_of(self, step, 256));
    all_reduce(buffer, comm);
  }
  SCAPE(scape_unregister(registration));
  CHECK(scape_unregister(registration) == SCAPE_ERR_NOT_FOUND);
  CHECK(stats_of(nullptr, 0).sparse_calls == 3);
  CHECK(stats_of(nullptr, 0).wire_bytes_sent > 0);
  scape_stats stats;
  stats.size = sizeof stats;
  CHECK(scape_get_stats(buffer.data(), 0, &stats) == SCAPE_ERR_NOT_FOUND);
  buffer.assign(256, 1);
  all_reduce(buffer, comm);
  CHECK(buffer[0] == 2);
  NCCL(ncclCommDestroy(comm));
}

// One address for two parameters, told apart by name.
RANKED_CASE(next_names_keep_state_apart, 2) {
  ncclComm_t comm = self.init();
  std::vector<float> scratch(128);
  add(scratch.data(), 128, "scratch", 0.25);
  std::vector<Conservation> sums(2, Conservation(128));
  const char* names[] = {"first", "second"};
  for (int step = 0; step < 8; ++step) {
    for (int which = 0; which < 2; ++which) {
      fill(scratch, values_of(self, 2 * step + which, 128));
      sums[static_cast<size_t>(which)].input(scratch);
      SCAPE(scape_next(names[which]));
      all_reduce(scratch, comm);
      sums[static_cast<size_t>(which)].output(scratch);
      check_agreement(self, comm, scratch.data(), 512);
      CHECK(stats_of(scratch.data(), 128).step == static_cast<uint64_t>(step + 1));
      if (step == 7) sums[static_cast<size_t>(which)].check(self, comm, scratch.data());
    }
  }
  CHECK(stats_of(scratch.data(), 0).sparse_calls == 14);
  SCAPE(scape_next("first"));
  CHECK(ncclAllReduce(scratch.data(), scratch.data(), 64, ncclFloat32, ncclSum, comm, nullptr) ==
        ncclInvalidUsage);
  CHECK(scape_next("") == SCAPE_ERR_ARGUMENT);
  NCCL(ncclCommDestroy(comm));
}

}  // namespace
}  // namespace scape::cases
