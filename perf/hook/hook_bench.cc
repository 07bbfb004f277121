// What the hook of device mode costs a call that is none of Scape's business: the same call
// straight into an NCCL, and through the hook to it.
//
//   scape_hook_bench [--nccl-lib PATH]     the real NCCL; default: the wheel of tools/setup.sh
//
// First over a stub, which does next to nothing for an in-place call, then in another process over
// the real NCCL. That takes no collective without a GPU; what it does take is a group with nothing
// in it, and a call that it refuses, which the hook looks at as at any other. Both variants of a
// call take turns in no order; a figure is the least of many turns, so that other work on the
// machine only makes it take longer. Exit status: 0; 1 where the hook costs 200 ns or more; 2 a bad
// option; 3 a library or a call failed.
#include <benchmark/benchmark.h>
#include <dlfcn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "nccl/api.h"
#include "nccl/functions.h"
#define SCAPE_LINKED  // for the types alone: the functions are looked up in the library under test
#include "scape/scape.h"

namespace {

using namespace scape::nccl;

constexpr double kLimit = 200;  // ns
constexpr int kTurns = 40;
constexpr int kCalls = 10000;  // a turn; one number for all, since one found by timing may be found
                               // while other work runs, and be too small for every turn
constexpr char kBehind[] = "SCAPE_HOOK_BENCH_BEHIND";

[[noreturn]] void fail(const char* what) {
  std::fprintf(stderr, "scape_hook_bench: %s\n", what);
  std::exit(3);
}

class Library {
 public:
  explicit Library(const char* path) : handle_(::dlopen(path, RTLD_NOW | RTLD_LOCAL)) {
    if (handle_ == nullptr) fail(::dlerror());
  }
  template <typename Function>
  Function find(const char* name) const {
    void* const found = ::dlsym(handle_, name);
    if (found == nullptr) fail(::dlerror());
    return reinterpret_cast<Function>(found);
  }

 private:
  void* handle_;
};

// The functions of one NCCL that are called here.
struct Calls {
  explicit Calls(const Library& library)
      : all_reduce(library.find<decltype(all_reduce)>("ncclAllReduce")),
        all_gather(library.find<decltype(all_gather)>("ncclAllGather")),
        group_start(library.find<decltype(group_start)>("ncclGroupStart")),
        group_end(library.find<decltype(group_end)>("ncclGroupEnd")) {}

  decltype(Functions::AllReduce) all_reduce;
  decltype(Functions::AllGather) all_gather;
  decltype(Functions::GroupStart) group_start;
  decltype(Functions::GroupEnd) group_end;
};

float buffer[64];

ncclResult_t reduce(const Calls& calls) {
  return calls.all_reduce(buffer, buffer, 64, ncclFloat32, ncclSum, nullptr, nullptr);
}
ncclResult_t gather(const Calls& calls) {
  return calls.all_gather(buffer, buffer, 64, ncclFloat32, nullptr, nullptr);
}
ncclResult_t empty_group(const Calls& calls) {
  const ncclResult_t started = calls.group_start();
  return started != ncclSuccess ? started : calls.group_end();
}
ncclResult_t group_of_one(const Calls& calls) {
  if (const ncclResult_t started = calls.group_start(); started != ncclSuccess) return started;
  if (const ncclResult_t reduced = reduce(calls); reduced != ncclSuccess) return reduced;
  return calls.group_end();
}

// The calls to be timed, and what came of it.
class Table final : public benchmark::BenchmarkReporter {
 public:
  Table(const char* behind, const Library& straight, const Library& scape)
      : behind_(behind), direct_(straight), hooked_(scape) {}

  void add(const char* what, ncclResult_t (*call)(const Calls&), ncclResult_t expected) {
    rows_.push_back(what);
    for (const bool hook : {false, true}) {
      const Calls* const calls = hook ? &hooked_ : &direct_;
      benchmark::RegisterBenchmark(name_of(what, hook).c_str(),
                                   [=](benchmark::State& state) {
                                     bool wrong = false;
                                     for (auto _ : state) wrong |= call(*calls) != expected;
                                     if (wrong) fail("a call did not end as it should");
                                   })
          ->Repetitions(kTurns)
          ->Iterations(kCalls);
    }
  }

  // Times those that were added, prints a row of each, and returns whether the hook costs little
  // enough.
  bool run() {
    benchmark::RunSpecifiedBenchmarks(this);
    benchmark::ClearRegisteredBenchmarks();
    bool well = true;
    for (const std::string& what : rows_) {
      const double straight = least_.at(name_of(what, false)),
                   through = least_.at(name_of(what, true));
      const double cost = through - straight;
      std::printf("%-10s %-32s %10.1f %10.1f %+10.1f%s\n", behind_, what.c_str(), straight, through,
                  cost, cost < kLimit ? "" : "  too much");
      well &= cost < kLimit;
    }
    std::fflush(stdout);
    rows_.clear();
    return well;
  }

 private:
  static std::string name_of(const std::string& what, bool hook) {
    return what + (hook ? ", hooked" : ", direct");
  }
  bool ReportContext(const Context&) override { return true; }
  void ReportRuns(const std::vector<Run>& runs) override {
    for (const Run& run : runs) {
      if (run.run_type != Run::RT_Iteration) continue;
      const double ns = run.real_accumulated_time * 1e9 / static_cast<double>(run.iterations);
      const auto [found, is_new] = least_.emplace(run.run_name.function_name, ns);
      if (!is_new) found->second = std::min(found->second, ns);
    }
  }

  const char* const behind_;
  const Calls direct_, hooked_;
  std::vector<std::string> rows_;
  std::map<std::string, double> least_;
};

// Buffers all around the one that is reduced, some of its size.
void register_others(const Library& scape) {
  const auto add = scape.find<scape_status (*)(void*, size_t, scape_dtype, const scape_config*,
                                               scape_registration*)>("scape_register");
  static std::vector<std::vector<float>> registered;
  for (size_t i = 0; i < 64; ++i) {
    registered.emplace_back(size_t{64} << (i % 8));
    scape_registration handle;
    if (add(registered.back().data(), registered.back().size(), SCAPE_FLOAT32, nullptr, &handle) !=
        SCAPE_OK) {
      fail("scape_register failed");
    }
  }
}

bool over_stub(const Library& scape) {
  const Library stub(STUB_NCCL);
  Table table("stub", stub, scape);
  table.add("ncclAllReduce", reduce, ncclSuccess);
  table.add("ncclAllGather", gather, ncclSuccess);
  table.add("group of one ncclAllReduce", group_of_one, ncclSuccess);
  const bool well = table.run();
  register_others(scape);
  table.add("ncclAllReduce, 64 registrations", reduce, ncclSuccess);
  return table.run() && well;
}

bool over_real(const Library& scape, const char* path) {
  const Library real(path);
  Table table("real NCCL", real, scape);
  table.add("empty group", empty_group, ncclSuccess);
  table.add("ncclAllReduce, refused", reduce, ncclInvalidArgument);
  const bool well = table.run();
  register_others(scape);
  table.add("refused, 64 registrations", reduce, ncclInvalidArgument);
  return table.run() && well;
}

// A process has one NCCL behind the hook.
int in_process_of_its_own(char** argv, const char* behind) {
  const pid_t child = ::fork();
  if (child == 0) {
    ::setenv(kBehind, behind, 1);
    ::execv("/proc/self/exe", argv);
    ::_exit(3);
  }
  int status = 0;
  if (child < 0 || ::waitpid(child, &status, 0) != child) return 3;
  return WIFEXITED(status) ? WEXITSTATUS(status) : 3;
}

}  // namespace

int main(int argc, char** argv) {
  const bool named = argc == 3 && std::strcmp(argv[1], "--nccl-lib") == 0;
  if (argc != 1 && !named) {
    std::fprintf(stderr, "usage: scape_hook_bench [--nccl-lib PATH]\n");
    return 2;
  }
  const char* const path = named ? argv[2] : REAL_NCCL;
  if (const char* behind = std::getenv(kBehind); behind != nullptr) {
    const bool real = std::strcmp(behind, "real") == 0;
    ::setenv("SCAPE_MODE", "device", 1);
    ::setenv("SCAPE_NCCL_LIB", real ? path : STUB_NCCL, 1);
    ::setenv("SCAPE_LOG", "none", 1);
    char program[] = "scape_hook_bench", interleaved[] = "--benchmark_enable_random_interleaving";
    char* arguments[] = {program, interleaved, nullptr};
    int count = 2;
    benchmark::Initialize(&count, arguments);
    const Library scape(SCAPE_NCCL);
    return (real ? over_real(scape, path) : over_stub(scape)) ? 0 : 1;
  }
  std::printf("%-10s %-32s %10s %10s %10s\n", "behind", "call", "direct, ns", "hooked, ns", "hook");
  std::fflush(stdout);
  int status = in_process_of_its_own(argv, "stub");
  if (named || ::access(path, R_OK) == 0) {
    status = std::max(status, in_process_of_its_own(argv, "real"));
  } else {
    std::printf("# no real NCCL at %s; see --nccl-lib\n", path);
  }
  return status;
}
