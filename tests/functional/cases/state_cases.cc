// Registration and saved state: F22, F24.
#include <algorithm>
#include <filesystem>
#include <fstream>

#include "tests/functional/cases/case.h"

namespace scape::cases {
namespace {

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

// ---- F22 ----

LAUNCHED_CASE(F22_registration_without_a_match) {
  for (const char* variant : {"pointer", "bytes", "late", "slice", "two slices", "moved"}) {
    const std::vector<Run> runs = rank_runs("F22_registration_without_a_match", 2, variant);
    const std::vector<Outcome> outcomes = run(runs);
    std::filesystem::remove_all(runs[0].environment.at("FIELD_CASE_FOLDER"));
    const std::string name = variant;
    for (const Outcome& outcome : outcomes) {
      CHECK_SAYING(outcome.status == 0, name + ": " + outcome.err);
      const bool warned = contains(outcome.err, "registration \"watched\"");
      CHECK_SAYING(warned == (name != "late" && name != "two slices"), name + ": " + outcome.err);
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
  for (int step = 0; step < 20; ++step) {
    if (variant == "late" && step == 10) registration = add(buffer.data(), 1000, "watched", 0.1);
    std::fill(buffer.begin(), buffer.end(), 1.f);
    const auto call = [&](float* from, size_t count) {
      NCCL(ncclAllReduce(from, from, count, ncclFloat32, ncclSum, comm, nullptr));
    };
    if (variant == "slice") {
      call(buffer.data() + 128, 500);
    } else if (variant == "two slices") {
      call(buffer.data(), 500);
      call(buffer.data() + 500, 500);
    } else if (variant == "moved" && step >= 3) {
      moved.assign(1000, 1);
      call(moved.data(), 1000);
      CHECK(moved[0] == 2 && moved[999] == 2);
    } else {
      call(buffer.data(), 1000);
      if (variant == "pointer" || (variant == "late" && step < 10))
        CHECK(buffer[0] == 2 && buffer[999] == 2);
    }
    check_agreement(self, comm, buffer.data(), 4000);
  }
  const scape_status status = scape_self_check(registration);
  const bool healthy = variant == "late" || variant == "two slices";
  CHECK_SAYING((status == SCAPE_OK) == healthy, scape_last_error());
  if (!healthy) CHECK(contains(scape_last_error(), "\"watched\""));
  NCCL(ncclCommDestroy(comm));
}

// ---- F24 ----

std::string state_file(const std::string& folder, int rank) {
  return folder + "/state." + std::to_string(rank);
}

// Ten steps, saved after the fifth; or, where a state is loaded, the last five of them. Each writes
// its outputs.
LAUNCHED_CASE(F24_save_and_resume) {
  std::vector<Run> runs = rank_runs("F24_save_and_resume", 2, "whole");
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
  go("swapped");
  go("cut");
  go("damaged");
  std::filesystem::remove_all(folder);
}
RANK_PART(F24_save_and_resume) {
  const std::string part = argument();
  const std::string mine = state_file(self.folder, self.rank);
  const std::string outputs = self.folder + "/outputs." + std::to_string(self.rank);
  ncclComm_t comm = self.init();
  std::vector<float> buffer(400);
  add(buffer.data(), 400, "grads", 0.1);
  const auto steps = [&](int first, int last, std::vector<float>* out) {
    for (int step = first; step < last; ++step) {
      fill(buffer, values_of(self, step, 400));
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
  } else if (part == "swapped") {
    CHECK(scape_load_state_file(state_file(self.folder, 1 - self.rank).c_str()) == SCAPE_ERR_DATA);
    CHECK(contains(scape_last_error(), "rank " + std::to_string(1 - self.rank) + "'s of 2"));
    steps(0, 3, &results);
    CHECK(stats_of(buffer.data(), 400).step == 3);
  } else {
    std::ifstream file(mine, std::ios::binary);
    std::string bytes((std::istreambuf_iterator<char>(file)), {});
    if (part == "cut") bytes.resize(bytes.size() / 2);
    if (part == "damaged") bytes[bytes.size() - 40] ^= 1;
    steps(0, 2, &results);
    CHECK(scape_load_state(bytes.data(), bytes.size()) == SCAPE_ERR_DATA);
    steps(2, 4, &results);
    CHECK(stats_of(buffer.data(), 400).step == 4);  // untouched
    check_agreement(self, comm, buffer.data(), 1600);
  }
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
