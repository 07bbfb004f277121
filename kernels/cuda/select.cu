// Selection: exactly the k largest scores, ties to the lower index.
//
// The threshold is narrowed down by histograms over a range of keys that has 4096 buckets: first
// over the two octaves around the caller's guess, where 12 bits more settle it; where the k-th
// largest is not in there, over all keys, in three rounds. The rounds are enqueued beforehand, and
// those that are not needed end at once. Then one pass writes the mask; where not all scores equal
// to the threshold are taken, their prefix sums say which.
#include "kernels/cuda/cuda_ops.h"
#include "kernels/cuda/element.cuh"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/scan.cuh"

namespace scape::kernels::cuda {
namespace {

constexpr unsigned kBucketBits = 12;
constexpr unsigned kBuckets = 1u << kBucketBits;
constexpr unsigned kKeyBits = 31;
constexpr unsigned kRounds = 4;  // a guess that missed, and three over all keys

// Keys of two octaves around a guess, in buckets that leave one round of single keys.
constexpr unsigned kGuessShift = 12;
constexpr uint32_t kGuessBelow = 1u << (kGuessShift + kBucketBits - 1);

}  // namespace

// What the rounds know. The keys in [low, low + (buckets << shift)) hold the threshold, or so the
// guess says; it is the rank-th largest of them.
struct Search {
  uint32_t low;
  uint32_t shift;
  uint32_t buckets;
  uint32_t guessed;  // keys above the range are not counted in rank yet
  uint32_t settled;  // low is the threshold
  uint32_t ties;     // not all scores equal to it are taken
  uint32_t arrived;  // blocks of threads that are done with this round
  unsigned long long rank;
  unsigned long long above;
  unsigned long long histogram[kBuckets];
};

namespace {

__device__ inline void search_everywhere(Search* search, unsigned long long k) {
  search->low = 0;
  search->shift = kKeyBits - kBucketBits;
  search->buckets = kBuckets;
  search->guessed = 0;
  search->rank = k;
}

// How many blocks share a round: enough to fill a device, and few enough that adding up their
// histograms is little beside reading the scores.
constexpr size_t kRoundElements = size_t{1} << 14;
constexpr size_t kMaxRoundBlocks = 1056;

}  // namespace

namespace kernel {

__global__ void __launch_bounds__(kThreads)
    begin_search(Search* search, size_t k, const float* guess) {
  for (unsigned b = threadIdx.x; b < kBuckets; b += kThreads) search->histogram[b] = 0;
  if (threadIdx.x != 0) return;
  search->settled = search->ties = search->arrived = 0;
  search->above = 0;
  const uint32_t key = score_key(*guess);
  if (key == 0 || !is_finite(*guess)) {
    search_everywhere(search, k);
    return;
  }
  search->low = key > kGuessBelow ? key - kGuessBelow : 0;
  search->shift = kGuessShift;
  search->buckets = kBuckets;
  search->guessed = 1;
  search->rank = k;
}

// What the last block of a round does: finds the bucket of the rank-th largest key and narrows the
// range to it. All its threads call it.
__device__ void narrow(Search* search, size_t k) {
  constexpr unsigned kOwn = kBuckets / kThreads;
  const unsigned shift = search->shift;
  const uint32_t low = search->low;
  const bool guessed = search->guessed != 0;
  const unsigned long long above = guessed ? search->above : 0;
  const unsigned long long rank = search->rank;
  // Thread 0 has the highest buckets.
  const unsigned top = kBuckets - 1 - threadIdx.x * kOwn;
  uint64_t own = 0;
  for (unsigned i = 0; i < kOwn; ++i) own += __ldcg(&search->histogram[top - i]);
  uint64_t total;
  uint64_t before = block_exclusive_sum<kThreads>(own, &total) + above;
  if (before < rank && rank <= before + own) {
    unsigned bucket = top;
    unsigned long long count = __ldcg(&search->histogram[bucket]);
    for (; before + count < rank; count = __ldcg(&search->histogram[--bucket])) before += count;
    search->low = low + (bucket << shift);
    search->rank = rank - before;
    search->guessed = 0;
    search->shift = shift > kBucketBits ? shift - kBucketBits : 0;
    search->buckets = 1u << (shift - search->shift);
    if (shift == 0) {
      search->settled = 1;
      search->ties = search->rank < count;
    }
  } else if (threadIdx.x == 0 && (rank <= above || rank > above + total)) {
    search_everywhere(search, k);
  }
  __syncthreads();
  for (unsigned i = 0; i < kOwn; ++i) search->histogram[top - i] = 0;
  if (threadIdx.x == 0) search->arrived = 0;
}

template <bool kAligned>
__global__ void __launch_bounds__(kThreads)
    search_round(const float* __restrict__ scores, size_t n, size_t k, Search* search) {
  __shared__ unsigned counts[kBuckets];
  __shared__ unsigned long long higher;
  __shared__ unsigned arrived;
  if (search->settled != 0) return;
  const uint32_t low = search->low;
  const unsigned shift = search->shift;
  const unsigned buckets = search->buckets;
  for (unsigned b = threadIdx.x; b < kBuckets; b += kThreads) counts[b] = 0;
  if (threadIdx.x == 0) higher = 0;
  __syncthreads();

  unsigned long long above = 0;
  for (size_t j = quad_begin(); j < n; j += size_t{gridDim.x} * kThreads * 4) {
    const Quad<float> quad = load_quad<kAligned>(scores, j, n);
#pragma unroll
    for (unsigned i = 0; i < 4; ++i) {
      const uint32_t key = score_key(quad.at[i]);
      if (j + i >= n || key < low) continue;
      const uint32_t bucket = (key - low) >> shift;
      if (bucket < buckets) {
        atomicAdd(&counts[bucket], 1u);
      } else {
        ++above;
      }
    }
  }
  if (above > 0) atomicAdd(&higher, above);
  __syncthreads();
  for (unsigned b = threadIdx.x; b < kBuckets; b += kThreads) {
    if (counts[b] > 0) atomicAdd(&search->histogram[b], counts[b]);
  }
  if (threadIdx.x == 0 && higher > 0) atomicAdd(&search->above, higher);
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) arrived = atomicAdd(&search->arrived, 1u) + 1;
  __syncthreads();
  if (arrived < gridDim.x) return;
  __threadfence();
  narrow(search, k);
}

// A warp writes the 32 words of its run: the scores above the threshold, and those equal to it if
// all of them are taken. If not, counts[run] says how many there are.
template <bool kAligned>
__global__ void __launch_bounds__(kThreads)
    write_mask(const float* __restrict__ scores, size_t n, const Search* search,
               uint64_t* __restrict__ words, float* threshold, uint64_t* counts) {
  const uint32_t lowest = search->low;
  const bool ties = search->ties != 0;
  if (blockIdx.x == 0 && threadIdx.x == 0) *threshold = float_of(lowest);
  const unsigned lane = lane_of_thread();
  const size_t run = (size_t{blockIdx.x} * blockDim.x + threadIdx.x) / 32;
  const size_t begin = run * kRunElements;
  if (begin >= n) return;
  uint64_t word = 0;
  unsigned equal = 0;
#pragma unroll 4
  for (unsigned step = 0; step < kRunSteps; ++step) {
    const size_t j = begin + step * 128u + lane * 4;
    const Quad<float> quad = load_quad<kAligned>(scores, j, n);
    unsigned bits = 0;
#pragma unroll
    for (unsigned i = 0; i < 4; ++i) {
      const uint32_t key = score_key(quad.at[i]);
      const bool tie = j + i < n && key == lowest;
      equal += tie;
      if (j + i < n && (key > lowest || (tie && !ties))) bits |= 1u << i;
    }
    // 8 lanes make half a word; lanes 2 step and 2 step + 1 keep this step's two words.
    bits <<= lane % 8 * 4;
    bits |= __shfl_xor_sync(kAllLanes, bits, 1);
    bits |= __shfl_xor_sync(kAllLanes, bits, 2);
    bits |= __shfl_xor_sync(kAllLanes, bits, 4);
    const int source = static_cast<int>(lane % 2 * 16);
    const uint32_t low = __shfl_sync(kAllLanes, bits, source);
    const uint32_t high = __shfl_sync(kAllLanes, bits, source + 8);
    if (lane / 2 == step) word = low | uint64_t{high} << 32;
  }
  const size_t w = run * kRunWords + lane;
  if (w * 64 < n) words[w] = word;
  if (!ties) return;
  equal = __reduce_add_sync(kAllLanes, equal);
  if (lane == 0) counts[run] = equal;
}

// counts[run] becomes the sum over the runs of its tile before it.
__global__ void __launch_bounds__(kThreads)
    scan_ties(const Search* search, uint64_t* counts, size_t runs) {
  if (search->ties == 0) return;
  const size_t run = size_t{blockIdx.x} * kTileRuns + threadIdx.x;
  put_tile(run < runs ? counts[run] : 0, counts, runs);
}

// The first `rank` of the scores equal to the threshold.
template <bool kAligned>
__global__ void __launch_bounds__(kThreads)
    take_ties(const float* __restrict__ scores, size_t n, const Search* search,
              const uint64_t* __restrict__ before, uint64_t* __restrict__ words) {
  if (search->ties == 0) return;
  const unsigned lane = lane_of_thread();
  const size_t run = (size_t{blockIdx.x} * blockDim.x + threadIdx.x) / 32;
  const size_t begin = run * kRunElements;
  if (begin >= n) return;
  const uint64_t rank = search->rank;
  uint64_t taken = before[run];
  if (taken >= rank || before[run + 1] == taken) return;
  const uint32_t lowest = search->low;
  for (unsigned step = 0; step < kRunSteps; ++step) {
    const size_t j = begin + step * 128u + lane * 4;
    const Quad<float> quad = load_quad<kAligned>(scores, j, n);
    unsigned ties = 0;
#pragma unroll
    for (unsigned i = 0; i < 4; ++i) {
      if (j + i < n && score_key(quad.at[i]) == lowest) ties |= 1u << i;
    }
    const auto own = static_cast<unsigned>(__popc(ties));
    const unsigned inclusive = warp_inclusive_sum(own);
    uint64_t place = taken + inclusive - own;
    unsigned long long bits = 0;
#pragma unroll
    for (unsigned i = 0; i < 4; ++i) {
      if ((ties >> i & 1) != 0 && place++ < rank) bits |= 1ull << (j % 64 + i);
    }
    if (bits != 0) atomicOr(reinterpret_cast<unsigned long long*>(&words[j / 64]), bits);
    taken += __shfl_sync(kAllLanes, inclusive, 31);
    if (taken >= rank) return;
  }
}

}  // namespace kernel

size_t select_scratch_bytes(size_t n) { return sizeof(Search) + scan_bytes(mask_index_runs(n)); }

Status select(cudaStream_t stream, const float* scores, size_t n, size_t k, uint64_t* words,
              float* threshold, void* scratch) {
  constexpr const char* kName = "select";
  k = std::min(k, n);
  if (k == 0) {
    SCAPE_RETURN_IF_ERROR(check(cudaMemsetAsync(threshold, 0, sizeof(float), stream), kName));
    return check(cudaMemsetAsync(words, 0, mask_words(n) * sizeof(uint64_t), stream), kName);
  }
  auto* const search = static_cast<Search*>(scratch);
  auto* const counts = reinterpret_cast<uint64_t*>(search + 1);
  const size_t runs = mask_index_runs(n);
  const bool fast = aligned(scores);
  SCAPE_RETURN_IF_ERROR(launch(kName, stream, 1, kThreads, kernel::begin_search, search, k,
                               static_cast<const float*>(threshold)));
  const size_t blocks = std::min(parts_of(n, kRoundElements), kMaxRoundBlocks);
  for (unsigned round = 0; round < kRounds; ++round) {
    SCAPE_RETURN_IF_ERROR(launch(kName, stream, blocks, kThreads,
                                 fast ? kernel::search_round<true> : kernel::search_round<false>,
                                 scores, n, k, search));
  }
  const Search* const found = search;
  SCAPE_RETURN_IF_ERROR(launch(kName, stream, run_blocks(n), kThreads,
                               fast ? kernel::write_mask<true> : kernel::write_mask<false>, scores,
                               n, found, words, threshold, counts));
  SCAPE_RETURN_IF_ERROR(launch(kName, stream, parts_of(runs, kTileRuns), kThreads,
                               kernel::scan_ties, found, counts, runs));
  SCAPE_RETURN_IF_ERROR(finish_scan(kName, stream, counts, runs, &found->ties));
  return launch(kName, stream, run_blocks(n), kThreads,
                fast ? kernel::take_ties<true> : kernel::take_ties<false>, scores, n, found,
                static_cast<const uint64_t*>(counts), words);
}

}  // namespace scape::kernels::cuda
