#include "simulation.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>

#include "plugin/collectives/order.h"

namespace scape::plugin::test {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

uint16_t to_half_bits(scape_dtype type, float value) {
  if (type == SCAPE_FLOAT16) {
    // By value: the nearest multiple of the spacing at this magnitude, ties to even.
    if (std::isnan(value)) return 0x7e00;
    const uint16_t sign = std::signbit(value) ? 0x8000 : 0;
    const double magnitude = std::fabs(static_cast<double>(value));
    if (magnitude >= 65520) return sign | 0x7c00;
    int exponent = magnitude == 0 ? -14 : std::max(-14, std::ilogb(magnitude));
    double units = std::nearbyint(std::ldexp(magnitude, 10 - exponent));
    if (units == 2048) {
      units = 1024;
      ++exponent;
    }
    const auto mantissa = static_cast<uint16_t>(units);
    if (mantissa < 1024) return sign | mantissa;
    return static_cast<uint16_t>(sign | ((exponent + 15) << 10) | (mantissa - 1024));
  }
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  if (std::isnan(value)) return static_cast<uint16_t>((bits >> 16) | 0x40);
  const uint32_t half = 0x7fff + ((bits >> 16) & 1);
  return static_cast<uint16_t>((bits + half) >> 16);
}

float from_half_bits(scape_dtype type, uint16_t half) {
  if (type == SCAPE_FLOAT16) {
    const float sign = (half & 0x8000) != 0 ? -1.0f : 1.0f;
    const int exponent = (half >> 10) & 31;
    const int mantissa = half & 1023;
    if (exponent == 31) return mantissa != 0 ? kNan : sign * std::numeric_limits<float>::infinity();
    if (exponent == 0) return sign * std::ldexp(static_cast<float>(mantissa), -24);
    return sign * std::ldexp(static_cast<float>(mantissa + 1024), exponent - 25);
  }
  const uint32_t bits = uint32_t{half} << 16;
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

DataType data_type(scape_dtype type) {
  return type == SCAPE_FLOAT32    ? DataType::kFloat32
         : type == SCAPE_BFLOAT16 ? DataType::kBfloat16
                                  : DataType::kFloat16;
}

struct Range {
  size_t begin, end;
};

// Whole groups of 64, c = ceil(ceil(n / 64) / P) of them each.
Range part(size_t n, int ranks, int q) {
  const size_t groups = (n + 63) / 64;
  const size_t c = (groups + ranks - 1) / ranks;
  return {std::min(n, 64 * c * q), std::min(n, 64 * c * (q + 1))};
}

}  // namespace

float narrowed(scape_dtype type, float value) {
  return type == SCAPE_FLOAT32 ? value : from_half_bits(type, to_half_bits(type, value));
}

std::vector<std::byte> to_bytes(scape_dtype type, const std::vector<float>& values) {
  const size_t width = type == SCAPE_FLOAT32 ? 4 : 2;
  std::vector<std::byte> bytes(values.size() * width);
  for (size_t j = 0; j < values.size(); ++j) {
    if (type == SCAPE_FLOAT32) {
      std::memcpy(&bytes[j * 4], &values[j], 4);
    } else {
      const uint16_t half = to_half_bits(type, values[j]);
      std::memcpy(&bytes[j * 2], &half, 2);
    }
  }
  return bytes;
}

std::vector<float> from_bytes(scape_dtype type, const std::vector<std::byte>& bytes) {
  const size_t width = type == SCAPE_FLOAT32 ? 4 : 2;
  std::vector<float> values(bytes.size() / width);
  for (size_t j = 0; j < values.size(); ++j) {
    if (type == SCAPE_FLOAT32) {
      std::memcpy(&values[j], &bytes[j * 4], 4);
    } else {
      uint16_t half;
      std::memcpy(&half, &bytes[j * 2], 2);
      values[j] = from_half_bits(type, half);
    }
  }
  return values;
}

Simulation::Simulation(BufferConfig config, size_t count, int ranks, bool shared, bool blind)
    : mask(count),
      ages(count, 1),
      m(count),
      r(ranks, std::vector<float>(count)),
      nonfinite(ranks),
      config_(std::move(config)),
      n_(count),
      ranks_(ranks),
      plain_dense_(ranks == 1 || config_.sparsity == 0),
      shared_(shared),
      blind_(blind),
      last_(count, -1),
      applied_(count),
      flag_(ranks) {
  double value = 1;
  for (int age = 0; age < 65536; ++age, value *= config_.beta1)
    powers_.push_back(static_cast<float>(value));
}

float Simulation::power(uint64_t age) const { return powers_[age]; }

uint64_t Simulation::age_at(size_t j, uint64_t now) const {
  if (plain_dense_ || config_.rule == SCAPE_RULE_PLAIN) return 1;
  return static_cast<uint64_t>(static_cast<int64_t>(now) - last_[j]);
}

double Simulation::sparsity() const {
  if (t < config_.dense_steps) return 0;
  return t < config_.ramp_steps ? std::min(config_.ramp_sparsity, config_.sparsity)
                                : config_.sparsity;
}

std::vector<float> Simulation::reduce(const std::vector<std::vector<float>>& values,
                                      scape_dtype type, const std::vector<Reduction>& reductions,
                                      Algorithm algorithm) const {
  std::vector<std::vector<std::byte>> operands;
  for (const auto& of_rank : values) operands.push_back(to_bytes(type, of_rank));
  std::vector<const void*> inputs;
  for (const auto& operand : operands) inputs.push_back(operand.data());
  std::vector<std::byte> result(operands[0].size());
  EXPECT_TRUE(simulate_all_reduce(inputs, result.data(), values[0].size(), data_type(type),
                                  reductions, algorithm)
                  .ok());
  return from_bytes(type, result);
}

void Simulation::step(const std::vector<std::vector<float>>& inputs,
                      const std::vector<Reduction>& reductions, std::vector<float>* param,
                      double lr, double weight_decay, bool flush) {
  const bool fused = config_.role == SCAPE_ROLE_FUSED;
  const bool moment_role = config_.role == SCAPE_ROLE_FIRST_MOMENT;
  const float beta1 = static_cast<float>(config_.beta1);
  const float beta2 = static_cast<float>(config_.beta2);
  const bool dense = flush || plain_dense_ || sparsity() == 0;
  const bool in_place = config_.residual == SCAPE_RESIDUAL_IN_PLACE;
  decay_.push_back(1 - lr * weight_decay);
  mask = dense || next_.empty() ? std::vector<bool>(n_, true) : next_;
  for (size_t j = 0; j < n_; ++j) {
    ages[j] = plain_dense_ ? 1 : static_cast<uint16_t>(static_cast<int64_t>(t) - last_[j]);
  }

  // Without a residual that waits, a dense step sums the caller's own elements, and nothing else.
  // docs/algorithm.md leaves the flag of such a step to its reduced values.
  const bool direct = plain_dense_ || (dense && !flush && !moment_role && (in_place || clean_));

  // 1. u = g + r.
  std::vector<std::vector<float>> u(ranks_, std::vector<float>(n_));
  for (int i = 0; i < ranks_; ++i) {
    for (size_t j = 0; j < n_; ++j) {
      float g = inputs[i][j];
      if (moment_role && !plain_dense_ && !flush) {
        g = (g - beta1 * narrowed(config_.dtype, m[j])) / (1.0f - beta1);
      }
      u[i][j] = flush ? r[i][j] : direct && !in_place ? g : r[i][j] + g;
    }
  }

  // 2. One all-reduce.
  std::vector<size_t> sent;
  for (size_t j = 0; j < n_; ++j) {
    if (mask[j]) sent.push_back(j);
  }
  const bool coded = config_.payload == SCAPE_BFLOAT16 && !dense;
  std::vector<std::vector<float>> errors(ranks_, std::vector<float>(n_));
  std::vector<std::vector<float>> payload(ranks_);
  for (int i = 0; i < ranks_; ++i) {
    for (const size_t j : sent) {
      float value = u[i][j];
      if (coded) {
        const uint64_t age = age_at(j, t);
        const float weight = 1.0f - power(age);
        const float scaled = weight * value / static_cast<float>(age);
        value = narrowed(SCAPE_BFLOAT16, scaled);
        errors[i][j] = (scaled - value) * static_cast<float>(age) / weight;
      }
      payload[i].push_back(value);
    }
    if (!direct) payload[i].push_back(flag_[i] ? kNan : 0.0f);
    if (!direct) flag_[i] = false;
  }
  const scape_dtype wire = direct ? config_.dtype : coded ? SCAPE_BFLOAT16 : SCAPE_FLOAT32;
  const bool in_rank_order = shared_ && !dense && sparsity() == config_.sparsity;
  std::vector<float> mean =
      reduce(payload, wire, reductions, in_rank_order ? Algorithm::kFlat : Algorithm::kAuto);
  if (coded) {
    for (size_t s = 0; s < sent.size(); ++s) {
      const uint64_t age = age_at(sent[s], t);
      mean[s] = mean[s] * static_cast<float>(age) / (1.0f - power(age));
    }
  }
  skipped =
      !std::all_of(mean.begin(), mean.end(), [](float value) { return std::isfinite(value); });
  if (plain_dense_ && !fused) skipped = false;

  // 3 to 5.
  std::vector<float> given(n_);
  if (plain_dense_) given = mean;
  if (plain_dense_ && !fused) m = mean;
  if (!plain_dense_) {
    for (int i = 0; i < ranks_; ++i) r[i] = u[i];
  }
  if (!plain_dense_ && config_.role == SCAPE_ROLE_GRADIENT_HOOKED && !skipped) {
    for (size_t j = 0; j < n_; ++j) {
      if (mask[j] || !applied_[j]) continue;
      given[j] = -(beta1 / (1.0f - beta1)) * m[j];
      m[j] = 0;
    }
  }
  if (moment_role && !plain_dense_) given = m;
  for (size_t s = 0; s < sent.size() && !(plain_dense_ && !fused); ++s) {
    const size_t j = sent[s];
    if (skipped) {
      if (!plain_dense_) {
        for (int i = 0; i < ranks_; ++i) {
          if (!std::isfinite(r[i][j])) r[i][j] = 0;
        }
      }
      given[j] = direct ? mean[s] : kNan;
      continue;
    }
    const uint64_t age = age_at(j, t);
    const float tau = static_cast<float>(age);
    const float gradient = mean[s] / tau;
    const float b = power(age) * m[j] + (1.0f - power(age)) * gradient;
    if (fused) {
      const float prior = power(age - 1) * m[j] + (1.0f - power(age - 1)) * gradient;
      const float v = beta2 * (prior * prior) + (1.0f - beta2) * (gradient * gradient);
      const float rate =
          static_cast<float>(lr) * std::min(tau, static_cast<float>(config_.age_cap));
      // Over the steps last + 1 .. t, the newest first.
      double product = 1;
      for (uint64_t x = t + 1; x > t + 1 - age; --x) product *= decay_[x - 1];
      const float kept = static_cast<float>(product);
      (*param)[j] =
          kept * (*param)[j] - rate * b / (std::sqrt(v) + static_cast<float>(config_.eps));
    }
    if (config_.role == SCAPE_ROLE_GRADIENT_HOOKED) {
      m[j] = beta1 * m[j] + (1.0f - beta1) * gradient;
      given[j] = gradient;
    } else {
      m[j] = b;
      given[j] = moment_role ? b : mean[s];
    }
    last_[j] = static_cast<int64_t>(t);
    for (int i = 0; i < ranks_; ++i) r[i][j] = errors[i][j];
  }
  if (!skipped) applied_ = mask;
  if (dense) clean_ = !skipped && !blind_;
  output = to_bytes(config_.dtype, given);

  // Ages stay below 2^16: a sweep over all elements in 2^14 steps.
  const size_t until = std::min(n_, sweep_ + n_ / 16384 + 1);
  for (size_t j = sweep_; j < until; ++j)
    last_[j] = std::max(last_[j], static_cast<int64_t>(t) - 32768);
  sweep_ = until == n_ ? 0 : until;

  choose_next(reductions);
  ++t;
}

// 6. Rank i judges partition (i + t) mod P; the plain rule does not rotate.
void Simulation::choose_next(const std::vector<Reduction>& reductions) {
  next_.clear();
  ++t;
  const double s = sparsity();
  --t;
  if (plain_dense_ || s == 0) return;
  next_.resize(n_);
  for (int i = 0; i < ranks_; ++i) {
    const int q = config_.rule == SCAPE_RULE_PLAIN ? i : static_cast<int>((i + t) % ranks_);
    const Range range = part(n_, ranks_, q);
    const size_t size = range.end - range.begin;
    if (size == 0) continue;
    const auto k = std::max<size_t>(
        1, static_cast<size_t>(std::nearbyint((1 - s) * static_cast<double>(size))));
    float scale = 1;
    if (reductions[i].op == ReduceOp::kSum) scale = static_cast<float>(ranks_);
    if (reductions[i].op == ReduceOp::kPremulSum)
      scale = static_cast<float>(ranks_ * reductions[i].factor);
    std::vector<float> score(size);
    for (size_t j = range.begin; j < range.end; ++j) {
      if (!std::isfinite(r[i][j])) {
        r[i][j] = 0;
        ++nonfinite[i];
        flag_[i] = true;
      }
      const uint64_t age = age_at(j, t + 1);
      const float value =
          static_cast<float>(age) * power(age) * m[j] + (1.0f - power(age)) * (scale * r[i][j]);
      score[j - range.begin] = std::isfinite(value) ? std::fabs(value) : 0.0f;
    }
    std::vector<size_t> order(size);
    std::iota(order.begin(), order.end(), size_t{0});
    std::stable_sort(order.begin(), order.end(),
                     [&](size_t a, size_t b) { return score[a] > score[b]; });
    for (size_t s2 = 0; s2 < std::min(k, size); ++s2) next_[range.begin + order[s2]] = true;
  }
}

}  // namespace scape::plugin::test
