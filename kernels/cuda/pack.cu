// Pack: the residual takes up the gradient and the masked elements become the payload; the codec
// bf16; and what becomes of the residual after the exchange.
#include "kernels/cuda/cuda_ops.h"
#include "kernels/cuda/element.cuh"
#include "kernels/cuda/launch.h"

namespace scape::kernels::cuda {
namespace kernel {

// Steps of a run whose loads are under way together.
constexpr unsigned kBatch = 2;

// The first thread of the grid writes the flag element.
__device__ inline void put_flag(const MaskView& mask, float* payload, NonfiniteFlag* flag) {
  if (flag == nullptr || blockIdx.x != 0 || threadIdx.x != 0) return;
  payload[mask.index[parts_of(mask.n, kRunElements)]] = take_flag(flag);
}

// kMoment: `in` is x, and the gradient follows from it and m.
template <typename T, bool kMoment, bool kAligned>
__global__ void __launch_bounds__(kThreads)
    accumulate_pack(const T* __restrict__ in, const float* __restrict__ m, float beta1,
                    float* __restrict__ residual, MaskView mask, float* __restrict__ payload,
                    NonfiniteFlag* flag) {
  put_flag(mask, payload, flag);
  const MaskRun run(mask);
  if (run.outside(mask)) return;
  const size_t n = mask.n;
  for (unsigned step = 0; step < kRunSteps; step += kBatch) {
    Quad<T> gradient[kBatch];
    Quad<float> sum[kBatch], moment[kBatch];
#pragma unroll
    for (unsigned b = 0; b < kBatch; ++b) {
      const size_t j = run.quad_begin(step + b);
      gradient[b] = load_quad<kAligned>(in, j, n);
      sum[b] = load_quad<kAligned>(residual, j, n);
      if constexpr (kMoment) moment[b] = load_quad<kAligned>(m, j, n);
    }
#pragma unroll
    for (unsigned b = 0; b < kBatch; ++b) {
      const size_t j = run.quad_begin(step + b);
#pragma unroll
      for (unsigned i = 0; i < 4; ++i) {
        float value = value_of(gradient[b].at[i]);
        if constexpr (kMoment) {
          value = gradient_of_moment(value, rounded_to<T>(moment[b].at[i]), beta1);
        }
        sum[b].at[i] += value;
      }
      store_quad<kAligned>(residual, j, n, sum[b]);
      auto [bits, at] = run.quad(step + b);
      if (bits == 0) continue;
#pragma unroll
      for (unsigned i = 0; i < 4; ++i) {
        if ((bits >> i & 1) != 0) payload[at++] = sum[b].at[i];
      }
    }
  }
}

__global__ void __launch_bounds__(kThreads)
    gather(const float* __restrict__ values, MaskView mask, float* __restrict__ payload,
           NonfiniteFlag* flag) {
  put_flag(mask, payload, flag);
  const MaskRun run(mask);
  run.for_each([&](size_t j, size_t i) { payload[i] = values[j]; });
}

__global__ void __launch_bounds__(kThreads)
    gather_ages(MaskView mask, const uint16_t* __restrict__ last, uint16_t t,
                uint16_t* __restrict__ ages) {
  const MaskRun run(mask);
  run.for_each([&](size_t j, size_t i) { ages[i] = age_of(last[j], t); });
}

// With `payload`: it becomes the values; without: 0 does.
__global__ void __launch_bounds__(kThreads)
    replace_masked(const float* __restrict__ payload, MaskView mask, float* __restrict__ values,
                   const Verdict* verdict) {
  const bool keep = skipped(verdict);
  const MaskRun run(mask);
  run.for_each([&](size_t j, size_t i) {
    if (!keep) {
      values[j] = payload != nullptr ? payload[i] : 0.0f;
    } else if (!is_finite(values[j])) {
      values[j] = 0.0f;
    }
  });
}

__global__ void __launch_bounds__(kThreads)
    clear_masked_nonfinite(float* values, MaskView mask, unsigned long long* cleared) {
  const MaskRun run(mask);
  unsigned count = 0;
  run.for_each([&](size_t j, size_t) {
    if (is_finite(values[j])) return;
    values[j] = 0.0f;
    ++count;
  });
  count = __reduce_add_sync(kAllLanes, count);
  if (count > 0 && cleared != nullptr && lane_of_thread() == 0) atomicAdd(cleared, count);
}

__global__ void put_flag_element(NonfiniteFlag* flag, float* element) {
  *element = take_flag(flag);
}

template <bool kAligned>
__global__ void __launch_bounds__(kThreads)
    encode_bf16(const float* __restrict__ u, const uint16_t* __restrict__ ages, size_t k,
                StepParams params, uint16_t* __restrict__ encoded, float* __restrict__ error,
                NonfiniteFlag* flag) {
  if (flag != nullptr && blockIdx.x == 0 && threadIdx.x == 0) {
    encoded[k] = to_bfloat16(take_flag(flag));
  }
  const size_t i = quad_begin();
  if (i >= k) return;
  const Quad<float> value = load_quad<kAligned>(u, i, k);
  const Quad<uint16_t> age = load_quad<kAligned>(ages, i, k);
  Quad<uint16_t> code;
  Quad<float> lost;
#pragma unroll
  for (unsigned q = 0; q < 4; ++q) {
    encode_bf16_element(value.at[q], counted_age(age.at[q], params), params.powers, &code.at[q],
                        &lost.at[q]);
  }
  store_quad<kAligned>(encoded, i, k, code);
  store_quad<kAligned>(error, i, k, lost);
}

template <bool kAligned>
__global__ void __launch_bounds__(kThreads)
    decode_bf16(const uint16_t* __restrict__ encoded, const uint16_t* __restrict__ ages, size_t k,
                StepParams params, float* __restrict__ u, Verdict* verdict) {
  bool found = blockIdx.x == 0 && threadIdx.x == 0 && !is_finite(from_bfloat16(encoded[k]));
  const size_t i = quad_begin();
  if (i < k) {
    const Quad<uint16_t> code = load_quad<kAligned>(encoded, i, k);
    const Quad<uint16_t> age = load_quad<kAligned>(ages, i, k);
    Quad<float> value;
#pragma unroll
    for (unsigned q = 0; q < 4; ++q) {
      value.at[q] = decode_bf16_element(code.at[q], counted_age(age.at[q], params), params.powers);
      found |= i + q < k && !is_finite(value.at[q]);
    }
    store_quad<kAligned>(u, i, k, value);
  }
  if (__any_sync(kAllLanes, found) && lane_of_thread() == 0) atomicExch(&verdict->skipped, 1u);
}

}  // namespace kernel

namespace {

// At least one block, which writes the flag element.
size_t pack_blocks(const MaskView& mask, const NonfiniteFlag* flag) {
  return std::max<size_t>(run_blocks(mask.n), flag != nullptr ? 1 : 0);
}

template <typename T, bool kMoment>
Status accumulate_pack_typed(const char* operation, cudaStream_t stream, const T* in,
                             const float* m, float beta1, float* residual, const MaskView& mask,
                             float* payload, NonfiniteFlag* flag) {
  const size_t blocks = pack_blocks(mask, flag);
  if (blocks == 0) return Status::Ok();
  const bool fast = aligned(in) && aligned(residual) && (!kMoment || aligned(m));
  return launch(
      operation, stream, blocks, kThreads,
      fast ? kernel::accumulate_pack<T, kMoment, true> : kernel::accumulate_pack<T, kMoment, false>,
      in, m, beta1, residual, mask, payload, flag);
}

Status replace_masked(const char* operation, cudaStream_t stream, const float* payload,
                      const MaskView& mask, float* values, const Verdict* verdict) {
  if (mask.n == 0) return Status::Ok();
  return launch(operation, stream, run_blocks(mask.n), kThreads, kernel::replace_masked, payload,
                mask, values, verdict);
}

}  // namespace

Status accumulate_pack(cudaStream_t stream, Type type, const void* gradient, float* residual,
                       const MaskView& mask, float* payload, NonfiniteFlag* flag) {
  return with_type(type, [&](auto tag) {
    using T = typename decltype(tag)::type;
    return accumulate_pack_typed<T, false>("accumulate_pack", stream,
                                           static_cast<const T*>(gradient), nullptr, 0, residual,
                                           mask, payload, flag);
  });
}

Status accumulate_pack_moment(cudaStream_t stream, Type type, const void* x, const float* m,
                              float beta1, float* residual, const MaskView& mask, float* payload,
                              NonfiniteFlag* flag) {
  return with_type(type, [&](auto tag) {
    using T = typename decltype(tag)::type;
    return accumulate_pack_typed<T, true>("accumulate_pack_moment", stream,
                                          static_cast<const T*>(x), m, beta1, residual, mask,
                                          payload, flag);
  });
}

Status gather(cudaStream_t stream, const float* values, const MaskView& mask, float* payload,
              NonfiniteFlag* flag) {
  const size_t blocks = pack_blocks(mask, flag);
  if (blocks == 0) return Status::Ok();
  return launch("gather", stream, blocks, kThreads, kernel::gather, values, mask, payload, flag);
}

Status gather_ages(cudaStream_t stream, const MaskView& mask, const uint16_t* last, uint16_t t,
                   uint16_t* ages) {
  if (mask.n == 0) return Status::Ok();
  return launch("gather_ages", stream, run_blocks(mask.n), kThreads, kernel::gather_ages, mask,
                last, t, ages);
}

Status clear_masked(cudaStream_t stream, float* values, const MaskView& mask,
                    const Verdict* verdict) {
  return replace_masked("clear_masked", stream, nullptr, mask, values, verdict);
}

Status scatter(cudaStream_t stream, const float* payload, const MaskView& mask, float* values,
               const Verdict* verdict) {
  return replace_masked("scatter", stream, payload, mask, values, verdict);
}

Status clear_masked_nonfinite(cudaStream_t stream, float* values, const MaskView& mask,
                              unsigned long long* cleared) {
  if (mask.n == 0) return Status::Ok();
  return launch("clear_masked_nonfinite", stream, run_blocks(mask.n), kThreads,
                kernel::clear_masked_nonfinite, values, mask, cleared);
}

Status put_flag(cudaStream_t stream, NonfiniteFlag* flag, float* element) {
  return launch("put_flag", stream, 1, 1, kernel::put_flag_element, flag, element);
}

Status encode_bf16(cudaStream_t stream, const float* u, const uint16_t* ages, size_t k,
                   const StepParams& params, uint16_t* encoded, float* error, NonfiniteFlag* flag) {
  const size_t blocks = std::max<size_t>(quad_blocks(k), flag != nullptr ? 1 : 0);
  if (blocks == 0) return Status::Ok();
  const bool fast = aligned(u) && aligned(ages) && aligned(encoded) && aligned(error);
  return launch("encode_bf16", stream, blocks, kThreads,
                fast ? kernel::encode_bf16<true> : kernel::encode_bf16<false>, u, ages, k, params,
                encoded, error, flag);
}

Status decode_bf16(cudaStream_t stream, const uint16_t* encoded, const uint16_t* ages, size_t k,
                   const StepParams& params, float* u, Verdict* verdict) {
  SCAPE_RETURN_IF_ERROR(
      check(cudaMemsetAsync(verdict, 0, sizeof(*verdict), stream), "decode_bf16"));
  const bool fast = aligned(encoded) && aligned(ages) && aligned(u);
  return launch("decode_bf16", stream, std::max<size_t>(quad_blocks(k), 1), kThreads,
                fast ? kernel::decode_bf16<true> : kernel::decode_bf16<false>, encoded, ages, k,
                params, u, verdict);
}

}  // namespace scape::kernels::cuda
