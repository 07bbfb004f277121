// What the hook of device mode costs a call that is none of Scape's business: the same call
// straight into an NCCL, and through the hook to it.
//
//   scape_hook_bench [--nccl-lib PATH]     the real NCCL; default: the wheel of tools/setup.sh
//
// First over a stub, which does next to nothing for an in-place call, then in another process over
// the real NCCL. That takes no collective without a GPU; what it does take is a group with nothing
// in it, and a call that it refuses, which the hook looks at as at any other. Both variants of a
// call take turns; a figure is the least of many turns, so that other work on the machine only
// makes it take longer. Exit status: 0; 1 where the hook costs 200 ns or more; 2 a bad option; 3 a
// library or a call failed.
#include <dlfcn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "nccl/api.h"
#include "nccl/functions.h"
#define SCAPE_LINKED  // for the types alone: the functions are looked up in the library under test
#include "scape/scape.h"

namespace {

using namespace scape::nccl;
using Clock = std::chrono::steady_clock;

constexpr double kLimit = 200;  // ns
constexpr int kTurns = 200;
constexpr int kCalls = 500;  // a turn
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

double turn_ns(const Calls& calls, ncclResult_t (*call)(const Calls&), ncclResult_t expected) {
  bool wrong = false;
  const auto begin = Clock::now();
  for (int i = 0; i < kCalls; ++i) wrong |= call(calls) != expected;
  const std::chrono::duration<double, std::nano> taken = Clock::now() - begin;
  if (wrong) fail("a call did not end as it should; is that a real NCCL?");
  return taken.count() / kCalls;
}

// Prints the row; whether the hook costs little enough.
bool row(const char* behind, const char* what, ncclResult_t (*call)(const Calls&),
         const Calls& direct, const Calls& hooked, ncclResult_t expected = ncclSuccess) {
  double straight = 1e30, through = 1e30;
  for (int turn = 0; turn < kTurns; ++turn) {
    straight = std::min(straight, turn_ns(direct, call, expected));
    through = std::min(through, turn_ns(hooked, call, expected));
  }
  const double cost = through - straight;
  std::printf("%-10s %-32s %10.1f %10.1f %+10.1f%s\n", behind, what, straight, through, cost,
              cost < kLimit ? "" : "  too much");
  std::fflush(stdout);
  return cost < kLimit;
}

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
  const Calls direct(stub), hooked(scape);
  bool well = row("stub", "ncclAllReduce", reduce, direct, hooked);
  well &= row("stub", "ncclAllGather", gather, direct, hooked);
  well &= row("stub", "group of one ncclAllReduce", group_of_one, direct, hooked);
  register_others(scape);
  well &= row("stub", "ncclAllReduce, 64 registrations", reduce, direct, hooked);
  return well;
}

bool over_real(const Library& scape, const char* path) {
  const Library real(path);
  const Calls direct(real), hooked(scape);
  bool well = row("real NCCL", "empty group", empty_group, direct, hooked);
  well &= row("real NCCL", "ncclAllReduce, refused", reduce, direct, hooked, ncclInvalidArgument);
  register_others(scape);
  well &=
      row("real NCCL", "refused, 64 registrations", reduce, direct, hooked, ncclInvalidArgument);
  return well;
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
