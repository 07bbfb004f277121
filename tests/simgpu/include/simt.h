// The device side of the simulated GPU: what CUDA sources are compiled against when the host
// compiler compiles them, and the runner of grids.
//
// Blocks run one by one on a few threads of the system; the threads of a block are fibers, which
// change places where CUDA lets them: at barriers and warp-wide operations. A seed sets the order
// of blocks and threads, so that a missing barrier shows as a wrong result under some seed. What
// would hang or be undefined on a device ends the grid with a sentence that names kernel, block and
// thread: a barrier that some threads never reach or reach elsewhere, a warp-wide operation whose
// mask names lanes that have exited or wait elsewhere, an index outside a shared array.
//
// __shared__ variables are thread-local: a block stays on one thread of the system. Dynamic shared
// memory is `extern __shared__ unsigned char dynamic_shared[];` at namespace scope, by this name.
#pragma once

#include <bit>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <thread>

namespace simgpu {

struct Dim {
  unsigned x = 1, y = 1, z = 1;
  size_t count() const { return size_t{x} * y * z; }
};

struct Launch {
  const void* kernel = nullptr;  // its address, for its name in errors
  Dim grid, block;
  size_t dynamic_shared_bytes = 0;
};

inline constexpr unsigned kMaxBlockThreads = 1024;
inline constexpr size_t kMaxDynamicShared = size_t{100} << 10;

// Calls thread() once for each thread of the grid and returns when all are done; empty, or what
// went wrong. Thread-safe; thread() must not throw.
std::string run_grid(const Launch& launch, const std::function<void()>& thread);

// The order of blocks and threads of grids that are run from now on: 0 is by index, any other seed
// is its own shuffle. Thread-safe.
void set_order(uint64_t seed);

// Of grids with more than twice so many blocks only so many first and last ones are run from now
// on; 0 is all. For kernels over arrays that are the same all along the middle, where this leaves
// what the rest would write unwritten; not for those whose last block waits for all. Thread-safe.
void set_ends(size_t blocks);

// ---- what the device functions below are made of ----

struct Indices {
  Dim thread, block, block_dim, grid_dim;
};

// Of the device thread that runs on this thread of the system.
extern constinit thread_local const Indices* current_indices;

// threadIdx and its like: each member reads what is there for the thread that runs.
template <Dim Indices::*kWhich>
struct BuiltIn {
  template <unsigned Dim::*kAxis>
  struct Axis {
    operator unsigned() const { return current_indices->*kWhich.*kAxis; }
  };
  Axis<&Dim::x> x;
  Axis<&Dim::y> y;
  Axis<&Dim::z> z;
};

struct Site {
  const char* file;
  unsigned line;
};

enum class WarpOp { kSync, kBallot, kAny, kAll, kShuffle, kAdd, kMin, kMax, kAnd, kOr, kXor };
enum class Vote { kNone, kAny, kAll, kCount };

// Waits until all threads of the block are here; the vote over their predicates.
int block_barrier(Vote vote, bool predicate, Site site);

// Waits until all lanes of the mask are here with the same operation. `source` is the lane whose
// value a shuffle returns.
uint64_t warp_operation(WarpOp op, unsigned mask, uint64_t value, unsigned source, Site site);

unsigned lane();

inline unsigned clamped_lane(int wanted, unsigned own) {
  return wanted < 0 || wanted > 31 ? own : static_cast<unsigned>(wanted);
}

template <typename T>
T shuffle(unsigned mask, T value, unsigned source, Site site) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8);
  if constexpr (sizeof(T) == 4) {
    const uint64_t got =
        warp_operation(WarpOp::kShuffle, mask, std::bit_cast<uint32_t>(value), source, site);
    return std::bit_cast<T>(static_cast<uint32_t>(got));
  } else {
    return std::bit_cast<T>(
        warp_operation(WarpOp::kShuffle, mask, std::bit_cast<uint64_t>(value), source, site));
  }
}

}  // namespace simgpu

// ---- qualifiers and built-in variables ----

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __shared__ thread_local

extern thread_local unsigned char dynamic_shared[];

inline constexpr simgpu::BuiltIn<&simgpu::Indices::thread> threadIdx;
inline constexpr simgpu::BuiltIn<&simgpu::Indices::block> blockIdx;
inline constexpr simgpu::BuiltIn<&simgpu::Indices::block_dim> blockDim;
inline constexpr simgpu::BuiltIn<&simgpu::Indices::grid_dim> gridDim;
inline constexpr int warpSize = 32;

// ---- barriers, votes, shuffles ----

#define SIMGPU_SITE \
  const char *file = __builtin_FILE(), unsigned line = static_cast<unsigned>(__builtin_LINE())

inline void __syncthreads(SIMGPU_SITE) {
  simgpu::block_barrier(simgpu::Vote::kNone, false, {file, line});
}
inline int __syncthreads_or(int predicate, SIMGPU_SITE) {
  return simgpu::block_barrier(simgpu::Vote::kAny, predicate != 0, {file, line});
}
inline int __syncthreads_and(int predicate, SIMGPU_SITE) {
  return simgpu::block_barrier(simgpu::Vote::kAll, predicate != 0, {file, line});
}
inline int __syncthreads_count(int predicate, SIMGPU_SITE) {
  return simgpu::block_barrier(simgpu::Vote::kCount, predicate != 0, {file, line});
}

inline void __syncwarp(unsigned mask = ~0u, SIMGPU_SITE) {
  simgpu::warp_operation(simgpu::WarpOp::kSync, mask, 0, 0, {file, line});
}
inline unsigned __ballot_sync(unsigned mask, int predicate, SIMGPU_SITE) {
  return static_cast<unsigned>(
      simgpu::warp_operation(simgpu::WarpOp::kBallot, mask, predicate != 0, 0, {file, line}));
}
inline int __any_sync(unsigned mask, int predicate, SIMGPU_SITE) {
  return static_cast<int>(
      simgpu::warp_operation(simgpu::WarpOp::kAny, mask, predicate != 0, 0, {file, line}));
}
inline int __all_sync(unsigned mask, int predicate, SIMGPU_SITE) {
  return static_cast<int>(
      simgpu::warp_operation(simgpu::WarpOp::kAll, mask, predicate != 0, 0, {file, line}));
}
// A device may return any set of active lanes that has the caller's.
inline unsigned __activemask() { return 1u << simgpu::lane(); }

template <typename T>
T __shfl_sync(unsigned mask, T value, int source, SIMGPU_SITE) {
  return simgpu::shuffle(mask, value, static_cast<unsigned>(source) % 32, {file, line});
}
template <typename T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, SIMGPU_SITE) {
  const unsigned own = simgpu::lane();
  return simgpu::shuffle(mask, value,
                         simgpu::clamped_lane(static_cast<int>(own) - static_cast<int>(delta), own),
                         {file, line});
}
template <typename T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, SIMGPU_SITE) {
  const unsigned own = simgpu::lane();
  return simgpu::shuffle(mask, value, simgpu::clamped_lane(static_cast<int>(own + delta), own),
                         {file, line});
}
template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int lanes, SIMGPU_SITE) {
  const unsigned own = simgpu::lane();
  return simgpu::shuffle(mask, value, simgpu::clamped_lane(static_cast<int>(own) ^ lanes, own),
                         {file, line});
}

#define SIMGPU_REDUCE(name, op)                                                    \
  inline unsigned name(unsigned mask, unsigned value, SIMGPU_SITE) {               \
    return static_cast<unsigned>(                                                  \
        simgpu::warp_operation(simgpu::WarpOp::op, mask, value, 0, {file, line})); \
  }
SIMGPU_REDUCE(__reduce_add_sync, kAdd)
SIMGPU_REDUCE(__reduce_min_sync, kMin)
SIMGPU_REDUCE(__reduce_max_sync, kMax)
SIMGPU_REDUCE(__reduce_and_sync, kAnd)
SIMGPU_REDUCE(__reduce_or_sync, kOr)
SIMGPU_REDUCE(__reduce_xor_sync, kXor)
#undef SIMGPU_REDUCE
#undef SIMGPU_SITE

// ---- integers, loads, stores, fences ----

inline int __popc(unsigned value) { return std::popcount(value); }
inline int __popcll(unsigned long long value) { return std::popcount(value); }
inline int __ffs(int value) { return __builtin_ffs(value); }
inline int __ffsll(long long value) { return __builtin_ffsll(value); }
inline int __clz(int value) { return std::countl_zero(static_cast<unsigned>(value)); }
inline int __clzll(long long value) {
  return std::countl_zero(static_cast<unsigned long long>(value));
}
inline unsigned long long __brevll(unsigned long long value) {
  unsigned long long reversed = 0;
  for (int i = 0; i < 64; ++i, value >>= 1) reversed = reversed << 1 | (value & 1);
  return reversed;
}
inline unsigned __brev(unsigned value) { return static_cast<unsigned>(__brevll(value) >> 32); }
inline unsigned __float_as_uint(float value) { return std::bit_cast<unsigned>(value); }
inline float __uint_as_float(unsigned bits) { return std::bit_cast<float>(bits); }

template <typename T>
T __ldg(const T* from) {
  return *from;
}
template <typename T>
T __ldcg(const T* from) {
  return *from;
}
// Looks at memory that the host may have written since.
template <typename T>
T __ldcv(const T* from) {
  return __atomic_load_n(from, __ATOMIC_ACQUIRE);
}
template <typename T>
T __ldcs(const T* from) {
  return *from;
}
template <typename T>
void __stcs(T* to, T value) {
  *to = value;
}

// The thread sanitizer knows no fences; the atomics beside them order as well.
inline void __threadfence() {
#if !defined(__SANITIZE_THREAD__)
  __atomic_thread_fence(__ATOMIC_SEQ_CST);
#endif
}
inline void __threadfence_block() { __threadfence(); }
inline void __threadfence_system() { __threadfence(); }

inline void __nanosleep(unsigned ns) { std::this_thread::sleep_for(std::chrono::nanoseconds(ns)); }

// ---- atomics, for the types that CUDA has them for ----

// Relaxed on a device; here they also order, as the fences beside them do there, in the one way
// that the thread sanitizer understands.
#define SIMGPU_ATOMIC(name, type, builtin)                                                \
  inline type name(type* at, type value) { return builtin(at, value, __ATOMIC_ACQ_REL); } \
  inline type name##_system(type* at, type value) { return name(at, value); }
#define SIMGPU_ATOMIC_CHOICE(name, type, better)                                   \
  inline type name(type* at, type value) {                                         \
    type held = __atomic_load_n(at, __ATOMIC_ACQUIRE);                             \
    while (value better held &&                                                    \
           !__atomic_compare_exchange_n(at, &held, value, false, __ATOMIC_ACQ_REL, \
                                        __ATOMIC_ACQUIRE)) {                       \
    }                                                                              \
    return held;                                                                   \
  }                                                                                \
  inline type name##_system(type* at, type value) { return name(at, value); }
#define SIMGPU_ATOMICS(type)                                                                      \
  SIMGPU_ATOMIC(atomicAdd, type, __atomic_fetch_add)                                              \
  SIMGPU_ATOMIC(atomicExch, type, __atomic_exchange_n)                                            \
  SIMGPU_ATOMIC(atomicAnd, type, __atomic_fetch_and)                                              \
  SIMGPU_ATOMIC(atomicOr, type, __atomic_fetch_or)                                                \
  SIMGPU_ATOMIC(atomicXor, type, __atomic_fetch_xor)                                              \
  SIMGPU_ATOMIC_CHOICE(atomicMin, type, <)                                                        \
  SIMGPU_ATOMIC_CHOICE(atomicMax, type, >)                                                        \
  inline type atomicCAS(type* at, type expected, type value) {                                    \
    __atomic_compare_exchange_n(at, &expected, value, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE); \
    return expected;                                                                              \
  }                                                                                               \
  inline type atomicCAS_system(type* at, type expected, type value) {                             \
    return atomicCAS(at, expected, value);                                                        \
  }
SIMGPU_ATOMICS(int)
SIMGPU_ATOMICS(unsigned)
SIMGPU_ATOMICS(unsigned long long)
#undef SIMGPU_ATOMICS
#undef SIMGPU_ATOMIC_CHOICE
#undef SIMGPU_ATOMIC
