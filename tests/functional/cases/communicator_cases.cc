// Communicators that are made anew, used by several threads, and split: F28 to F30.
#include <sys/resource.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <random>
#include <thread>
#include <utility>

#include "tests/functional/cases/case.h"
#include "tests/support/slowdown.h"

namespace scape::cases {
namespace {

using Clock = std::chrono::steady_clock;

// A registered buffer, and what went into it and came out of it over one communicator.
struct Weights {
  Weights(size_t count, const std::string& name, double kept)
      : values(count), registration(add(values.data(), count, name.c_str(), kept)) {}
  ~Weights() { SCAPE(scape_unregister(registration)); }

  void step(const Rank& self, ncclComm_t comm, int step, Conservation* sum) {
    fill(values, values_of(self, step, values.size()));
    sum->input(values);
    all_reduce(values, comm);
    sum->output(values);
  }
  void check(Rank& self, ncclComm_t comm, const Conservation& sum) const {
    check_agreement(self, comm, values.data(), values.size() * sizeof(float));
    sum.check(self, comm, values.data());
  }
  scape_stats stats() const { return stats_of(values.data(), values.size()); }

  std::vector<float> values;
  scape_registration registration;
};

// A dense sum to which each of `ranks` ranks gives `value`.
void check_dense(ncclComm_t comm, int ranks, float value, size_t count = 1000) {
  std::vector<float> buffer(count, value);
  all_reduce(buffer, comm);
  for (const float sum : buffer) CHECK(sum == static_cast<float>(ranks) * value);
}

// ---- F28 ----

// Whether the rounds that have been are enough: all ranks say the same. On a busy machine a round
// can take half a second, most of it for the 180 MB that libfabric's endpoints fill.
bool enough(ncclComm_t comm, Clock::time_point began, int done, int all) {
  float late = since(began) > 8 ? 1 : 0;
  NCCL(ncclAllReduce(&late, &late, 1, ncclFloat32, ncclMax, comm, nullptr));
  return done == all || (done >= 10 && late == 1);
}

RANKED_CASE(F28_made_anew_while_a_rank_is_slow, 2) {
  Weights weights(1000, "weights", 0.1);
  const auto began = Clock::now();
  int rounds = 0;
  for (bool over = false; !over;) {
    const ncclComm_t comm = self.init();
    check_dense(comm, 2, static_cast<float>(rounds));
    Conservation sum(1000);
    for (int step = 0; step < 3; ++step) weights.step(self, comm, 3 * rounds + step, &sum);
    weights.check(self, comm, sum);
    over = enough(comm, began, ++rounds, 50);
    // The other has closed, and calls for the next one.
    if (self.rank == 1 && rounds % 2 == 0)
      std::this_thread::sleep_for(std::chrono::milliseconds(200));
    NCCL(ncclCommDestroy(comm));
  }
  std::fprintf(stderr, "%d rounds\n", rounds);
  CHECK(stats_of(weights.values.data(), 0).sparse_calls == 2 * static_cast<uint64_t>(rounds));
}

RANKED_CASE(F28_id_used_twice, 2) {
  const ncclUniqueId id = self.next_id();
  ncclComm_t comm = nullptr;
  NCCL(ncclCommInitRank(&comm, 2, id, self.rank));
  for (const bool lives : {true, false}) {
    const auto began = Clock::now();
    ncclComm_t second = nullptr;
    CHECK(ncclCommInitRank(&second, 2, id, self.rank) != ncclSuccess);
    CHECK(since(began) < 10 * test::kSlowdown);
    CHECK_SAYING(contains(ncclGetLastError(nullptr), "the unique id was used before"),
                 ncclGetLastError(nullptr));
    CHECK(second == nullptr);
    if (!lives) continue;
    check_dense(comm, 2, 1);
    NCCL(ncclCommDestroy(comm));
  }
}

RANKED_CASE(F28_destroyed_twice, 2) {
  Weights weights(1000, "weights", 0.1);
  const ncclComm_t other = self.init();
  for (int round = 0; round < 10; ++round) {
    const ncclComm_t comm = self.init();
    all_reduce(weights.values, comm);
    std::atomic<int> destroyed{0}, refused{0};
    std::vector<std::thread> threads;
    for (int i = 0; i < 4; ++i) {
      threads.emplace_back([&] {
        const ncclResult_t result = ncclCommDestroy(comm);
        destroyed += result == ncclSuccess;
        refused += result == ncclInvalidArgument;
      });
    }
    for (std::thread& thread : threads) thread.join();
    CHECK(destroyed == 1 && refused == 3);
    // Whatever is called afterwards, registered or not, alone or in a group.
    CHECK(ncclCommFinalize(comm) == ncclInvalidArgument);
    CHECK(ncclCommAbort(comm) == ncclInvalidArgument);
    float* const data = weights.values.data();
    CHECK(ncclAllReduce(data, data, 1000, ncclFloat32, ncclSum, comm, nullptr) ==
          ncclInvalidArgument);
    CHECK_SAYING(contains(ncclGetLastError(nullptr), "destroyed"), ncclGetLastError(nullptr));
    NCCL(ncclGroupStart());
    CHECK(ncclBroadcast(data, data, 1000, ncclFloat32, 0, comm, nullptr) == ncclInvalidArgument);
    CHECK(ncclGroupEnd() == ncclInvalidArgument);
    check_dense(other, 2, 1);
  }
}

RANKED_CASE(F28_nothing_is_left_open, 2) {
  Weights weights(1000, "weights", 0.1);
  size_t descriptors = 0, threads = 0;
  const auto began = Clock::now();
  int rounds = 0;
  for (bool over = false; !over;) {
    const ncclComm_t comm = self.init();
    for (int step = 0; step < 2; ++step) all_reduce(weights.values, comm);
    over = enough(comm, began, ++rounds, 200);
    NCCL(ncclCommDestroy(comm));
    if (rounds == 5) {
      descriptors = entries_of("/proc/self/fd");
      threads = entries_of("/proc/self/task");
    }
  }
  std::fprintf(stderr, "%d rounds, %zu descriptors and %zu threads after five\n", rounds,
               descriptors, threads);
  CHECK_SAYING(entries_of("/proc/self/fd") == descriptors,
               std::to_string(entries_of("/proc/self/fd")) + " descriptors");
  CHECK_SAYING(entries_of("/proc/self/task") == threads,
               std::to_string(entries_of("/proc/self/task")) + " threads");
}

// Rank 1 may open 64 files. Communicators are made until that is not enough.
LAUNCHED_CASE(F28_few_descriptors) {
  std::vector<Run> runs = rank_runs("F28_few_descriptors", 2);
  for (Run& one : runs) {
    one.environment["SCAPE_TIMEOUT"] = "3";
    one.environment["SCAPE_BOOTSTRAP_TIMEOUT"] = "3";
  }
  expect(runs, {0, 0});
}
RANK_PART(F28_few_descriptors) {
  const rlimit few{64, 64};
  if (self.rank == 1) CHECK(::setrlimit(RLIMIT_NOFILE, &few) == 0);
  std::vector<ncclComm_t> comms;
  ncclResult_t result = ncclSuccess;
  std::string explanation;
  while (result == ncclSuccess) {
    CHECK(comms.size() < 64);
    ncclComm_t comm = nullptr;
    result = ncclCommInitRank(&comm, 2, self.next_id(), self.rank);
    explanation = ncclGetLastError(nullptr);
    if (comm == nullptr) continue;
    comms.push_back(comm);
    check_dense(comm, 2, 1);
  }
  std::fprintf(stderr, "%zu communicators, then: %s\n", comms.size(), explanation.c_str());
  if (self.rank == 1) CHECK_SAYING(contains(explanation, "ulimit -n"), explanation);
  self.meet("short of descriptors");
  // Those that there are go on, and what they held serves the next one.
  for (const ncclComm_t comm : comms) check_dense(comm, 2, 2);
  for (const ncclComm_t comm : comms) NCCL(ncclCommDestroy(comm));
  const ncclComm_t comm = self.init();
  check_dense(comm, 2, 3);
  NCCL(ncclCommDestroy(comm));
  // Ids hold descriptors, too, until they are used.
  if (self.rank == 0) return;
  ncclUniqueId id;
  result = ncclSuccess;
  for (int made = 0; made < 64 && result == ncclSuccess; ++made) result = ncclGetUniqueId(&id);
  CHECK(result == ncclSystemError);
  CHECK_SAYING(contains(ncclGetLastError(nullptr), "Too many open files"),
               ncclGetLastError(nullptr));
}

// ---- F29 ----

constexpr int kThreads = 4;

RANKED_CASE(F29_a_communicator_for_each_thread, 2) {
  std::vector<ncclComm_t> comms;
  for (int i = 0; i < kThreads; ++i) comms.push_back(self.init());
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i) {
    threads.emplace_back([&, i] {
      const ncclComm_t comm = comms[static_cast<size_t>(i)];
      // The order of the threads' calls differs between the ranks.
      std::minstd_rand random(static_cast<unsigned>(1 + self.rank * kThreads + i));
      Weights weights(5000, "weights " + std::to_string(i), 0.1);
      Conservation sum(5000);
      for (int call = 0; call < 100; ++call) {
        std::this_thread::sleep_for(std::chrono::microseconds(random() % 1000));
        weights.step(self, comm, 100 * i + call, &sum);
        check_dense(comm, 2, static_cast<float>(100 * i + call), 50);
        if (call % 10 == 9) weights.check(self, comm, sum);
      }
      const scape_stats stats = weights.stats();
      CHECK(stats.sparse_calls == 99 && stats.step == 100);
    });
  }
  // Meanwhile others come and go.
  std::atomic<bool> over{false};
  size_t rounds = 0;
  std::thread clerk([&] {
    std::vector<float> buffer(3000);
    scape_stats stats;
    stats.size = sizeof stats;
    for (; !over; ++rounds) {
      const scape_registration registration = add(buffer.data(), 3000, "unused", 0.1);
      CHECK(stats_of(buffer.data(), 0).intercepted_calls == 0);
      SCAPE(scape_get_stats(nullptr, 0, &stats));
      SCAPE(scape_unregister(registration));
      CHECK(scape_get_stats(buffer.data(), 3000, &stats) == SCAPE_ERR_NOT_FOUND);
      std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
  });
  for (std::thread& thread : threads) thread.join();
  over = true;
  clerk.join();
  CHECK(rounds > 0);
  scape_stats stats;
  stats.size = sizeof stats;
  SCAPE(scape_get_stats(nullptr, 0, &stats));
  CHECK(stats.sparse_calls == 99 * kThreads);
  for (const ncclComm_t comm : comms) NCCL(ncclCommDestroy(comm));
}

std::vector<std::pair<const char*, std::string>> variables() {
  std::vector<std::pair<const char*, std::string>> found;
  for (char** entry = environ; *entry != nullptr; ++entry) found.emplace_back(*entry, *entry);
  return found;
}

// Nothing has been called when eight threads begin.
RANKED_CASE(F29_first_use_from_eight_threads, 2) {
  const auto before = variables();
  std::atomic<int> waiting{8};
  std::vector<std::thread> threads;
  for (int i = 0; i < 8; ++i) {
    threads.emplace_back([&, i] {
      Rank mine = self;
      mine.ids = i;
      --waiting;
      while (waiting > 0) std::this_thread::yield();
      const ncclComm_t comm = mine.init();
      Weights weights(2000, "weights " + std::to_string(i), 0.1);
      Conservation sum(2000);
      for (int step = 0; step < 5; ++step) weights.step(self, comm, 5 * i + step, &sum);
      weights.check(mine, comm, sum);
      CHECK(weights.stats().sparse_calls == 4);
      check_dense(comm, 2, static_cast<float>(i));
      NCCL(ncclCommDestroy(comm));
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(variables() == before);
}

// Their calls are served one after the other. Each rank's order is its own, which is right as long
// as the calls are alike.
RANKED_CASE(F29_two_threads_on_one_communicator, 2) {
  const ncclComm_t comm = self.init();
  std::vector<std::thread> threads;
  for (int i = 0; i < 2; ++i) {
    threads.emplace_back([&] {
      for (int call = 0; call < 200; ++call) check_dense(comm, 2, 3, 5000);
    });
  }
  for (std::thread& thread : threads) thread.join();
  NCCL(ncclCommDestroy(comm));
}

// Where they are not alike, a call that meets another's is refused, and nothing hangs.
LAUNCHED_CASE(F29_two_threads_with_different_calls) {
  std::vector<Run> runs = rank_runs("F29_two_threads_with_different_calls", 2);
  for (Run& one : runs) one.environment["SCAPE_TIMEOUT"] = "5";
  expect(runs, {0, 0});
}
RANK_PART(F29_two_threads_with_different_calls) {
  const ncclComm_t comm = self.init();
  Weights weights(5000, "weights", 0.1);
  std::atomic<int> failures{0};
  std::vector<std::thread> threads;
  for (int i = 0; i < 2; ++i) {
    threads.emplace_back([&, i] {
      std::minstd_rand random(static_cast<unsigned>(1 + self.rank * 2 + i));
      std::vector<float> buffer(3000);
      for (int call = 0; call < 200; ++call) {
        std::this_thread::sleep_for(std::chrono::microseconds(random() % 300));
        std::vector<float>& data = i == 0 ? buffer : weights.values;
        data.assign(data.size(), 1);
        const ncclResult_t result = ncclAllReduce(data.data(), data.data(), data.size(),
                                                  ncclFloat32, ncclSum, comm, nullptr);
        if (result != ncclSuccess) {
          const std::string why = ncclGetLastError(comm);
          CHECK_SAYING(contains(why, "let all ranks make the same calls in one order"), why);
          ++failures;
          return;
        }
        if (i == 0) CHECK(data.front() == 2 && data.back() == 2);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  self.meet("both have heard of it");
  if (failures > 0) {
    NCCL(ncclCommAbort(comm));
  } else {
    NCCL(ncclCommDestroy(comm));
  }
}

// ---- F30 ----

// Colours 0, 0, 1, none.
int colour_of(const Rank& self) { return self.rank < 2 ? 0 : self.rank == 2 ? 1 : kSplitNoColor; }

// The rank that this process is in a child of the split by colours.
Rank member_of(const Rank& self, ncclComm_t child) {
  Rank member = self;
  NCCL(ncclCommCount(child, &member.ranks));
  NCCL(ncclCommUserRank(child, &member.rank));
  CHECK(member.ranks == (self.rank < 2 ? 2 : 1));
  CHECK(member.rank == (self.rank < 2 ? self.rank : 0));
  return member;
}

RANKED_CASE(F30_one_buffer_on_parent_and_child, 4) {
  const ncclComm_t parent = self.init();
  ncclComm_t child = nullptr;
  NCCL(ncclCommSplit(parent, colour_of(self), self.rank, &child, nullptr));
  check_dense(parent, 4, 1);
  CHECK((child == nullptr) == (self.rank == 3));

  Weights weights(128, "weights", 0.2);
  Conservation of_parent(128), of_child(128);
  Rank member = child != nullptr ? member_of(self, child) : self;
  for (int step = 0; step < 8; ++step) {
    weights.step(self, parent, 2 * step, &of_parent);
    weights.check(self, parent, of_parent);
    if (child == nullptr) continue;
    weights.step(self, child, 2 * step + 1, &of_child);
    weights.check(member, child, of_child);
  }
  // The parent goes first; what it kept goes with it, what the child keeps does not.
  NCCL(ncclCommDestroy(parent));
  if (child == nullptr) return;
  for (int step = 8; step < 13; ++step) {
    weights.step(self, child, 2 * step + 1, &of_child);
    weights.check(member, child, of_child);
    check_dense(child, member.ranks, static_cast<float>(step));
  }
  CHECK(weights.stats().step == 13);
  CHECK(weights.stats().sparse_calls == (member.ranks > 1 ? 12 : 0));
  NCCL(ncclCommDestroy(child));
}

RANKED_CASE(F30_split_that_does_not_block, 4) {
  ncclConfig_t config{};
  config.size = sizeof config;
  config.magic = kApiMagic;
  config.version = kVersionCode;
  config.blocking = 0;
  // As programs wait that know nothing of when a call is over.
  const auto done = [](ncclResult_t result, ncclComm_t comm) {
    const auto began = Clock::now();
    while (result == ncclInProgress) {
      CHECK(since(began) < 10 * test::kSlowdown);
      NCCL(ncclCommGetAsyncError(comm, &result));
    }
    CHECK_SAYING(result == ncclSuccess, ncclGetLastError(comm));
  };
  ncclComm_t parent = nullptr;
  ncclResult_t result = ncclCommInitRankConfig(&parent, 4, self.next_id(), self.rank, &config);
  done(result, parent);
  done(ncclInProgress, parent);
  for (const bool grouped : {false, true}) {
    ncclComm_t child = reinterpret_cast<ncclComm_t>(&config);
    if (grouped) NCCL(ncclGroupStart());
    result = ncclCommSplit(parent, colour_of(self), self.rank, &child, &config);
    if (grouped) {
      CHECK(result == ncclSuccess || result == ncclInProgress);
      result = ncclGroupEnd();
    }
    done(result, parent);
    CHECK((child == nullptr) == (self.rank == 3));
    check_dense(parent, 4, 1);
    if (child == nullptr) continue;
    done(ncclInProgress, child);
    const Rank member = member_of(self, child);
    check_dense(child, member.ranks, 2);
    done(ncclCommFinalize(child), child);
    NCCL(ncclCommDestroy(child));
  }
  done(ncclCommFinalize(parent), parent);
  NCCL(ncclCommDestroy(parent));
}

}  // namespace
}  // namespace scape::cases
