// Kernels that read a word which the host writes.
#include "kernels/cuda/cuda_ops.h"
#include "kernels/cuda/launch.h"

namespace scape::kernels::cuda {
namespace kernel {

// How long a thread rests before it looks again: each look goes over the bus.
constexpr unsigned kRestNs = 1000;

__global__ void wait_for_word(const unsigned* word) {
  while (__ldcv(word) == 0) __nanosleep(kRestNs);
  __threadfence_system();
}

__global__ void __launch_bounds__(kThreads)
    poison_where(const unsigned* word, unsigned bad, unsigned char* data, size_t bytes) {
  __shared__ unsigned found;
  if (threadIdx.x == 0) found = __ldcv(word);  // one look a block
  __syncthreads();
  if (found != bad) return;
  const size_t all = size_t{gridDim.x} * blockDim.x;
  for (size_t i = size_t{blockIdx.x} * blockDim.x + threadIdx.x; i < bytes; i += all) {
    data[i] = 0xff;
  }
}

}  // namespace kernel

namespace {

// Enough to fill the memory of a step that is lost anyway; few, since most find nothing to do.
constexpr size_t kMostBlocks = 32;

}  // namespace

Status wait_for_word(cudaStream_t stream, const uint32_t* word) {
  return launch("wait_for_word", stream, 1, 1, kernel::wait_for_word, word);
}

Status poison_where(cudaStream_t stream, const uint32_t* word, uint32_t bad, void* data,
                    size_t bytes) {
  if (bytes == 0) return Status::Ok();
  return launch("poison_where", stream, std::min(parts_of(bytes, kThreads), kMostBlocks), kThreads,
                kernel::poison_where, word, bad, static_cast<unsigned char*>(data), bytes);
}

}  // namespace scape::kernels::cuda
