// Ranks that die or stop: F27, and a death at each point where a rank can be.
#include <sched.h>
#include <signal.h>
#include <sys/mount.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <set>
#include <thread>

#include "tests/functional/cases/case.h"
#include "tests/support/slowdown.h"

namespace scape::cases {
namespace {

using Clock = std::chrono::steady_clock;

// What a killed process could leave behind on the machine.
std::set<std::string> memory_of_the_machine() {
  std::set<std::string> found;
  for (const auto& entry : std::filesystem::directory_iterator("/dev/shm"))
    found.insert(entry.path().filename());
  std::ifstream segments("/proc/sysvipc/shm");
  for (std::string line; std::getline(segments, line);) {
    // The key and the id; the rest changes with use.
    found.insert(line.substr(0, 22));
  }
  return found;
}

// The survivors' part: an error of a call that names the victim, in time; then the way out.
void see_the_death(ncclComm_t comm, int victim, Clock::time_point began, double limit_s,
                   const char* explanation) {
  const std::string text = explanation;
  std::fprintf(stderr, "after %.1f s: %s\n", since(began), text.c_str());
  // A rank that has not met the others knows where the meeting was, not whose it was.
  const bool met_nobody = comm == nullptr && contains(text, "the process that made");
  CHECK_SAYING(contains(text, "rank " + std::to_string(victim)) || met_nobody, text);
  CHECK_SAYING(since(began) < limit_s * test::kSlowdown, text);
  if (comm == nullptr) return;
  ncclResult_t state = ncclSuccess;
  NCCL(ncclCommGetAsyncError(comm, &state));
  CHECK(state != ncclSuccess && state != ncclInProgress);
  const auto aborting = Clock::now();
  NCCL(ncclCommAbort(comm));
  CHECK(since(aborting) < 5 * test::kSlowdown);
}

// ---- F27 ----

constexpr size_t kLarge = 5000000;

RANK_PART(F27_dead_and_stopped_ranks) {
  const std::string how = argument();
  const bool victim = self.rank == 2;
  if (how == "creation") {
    const ncclUniqueId id = self.next_id();
    if (victim) {
      ::raise(SIGKILL);
    }
    const auto began = Clock::now();
    ncclComm_t comm = nullptr;
    CHECK(ncclCommInitRank(&comm, self.ranks, id, self.rank) != ncclSuccess);
    see_the_death(nullptr, 2, began, 15, ncclGetLastError(nullptr));
    return;
  }
  const ncclComm_t comm = self.init();
  std::vector<float> values(how == "large" ? kLarge : 50000, 1);
  for (int call = 0; call < 3; ++call) all_reduce(values, comm);
  self.meet("called");
  if (victim && how == "between") ::raise(SIGKILL);
  if (victim && how == "stopped") ::raise(SIGSTOP);
  std::thread killer;
  if (victim) {
    killer = std::thread([] {
      std::this_thread::sleep_for(std::chrono::milliseconds(30));
      ::raise(SIGKILL);
    });
  }
  const auto began = Clock::now();
  ncclResult_t result = ncclSuccess;
  for (int call = 0; result == ncclSuccess && call < 100000; ++call) {
    result = ncclAllReduce(values.data(), values.data(), values.size(), ncclFloat32, ncclMax, comm,
                           nullptr);
  }
  if (victim) killer.join();
  CHECK(result != ncclSuccess);
  see_the_death(comm, 2, began, 15, ncclGetLastError(comm));
}

LAUNCHED_CASE(F27_dead_and_stopped_ranks) {
  for (const std::string how : {"between", "large", "stopped", "creation"}) {
    std::vector<Run> runs = rank_runs("F27_dead_and_stopped_ranks", 3, how);
    for (Run& one : runs) {
      one.environment["SCAPE_TIMEOUT"] = "10";
      one.environment["SCAPE_BOOTSTRAP_TIMEOUT"] = "10";
    }
    runs[2].limit_s = 25;
    expect(runs, {0, 0, how == "stopped" ? -1 : 128 + SIGKILL});
  }
}

// Whoever waits for whom in the ring, all name the rank that stopped, or stays away from the call.
RANK_PART(F27_who_keeps_the_others_is_named) {
  const std::string text = argument();  // "victim how"
  const int victim = std::stoi(text.substr(0, text.find(' ')));
  const bool masked = contains(text, "masked");
  std::vector<float> values(50000, 1);
  if (masked) add(values.data(), values.size(), "weights", 0.1);
  ncclComm_t comm = self.init();
  for (int call = 0; call < 4; ++call) all_reduce(values, comm);
  const std::string pid_file = self.folder + "/victim";
  if (self.rank == victim) std::ofstream(pid_file) << ::getpid();
  self.meet("called");
  if (self.rank == victim && contains(text, "stopped")) ::raise(SIGSTOP);
  if (self.rank == victim) ::pause();
  const auto began = Clock::now();
  ncclResult_t result = ncclSuccess;
  for (int call = 0; result == ncclSuccess && call < 100000; ++call) {
    result = ncclAllReduce(values.data(), values.data(), values.size(), ncclFloat32, ncclSum, comm,
                           nullptr);
  }
  CHECK(result != ncclSuccess);
  const std::string why = ncclGetLastError(comm);
  // No other rank is.
  for (int other = 0; other < self.ranks; ++other) {
    const bool named = contains(why, "rank " + std::to_string(other));
    CHECK_SAYING(named == (other == victim), why);
  }
  see_the_death(comm, victim, began, 10, why.c_str());
  pid_t pid = 0;
  std::ifstream(pid_file) >> pid;
  ::kill(pid, SIGKILL);
}

LAUNCHED_CASE(F27_who_keeps_the_others_is_named) {
  for (const char* how : {"stopped", "stopped masked", "busy masked"}) {
    std::vector<Run> all;
    std::vector<int> statuses;
    for (int victim = 0; victim < 3; ++victim) {
      std::vector<Run> runs =
          rank_runs("F27_who_keeps_the_others_is_named", 3, std::to_string(victim) + " " + how);
      for (size_t rank = 0; rank < runs.size(); ++rank) {
        runs[rank].environment["SCAPE_TIMEOUT"] = "4";
        runs[rank].environment["SCAPE_SHARED_MEMORY"] = victim == 1 ? "0" : "1";
        runs[rank].limit_s = 60;
        statuses.push_back(rank == static_cast<size_t>(victim) ? 128 + SIGKILL : 0);
        all.push_back(runs[rank]);
      }
    }
    expect(all, statuses);
  }
}

// ---- a death at each point ----

// A trainer: a registered buffer of the fused role and a dense call in each step.
RANK_PART(F27_killed_at_each_point) {
  const std::string text = argument();
  const int victim = std::stoi(text.substr(0, text.find(' ')));
  const bool closing = contains(text, "closing");
  constexpr size_t kCount = 20000;
  std::vector<float> gradient(kCount), param(kCount, 1), loss(64);
  scape_config config = gradient_config("weights", 0.1);
  config.role = SCAPE_ROLE_FUSED;
  scape_registration registration = nullptr;
  SCAPE(scape_register(gradient.data(), kCount, SCAPE_FLOAT32, &config, &registration));

  const ncclUniqueId id = self.next_id();
  auto began = Clock::now();
  ncclComm_t comm = nullptr;
  if (ncclCommInitRank(&comm, self.ranks, id, self.rank) != ncclSuccess) {
    return see_the_death(nullptr, victim, began, 5, ncclGetLastError(nullptr));
  }
  for (int step = 0; step < 40; ++step) {
    fill(gradient, values_of(self, step, kCount));
    began = Clock::now();
    if (ncclAllReduce(gradient.data(), gradient.data(), kCount, ncclFloat32, ncclAvg, comm,
                      nullptr) != ncclSuccess ||
        ncclAllReduce(loss.data(), loss.data(), loss.size(), ncclFloat32, ncclSum, comm, nullptr) !=
            ncclSuccess) {
      return see_the_death(comm, victim, began, 5, ncclGetLastError(comm));
    }
    if (scape_adams_step(gradient.data(), kCount, param.data(), 1e-3, 0.1, nullptr) != SCAPE_OK)
      return see_the_death(comm, victim, began, 5, scape_last_error());
  }
  CHECK(victim < 0 || closing);
  check_agreement(self, comm, param.data(), kCount * sizeof(float));
  began = Clock::now();
  const ncclResult_t result = ncclCommDestroy(comm);
  CHECK(result == ncclSuccess || closing);
  CHECK(since(began) < 5 * test::kSlowdown);
}

// A program's signals mean what they did before there was a communicator.
RANK_PART(F27_signals_mean_what_they_did) {
  // Below 32: the C library itself takes two real-time signals with the first thread.
  const auto handled = [] {
    std::ifstream status("/proc/self/status");
    for (std::string line; std::getline(status, line);) {
      if (line.rfind("SigCgt:", 0) == 0)
        return std::stoull(line.substr(7), nullptr, 16) & 0x7fffffff;
    }
    failed(__FILE__, __LINE__, "SigCgt", "");
  };
  const auto before = handled();
  std::vector<float> gradient(1000, 1);
  add(gradient.data(), gradient.size(), "weights", 0.1);
  ncclComm_t comm = self.init();
  for (int step = 0; step < 3; ++step) all_reduce(gradient, comm);
  CHECK(handled() == before);
  self.meet("stepped");
  ::raise(SIGTERM);
}

LAUNCHED_CASE(F27_signals_mean_what_they_did) {
  expect(rank_runs("F27_signals_mean_what_they_did", 2), {128 + SIGTERM, 128 + SIGTERM});
}

LAUNCHED_CASE(F27_killed_at_each_point) {
  struct Point {
    const char* name;
    int after;
  };
  const Point points[] = {{"meeting", 1},   {"connecting", 1},   {"connected", 1}, {"dense", 7},
                          {"agreement", 1}, {"side_channel", 1}, {"share", 1},     {"pack", 5},
                          {"exchange", 5},  {"unpack", 5},       {"step", 5},      {"select", 5},
                          {"masks", 5},     {"closing", 1}};
  // What other processes of the machine make and leave must not be taken for the ranks'.
  const bool alone = ::unshare(CLONE_NEWIPC | CLONE_NEWNS) == 0 &&
                     ::mount(nullptr, "/", nullptr, MS_REC | MS_PRIVATE, nullptr) == 0 &&
                     ::mount("tmpfs", "/dev/shm", "tmpfs", 0, "mode=1777") == 0;
  const std::set<std::string> before = memory_of_the_machine();
  for (const int victim : {0, 1}) {
    for (const Point& point : points) {
      std::fprintf(stderr, "rank %d dies at %s\n", victim, point.name);
      const std::string argument = std::to_string(victim) + " " + point.name;
      std::vector<Run> runs = rank_runs("F27_killed_at_each_point", 3, argument);
      std::vector<int> statuses(3, 0);
      Run& dying = runs[static_cast<size_t>(victim)];
      dying.environment["SCAPE_FAULT"] = point.name;
      dying.environment["SCAPE_FAULT_AFTER"] = std::to_string(point.after);
      statuses[static_cast<size_t>(victim)] = 128 + SIGKILL;
      expect(runs, statuses);
    }
  }
  expect(rank_runs("F27_killed_at_each_point", 3, "-1 nowhere"), {0, 0, 0});
  std::set<std::string> left = memory_of_the_machine();
  for (const std::string& name : before) left.erase(name);
  if (alone) CHECK_SAYING(left.empty(), *left.begin());
}

}  // namespace
}  // namespace scape::cases
