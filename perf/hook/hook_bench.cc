// An all-reduce of an unregistered buffer, straight into a stub NCCL and through the hook to it.
//
// The stub does next to nothing for an in-place call, so the difference is what the hook costs: it
// has to stay under 200 ns (docs/performance.md).
#include <benchmark/benchmark.h>
#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>
#include <vector>

#include "nccl/api.h"
#define SCAPE_LINKED  // for the types alone: the functions are looked up in the library under test
#include "scape/scape.h"

namespace {

using namespace scape::nccl;

using AllReduce = ncclResult_t (*)(const void*, void*, size_t, ncclDataType_t, ncclRedOp_t,
                                   ncclComm_t, cudaStream_t);
using Register = scape_status (*)(void*, size_t, scape_dtype, const scape_config*,
                                  scape_registration*);

void* must_open(const char* path) {
  void* handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    std::fprintf(stderr, "%s\n", dlerror());
    std::exit(1);
  }
  return handle;
}

template <typename Function>
Function must_find(void* handle, const char* name) {
  void* found = dlsym(handle, name);
  if (found == nullptr) {
    std::fprintf(stderr, "%s\n", dlerror());
    std::exit(1);
  }
  return reinterpret_cast<Function>(found);
}

void* stub() {
  static void* const handle = must_open(STUB_NCCL);
  return handle;
}
void* hook() {
  static void* const handle = must_open(SCAPE_NCCL);
  return handle;
}

void call(benchmark::State& state, AllReduce all_reduce) {
  float buffer[64] = {};
  for (auto _ : state) {
    if (all_reduce(buffer, buffer, 64, ncclFloat32, ncclSum, nullptr, nullptr) != ncclSuccess) {
      state.SkipWithError("ncclAllReduce failed");
      break;
    }
  }
}

void direct(benchmark::State& state) {
  call(state, must_find<AllReduce>(stub(), "pncclAllReduce"));
}
BENCHMARK(direct);

void hooked(benchmark::State& state) { call(state, must_find<AllReduce>(hook(), "ncclAllReduce")); }
BENCHMARK(hooked);

// Other buffers are registered all around the one that is reduced, some of its size.
void hooked_among_registrations(benchmark::State& state) {
  const auto add = must_find<Register>(hook(), "scape_register");
  static std::vector<std::vector<float>> registered;
  static const bool done = [&] {
    bool ok = true;
    for (size_t i = 0; i < 64; ++i) {
      registered.emplace_back(64 << (i % 8));
      scape_registration handle;
      ok &= add(registered.back().data(), registered.back().size(), SCAPE_FLOAT32, nullptr,
                &handle) == SCAPE_OK;
    }
    return ok;
  }();
  if (!done) {
    state.SkipWithError("scape_register failed");
    return;
  }
  call(state, must_find<AllReduce>(hook(), "ncclAllReduce"));
}
BENCHMARK(hooked_among_registrations);

}  // namespace

int main(int argc, char** argv) {
  setenv("SCAPE_MODE", "device", 1);
  setenv("SCAPE_NCCL_LIB", STUB_NCCL, 1);
  setenv("SCAPE_LOG", "none", 1);
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 1;
  benchmark::RunSpecifiedBenchmarks();
  return 0;
}
