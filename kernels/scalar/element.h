// The equations of docs/algorithm.md for one element, and the walk over a mask's set bits.
//
// The scalar backend is loops over these; the SIMD backends use them for ends that fill no vector,
// the CUDA kernels for every element. The order of operations written here is the specification:
// each line is one IEEE operation at a time, and the project is compiled without contraction to
// fused multiply-add.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "kernels/kernels.h"

#if defined(__CUDACC__)
#define SCAPE_HOST_DEVICE __host__ __device__
#else
#define SCAPE_HOST_DEVICE
#endif

namespace scape::kernels {

// ---- conversion ----

SCAPE_HOST_DEVICE inline uint32_t bits_of(float value) { return std::bit_cast<uint32_t>(value); }
SCAPE_HOST_DEVICE inline float float_of(uint32_t bits) { return std::bit_cast<float>(bits); }

SCAPE_HOST_DEVICE inline bool is_finite(float value) {
  return (bits_of(value) & 0x7f800000u) != 0x7f800000u;
}

SCAPE_HOST_DEVICE inline float from_bfloat16(uint16_t bits) {
  return float_of(uint32_t{bits} << 16);
}

SCAPE_HOST_DEVICE inline uint16_t to_bfloat16(float value) {
  const uint32_t bits = bits_of(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((bits >> 16) | 0x40);  // NaN
  return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

SCAPE_HOST_DEVICE inline float from_float16(uint16_t half) {
  const uint32_t sign = uint32_t{half & 0x8000u} << 16;
  const uint32_t rest = uint32_t{half & 0x7fffu} << 13;
  if (rest >= 0x0f800000u) {  // infinity or NaN, which becomes quiet as hardware makes it
    return float_of(sign | 0x70000000u | rest | (rest > 0x0f800000u ? 0x400000u : 0u));
  }
  if (rest < 0x00800000u) {  // zero or denormal: mantissa * 2^-24, by way of normal floats only
    const float magnitude = float_of(rest | 0x38800000u) - float_of(0x38800000u);
    return float_of(sign | bits_of(magnitude));
  }
  return float_of(sign | (rest + 0x38000000u));
}

SCAPE_HOST_DEVICE inline uint16_t to_float16(float value) {
  const uint32_t bits = bits_of(value);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  uint32_t half;
  if (magnitude > 0x7f800000u) {  // NaN
    half = 0x7e00u | ((magnitude >> 13) & 0x3ffu);
  } else if (magnitude < 0x38800000u) {  // below 2^-14: adding 0.5 rounds to multiples of 2^-24
    half = bits_of(float_of(magnitude) + 0.5f) - bits_of(0.5f);
  } else {
    const uint32_t rounded = magnitude + 0xfff + ((magnitude >> 13) & 1);
    half = std::min((rounded - 0x38000000u) >> 13, 0x7c00u);
  }
  return static_cast<uint16_t>(sign | half);
}

SCAPE_HOST_DEVICE inline float load(Type type, const void* values, size_t j) {
  switch (type) {
    case Type::kBfloat16:
      return from_bfloat16(static_cast<const uint16_t*>(values)[j]);
    case Type::kFloat16:
      return from_float16(static_cast<const uint16_t*>(values)[j]);
    default:
      return static_cast<const float*>(values)[j];
  }
}

SCAPE_HOST_DEVICE inline void store(Type type, void* values, size_t j, float value) {
  switch (type) {
    case Type::kBfloat16:
      static_cast<uint16_t*>(values)[j] = to_bfloat16(value);
      break;
    case Type::kFloat16:
      static_cast<uint16_t*>(values)[j] = to_float16(value);
      break;
    default:
      static_cast<float*>(values)[j] = value;
  }
}

// ---- masks ----

// Calls visit(j) for each set bit j of the mask of n elements, in order; returns how many there
// were.
template <typename Visit>
size_t for_each_masked(const uint64_t* mask, size_t n, Visit&& visit) {
  size_t count = 0;
  for (size_t w = 0; w < mask_words(n); ++w) {
    for (uint64_t word = mask[w]; word != 0; word &= word - 1) {
      visit(w * 64 + static_cast<size_t>(std::countr_zero(word)));
      ++count;
    }
  }
  return count;
}

SCAPE_HOST_DEVICE inline bool is_masked(const uint64_t* mask, size_t j) {
  return (mask[j / 64] >> (j % 64)) & 1;
}

// ---- ages and tables ----

// Steps from `last` to `now`, in 16-bit arithmetic.
SCAPE_HOST_DEVICE inline uint16_t age_of(uint16_t last, uint16_t now) {
  return static_cast<uint16_t>(now - last);
}

// The age that the equations use: the plain rule counts every age as 1.
SCAPE_HOST_DEVICE inline uint16_t counted_age(uint16_t age, const StepParams& params) {
  return params.plain ? uint16_t{1} : age;
}

SCAPE_HOST_DEVICE inline float power_at(const PowerTable& powers, uint32_t age) {
  return powers.pow[std::min(age, powers.size - 1)];
}

SCAPE_HOST_DEVICE inline float decay_at(const StepParams& params, uint32_t age) {
  return params.decay == nullptr ? 1.0f : params.decay[std::min(age, params.decay_size - 1)];
}

// ---- steps 2 to 6 ----

SCAPE_HOST_DEVICE inline float gradient_of_moment(float x, float m, float beta1) {
  return (x - beta1 * m) / (1.0f - beta1);
}

struct MomentResult {
  float gradient;      // g^ = u / age
  float moment;        // b = beta1^age * m + (1 - beta1^age) * g^
  float prior_moment;  // m' = beta1^(age-1) * m + (1 - beta1^(age-1)) * g^
};

SCAPE_HOST_DEVICE inline MomentResult moment_element(float u, float m, uint16_t age,
                                                     const PowerTable& powers) {
  const float power = power_at(powers, age);
  const float prior = power_at(powers, age - 1u);
  const float gradient = u / static_cast<float>(age);
  return {gradient, power * m + (1.0f - power) * gradient, prior * m + (1.0f - prior) * gradient};
}

SCAPE_HOST_DEVICE inline void adams_element(float u, uint16_t age, const StepParams& params,
                                            float* m, float* param) {
  const MomentResult r = moment_element(u, *m, age, params.powers);
  const float v = params.beta2 * (r.prior_moment * r.prior_moment) +
                  (1.0f - params.beta2) * (r.gradient * r.gradient);
  const float rate = params.lr * std::min(static_cast<float>(age), params.age_cap);
  const float step = rate * r.moment / (std::sqrt(v) + params.eps);
  *param = decay_at(params, age) * *param - step;
  *m = r.moment;
}

// The factor of the hooked role's output for an element that leaves the mask: it makes the
// optimizer's moment zero.
SCAPE_HOST_DEVICE inline float leaving_factor(float beta1) { return -(beta1 / (1.0f - beta1)); }

// A step that is one step long stays the optimizer's to the bit.
SCAPE_HOST_DEVICE inline float post_step_element(float before, uint16_t age, float decay,
                                                 float age_cap, float after) {
  const float decayed = before * decay;
  const float steps = std::min(static_cast<float>(age), age_cap);
  return steps == 1.0f ? after : decayed + steps * (after - decayed);
}

SCAPE_HOST_DEVICE inline void encode_bf16_element(float u, uint16_t age, const PowerTable& powers,
                                                  uint16_t* encoded, float* error) {
  const float weight = 1.0f - power_at(powers, age);
  const float steps = static_cast<float>(age);
  const float value = weight * u / steps;
  *encoded = to_bfloat16(value);
  *error = (value - from_bfloat16(*encoded)) * steps / weight;
}

SCAPE_HOST_DEVICE inline float decode_bf16_element(uint16_t encoded, uint16_t age,
                                                   const PowerTable& powers) {
  const float weight = 1.0f - power_at(powers, age);
  return from_bfloat16(encoded) * static_cast<float>(age) / weight;
}

// The score of a finite residual; 0 where the result is not finite.
SCAPE_HOST_DEVICE inline float score_element(float m, float residual, uint16_t age,
                                             const PowerTable& powers, float scale) {
  const float power = power_at(powers, age);
  const float score =
      std::fabs(static_cast<float>(age) * power * m + (1.0f - power) * (scale * residual));
  return is_finite(score) ? score : 0.0f;
}

// `last` of an element older than 2^15 steps, at that age.
SCAPE_HOST_DEVICE inline uint16_t restamped(uint16_t last, uint16_t t) {
  return age_of(last, t) > 0x8000u ? static_cast<uint16_t>(t - 0x8000u) : last;
}

// ---- selection ----

// Scores order as their bits do, the sign left out (so that -0 equals +0).
SCAPE_HOST_DEVICE inline uint32_t score_key(float score) { return bits_of(score) & 0x7fffffffu; }

}  // namespace scape::kernels
