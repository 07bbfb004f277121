// Steps 3, 4 and 6: the update of the masked elements, what the caller gets back, and the score.
#include "kernels/cuda/cuda_ops.h"
#include "kernels/cuda/element.cuh"
#include "kernels/cuda/launch.h"

namespace scape::kernels::cuda {
namespace kernel {

__global__ void __launch_bounds__(kThreads)
    adams_step(const float* __restrict__ payload, MaskView mask, StepParams params,
               float* __restrict__ m, uint16_t* __restrict__ last, float* __restrict__ param,
               const Verdict* verdict) {
  if (skipped(verdict)) return;
  const MaskRun run(mask);
  run.for_each([&](size_t j, size_t i) {
    const uint16_t age = counted_age(age_of(last[j], params.t), params);
    float moment = m[j];
    float value = param[j];
    adams_element(payload[i], age, params, &moment, &value);
    m[j] = moment;
    param[j] = value;
    last[j] = params.t;
  });
}

template <typename T>
__global__ void __launch_bounds__(kThreads)
    moment_step(const T* __restrict__ payload, MaskView mask, StepParams params,
                float* __restrict__ m, uint16_t* __restrict__ last, const Verdict* verdict) {
  if (skipped(verdict)) return;
  const MaskRun run(mask);
  run.for_each([&](size_t j, size_t i) {
    const uint16_t age = counted_age(age_of(last[j], params.t), params);
    m[j] = moment_element(value_of(payload[i]), m[j], age, params.powers).moment;
    last[j] = params.t;
  });
}

template <typename T, bool kAligned>
__global__ void __launch_bounds__(kThreads)
    moment_output(const float* __restrict__ m, const uint64_t* __restrict__ words, size_t n,
                  T* __restrict__ out, const Verdict* verdict) {
  const size_t j = quad_begin();
  if (j >= n) return;
  const bool skip = skipped(verdict);
  const Quad<float> moment = load_quad<kAligned>(m, j, n);
  const uint64_t bits = skip ? words[j / 64] >> (j % 64) : 0;
  Quad<T> quad;
#pragma unroll
  for (unsigned i = 0; i < 4; ++i) {
    set(&quad.at[i], (bits >> i & 1) != 0 ? quiet_nan() : moment.at[i]);
  }
  store_quad<kAligned>(out, j, n, quad);
}

template <typename T, bool kAligned>
__global__ void __launch_bounds__(kThreads)
    hooked_step(const float* __restrict__ payload, MaskView mask,
                const uint64_t* __restrict__ before, StepParams params, T* __restrict__ out,
                float* __restrict__ m, uint16_t* __restrict__ last, const Verdict* verdict) {
  const MaskRun run(mask);
  if (run.outside(mask)) return;
  const bool skip = skipped(verdict);
  const float factor = leaving_factor(params.beta1);
  const uint64_t held = skip ? 0 : run.load(before, mask.n);
  for (unsigned step = 0; step < kRunSteps; ++step) {
    const size_t j = run.quad_begin(step);
    const unsigned leaving = run.quad_bits(held, step);
    auto [bits, at] = run.quad(step);
    Quad<T> quad;
#pragma unroll
    for (unsigned i = 0; i < 4; ++i) {
      float value = 0.0f;
      if ((bits >> i & 1) != 0) {
        if (skip) {
          value = quiet_nan();
        } else {
          const uint16_t age = counted_age(age_of(last[j + i], params.t), params);
          value = payload[at++] / static_cast<float>(age);
          m[j + i] = params.beta1 * m[j + i] + (1.0f - params.beta1) * value;
          last[j + i] = params.t;
        }
      } else if ((leaving >> i & 1) != 0) {
        value = factor * m[j + i];
        m[j + i] = 0.0f;
      }
      set(&quad.at[i], value);
    }
    store_quad<kAligned>(out, j, mask.n, quad);
  }
}

template <typename T, bool kAligned>
__global__ void __launch_bounds__(kThreads) expand(const float* __restrict__ payload, MaskView mask,
                                                   T* __restrict__ out, const Verdict* verdict) {
  const MaskRun run(mask);
  if (run.outside(mask)) return;
  const bool skip = skipped(verdict);
  for (unsigned step = 0; step < kRunSteps; ++step) {
    auto [bits, at] = run.quad(step);
    Quad<T> quad;
#pragma unroll
    for (unsigned i = 0; i < 4; ++i) {
      float value = 0.0f;
      if ((bits >> i & 1) != 0) value = skip ? quiet_nan() : payload[at++];
      set(&quad.at[i], value);
    }
    store_quad<kAligned>(out, run.quad_begin(step), mask.n, quad);
  }
}

// `before` and `param` are addressed by the buffer's elements; those in [begin, end) are there.
template <bool kAligned>
__global__ void __launch_bounds__(kThreads)
    post_step(const float* __restrict__ before, MaskView mask, const uint16_t* __restrict__ ages,
              size_t begin, size_t end, float decay, float age_cap, float* __restrict__ param,
              const Verdict* verdict) {
  if (skipped(verdict)) return;
  const MaskRun run(mask);
  if (run.outside(mask) || run.begin() >= end || run.begin() + kRunElements <= begin) return;
  for (unsigned step = 0; step < kRunSteps; ++step) {
    const size_t j = run.quad_begin(step);
    auto [bits, at] = run.quad(step);
    if (j + 4 <= begin || j >= end) continue;
    const size_t left_out = j < begin ? begin - j : 0;
    if (left_out > 0) {
      for (size_t i = 0; i < 4; ++i) {
        const bool masked = (bits >> i & 1) != 0;
        if (i >= left_out && j + i < end) {
          param[j + i] =
              masked ? post_step_element(before[j + i], ages[at], decay, age_cap, param[j + i])
                     : before[j + i] * decay;
        }
        at += masked;
      }
      continue;
    }
    const Quad<float> old = load_quad<kAligned>(before, j, end);
    Quad<float> quad{};
    if (bits != 0) quad = load_quad<kAligned>(param, j, end);
#pragma unroll
    for (unsigned i = 0; i < 4; ++i) {
      if ((bits >> i & 1) == 0) {
        quad.at[i] = old.at[i] * decay;
      } else if (j + i < end) {
        quad.at[i] = post_step_element(old.at[i], ages[at++], decay, age_cap, quad.at[i]);
      }
    }
    store_quad<kAligned>(param, j, end, quad);
  }
}

template <bool kAligned>
__global__ void __launch_bounds__(kThreads)
    score(const float* __restrict__ m, const uint16_t* __restrict__ last, const float* residual,
          float* home, size_t n, StepParams params, float scale, float* __restrict__ out,
          NonfiniteFlag* flag) {
  const size_t j = quad_begin();
  const auto next = static_cast<uint16_t>(params.t + 1);
  unsigned cleared = 0;
  if (j < n) {
    const Quad<float> moment = load_quad<kAligned>(m, j, n);
    const Quad<uint16_t> stamp = load_quad<kAligned>(last, j, n);
    Quad<float> held = load_quad<kAligned>(residual, j, n);
    Quad<float> quad;
#pragma unroll
    for (unsigned i = 0; i < 4; ++i) {
      if (!is_finite(held.at[i])) {
        held.at[i] = home[j + i] = 0.0f;
        ++cleared;
      }
      const uint16_t age = counted_age(age_of(stamp.at[i], next), params);
      quad.at[i] = score_element(moment.at[i], held.at[i], age, params.powers, scale);
    }
    store_quad<kAligned>(out, j, n, quad);
  }
  cleared = __reduce_add_sync(kAllLanes, cleared);
  if (cleared > 0 && lane_of_thread() == 0) {
    atomicAdd(&flag->cleared, cleared);
    atomicExch(&flag->raised, 1u);
  }
}

}  // namespace kernel

Status adams_step(cudaStream_t stream, const float* payload, const MaskView& mask,
                  const StepParams& params, float* m, uint16_t* last, float* param,
                  const Verdict* verdict) {
  if (mask.n == 0) return Status::Ok();
  return launch("adams_step", stream, run_blocks(mask.n), kThreads, kernel::adams_step, payload,
                mask, params, m, last, param, verdict);
}

Status moment_step(cudaStream_t stream, Type type, const void* payload, const MaskView& mask,
                   const StepParams& params, float* m, uint16_t* last, const Verdict* verdict) {
  if (mask.n == 0) return Status::Ok();
  return with_type(type, [&](auto tag) {
    using T = typename decltype(tag)::type;
    return launch("moment_step", stream, run_blocks(mask.n), kThreads, kernel::moment_step<T>,
                  static_cast<const T*>(payload), mask, params, m, last, verdict);
  });
}

Status moment_output(cudaStream_t stream, Type type, const float* m, const MaskView& mask,
                     void* out, const Verdict* verdict) {
  if (mask.n == 0) return Status::Ok();
  return with_type(type, [&](auto tag) {
    using T = typename decltype(tag)::type;
    auto* to = static_cast<T*>(out);
    return launch("moment_output", stream, quad_blocks(mask.n), kThreads,
                  aligned(m) && aligned(to) ? kernel::moment_output<T, true>
                                            : kernel::moment_output<T, false>,
                  m, mask.words, mask.n, to, verdict);
  });
}

Status hooked_step(cudaStream_t stream, const float* payload, const MaskView& mask,
                   const uint64_t* before, const StepParams& params, Type type, void* out, float* m,
                   uint16_t* last, const Verdict* verdict) {
  if (mask.n == 0) return Status::Ok();
  return with_type(type, [&](auto tag) {
    using T = typename decltype(tag)::type;
    auto* to = static_cast<T*>(out);
    return launch("hooked_step", stream, run_blocks(mask.n), kThreads,
                  aligned(to) ? kernel::hooked_step<T, true> : kernel::hooked_step<T, false>,
                  payload, mask, before, params, to, m, last, verdict);
  });
}

Status expand(cudaStream_t stream, Type type, const float* payload, const MaskView& mask, void* out,
              const Verdict* verdict) {
  if (mask.n == 0) return Status::Ok();
  return with_type(type, [&](auto tag) {
    using T = typename decltype(tag)::type;
    auto* to = static_cast<T*>(out);
    return launch("expand", stream, run_blocks(mask.n), kThreads,
                  aligned(to) ? kernel::expand<T, true> : kernel::expand<T, false>, payload, mask,
                  to, verdict);
  });
}

Status post_step(cudaStream_t stream, const float* before, const MaskView& mask,
                 const uint16_t* ages, size_t begin, size_t length, float decay, float age_cap,
                 float* param, const Verdict* verdict) {
  if (length == 0) return Status::Ok();
  const float* const first_before = before - begin;
  float* const first_param = param - begin;
  const bool fast = aligned(first_before) && aligned(first_param);
  return launch("post_step", stream, run_blocks(mask.n), kThreads,
                fast ? kernel::post_step<true> : kernel::post_step<false>, first_before, mask, ages,
                begin, begin + length, decay, age_cap, first_param, verdict);
}

Status score(cudaStream_t stream, const float* m, const uint16_t* last, const float* residual,
             float* home, size_t n, const StepParams& params, float scale, float* out,
             NonfiniteFlag* flag) {
  if (n == 0) return Status::Ok();
  const bool fast = aligned(m) && aligned(last) && aligned(residual) && aligned(out);
  return launch("score", stream, quad_blocks(n), kThreads,
                fast ? kernel::score<true> : kernel::score<false>, m, last, residual, home, n,
                params, scale, out, flag);
}

}  // namespace scape::kernels::cuda
