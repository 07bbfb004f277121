// The SIMD backends of this build.
#pragma once

#include <vector>

#include "kernels/kernels.h"

namespace scape::kernels {

// Those that this CPU and its operating system can run, best first.
std::vector<const Ops*> usable_cpu_ops();

}  // namespace scape::kernels
