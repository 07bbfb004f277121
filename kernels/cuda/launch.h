// Launching, on the host: what every operation does around its kernel.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "base/status.h"
#include "kernels/cuda/element.cuh"

namespace scape::kernels::cuda {

inline constexpr unsigned kThreads = 256;

inline Status check(cudaError_t result, const char* operation) {
  if (result == cudaSuccess) return Status::Ok();
  return error(SCAPE_ERR_INTERNAL,
               "kernel %s was not launched: %s; see whether this library was built for this GPU, "
               "and whether an earlier call failed",
               operation, cudaGetErrorString(result));
}

// What a grid may have in x, the one direction that is used.
inline constexpr size_t kMaxBlocks = 0x7fffffff;

// Always cudaLaunchKernelEx: sources with <<<>>> would be nvcc's alone.
template <typename... Params, typename... Args>
Status launch(const char* operation, cudaStream_t stream, size_t blocks, unsigned threads,
              void (*kernel)(Params...), Args... args) {
  if (blocks > kMaxBlocks) {
    return error(SCAPE_ERR_ARGUMENT,
                 "kernel %s was not launched: its array would take %zu blocks of threads, and a "
                 "grid has at most %zu; cut the buffer into smaller ones",
                 operation, blocks, kMaxBlocks);
  }
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(threads);
  config.stream = stream;
  return check(cudaLaunchKernelEx(&config, kernel, args...), operation);
}

constexpr size_t parts_of(size_t n, size_t part) { return n / part + (n % part != 0); }

// Blocks for one thread per 4 elements.
inline size_t quad_blocks(size_t n) { return parts_of(n, size_t{kThreads} * 4); }
// Blocks for one warp per run of 32 mask words.
inline size_t run_blocks(size_t n) { return parts_of(n, size_t{kThreads} / 32 * kRunElements); }

// Whether 4 elements of T can be loaded at once from any multiple of 4.
template <typename T>
bool aligned(const T* values) {
  return reinterpret_cast<uintptr_t>(values) % (4 * sizeof(T)) == 0;
}

template <typename T>
struct TypeTag {
  using type = T;
};

// Calls body(tag) with the element type's tag.
template <typename Body>
Status with_type(Type type, Body&& body) {
  switch (type) {
    case Type::kBfloat16:
      return body(TypeTag<Bfloat16>{});
    case Type::kFloat16:
      return body(TypeTag<Float16>{});
    default:
      return body(TypeTag<float>{});
  }
}

}  // namespace scape::kernels::cuda
