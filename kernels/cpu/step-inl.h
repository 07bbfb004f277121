// Codec, AdamS step and score.
#if defined(SCAPE_KERNELS_CPU_STEP_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef SCAPE_KERNELS_CPU_STEP_INL_H_
#undef SCAPE_KERNELS_CPU_STEP_INL_H_
#else
#define SCAPE_KERNELS_CPU_STEP_INL_H_
#endif

#include "kernels/cpu/vec-inl.h"

HWY_BEFORE_NAMESPACE();
namespace scape::kernels::HWY_NAMESPACE {

// ---- what the equations need, a vector at a time; each line as in scalar/element.h ----

HWY_INLINE FloatVec power_vec(const StepParams& params, IntVec age) {
  return look_up(params.powers.pow, params.powers.size, age);
}

// now - last in 16-bit arithmetic, or 1 under the plain rule.
HWY_INLINE IntVec age_vec(const uint16_t* last, uint16_t now, bool plain) {
  const Words d;
  if (plain) return hn::Set(Ints(), 1);
  const auto age = hn::Sub(hn::Set(d, now), widen(last));
  return hn::BitCast(Ints(), hn::And(age, hn::Set(d, 0xffffu)));
}

HWY_INLINE IntVec counted_age_vec(const uint16_t* ages, bool plain) {
  return plain ? hn::Set(Ints(), 1) : hn::BitCast(Ints(), widen(ages));
}

HWY_INLINE hn::Mask<Floats> nonfinite(FloatVec v) {
  const Ints d;
  const auto exponent = hn::Set(d, 0x7f800000);
  return hn::RebindMask(Floats(), hn::Eq(hn::And(hn::BitCast(d, v), exponent), exponent));
}

HWY_INLINE FloatVec blend(FloatVec weight, FloatVec held, FloatVec gradient) {
  const auto rest = hn::Sub(hn::Set(Floats(), 1.0f), weight);
  return hn::Add(hn::Mul(weight, held), hn::Mul(rest, gradient));
}

// ---- codec ----

void encode_bf16(const float* u, const uint16_t* ages, size_t k, const StepParams& params,
                 uint16_t* encoded, float* error) {
  const Floats d;
  size_t i = 0;
  for (; i + kLanes <= k; i += kLanes) {
    const auto age = counted_age_vec(ages + i, params.plain);
    const auto weight = hn::Sub(hn::Set(d, 1.0f), power_vec(params, age));
    const auto steps = hn::ConvertTo(d, age);
    const auto value = hn::Div(hn::Mul(weight, hn::LoadU(d, u + i)), steps);
    const auto bits = float_to_bfloat16(value);
    narrow(bits, encoded + i);
    const auto lost = hn::Sub(value, bfloat16_to_float(bits));
    hn::StoreU(hn::Div(hn::Mul(lost, steps), weight), d, error + i);
  }
  scalar_ops().encode_bf16(u + i, ages + i, k - i, params, encoded + i, error + i);
}

void decode_bf16(const uint16_t* encoded, const uint16_t* ages, size_t k, const StepParams& params,
                 float* u) {
  const Floats d;
  size_t i = 0;
  for (; i + kLanes <= k; i += kLanes) {
    const auto age = counted_age_vec(ages + i, params.plain);
    const auto weight = hn::Sub(hn::Set(d, 1.0f), power_vec(params, age));
    const auto value = bfloat16_to_float(widen(encoded + i));
    hn::StoreU(hn::Div(hn::Mul(value, hn::ConvertTo(d, age)), weight), d, u + i);
  }
  scalar_ops().decode_bf16(encoded + i, ages + i, k - i, params, u + i);
}

// ---- AdamS ----

// Steps 3 and 4 of `count` elements that lie side by side; without param, the moment alone.
template <bool kWithParam>
HWY_INLINE void step_run(const float* payload, size_t count, const StepParams& params, float* m,
                         const uint16_t* last, float* param) {
  const Floats d;
  const auto one = hn::Set(d, 1.0f);
  const auto beta2 = hn::Set(d, params.beta2);
  const auto beta2_rest = hn::Set(d, 1.0f - params.beta2);
  const auto eps = hn::Set(d, params.eps);
  size_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    const auto age = age_vec(last + i, params.t, params.plain);
    const auto steps = hn::ConvertTo(d, age);
    const auto held = hn::LoadU(d, m + i);
    const auto gradient = hn::Div(hn::LoadU(d, payload + i), steps);
    const auto moment = blend(power_vec(params, age), held, gradient);
    hn::StoreU(moment, d, m + i);
    if constexpr (kWithParam) {
      // Age 0 wraps to the table's end, as in scalar/element.h.
      const auto wrapped = hn::And(hn::Sub(age, hn::Set(Ints(), 1)), hn::Set(Ints(), 0x7fffffff));
      const auto prior = blend(power_vec(params, wrapped), held, gradient);
      const auto v = hn::Add(hn::Mul(beta2, hn::Mul(prior, prior)),
                             hn::Mul(beta2_rest, hn::Mul(gradient, gradient)));
      const auto rate = hn::Mul(hn::Set(d, params.lr), hn::Min(steps, hn::Set(d, params.age_cap)));
      const auto step = hn::Div(hn::Mul(rate, moment), hn::Add(hn::Sqrt(v), eps));
      const auto decay =
          params.decay == nullptr ? one : look_up(params.decay, params.decay_size, age);
      hn::StoreU(hn::Sub(hn::Mul(decay, hn::LoadU(d, param + i)), step), d, param + i);
    }
  }
  for (; i < count; ++i) {
    const uint16_t age = counted_age(age_of(last[i], params.t), params);
    if constexpr (kWithParam) {
      adams_element(payload[i], age, params, &m[i], &param[i]);
    } else {
      m[i] = moment_element(payload[i], m[i], age, params.powers).moment;
    }
  }
}

// Masked elements lie apart: they are brought together, a few hundred at a time, stepped and put
// back.
template <bool kWithParam>
HWY_INLINE void step_masked(const float* payload, const uint64_t* mask, size_t n,
                            const StepParams& params, float* m, uint16_t* last, float* param) {
  constexpr size_t kBatch = 256;
  size_t index[kBatch];
  alignas(64) float batch_m[kBatch];
  alignas(64) float batch_param[kBatch];
  alignas(64) uint16_t batch_last[kBatch];
  size_t waiting = 0;

  const auto step_waiting = [&](size_t count) HWY_ATTR {
    for (size_t i = 0; i < count; ++i) {
      batch_m[i] = m[index[i]];
      batch_last[i] = last[index[i]];
      if constexpr (kWithParam) batch_param[i] = param[index[i]];
    }
    step_run<kWithParam>(payload, count, params, batch_m, batch_last, batch_param);
    for (size_t i = 0; i < count; ++i) {
      m[index[i]] = batch_m[i];
      last[index[i]] = params.t;
      if constexpr (kWithParam) param[index[i]] = batch_param[i];
    }
    payload += count;
    std::copy(index + count, index + waiting, index);
    waiting -= count;
  };

  for (size_t w = 0; w < mask_words(n); ++w) {
    const size_t base = w * 64;
    if (mask[w] == kFullWord) {
      step_waiting(waiting);
      step_run<kWithParam>(payload, 64, params, m + base, last + base,
                           kWithParam ? param + base : nullptr);
      std::fill_n(last + base, 64, params.t);
      payload += 64;
      continue;
    }
    // What is asked for here comes while the elements before it are stepped.
    for_each_bit(mask[w], base, [&](size_t j) {
      hwy::Prefetch(m + j);
      hwy::Prefetch(last + j);
      if constexpr (kWithParam) hwy::Prefetch(param + j);
      index[waiting++] = j;
    });
    if (waiting > kBatch - 64) step_waiting(waiting / kLanes * kLanes);
  }
  step_waiting(waiting);
}

void adams_step(const float* payload, const uint64_t* mask, size_t n, const StepParams& params,
                float* m, uint16_t* last, float* param) {
  step_masked<true>(payload, mask, n, params, m, last, param);
}

void moment_step(const float* payload, const uint64_t* mask, size_t n, const StepParams& params,
                 float* m, uint16_t* last) {
  step_masked<false>(payload, mask, n, params, m, last, nullptr);
}

void hooked_step(const float* payload, const uint64_t* mask, const uint64_t* before, size_t n,
                 const StepParams& params, Type type, void* out, float* m, uint16_t* last) {
  const float factor = leaving_factor(params.beta1);
  const float rest = 1.0f - params.beta1;
  std::fill_n(static_cast<std::byte*>(out), n * size_of(type), std::byte{0});  // null where n is 0
  for (size_t w = 0; w < mask_words(n); ++w) {
    for_each_bit(mask[w], w * 64, [&](size_t j) {
      const uint16_t age = counted_age(age_of(last[j], params.t), params);
      const float gradient = *payload++ / static_cast<float>(age);
      store(type, out, j, gradient);
      m[j] = params.beta1 * m[j] + rest * gradient;
      last[j] = params.t;
    });
    for_each_bit(before[w] & ~mask[w], w * 64, [&](size_t j) {
      store(type, out, j, factor * m[j]);
      m[j] = 0.0f;
    });
  }
}

// ---- score ----

size_t score(const float* m, const uint16_t* last, float* residual, size_t n,
             const StepParams& params, float scale, float* out) {
  const Floats d;
  const auto next = static_cast<uint16_t>(params.t + 1);
  const auto factor = hn::Set(d, scale);
  size_t cleared = 0;
  size_t j = 0;
  for (; j + kLanes <= n; j += kLanes) {
    auto r = hn::LoadU(d, residual + j);
    if (const auto bad = nonfinite(r); !hn::AllFalse(d, bad)) {
      cleared += hn::CountTrue(d, bad);
      r = hn::IfThenZeroElse(bad, r);
      hn::StoreU(r, d, residual + j);
    }
    const auto age = age_vec(last + j, next, params.plain);
    const auto power = power_vec(params, age);
    const auto held = hn::Mul(hn::Mul(hn::ConvertTo(d, age), power), hn::LoadU(d, m + j));
    const auto rest = hn::Sub(hn::Set(d, 1.0f), power);
    const auto sum = hn::Abs(hn::Add(held, hn::Mul(rest, hn::Mul(factor, r))));
    hn::StoreU(hn::IfThenZeroElse(nonfinite(sum), sum), d, out + j);
  }
  return cleared + scalar_ops().score(m + j, last + j, residual + j, n - j, params, scale, out + j);
}

void restamp(uint16_t* last, size_t n, uint16_t t) {
  for (size_t j = 0; j < n; ++j) last[j] = restamped(last[j], t);
}

}  // namespace scape::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
