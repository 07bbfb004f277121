// Selection and numerics, through the preloaded library: F08 to F13.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <limits>
#include <numeric>
#include <set>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

#include "tests/functional/cases/case.h"

namespace scape::cases {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

std::vector<uint64_t> mask_of(const void* buffer, size_t count) {
  std::vector<uint64_t> words(count / 64 + (count % 64 != 0));
  SCAPE(scape_read_mask(buffer, count, words.data(), words.size()));
  return words;
}

size_t bits(const std::vector<uint64_t>& mask) {
  size_t total = 0;
  for (uint64_t word : mask) total += static_cast<size_t>(std::popcount(word));
  return total;
}

bool in_mask(const std::vector<uint64_t>& mask, size_t element) {
  return (mask[element / 64] >> element % 64 & 1) != 0;
}

uint16_t to_bf16(float value) {
  return static_cast<uint16_t>(std::bit_cast<uint32_t>(value) >> 16);
}
float from_bf16(uint16_t bits16) {
  return std::bit_cast<float>(static_cast<uint32_t>(bits16) << 16);
}

// The kernels that a case runs with, one after the other; a CPU that lacks one takes its best.
const char* const kSimd[] = {"scalar", "baseline", "avx2", "avx512"};

// Runs the ranks of `name` once for each kind of kernels and demands that all print one line.
void same_with_all_kernels(const std::string& name) {
  std::string first;
  for (const char* simd : kSimd) {
    std::vector<Run> runs = rank_runs(name, 2);
    for (Run& one : runs) one.environment["SCAPE_SIMD"] = simd;
    for (const Outcome& outcome : expect(runs, {0, 0})) {
      const size_t at = outcome.err.find("masks of this run: ");
      CHECK_SAYING(at != std::string::npos, outcome.err);
      const std::string line = outcome.err.substr(at, outcome.err.find('\n', at) - at);
      if (first.empty()) first = line;
      CHECK_SAYING(line == first, std::string(simd) + ": " + line + ", not " + first);
    }
  }
}

// All masks that a rank has seen, as one number.
class MaskDigest {
 public:
  void add(const std::vector<uint64_t>& mask) {
    for (uint64_t word : mask) digest_ = (digest_ ^ word) * 0x9e3779b97f4a7c15 + (digest_ >> 29);
  }
  void print() const {
    std::fprintf(stderr, "masks of this run: %016llx\n", static_cast<unsigned long long>(digest_));
  }

 private:
  uint64_t digest_ = 1;
};

// Non-finite values on one rank: seen by all within two steps, each counted or part of a skip, and
// the mask stays valid.
LAUNCHED_CASE(F08_nonfinite_values) { same_with_all_kernels("F08_nonfinite_values"); }
RANK_PART(F08_nonfinite_values) {
  ncclComm_t comm = self.init();
  MaskDigest digest;
  for (int variant = 0; variant < 4; ++variant) {
    std::vector<float> buffer(64);
    const scape_registration registration = add(buffer.data(), 64, "nonfinite", 0.125);
    const auto finite = [&] {
      for (size_t i = 0; i < 64; ++i) buffer[i] = self.rank == 0 ? static_cast<float>(i + 1) : 1.f;
    };
    for (int step = 0; step < 3; ++step) {
      finite();
      all_reduce(buffer, comm);
    }
    finite();
    if (self.rank == 0 && variant == 0) buffer[5] = kNan, buffer[9] = kInf, buffer[10] = -kInf;
    if (self.rank == 0 && variant == 1) std::fill_n(buffer.begin(), 20, kInf);
    if (self.rank == 0 && variant == 2) std::fill(buffer.begin(), buffer.end(), kNan);
    if (self.rank == 0 && variant == 3) buffer[63] = -kNan, buffer[62] = kNan;
    std::set<size_t> waiting;  // elements of this rank's residual that are not finite
    for (size_t i = 0; i < 64; ++i) {
      if (!std::isfinite(buffer[i])) waiting.insert(i);
    }
    uint64_t met = 0;
    int seen_after = -1;
    uint64_t skipped = 0;
    for (int step = 0; step < 4; ++step) {
      all_reduce(buffer, comm);
      const bool seen = std::any_of(buffer.begin(), buffer.end(),
                                    [](float value) { return !std::isfinite(value); });
      if (seen && seen_after < 0) seen_after = step;
      check_agreement(self, comm, buffer.data(), 256);
      const std::vector<uint64_t> mask = mask_of(buffer.data(), 64);
      check_agreement(self, comm, mask.data(), 8);
      CHECK(bits(mask) == 8);
      digest.add(mask);
      // In the mask they make the step a skip and are gone; off it they are met when this rank
      // reads the only partition's scores, every other step.
      std::erase_if(waiting, [&](size_t i) { return in_mask(mask, i); });
      const scape_stats stats = stats_of(buffer.data(), 64);
      if ((static_cast<uint64_t>(self.rank) + stats.step - 1) % 2 == 0) {
        met += waiting.size();
        waiting.clear();
      }
      CHECK_SAYING(stats.nonfinite_values == met,
                   std::to_string(stats.nonfinite_values) + " counted, not " + std::to_string(met));
      skipped = stats.skipped_steps;
      finite();
    }
    CHECK(seen_after >= 0 && seen_after <= 2);
    CHECK(skipped >= 1);
    CHECK(waiting.empty());
    // Afterwards it works as before.
    for (int step = 0; step < 3; ++step) {
      finite();
      all_reduce(buffer, comm);
      for (float value : buffer) CHECK(std::isfinite(value));
    }
    CHECK(stats_of(buffer.data(), 64).skipped_steps == skipped);
    SCAPE(scape_unregister(registration));
  }
  digest.print();
  NCCL(ncclCommDestroy(comm));
}

LAUNCHED_CASE(F09_ties_and_zeros) { same_with_all_kernels("F09_ties_and_zeros"); }
RANK_PART(F09_ties_and_zeros) {
  ncclComm_t comm = self.init();
  MaskDigest digest;
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
  for (int kind = 0; kind < 5; ++kind) {
    std::vector<uint64_t> first;
    for (int repeat = 0; repeat < 20; ++repeat) {
      std::vector<float> buffer(96);
      const scape_registration registration = add(buffer.data(), 96, "ties", 0.25);
      Conservation sums(96);
      std::vector<uint64_t> masks;
      for (int step = 0; step < 3; ++step) {
        for (size_t i = 0; i < 96; ++i) buffer[i] = pattern(kind, i);
        sums.input(buffer);
        all_reduce(buffer, comm);
        sums.output(buffer);
        const std::vector<uint64_t> mask = mask_of(buffer.data(), 96);
        CHECK(step == 0 || bits(mask) == 24);
        CHECK(mask[1] >> 32 == 0);  // padding
        masks.insert(masks.end(), mask.begin(), mask.end());
      }
      check_agreement(self, comm, masks.data(), masks.size() * 8);
      sums.check(self, comm, buffer.data());
      if (repeat == 0) first = masks;
      CHECK(masks == first);
      SCAPE(scape_unregister(registration));
    }
    digest.add(first);
    // Where all magnitudes are equal the ties go to the lowest index of each partition.
    if (kind == 0 || kind == 1 || kind == 3) CHECK(first[2] == 0xffff && first[3] == 0xff);
  }
  digest.print();
  NCCL(ncclCommDestroy(comm));
}

RANKED_CASE(F10_impossible_and_extreme_ratios, 2) {
  ncclComm_t comm = self.init();
  // Small buffers still send something, and everything in the end.
  for (size_t count : {1, 2, 3, 5, 31, 100}) {
    std::vector<float> buffer(count);
    Conservation sums(count);
    const scape_registration registration = add(buffer.data(), count, "small", 0.01);
    for (int step = 0; step < 6; ++step) {
      fill(buffer, values_of(self, step, count));
      sums.input(buffer);
      all_reduce(buffer, comm);
      sums.output(buffer);
      const size_t sent = bits(mask_of(buffer.data(), count));
      // At least one element a partition that is not empty.
      CHECK(step == 0 ? sent == count : sent >= 1 && sent <= 2);
    }
    sums.check(self, comm, buffer.data());
    SCAPE(scape_unregister(registration));
  }
  {
    std::vector<float> buffer(1000);
    const scape_registration registration = add(buffer.data(), 1000, "thousand", 0.01);
    for (int step = 0; step < 2; ++step) all_reduce(buffer, comm);
    CHECK(bits(mask_of(buffer.data(), 1000)) == 10);
    SCAPE(scape_unregister(registration));
  }
  {
    std::vector<float> buffer(100);
    add(buffer.data(), 100, "dense", 1);
    for (int step = 0; step < 3; ++step) {
      fill(buffer, values_of(self, step, 100));
      std::vector<float> plain = buffer;
      all_reduce(buffer, comm);
      all_reduce(plain, comm);
      CHECK(buffer == plain);
    }
  }
  // Sparsity is the fraction that is not sent, in [0, 1).
  std::vector<float> refused(10);
  for (double bad : {1.0, -0.1, 1.5, std::nan(""), static_cast<double>(kInf)}) {
    scape_config config = gradient_config("refused", 0.5);
    config.sparsity = bad;
    scape_registration registration = nullptr;
    CHECK(scape_register(refused.data(), 10, SCAPE_FLOAT32, &config, &registration) ==
          SCAPE_ERR_ARGUMENT);
    CHECK(registration == nullptr);
    CHECK(std::string(scape_last_error()).find("sparsity") != std::string::npos);
  }
  // Magnitudes count, not values: after the dense step the first moment is in their proportion.
  {
    float buffer[4] = {0, 0, 0, 0};
    const scape_config config = gradient_config("signs", 0.5);
    scape_registration registration = nullptr;
    SCAPE(scape_register(buffer, 4, SCAPE_FLOAT32, &config, &registration));
    for (int step = 0; step < 2; ++step) {
      const float values[4] = {-9, 1, 2, -8};
      std::copy(values, values + 4, buffer);
      NCCL(ncclAllReduce(buffer, buffer, 4, ncclFloat32, ncclSum, comm, nullptr));
    }
    CHECK(mask_of(buffer, 4) == std::vector<uint64_t>{0b1001});
  }
  NCCL(ncclCommDestroy(comm));
}

template <typename T>
void odd_lengths(Rank& self, ncclComm_t comm, int turn, ncclDataType_t type, scape_dtype dtype,
                 T one, T large) {
  constexpr size_t kGuard = 64;
  const T mark = static_cast<T>(one + one);
  std::vector<size_t> counts(130);
  std::iota(counts.begin(), counts.end(), size_t{1});
  for (size_t count : {255, 256, 257, 1023, 4097}) counts.push_back(count);
  for (size_t count : counts) {
    const size_t shift = (count + static_cast<size_t>(turn)) % 4;
    std::vector<T> memory(count + 2 * kGuard + 20);
    T* aligned = memory.data() + (64 - reinterpret_cast<uintptr_t>(memory.data()) % 64) /
                                     sizeof(T) % (64 / sizeof(T));
    T* buffer = aligned + kGuard / 2 + shift;
    std::fill(memory.begin(), memory.end(), mark);
    const scape_registration registration = add(buffer, count, "odd", 0.3, dtype);
    for (int step = 0; step < 4; ++step) {
      std::fill_n(buffer, count, one);
      buffer[count - 1] = large;
      NCCL(ncclAllReduce(buffer, buffer, count, type, ncclSum, comm, nullptr));
      const std::vector<uint64_t> mask = mask_of(buffer, count);
      if (count % 64 != 0) CHECK(mask.back() >> count % 64 == 0);
      CHECK(in_mask(mask, count - 1));
      check_agreement(self, comm, mask.data(), mask.size() * 8);
      check_agreement(self, comm, buffer, count * sizeof(T));
    }
    for (T* at = memory.data(); at < buffer; ++at) CHECK(*at == mark);
    for (T* at = buffer + count; at < memory.data() + memory.size(); ++at) CHECK(*at == mark);
    SCAPE(scape_unregister(registration));
  }
}

void odd_lengths_of_all_types(Rank& self) {
  ncclComm_t comm = self.init();
  // Each count from each of four starts.
  for (int turn = 0; turn < 4; ++turn) {
    odd_lengths<float>(self, comm, turn, ncclFloat32, SCAPE_FLOAT32, 1.f, 100.f);
    odd_lengths<uint16_t>(self, comm, turn, ncclFloat16, SCAPE_FLOAT16, 0x3c00, 0x5640);
    odd_lengths<uint16_t>(self, comm, turn, ncclBfloat16, SCAPE_BFLOAT16, 0x3f80, 0x42c8);
  }
  NCCL(ncclCommDestroy(comm));
}
RANKED_CASE(F11_odd_lengths_2_ranks, 2) { odd_lengths_of_all_types(self); }
RANKED_CASE(F11_odd_lengths_3_ranks, 3) { odd_lengths_of_all_types(self); }

RANKED_CASE(F12_half_precision, 4) {
  ncclComm_t comm = self.init();
  // fp16: the mean of 40000 four times is 40000, though their sum has no fp16.
  constexpr uint16_t kFortyThousand = 0x78e2;
  for (bool registered : {false, true}) {
    std::vector<uint16_t> half(32, kFortyThousand);
    if (registered) add(half.data(), 32, "half", 1, SCAPE_FLOAT16);
    NCCL(ncclAllReduce(half.data(), half.data(), 32, ncclFloat16, ncclAvg, comm, nullptr));
    for (uint16_t value : half) CHECK(value == kFortyThousand);
    // bf16: 256 + 1 + 1 + 1 is 259, which rounds to 260, once.
    std::vector<uint16_t> brain(32, to_bf16(self.rank == 0 ? 256.f : 1.f));
    if (registered) add(brain.data(), 32, "brain", 1, SCAPE_BFLOAT16);
    NCCL(ncclAllReduce(brain.data(), brain.data(), 32, ncclBfloat16, ncclSum, comm, nullptr));
    for (uint16_t value : brain)
      CHECK_SAYING(from_bf16(value) == 260, std::to_string(from_bf16(value)));
  }
  NCCL(ncclCommDestroy(comm));
}

// The residual is fp32 whatever the buffer's type: small addends do not get lost in it.
RANKED_CASE(F12_residual_is_single_precision, 2) {
  ncclComm_t comm = self.init();
  constexpr int kSteps = 5000;
  constexpr uint16_t kSmall = 0x068e;  // 1e-4 in fp16, about
  const double small = std::ldexp(1024 + 0x28e, 1 - 15 - 10);
  std::vector<uint16_t> buffer(64);
  scape_config config = gradient_config("residual", 1.0 / 64);
  config.rule = SCAPE_RULE_PLAIN;  // by age an element that is held back would be sent in the end
  scape_registration registration = nullptr;
  SCAPE(scape_register(buffer.data(), 64, SCAPE_FLOAT16, &config, &registration));
  for (int step = 0; step < kSteps; ++step) {
    std::fill(buffer.begin(), buffer.end(),
              0x5640);  // 100: always larger than what one element has gathered
    buffer[40] = kSmall;
    NCCL(ncclAllReduce(buffer.data(), buffer.data(), 64, ncclFloat16, ncclSum, comm, nullptr));
  }
  std::vector<float> residual(64);
  SCAPE(scape_read_residual(buffer.data(), 64, residual.data(), 64));
  const double expected = small * (kSteps - 1);  // the first step was dense
  CHECK_SAYING(std::abs(residual[40] - expected) < 0.01 * expected, std::to_string(residual[40]));
  NCCL(ncclCommDestroy(comm));
}

// 3 (r + 1) from each rank for a step, then zeros: what comes out in all is scaled exactly once.
template <typename T>
void scaled(Rank& self, ncclComm_t comm, ncclDataType_t type, scape_dtype dtype, double kept,
            const std::function<T(float)>& pack, const std::function<float(T)>& unpack,
            double tolerance) {
  const T half = pack(0.5f);
  ncclRedOp_t halved;
  NCCL(ncclRedOpCreatePreMulSum(&halved, const_cast<T*>(&half), type, ncclScalarHostImmediate,
                                comm));
  for (ncclRedOp_t op : {ncclAvg, halved}) {
    std::vector<T> buffer(60);
    const scape_registration registration = add(buffer.data(), 60, "scaled", kept, dtype);
    // A dense first step of zeros, so that the values meet the mask.
    NCCL(ncclAllReduce(buffer.data(), buffer.data(), 60, type, op, comm, nullptr));
    std::vector<double> total(60);
    for (int step = 0; step < 13; ++step) {
      std::fill(buffer.begin(), buffer.end(),
                pack(step == 0 ? 3.f * static_cast<float>(self.rank + 1) : 0.f));
      NCCL(ncclAllReduce(buffer.data(), buffer.data(), 60, type, op, comm, nullptr));
      for (size_t i = 0; i < 60; ++i) total[i] += unpack(buffer[i]);
      if (kept == 1 && step == 0) break;
    }
    // What is still held back counts too, with the scale it would get.
    std::vector<float> residual(60);
    if (kept < 1) SCAPE(scape_read_residual(buffer.data(), 60, residual.data(), 60));
    std::vector<double> held(residual.begin(), residual.end());
    NCCL(ncclAllReduce(held.data(), held.data(), 60, ncclFloat64, ncclSum, comm, nullptr));
    const double ranks = self.ranks;
    const double scale = op == ncclAvg ? 1 / ranks : 0.5;
    const double expected = 3 * ranks * (ranks + 1) / 2 * scale;
    bool any = false;
    for (size_t i = 0; i < 60; ++i) {
      CHECK_SAYING(std::abs(total[i] + held[i] * scale - expected) <= tolerance,
                   std::to_string(i) + ": " + std::to_string(total[i]) + " + " +
                       std::to_string(held[i] * scale));
      any |= total[i] != 0;
    }
    CHECK(any);
    SCAPE(scape_unregister(registration));
  }
}

void scaled_both_ways(Rank& self) {
  ncclComm_t comm = self.init();
  for (double kept : {0.2, 1.0}) {
    scaled<float>(
        self, comm, ncclFloat32, SCAPE_FLOAT32, kept, [](float v) { return v; },
        [](float v) { return v; }, 1e-5);
    scaled<uint16_t>(self, comm, ncclBfloat16, SCAPE_BFLOAT16, kept, to_bf16, from_bf16, 0.0625);
  }
  NCCL(ncclCommDestroy(comm));
}
RANKED_CASE(F13_scale_applied_once_3_ranks, 3) { scaled_both_ways(self); }
RANKED_CASE(F13_scale_applied_once_4_ranks, 4) { scaled_both_ways(self); }

#if defined(__x86_64__)
// A rank whose program has denormals flushed (torch.set_flush_denormal(True)) gets the others'
// bits.
RANKED_CASE(denormals_are_kept_whatever_the_program_set, 2) {
  constexpr size_t kCount = 640;
  const unsigned before = _mm_getcsr();
  if (self.rank == 1) _mm_setcsr(before | 0x8040);
  const unsigned set = _mm_getcsr() & ~0x3fu;
  ncclComm_t comm = self.init();
  // Multiples of the smallest number there is, made as integers.
  const auto tiny = [](size_t i) { return std::bit_cast<float>(static_cast<uint32_t>(i)); };
  std::vector<float> plain(kCount), buffer(kCount), param(kCount), moment(kCount);
  for (size_t i = 0; i < kCount; ++i) plain[i] = tiny(3 * i), param[i] = tiny(100 * i);
  all_reduce(plain, comm);
  for (size_t i = 0; i < kCount; ++i) CHECK(std::bit_cast<uint32_t>(plain[i]) == 6 * i);

  scape_config config = gradient_config("tiny", 0.25);
  config.role = SCAPE_ROLE_FUSED;
  scape_registration registration = nullptr;
  SCAPE(scape_register(buffer.data(), kCount, SCAPE_FLOAT32, &config, &registration));
  for (int step = 0; step < 12; ++step) {
    for (size_t i = 0; i < kCount; ++i) buffer[i] = tiny(1 + (i * 7919 + 13) % 4001);
    all_reduce(buffer, comm, ncclAvg);
    SCAPE(scape_adams_step(buffer.data(), kCount, param.data(), 1e-3, 0.1, nullptr));
    SCAPE(scape_read_moment(buffer.data(), kCount, moment.data(), kCount));
    const std::vector<uint64_t> mask = mask_of(buffer.data(), kCount);
    check_agreement(self, comm, mask.data(), mask.size() * 8);
    check_agreement(self, comm, moment.data(), kCount * 4);
    check_agreement(self, comm, param.data(), kCount * 4);
  }
  size_t denormal = 0;
  for (float value : moment) denormal += std::bit_cast<uint32_t>(value) - 1 < 0x7fffff;
  CHECK(denormal > kCount / 2);
  CHECK((_mm_getcsr() & ~0x3fu) == set);
  NCCL(ncclCommDestroy(comm));
}
#endif

}  // namespace
}  // namespace scape::cases
