// Prefix sums over counts: what follows the sums inside tiles.
#include "kernels/cuda/scan.cuh"

namespace scape::kernels::cuda {
namespace kernel {

__global__ void __launch_bounds__(kScanThreads)
    scan_tiles(uint64_t* index, size_t runs, const uint32_t* wanted) {
  if (wanted != nullptr && *wanted == 0) return;
  const size_t count = parts_of(runs, kTileRuns);
  uint64_t* const tiles = index + runs + 1;
  uint64_t before = 0;
  for (size_t first = 0; first < count; first += kScanThreads) {
    const size_t i = first + threadIdx.x;
    uint64_t total;
    const uint64_t sum = block_exclusive_sum<kScanThreads>(i < count ? tiles[i] : 0, &total);
    if (i < count) tiles[i] = before + sum;
    before += total;
    __syncthreads();
  }
  if (threadIdx.x == 0) index[runs] = before;
}

__global__ void __launch_bounds__(kThreads)
    add_tiles(uint64_t* index, size_t runs, const uint32_t* wanted) {
  if (wanted != nullptr && *wanted == 0) return;
  const size_t run = size_t{blockIdx.x} * kTileRuns + threadIdx.x;
  if (run < runs) index[run] += index[runs + 1 + blockIdx.x];
}

}  // namespace kernel

Status finish_scan(const char* operation, cudaStream_t stream, uint64_t* index, size_t runs,
                   const uint32_t* wanted) {
  SCAPE_RETURN_IF_ERROR(
      launch(operation, stream, 1, kScanThreads, kernel::scan_tiles, index, runs, wanted));
  if (runs == 0) return Status::Ok();
  return launch(operation, stream, parts_of(runs, kTileRuns), kThreads, kernel::add_tiles, index,
                runs, wanted);
}

}  // namespace scape::kernels::cuda
