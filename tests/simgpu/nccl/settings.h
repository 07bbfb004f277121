// The SIMGPU_NCCL_* variables, read at the first call (tests/simgpu/README.md lists them).
#pragma once

#include <chrono>
#include <string>

#include "nccl/api.h"
#include "tests/simgpu/runtime/environment.h"

namespace simnccl {

struct Settings {
  int version = scape::nccl::kVersionCode;
  std::chrono::milliseconds in_progress{0};  // at least, of each job of a non-blocking communicator
  std::chrono::milliseconds launch{0};       // before its groups are enqueued
  std::vector<simgpu::Failure> failures;     // of "ncclX", or of "run/ncclX": its run on a stream
  std::string mistake;                       // what is wrong with a variable
};
const Settings& settings();

}  // namespace simnccl
