// Masked all-reduces of device buffers have host mode's bits: training in every role, and the field
// cases of selection and numerics (F08 to F13).
#include "tests/functional/simgpu/placed_case.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <memory>

namespace scape::cases {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

uint16_t to_bf16(float value) {
  return static_cast<uint16_t>(std::bit_cast<uint32_t>(value) >> 16);
}
float from_bf16(uint16_t bits) { return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16); }

template <typename T>
T packed(float value) {
  if constexpr (std::is_same_v<T, float>) {
    return value;
  } else {
    return to_bf16(value);
  }
}
template <typename T>
float unpacked(T value) {
  if constexpr (std::is_same_v<T, float>) {
    return value;
  } else {
    return from_bf16(value);
  }
}

// No sum of these is exact.
float noise(int rank, int step, size_t i) {
  uint32_t mixed = static_cast<uint32_t>(i) * 2654435761u + static_cast<uint32_t>(step) * 40503u +
                   static_cast<uint32_t>(rank) * 9176u + 1;
  mixed ^= mixed >> 15;
  mixed *= 0x2c1b3c6du;
  mixed ^= mixed >> 12;
  return static_cast<float>(static_cast<int32_t>(mixed)) * 0x1.0p-31f;
}

struct Training {
  const char* name;
  scape_role role = SCAPE_ROLE_FUSED;
  scape_dtype payload = SCAPE_FLOAT32;
  scape_residual residual = SCAPE_RESIDUAL_INTERNAL;
  ncclRedOp_t op = ncclAvg;
  bool apart = false;  // sendbuff and recvbuff
};

constexpr int kSteps = 12;
constexpr size_t kCount = 1219;

// Steps with everything that may happen between them: a non-finite value, a flush, a saved state
// that is loaded again.
template <typename T>
void train(Rank& self, ncclComm_t comm, cudaStream_t stream, const Training& as) {
  constexpr bool kWide = std::is_same_v<T, float>;
  const ncclDataType_t type = kWide ? ncclFloat32 : ncclBfloat16;
  Placed<T> gradient(kCount), result(kCount);
  Placed<float> param(kCount), before(kCount);
  std::vector<float> weights(kCount, 0.5f), moment(kCount);
  param.put(weights, stream);
  scape_config config = gradient_config(as.name, 0.1);
  config.role = as.role;
  config.payload = as.payload;
  config.residual = as.residual;
  scape_registration registration = nullptr;
  SCAPE(scape_register(gradient.get(), kCount, kWide ? SCAPE_FLOAT32 : SCAPE_BFLOAT16, &config,
                       &registration));
  Placed<T>& out = as.apart ? result : gradient;
  const bool fused = as.role == SCAPE_ROLE_FUSED;
  const bool in_place = as.residual == SCAPE_RESIDUAL_IN_PLACE;
  const auto optimize = [&] {
    if (fused) {
      SCAPE(scape_adams_step(gradient.get(), kCount, param.get(), 1e-2, 0.1, stream));
      if (in_place) SCAPE(scape_clear_masked(gradient.get(), kCount, stream));
    } else if (as.role == SCAPE_ROLE_GRADIENT_HOOKED) {
      before.put(weights, stream);
      const std::vector<T> mean = out.read(stream);
      for (size_t i = 0; i < kCount; ++i) weights[i] -= 1e-2f * unpacked(mean[i]);
      param.put(weights, stream);
      SCAPE(scape_post_step(gradient.get(), kCount, 0, 1000, before.get(), param.get(), 1e-2, 0.1,
                            stream));
      SCAPE(scape_post_step(gradient.get(), kCount, 1000, kCount - 1000, before.get() + 1000,
                            param.get() + 1000, 1e-2, 0.1, stream));
    } else if (as.role == SCAPE_ROLE_FIRST_MOMENT) {
      const std::vector<T> synchronized = out.read(stream);
      for (size_t i = 0; i < kCount; ++i) moment[i] = unpacked(synchronized[i]);
    }
  };
  Journal mine, all;
  for (int step = 0; step < kSteps; ++step) {
    std::vector<T> values(kCount);
    const std::vector<T> waiting = in_place ? gradient.read(stream) : values;
    for (size_t i = 0; i < kCount; ++i) {
      float value = noise(self.rank, step, i) + unpacked(waiting[i]);
      if (as.role == SCAPE_ROLE_FIRST_MOMENT) value = 0.9f * moment[i] + 0.1f * value;
      values[i] = packed<T>(value);
    }
    if (step == 5 && self.rank == 0) {
      for (size_t i = 0; i < kCount; i += 7) values[i] = packed<T>(i % 2 == 0 ? kInf : kNan);
    }
    gradient.put(values, stream);
    NCCL(ncclAllReduce(gradient.get(), out.get(), kCount, type, as.op, comm, stream));
    if (!fused) all.add(out.read(stream));
    optimize();
    if (step == 8) {
      SCAPE(scape_flush(gradient.get(), kCount, fused ? param.get() : nullptr, 1e-2, 0.1, stream));
    }
    if (step == 10) {
      size_t needed = 0;
      SCAPE(scape_save_state(nullptr, 0, &needed));
      std::vector<char> state(needed);
      SCAPE(scape_save_state(state.data(), state.size(), &needed));
      SCAPE(scape_load_state(state.data(), state.size()));
    }
    all.add(param.read(stream));
    mine.add(gradient.read(stream));
    mine.add_state(gradient.get(), kCount);
    const std::string of = std::string(as.name) + " step " + std::to_string(step);
    all.line("all " + of);
    mine.line(of);
  }
  CHECK(stats_of(gradient.get(), kCount).skipped_steps >= 1);
  SCAPE(scape_unregister(registration));
}

void train_all(Rank& self) {
  const ncclComm_t comm = self.init();
  const cudaStream_t stream = stream_here();
  float factor = 0.375f;
  uint16_t narrow_factor = to_bf16(factor);
  ncclRedOp_t scaled = ncclSum, narrow_scaled = ncclSum;
  NCCL(ncclRedOpCreatePreMulSum(&scaled, &factor, ncclFloat32, ncclScalarHostImmediate, comm));
  NCCL(ncclRedOpCreatePreMulSum(&narrow_scaled, &narrow_factor, ncclBfloat16,
                                ncclScalarHostImmediate, comm));
  train<float>(self, comm, stream, {.name = "fused"});
  train<float>(self, comm, stream,
               {.name = "fused, narrow", .payload = SCAPE_BFLOAT16, .op = ncclSum, .apart = true});
  train<float>(self, comm, stream,
               {.name = "fused, in place", .residual = SCAPE_RESIDUAL_IN_PLACE});
  train<float>(self, comm, stream,
               {.name = "fused, in host memory", .residual = SCAPE_RESIDUAL_HOST});
  train<uint16_t>(self, comm, stream, {.name = "fused, bf16"});
  train<float>(self, comm, stream, {.name = "first moment", .role = SCAPE_ROLE_FIRST_MOMENT});
  train<float>(self, comm, stream,
               {.name = "hooked", .role = SCAPE_ROLE_GRADIENT_HOOKED, .op = scaled});
  train<uint16_t>(self, comm, stream,
                  {.name = "gradient, bf16",
                   .role = SCAPE_ROLE_GRADIENT,
                   .payload = SCAPE_BFLOAT16,
                   .apart = true});
  train<float>(self, comm, stream,
               {.name = "gradient", .role = SCAPE_ROLE_GRADIENT, .op = ncclSum});
  NCCL(ncclCommDestroy(comm));
}

LAUNCHED_CASE(DEVICE_training_of_two) { same_in_both_modes("DEVICE_training_of_two", 2); }
RANK_PART(DEVICE_training_of_two) { train_all(self); }
LAUNCHED_CASE(DEVICE_training_of_four) { same_in_both_modes("DEVICE_training_of_four", 4); }
RANK_PART(DEVICE_training_of_four) { train_all(self); }

// ---- selection and numerics ----

// A buffer of the gradient role and its steps.
template <typename T>
class Steps {
 public:
  Steps(ncclComm_t comm, cudaStream_t stream, size_t count, const char* name, double kept,
        scape_rule rule = SCAPE_RULE_LAZY)
      : comm_(comm), stream_(stream), buffer_(count) {
    scape_config config = gradient_config(name, kept);
    config.rule = rule;
    SCAPE(scape_register(buffer_.get(), count,
                         std::is_same_v<T, float> ? SCAPE_FLOAT32 : SCAPE_BFLOAT16, &config,
                         &registration_));
  }
  ~Steps() { SCAPE(scape_unregister(registration_)); }

  std::vector<T> step(const std::vector<T>& values, ncclRedOp_t op = ncclSum) {
    buffer_.put(values, stream_);
    NCCL(ncclAllReduce(buffer_.get(), buffer_.get(), buffer_.count(),
                       std::is_same_v<T, float> ? ncclFloat32 : ncclBfloat16, op, comm_, stream_));
    return buffer_.read(stream_);
  }
  std::vector<uint64_t> mask() {
    std::vector<uint64_t> words((buffer_.count() + 63) / 64);
    SCAPE(scape_read_mask(buffer_.get(), buffer_.count(), words.data(), words.size()));
    return words;
  }
  size_t bits() {
    size_t total = 0;
    for (const uint64_t word : mask()) total += static_cast<size_t>(std::popcount(word));
    return total;
  }
  std::vector<float> residual() {
    std::vector<float> values(buffer_.count());
    SCAPE(scape_read_residual(buffer_.get(), values.size(), values.data(), values.size()));
    return values;
  }
  scape_stats stats() { return stats_of(buffer_.get(), buffer_.count()); }
  void* address() { return buffer_.get(); }
  size_t count() const { return buffer_.count(); }

 private:
  const ncclComm_t comm_;
  const cudaStream_t stream_;
  Placed<T> buffer_;
  scape_registration registration_ = nullptr;
};

LAUNCHED_CASE(DEVICE_F08_nonfinite_values) { same_in_both_modes("DEVICE_F08_nonfinite_values", 2); }
RANK_PART(DEVICE_F08_nonfinite_values) {
  const ncclComm_t comm = self.init();
  const cudaStream_t stream = stream_here();
  Journal all, mine;
  for (int variant = 0; variant < 4; ++variant) {
    Steps<float> steps(comm, stream, 64, "nonfinite", 0.125);
    std::vector<float> finite(64);
    for (size_t i = 0; i < 64; ++i) finite[i] = self.rank == 0 ? static_cast<float>(i + 1) : 1.f;
    for (int step = 0; step < 3; ++step) steps.step(finite);
    std::vector<float> bad = finite;
    if (self.rank == 0 && variant == 0) bad[5] = kNan, bad[9] = kInf, bad[10] = -kInf;
    if (self.rank == 0 && variant == 1) std::fill_n(bad.begin(), 20, kInf);
    if (self.rank == 0 && variant == 2) std::fill(bad.begin(), bad.end(), kNan);
    if (self.rank == 0 && variant == 3) bad[63] = -kNan, bad[62] = kNan;
    int seen_after = -1;
    for (int step = 0; step < 7; ++step) {
      const std::vector<float> out = steps.step(step == 0 ? bad : finite);
      const bool seen =
          std::any_of(out.begin(), out.end(), [](float v) { return !std::isfinite(v); });
      if (seen && seen_after < 0) seen_after = step;
      CHECK(!seen || step < 4);
      CHECK(steps.bits() == 8);
      // A NaN's bits are nobody's promise.
      std::vector<float> plain = out;
      for (float& value : plain) value = std::isfinite(value) ? value : 12345.f;
      all.add(plain);
      all.add(steps.mask());
      mine.add_state(steps.address(), 64);
    }
    CHECK(seen_after >= 0 && seen_after <= 2);
    CHECK(steps.stats().skipped_steps >= 1);
    all.line("all " + std::to_string(variant));
    mine.line(std::to_string(variant));
  }
  NCCL(ncclCommDestroy(comm));
}

LAUNCHED_CASE(DEVICE_F09_ties_and_zeros) { same_in_both_modes("DEVICE_F09_ties_and_zeros", 2); }
RANK_PART(DEVICE_F09_ties_and_zeros) {
  const ncclComm_t comm = self.init();
  const cudaStream_t stream = stream_here();
  const auto pattern = [](int kind, size_t i) -> float {
    switch (kind) {
      case 0:
        return 3;
      case 1:
        return i % 2 == 0 ? 0.0f : -0.0f;
      case 2:
        return i % 20 == 7 ? 5 : 0;
      case 3:
        return i % 2 == 0 ? 2 : -2;
      default:
        return i < 10 ? 9 : i < 40 ? 4 : 1;
    }
  };
  Journal all;
  for (int kind = 0; kind < 5; ++kind) {
    for (int repeat = 0; repeat < 3; ++repeat) {
      Steps<float> steps(comm, stream, 96, "ties", 0.25);
      std::vector<float> values(96);
      for (size_t i = 0; i < 96; ++i) values[i] = pattern(kind, i);
      for (int step = 0; step < 3; ++step) {
        all.add(steps.step(values));
        const std::vector<uint64_t> mask = steps.mask();
        CHECK(step == 0 || steps.bits() == 24);
        CHECK(mask[1] >> 32 == 0);
        // Where all magnitudes are equal the ties go to the lowest index of each partition.
        if (step == 1 && (kind == 0 || kind == 1 || kind == 3))
          CHECK(mask[0] == 0xffff && mask[1] == 0xff);
        all.add(mask);
      }
    }
    all.line("all " + std::to_string(kind));
  }
  NCCL(ncclCommDestroy(comm));
}

LAUNCHED_CASE(DEVICE_F10_extreme_ratios) { same_in_both_modes("DEVICE_F10_extreme_ratios", 2); }
RANK_PART(DEVICE_F10_extreme_ratios) {
  const ncclComm_t comm = self.init();
  const cudaStream_t stream = stream_here();
  Journal all, mine;
  for (const size_t count : {1, 2, 3, 5, 31, 100}) {
    Steps<float> steps(comm, stream, count, "small", 0.01);
    for (int step = 0; step < 6; ++step) {
      all.add(steps.step(values_of(self, step, count)));
      const size_t sent = steps.bits();
      CHECK(step == 0 ? sent == count : sent >= 1 && sent <= 2);
      mine.add(steps.residual());
    }
    all.line("all " + std::to_string(count));
    mine.line(std::to_string(count));
  }
  Steps<float> thousand(comm, stream, 1000, "thousand", 0.01);
  for (int step = 0; step < 2; ++step) thousand.step(values_of(self, step, 1000));
  CHECK(thousand.bits() == 10);
  // Everything travels: the plain sum, at once.
  Steps<float> dense(comm, stream, 100, "dense", 1);
  for (int step = 0; step < 3; ++step) {
    std::vector<float> sum = values_of(self, step, 100);
    const std::vector<float> theirs = values_of({1 - self.rank, 2, "", 0}, step, 100);
    const std::vector<float> out = dense.step(sum);
    for (size_t i = 0; i < 100; ++i) CHECK(out[i] == sum[i] + theirs[i]);
  }
  // Magnitudes count, not values.
  Steps<float> signs(comm, stream, 4, "signs", 0.5);
  for (int step = 0; step < 2; ++step) signs.step({-9, 1, 2, -8});
  CHECK(signs.mask() == std::vector<uint64_t>{0b1001});
  NCCL(ncclCommDestroy(comm));
}

// Each count at a start of its own, with guards before and behind.
template <typename T>
void odd_lengths(ncclComm_t comm, cudaStream_t stream, Journal& all) {
  const ncclDataType_t type = std::is_same_v<T, float> ? ncclFloat32 : ncclBfloat16;
  constexpr size_t kGuard = 64;
  for (const size_t count : {1, 2, 31, 63, 65, 129, 257, 4097}) {
    const size_t shift = count % 4;
    Placed<T> memory(count + 2 * kGuard);
    T* const buffer = memory.get() + kGuard / 2 + shift;
    std::vector<T> values(memory.count(), packed<T>(2));
    const auto first = values.begin() + static_cast<ptrdiff_t>(kGuard / 2 + shift);
    const scape_registration registration =
        add(buffer, count, "odd", 0.3, std::is_same_v<T, float> ? SCAPE_FLOAT32 : SCAPE_BFLOAT16);
    for (int step = 0; step < 3; ++step) {
      std::fill_n(first, count, packed<T>(1));
      first[static_cast<ptrdiff_t>(count) - 1] = packed<T>(100);
      memory.put(values, stream);
      NCCL(ncclAllReduce(buffer, buffer, count, type, ncclSum, comm, stream));
      const std::vector<T> out = memory.read(stream);
      all.add(out);
      std::vector<uint64_t> mask((count + 63) / 64);
      SCAPE(scape_read_mask(buffer, count, mask.data(), mask.size()));
      if (count % 64 != 0) CHECK(mask.back() >> count % 64 == 0);
      CHECK((mask[(count - 1) / 64] >> (count - 1) % 64 & 1) != 0);
      for (size_t i = 0; i < out.size(); ++i) {
        const size_t begin = kGuard / 2 + shift;
        if (i < begin || i >= begin + count) CHECK(out[i] == packed<T>(2));
      }
    }
    SCAPE(scape_unregister(registration));
    all.line("all " + std::to_string(count));
  }
}

void all_odd_lengths(Rank& self) {
  const ncclComm_t comm = self.init();
  const cudaStream_t stream = stream_here();
  Journal all;
  odd_lengths<float>(comm, stream, all);
  odd_lengths<uint16_t>(comm, stream, all);
  NCCL(ncclCommDestroy(comm));
}
LAUNCHED_CASE(DEVICE_F11_odd_lengths_2_ranks) {
  same_in_both_modes("DEVICE_F11_odd_lengths_2_ranks", 2);
}
RANK_PART(DEVICE_F11_odd_lengths_2_ranks) { all_odd_lengths(self); }
LAUNCHED_CASE(DEVICE_F11_odd_lengths_3_ranks) {
  same_in_both_modes("DEVICE_F11_odd_lengths_3_ranks", 3);
}
RANK_PART(DEVICE_F11_odd_lengths_3_ranks) { all_odd_lengths(self); }

LAUNCHED_CASE(DEVICE_F12_half_precision) { same_in_both_modes("DEVICE_F12_half_precision", 2); }
RANK_PART(DEVICE_F12_half_precision) {
  const ncclComm_t comm = self.init();
  const cudaStream_t stream = stream_here();
  // The residual is fp32 whatever the buffer's type: small addends do not get lost in it. By age an
  // element that is held back would be sent in the end.
  Steps<uint16_t> steps(comm, stream, 64, "residual", 1.0 / 64, SCAPE_RULE_PLAIN);
  constexpr int kCalls = 100;
  const uint16_t small = to_bf16(0x1.3p-9f);
  for (int step = 0; step < kCalls; ++step) {
    std::vector<uint16_t> values(64, to_bf16(100));
    values[40] = small;
    steps.step(values);
  }
  const std::vector<float> residual = steps.residual();
  const double expected = from_bf16(small) * (kCalls - 1.0);  // the first step was dense
  CHECK_SAYING(std::abs(residual[40] - expected) < 0.01 * expected, std::to_string(residual[40]));
  Journal mine;
  mine.add(residual);
  mine.line("residual");
  NCCL(ncclCommDestroy(comm));
}

template <typename T>
void scaled_once(Rank& self, ncclComm_t comm, cudaStream_t stream, ncclRedOp_t op, double scale,
                 double kept, double tolerance, Journal& all) {
  Steps<T> steps(comm, stream, 60, "scaled", kept);
  steps.step(std::vector<T>(60), op);
  std::vector<double> total(60);
  for (int step = 0; step < 13; ++step) {
    const float value = step == 0 ? 3.f * static_cast<float>(self.rank + 1) : 0.f;
    const std::vector<T> out = steps.step(std::vector<T>(60, packed<T>(value)), op);
    for (size_t i = 0; i < 60; ++i) total[i] += unpacked(out[i]);
    all.add(out);
  }
  // With every element sent in the end; what is still held back is in the journal of its rank.
  const double ranks = self.ranks, expected = 3 * ranks * (ranks + 1) / 2 * scale;
  for (size_t i = 0; i < 60; ++i) {
    const bool arrived = std::abs(total[i] - expected) <= tolerance;
    CHECK_SAYING(arrived || (kept < 1 && total[i] == 0), std::to_string(total[i]));
  }
  CHECK(std::any_of(total.begin(), total.end(), [](double sum) { return sum != 0; }));
}

LAUNCHED_CASE(DEVICE_F13_scale_applied_once) {
  same_in_both_modes("DEVICE_F13_scale_applied_once", 3);
}
RANK_PART(DEVICE_F13_scale_applied_once) {
  const ncclComm_t comm = self.init();
  const cudaStream_t stream = stream_here();
  float half = 0.5f;
  uint16_t narrow_half = to_bf16(half);
  ncclRedOp_t halved = ncclSum, narrow_halved = ncclSum;
  NCCL(ncclRedOpCreatePreMulSum(&halved, &half, ncclFloat32, ncclScalarHostImmediate, comm));
  NCCL(ncclRedOpCreatePreMulSum(&narrow_halved, &narrow_half, ncclBfloat16, ncclScalarHostImmediate,
                                comm));
  Journal all;
  for (const double kept : {0.2, 1.0}) {
    scaled_once<float>(self, comm, stream, ncclAvg, 1.0 / self.ranks, kept, 1e-5, all);
    scaled_once<float>(self, comm, stream, halved, 0.5, kept, 1e-5, all);
    scaled_once<uint16_t>(self, comm, stream, ncclAvg, 1.0 / self.ranks, kept, 0.0625, all);
    scaled_once<uint16_t>(self, comm, stream, narrow_halved, 0.5, kept, 0.0625, all);
    all.line("all");
  }
  NCCL(ncclRedOpDestroy(halved, comm));
  NCCL(ncclRedOpDestroy(narrow_halved, comm));
  NCCL(ncclCommDestroy(comm));
}

}  // namespace
}  // namespace scape::cases
