// Conversions, sums, the search for non-finite values, and the sweep over `last`.
#include "kernels/cuda/cuda_ops.h"
#include "kernels/cuda/element.cuh"
#include "kernels/cuda/launch.h"

namespace scape::kernels::cuda {
namespace kernel {

template <typename From, typename To, bool kAligned>
__global__ void __launch_bounds__(kThreads)
    convert(const From* __restrict__ in, To* __restrict__ out, size_t n) {
  const size_t j = quad_begin();
  if (j >= n) return;
  const Quad<From> from = load_quad<kAligned>(in, j, n);
  Quad<To> to;
#pragma unroll
  for (unsigned i = 0; i < 4; ++i) set(&to.at[i], value_of(from.at[i]));
  store_quad<kAligned>(out, j, n, to);
}

template <typename T, bool kAligned>
__global__ void __launch_bounds__(kThreads)
    any_nonfinite(const T* __restrict__ values, size_t n, Verdict* verdict) {
  const size_t j = quad_begin();
  const Quad<T> quad = load_quad<kAligned>(values, j, n);
  bool found = false;
#pragma unroll
  for (unsigned i = 0; i < 4; ++i) found |= !is_finite(value_of(quad.at[i]));
  if (__any_sync(kAllLanes, found) && lane_of_thread() == 0) atomicExch(&verdict->skipped, 1u);
}

__global__ void count_skip(const Verdict* verdict, unsigned long long* skips) {
  if (skipped(verdict)) ++*skips;
}

__global__ void __launch_bounds__(kThreads)
    add(const float* __restrict__ in, float* __restrict__ out, size_t n) {
  const size_t j = quad_begin();
#pragma unroll
  for (unsigned i = 0; i < 4; ++i) {
    if (j + i < n) out[j + i] = in[j + i] + out[j + i];
  }
}

template <bool kAligned>
__global__ void __launch_bounds__(kThreads) restamp(uint16_t* last, size_t n, uint16_t t) {
  const size_t j = quad_begin();
  if (j >= n) return;
  const Quad<uint16_t> quad = load_quad<kAligned>(last, j, n);
#pragma unroll
  for (unsigned i = 0; i < 4; ++i) {
    const uint16_t stamp = restamped(quad.at[i], t);
    if (j + i < n && stamp != quad.at[i]) last[j + i] = stamp;
  }
}

}  // namespace kernel

namespace {

template <typename From, typename To>
Status convert(const char* operation, cudaStream_t stream, const From* in, To* out, size_t n) {
  if (n == 0) return Status::Ok();
  const bool fast = aligned(in) && aligned(out);
  return launch(operation, stream, quad_blocks(n), kThreads,
                fast ? kernel::convert<From, To, true> : kernel::convert<From, To, false>, in, out,
                n);
}

}  // namespace

Status to_float(cudaStream_t stream, Type type, const void* in, float* out, size_t n) {
  return with_type(type, [&](auto tag) {
    using T = typename decltype(tag)::type;
    return convert("to_float", stream, static_cast<const T*>(in), out, n);
  });
}

Status from_float(cudaStream_t stream, Type type, const float* in, void* out, size_t n) {
  return with_type(type, [&](auto tag) {
    using T = typename decltype(tag)::type;
    return convert("from_float", stream, in, static_cast<T*>(out), n);
  });
}

Status any_nonfinite(cudaStream_t stream, Type type, const void* values, size_t n,
                     Verdict* verdict) {
  SCAPE_RETURN_IF_ERROR(
      check(cudaMemsetAsync(verdict, 0, sizeof(*verdict), stream), "any_nonfinite"));
  if (n == 0) return Status::Ok();
  return with_type(type, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const auto* in = static_cast<const T*>(values);
    return launch("any_nonfinite", stream, quad_blocks(n), kThreads,
                  aligned(in) ? kernel::any_nonfinite<T, true> : kernel::any_nonfinite<T, false>,
                  in, n, verdict);
  });
}

Status count_skip(cudaStream_t stream, const Verdict* verdict, unsigned long long* skips) {
  return launch("count_skip", stream, 1, 1, kernel::count_skip, verdict, skips);
}

Status add(cudaStream_t stream, const float* in, float* out, size_t n) {
  if (n == 0) return Status::Ok();
  return launch("add", stream, quad_blocks(n), kThreads, kernel::add, in, out, n);
}

Status restamp(cudaStream_t stream, uint16_t* last, size_t n, uint16_t t) {
  if (n == 0) return Status::Ok();
  return launch("restamp", stream, quad_blocks(n), kThreads,
                aligned(last) ? kernel::restamp<true> : kernel::restamp<false>, last, n, t);
}

}  // namespace scape::kernels::cuda
