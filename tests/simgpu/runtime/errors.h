// The names of CUDA's errors.
#pragma once

#include <string>

#include "cuda_runtime_api.h"

namespace simgpu {

// The error of this name or number; false where there is none.
bool error_of(const std::string& text, cudaError_t* out);

}  // namespace simgpu
