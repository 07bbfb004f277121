// Prefix sums over counts, one count for each run of a mask, in three launches: inside tiles of 256
// runs, over tiles, and the tiles' starts onto the runs.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "kernels/cuda/element.cuh"
#include "kernels/cuda/launch.h"

namespace scape::kernels::cuda {

inline constexpr unsigned kTileRuns = kThreads;
inline constexpr unsigned kScanThreads = 1024;

// The sum over the threads of the block before this one; *total gets that of all. All threads call
// it; a barrier has to stand between two calls.
template <unsigned kBlock>
__device__ inline uint64_t block_exclusive_sum(uint64_t value, uint64_t* total) {
  __shared__ uint64_t warps[kBlock / 32];
  const uint64_t inclusive = warp_inclusive_sum(value);
  const unsigned warp = threadIdx.x / 32;
  if (lane_of_thread() == 31) warps[warp] = inclusive;
  __syncthreads();
  uint64_t before = inclusive - value;
  uint64_t all = 0;
  for (unsigned w = 0; w < kBlock / 32; ++w) {
    if (w < warp) before += warps[w];
    all += warps[w];
  }
  *total = all;
  return before;
}

namespace kernel {

// The end of a tile: thread i has the count of run i of it.
__device__ inline void put_tile(uint64_t count, uint64_t* index, size_t runs) {
  uint64_t total;
  const uint64_t before = block_exclusive_sum<kThreads>(count, &total);
  const size_t run = size_t{blockIdx.x} * kTileRuns + threadIdx.x;
  if (run < runs) index[run] = before;
  uint64_t* const tiles = index + runs + 1;
  if (threadIdx.x == 0) tiles[blockIdx.x] = total;
}

}  // namespace kernel

// Counts, the total, and one sum a tile.
inline size_t scan_bytes(size_t runs) {
  return (runs + 1 + parts_of(runs, kTileRuns)) * sizeof(uint64_t);
}

// After a launch over tiles that ended with put_tile(). `wanted`, in device memory: where it is not
// null and 0, there is nothing to do.
Status finish_scan(const char* operation, cudaStream_t stream, uint64_t* index, size_t runs,
                   const uint32_t* wanted);

}  // namespace scape::kernels::cuda
