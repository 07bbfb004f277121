// The SIMGPU_* variables of the environment, read at the first call (tests/simgpu/README.md lists
// them).
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "environment.h"

namespace simgpu {

enum class Leaks { kIgnore, kReport, kFail };

struct Settings {
  int devices = 2;
  size_t memory = size_t{1} << 30;  // bytes of each device
  bool reorder = false;
  uint64_t seed = 0;
  uint64_t delay_us = 2000;  // the longest that the reorder mode holds a work back
  bool guard_host_access = false;
  bool memory_operations = true;  // whether streams can wait for memory, and write to it
  Leaks leaks = Leaks::kIgnore;
  std::vector<Failure> failures;  // of functions of the API, or "kernel": the execution of one
  std::string mistake;            // what is wrong with a variable; the runtime does not start then
};

const Settings& settings();

}  // namespace simgpu
