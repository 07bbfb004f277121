// The SIMGPU_* variables of the environment, read at the first call (tests/simgpu/README.md lists
// them).
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "cuda_runtime_api.h"

namespace simgpu {

// A call that is to fail.
struct Failure {
  std::string function;  // of the API, or "kernel": the execution of one
  uint64_t nth = 1;
  bool later_too = false;
  cudaError_t error = cudaErrorUnknown;
};

enum class Leaks { kIgnore, kReport, kFail };

struct Settings {
  int devices = 2;
  size_t memory = size_t{1} << 30;  // bytes of each device
  bool reorder = false;
  uint64_t seed = 0;
  uint64_t delay_us = 2000;  // the longest that the reorder mode holds a work back
  bool guard_host_access = false;
  Leaks leaks = Leaks::kIgnore;
  std::vector<Failure> failures;
  std::string mistake;  // what is wrong with a variable; the runtime does not start then
};

const Settings& settings();

}  // namespace simgpu
