// Masks: their index, how many bits two of them share, and the codes in which they travel.
#include "kernels/cuda/cuda_ops.h"
#include "kernels/cuda/element.cuh"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/scan.cuh"

namespace scape::kernels::cuda {
namespace kernel {

constexpr unsigned kBlockWords = kOffsetBlock / 64;
constexpr unsigned kBlockRuns = kOffsetBlock / kRunElements;

// A warp counts 32 runs of its tile, one after another.
__global__ void __launch_bounds__(kThreads)
    count_runs(const uint64_t* __restrict__ words, size_t n, uint64_t* index, size_t runs) {
  const unsigned lane = lane_of_thread();
  const size_t first = size_t{blockIdx.x} * kTileRuns + threadIdx.x / 32 * 32;
  unsigned count = 0;
#pragma unroll 8
  for (unsigned i = 0; i < 32; ++i) {
    const size_t w = (first + i) * kRunWords + lane;
    const auto own = static_cast<unsigned>(w * 64 < n ? __popcll(words[w]) : 0);
    const unsigned all = __reduce_add_sync(kAllLanes, own);
    if (lane == i) count = all;
  }
  put_tile(count, index, runs);
}

__global__ void __launch_bounds__(kThreads)
    copy_mask(const uint64_t* __restrict__ from, size_t words, uint64_t* __restrict__ to,
              const Verdict* verdict) {
  const size_t w = size_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (w < words && !skipped(verdict)) to[w] = from[w];
}

__global__ void __launch_bounds__(kThreads)
    replace_refused(uint64_t* words, size_t n, MaskParts parts, const uint32_t* refused) {
  const size_t begin = (size_t{blockIdx.x} * blockDim.x + threadIdx.x) * 64;
  if (begin >= n || *refused == 0) return;
  const size_t part = begin / parts.size * parts.size;
  const size_t bits = n - part < parts.size ? parts.last_bits : parts.bits;
  const size_t before = begin - part;
  const size_t set = bits > before ? bits - before : 0;
  words[begin / 64] = set >= 64 ? ~uint64_t{0} : (uint64_t{1} << set) - 1;
}

__global__ void __launch_bounds__(kThreads)
    count_common_bits(const uint64_t* __restrict__ a, const uint64_t* __restrict__ b, size_t words,
                      unsigned long long* count) {
  const size_t w = size_t{blockIdx.x} * blockDim.x + threadIdx.x;
  auto common = static_cast<unsigned>(w < words ? __popcll(a[w] & b[w]) : 0);
  common = __reduce_add_sync(kAllLanes, common);
  if (lane_of_thread() == 0 && common > 0) atomicAdd(count, common);
}

// Codes are aligned to 2 bytes.
__device__ inline void put32(uint16_t* to, uint32_t value) {
  to[0] = static_cast<uint16_t>(value);
  to[1] = static_cast<uint16_t>(value >> 16);
}
__device__ inline uint32_t get32(const uint16_t* from) { return from[0] | uint32_t{from[1]} << 16; }

__global__ void __launch_bounds__(kThreads) encode_offsets(MaskView mask, uint16_t* out) {
  const MaskRun run(mask);
  if (run.outside(mask)) return;
  const size_t blocks = parts_of(mask.n, kOffsetBlock);
  if (run.begin() % kOffsetBlock == 0 && lane_of_thread() == 0) {
    const size_t runs = parts_of(mask.n, kRunElements);
    const size_t first = run.begin() / kRunElements;
    const size_t end = first + kBlockRuns < runs ? first + kBlockRuns : runs;
    put32(out + run.begin() / kOffsetBlock * 2,
          static_cast<uint32_t>(mask.index[end] - mask.index[first]));
  }
  uint16_t* const offsets = out + blocks * 2;
  run.for_each([&](size_t j, size_t i) { offsets[i] = static_cast<uint16_t>(j); });
}

__device__ inline void refuse(const Refusal& refusal) { atomicCAS(refusal.word, 0u, refusal.code); }

// Where each block's offsets begin: starts[b]; starts[blocks] is 0 where the counts are not those
// of k bits, and nothing more may be read then.
__global__ void __launch_bounds__(kScanThreads)
    scan_counts(const uint16_t* __restrict__ code, size_t blocks, size_t k, uint64_t* starts,
                Refusal refusal) {
  uint64_t before = 0;
  for (size_t first = 0; first < blocks; first += kScanThreads) {
    const size_t b = first + threadIdx.x;
    uint64_t total;
    const uint64_t sum =
        block_exclusive_sum<kScanThreads>(b < blocks ? get32(code + b * 2) : 0, &total);
    if (b < blocks) starts[b] = before + sum;
    before += total;
    __syncthreads();
  }
  if (threadIdx.x != 0) return;
  starts[blocks] = before == k;
  if (before != k) refuse(refusal);
}

// One block of threads for each block of the code: its bits are put together in shared memory.
__global__ void __launch_bounds__(kThreads)
    decode_offsets(const uint16_t* __restrict__ code, size_t n, const uint64_t* __restrict__ starts,
                   uint64_t* __restrict__ words, Refusal refusal) {
  __shared__ unsigned halves[kBlockWords * 2];
  const size_t blocks = parts_of(n, kOffsetBlock);
  if (starts[blocks] == 0) return;
  const size_t begin = size_t{blockIdx.x} * kOffsetBlock;
  const size_t size = n - begin < kOffsetBlock ? n - begin : kOffsetBlock;
  const uint32_t count = get32(code + size_t{blockIdx.x} * 2);
  if (count > size) {
    if (threadIdx.x == 0) refuse(refusal);
    return;
  }
  const uint16_t* const offsets = code + blocks * 2 + starts[blockIdx.x];
  for (unsigned w = threadIdx.x; w < kBlockWords * 2; w += kThreads) halves[w] = 0;
  __syncthreads();
  bool wrong = false;
  for (uint32_t i = threadIdx.x; i < count; i += kThreads) {
    const unsigned offset = offsets[i];
    wrong |= offset >= size || (i > 0 && offsets[i - 1] >= offset);
    atomicOr(&halves[offset / 32], 1u << (offset % 32));
  }
  if (wrong) refuse(refusal);
  __syncthreads();
  for (unsigned w = threadIdx.x; w < parts_of(size, 64); w += kThreads) {
    words[begin / 64 + w] = halves[w * 2] | uint64_t{halves[w * 2 + 1]} << 32;
  }
}

// scratch[0]: bits; scratch[1]: blocks of threads that are done.
__global__ void __launch_bounds__(kThreads)
    decode_words(const uint16_t* __restrict__ code, size_t n, size_t k,
                 uint64_t* __restrict__ words, unsigned long long* scratch, Refusal refusal) {
  const size_t w = size_t{blockIdx.x} * blockDim.x + threadIdx.x;
  const size_t count = parts_of(n, 64);
  uint64_t word = 0;
  if (w < count) {
    for (unsigned i = 0; i < 4; ++i) word |= uint64_t{code[w * 4 + i]} << (16 * i);
    words[w] = word;
    if (w + 1 == count && n % 64 != 0 && word >> (n % 64) != 0) refuse(refusal);
  }
  const auto bits = static_cast<unsigned>(__popcll(word));
  const unsigned all = __reduce_add_sync(kAllLanes, bits);
  if (lane_of_thread() == 0 && all > 0) atomicAdd(&scratch[0], all);
  __threadfence();
  __syncthreads();
  if (threadIdx.x != 0) return;
  if (atomicAdd(&scratch[1], 1ull) + 1 < gridDim.x) return;
  if (atomicAdd(&scratch[0], 0ull) != k) refuse(refusal);
}

}  // namespace kernel

namespace {

size_t word_blocks(size_t words) { return parts_of(words, kThreads); }

}  // namespace

size_t mask_index_bytes(size_t n) { return scan_bytes(mask_index_runs(n)); }

Status index_mask(cudaStream_t stream, const uint64_t* words, size_t n, uint64_t* index) {
  const size_t runs = mask_index_runs(n);
  if (runs > 0) {
    SCAPE_RETURN_IF_ERROR(launch("index_mask", stream, parts_of(runs, kTileRuns), kThreads,
                                 kernel::count_runs, words, n, index, runs));
  }
  return finish_scan("index_mask", stream, index, runs, nullptr);
}

Status replace_refused(cudaStream_t stream, uint64_t* words, size_t n, const MaskParts& parts,
                       const uint32_t* refused) {
  if (n == 0) return Status::Ok();
  return launch("replace_refused", stream, word_blocks(mask_words(n)), kThreads,
                kernel::replace_refused, words, n, parts, refused);
}

Status copy_mask(cudaStream_t stream, const uint64_t* from, size_t n, uint64_t* to,
                 const Verdict* verdict) {
  if (n == 0) return Status::Ok();
  const size_t words = mask_words(n);
  return launch("copy_mask", stream, word_blocks(words), kThreads, kernel::copy_mask, from, words,
                to, verdict);
}

Status count_common_bits(cudaStream_t stream, const uint64_t* a, const uint64_t* b, size_t words,
                         unsigned long long* count) {
  SCAPE_RETURN_IF_ERROR(
      check(cudaMemsetAsync(count, 0, sizeof(*count), stream), "count_common_bits"));
  if (words == 0) return Status::Ok();
  return launch("count_common_bits", stream, word_blocks(words), kThreads,
                kernel::count_common_bits, a, b, words, count);
}

Status encode_offsets(cudaStream_t stream, const MaskView& mask, void* out) {
  if (mask.n == 0) return Status::Ok();
  return launch("encode_offsets", stream, run_blocks(mask.n), kThreads, kernel::encode_offsets,
                mask, static_cast<uint16_t*>(out));
}

Status encode_words(cudaStream_t stream, const uint64_t* words, size_t n, void* out) {
  return check(cudaMemcpyAsync(out, words, mask_words(n) * sizeof(uint64_t),
                               cudaMemcpyDeviceToDevice, stream),
               "encode_words");
}

size_t decode_scratch_bytes(size_t n) {
  return std::max<size_t>(parts_of(n, kOffsetBlock) + 1, 2) * sizeof(uint64_t);
}

Status decode_offsets(cudaStream_t stream, const void* in, size_t n, size_t k, uint64_t* words,
                      void* scratch, const Refusal& refusal) {
  const size_t blocks = parts_of(n, kOffsetBlock);
  const auto* code = static_cast<const uint16_t*>(in);
  auto* starts = static_cast<uint64_t*>(scratch);
  SCAPE_RETURN_IF_ERROR(launch("decode_offsets", stream, 1, kScanThreads, kernel::scan_counts, code,
                               blocks, k, starts, refusal));
  if (blocks == 0) return Status::Ok();
  return launch("decode_offsets", stream, blocks, kThreads, kernel::decode_offsets, code, n, starts,
                words, refusal);
}

Status decode_words(cudaStream_t stream, const void* in, size_t n, size_t k, uint64_t* words,
                    void* scratch, const Refusal& refusal) {
  auto* counters = static_cast<unsigned long long*>(scratch);
  SCAPE_RETURN_IF_ERROR(
      check(cudaMemsetAsync(counters, 0, 2 * sizeof(*counters), stream), "decode_words"));
  return launch("decode_words", stream, std::max<size_t>(word_blocks(mask_words(n)), 1), kThreads,
                kernel::decode_words, static_cast<const uint16_t*>(in), n, k, words, counters,
                refusal);
}

}  // namespace scape::kernels::cuda
