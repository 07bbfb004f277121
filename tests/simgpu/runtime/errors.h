// The names of CUDA's errors.
#pragma once

#include <string>

namespace simgpu {

// The error of this name or number; false where there is none.
bool error_of(const std::string& text, int* out);

}  // namespace simgpu
