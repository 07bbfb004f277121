// The SIMD backends that this build has, whether or not this CPU can run them.
#pragma once

#include <vector>

#include "kernels/kernels.h"

namespace scape::kernels {

struct CpuBackend {
  const Ops* ops;
  bool usable;  // this CPU and its operating system can run it
};

// Best first.
std::vector<CpuBackend> cpu_backends();

}  // namespace scape::kernels
