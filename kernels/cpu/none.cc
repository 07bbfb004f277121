// In the place of cpu.cc where the build does without Highway: the scalar table serves alone.
#include "kernels/cpu/cpu.h"

namespace scape::kernels {

std::vector<const Ops*> usable_cpu_ops() { return {}; }

}  // namespace scape::kernels
