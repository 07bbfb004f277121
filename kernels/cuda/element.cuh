// Elements of caller buffers on the device, four at a time, and the walk of a warp over a run of a
// mask.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "kernels/cuda/cuda_ops.h"
#include "kernels/scalar/element.h"

namespace scape::kernels::cuda {

inline constexpr unsigned kAllLanes = 0xffffffffu;

// ---- element types ----

struct Bfloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

__device__ inline float value_of(float element) { return element; }
__device__ inline float value_of(Bfloat16 element) { return from_bfloat16(element.bits); }
__device__ inline float value_of(Float16 element) { return from_float16(element.bits); }

__device__ inline void set(float* element, float value) { *element = value; }
__device__ inline void set(Bfloat16* element, float value) { element->bits = to_bfloat16(value); }
__device__ inline void set(Float16* element, float value) { element->bits = to_float16(value); }

// The value as a buffer of type T would hold it.
template <typename T>
__device__ inline float rounded_to(float value) {
  T element;
  set(&element, value);
  return value_of(element);
}

__device__ inline float quiet_nan() { return float_of(0x7fc00000u); }

__device__ inline bool skipped(const Verdict* verdict) {
  return verdict != nullptr && verdict->skipped != 0;
}

// ---- four elements at a time ----

template <typename T>
struct alignas(4 * sizeof(T)) Quad {
  T at[4];
};

// Elements from + j .. + 3 that are below end; the others are value-initialised.
template <bool kAligned, typename T>
__device__ inline Quad<T> load_quad(const T* from, size_t j, size_t end) {
  if (kAligned && j + 4 <= end) return *reinterpret_cast<const Quad<T>*>(from + j);
  Quad<T> quad{};
#pragma unroll
  for (unsigned i = 0; i < 4; ++i) {
    if (j + i < end) quad.at[i] = from[j + i];
  }
  return quad;
}

template <bool kAligned, typename T>
__device__ inline void store_quad(T* to, size_t j, size_t end, const Quad<T>& quad) {
  if (kAligned && j + 4 <= end) {
    *reinterpret_cast<Quad<T>*>(to + j) = quad;
    return;
  }
#pragma unroll
  for (unsigned i = 0; i < 4; ++i) {
    if (j + i < end) to[j + i] = quad.at[i];
  }
}

// Of a grid with one thread per 4 elements: this thread's first.
__device__ inline size_t quad_begin() {
  return (size_t{blockIdx.x} * blockDim.x + threadIdx.x) * 4;
}

// ---- warps ----

__device__ inline unsigned lane_of_thread() { return threadIdx.x % 32; }

// The sum over this lane and those below it.
template <typename T>
__device__ inline T warp_inclusive_sum(T value) {
#pragma unroll
  for (unsigned distance = 1; distance < 32; distance *= 2) {
    const T below = __shfl_up_sync(kAllLanes, value, distance);
    if (lane_of_thread() >= distance) value += below;
  }
  return value;
}

// The position of the (n + 1)-th set bit of a word that has more than n.
__device__ inline unsigned nth_bit(uint64_t word, unsigned n) {
  unsigned position = 0;
  auto bits = static_cast<uint32_t>(word);
  const auto low = static_cast<unsigned>(__popc(bits));
  if (n >= low) {
    n -= low;
    position = 32;
    bits = static_cast<uint32_t>(word >> 32);
  }
#pragma unroll
  for (unsigned width = 16; width > 0; width /= 2) {
    const auto count = static_cast<unsigned>(__popc(bits & ((1u << width) - 1)));
    if (n >= count) {
      n -= count;
      position += width;
      bits >>= width;
    }
  }
  return position;
}

// ---- a warp and its run of a mask: 32 words, one in each lane ----

inline constexpr unsigned kRunWords = 32;
inline constexpr unsigned kRunElements = kRunWords * 64;
static_assert(kRunElements == 2048);  // as cuda_ops.h says
// A warp goes over its run's elements in so many steps, 4 elements a lane.
inline constexpr unsigned kRunSteps = kRunElements / 128;

// Every lane of a warp makes one and calls its functions together.
class MaskRun {
 public:
  __device__ explicit MaskRun(const MaskView& mask)
      : lane_(lane_of_thread()),
        run_((size_t{blockIdx.x} * blockDim.x + threadIdx.x) / 32),
        begin_(run_ * kRunElements) {
    if (begin_ >= mask.n) return;
    word_ = load(mask.words, mask.n);
    const auto count = static_cast<unsigned>(__popcll(word_));
    const unsigned inclusive = warp_inclusive_sum(count);
    before_ = inclusive - count;
    bits_ = __shfl_sync(kAllLanes, inclusive, 31);
    payload_begin_ = mask.index[run_];
  }

  // Past the mask's end: the same for all lanes of the warp.
  __device__ bool outside(const MaskView& mask) const { return begin_ >= mask.n; }
  __device__ size_t begin() const { return begin_; }

  // This lane's word of another mask of n elements.
  __device__ uint64_t load(const uint64_t* words, size_t n) const {
    const size_t w = run_ * kRunWords + lane_;
    return w * 64 < n ? words[w] : 0;
  }

  // The first of this lane's 4 elements in a step.
  __device__ size_t quad_begin(unsigned step) const { return begin_ + step * 128u + lane_ * 4; }

  // This lane's 4 bits in a step, of any word that lanes hold.
  __device__ unsigned quad_bits(uint64_t word, unsigned step) const {
    return static_cast<unsigned>(__shfl_sync(kAllLanes, word, word_of(step)) >> shift()) & 15u;
  }

  struct QuadBits {
    unsigned bits;   // of this lane's 4 elements in the step
    size_t payload;  // where the first of them stands in the payload
  };
  __device__ QuadBits quad(unsigned step) const {
    const uint64_t word = __shfl_sync(kAllLanes, word_, word_of(step));
    const unsigned before = __shfl_sync(kAllLanes, before_, word_of(step));
    const auto below = static_cast<unsigned>(__popcll(word & ((uint64_t{1} << shift()) - 1)));
    return {static_cast<unsigned>(word >> shift()) & 15u, payload_begin_ + before + below};
  }

  // Calls visit(j, i) for the run's masked elements j and their places i in the payload, 32
  // neighbours of the payload at a time, whatever the density.
  template <typename Visit>
  __device__ void for_each(Visit&& visit) const {
    for (unsigned first = 0; first < bits_; first += 32) {
      const unsigned i = first + lane_;
      unsigned owner = 0;  // the last lane whose word begins at or before bit i
#pragma unroll
      for (unsigned step = 16; step > 0; step /= 2) {
        const unsigned before = __shfl_sync(kAllLanes, before_, static_cast<int>(owner + step));
        if (before <= i) owner += step;
      }
      const uint64_t word = __shfl_sync(kAllLanes, word_, static_cast<int>(owner));
      const unsigned before = __shfl_sync(kAllLanes, before_, static_cast<int>(owner));
      if (i < bits_) visit(begin_ + owner * 64 + nth_bit(word, i - before), payload_begin_ + i);
    }
  }

 private:
  __device__ int word_of(unsigned step) const { return static_cast<int>(step * 2 + lane_ / 16); }
  __device__ unsigned shift() const { return lane_ % 16 * 4; }

  unsigned lane_;
  size_t run_;
  size_t begin_;
  size_t payload_begin_ = 0;
  uint64_t word_ = 0;
  unsigned before_ = 0;  // bits of the run before this lane's word
  unsigned bits_ = 0;    // of the run
};

// The payload's flag element; one thread calls it.
__device__ inline float take_flag(NonfiniteFlag* flag) {
  const float value = flag->raised != 0 ? quiet_nan() : 0.0f;
  flag->raised = 0;
  return value;
}

}  // namespace scape::kernels::cuda
