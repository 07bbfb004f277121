// What the kernel tests share: arrays with guards around them, random data, and the comparison of
// two backends' results.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "kernels/kernels.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

namespace scape::kernels::testing {

// n elements that begin `offset` elements after a 64-byte boundary, between guard bytes.
// check_guards() fails when a guard was written; the address sanitizer also sees one read.
template <typename T>
class Guarded {
 public:
  explicit Guarded(size_t n, size_t offset = 0)
      : n_(n), total_((n + offset) * sizeof(T) + 384), bytes_(new uint8_t[total_]) {
    std::memset(bytes_.get(), kGuard, total_);
    const auto address = reinterpret_cast<uintptr_t>(bytes_.get());
    begin_ = (address + 128 + 63) / 64 * 64 - address + offset * sizeof(T);
    std::fill_n(data(), n, T{});
    poison(true);
  }
  Guarded(const Guarded& other) : Guarded(other.n_, 0) { assign(other); }
  Guarded& operator=(const Guarded&) = delete;
  ~Guarded() { poison(false); }

  T* data() { return reinterpret_cast<T*>(bytes_.get() + begin_); }
  const T* data() const { return reinterpret_cast<const T*>(bytes_.get() + begin_); }
  size_t size() const { return n_; }
  T& operator[](size_t j) { return data()[j]; }
  const T& operator[](size_t j) const { return data()[j]; }
  void assign(const Guarded& other) { std::copy_n(other.data(), n_, data()); }

  void check_guards() {
    poison(false);
    const size_t end = begin_ + n_ * sizeof(T);
    for (size_t i = 0; i < total_; ++i) {
      if (i == begin_) i = end;
      if (bytes_[i] == kGuard) continue;
      FAIL() << "byte " << static_cast<int64_t>(i) - static_cast<int64_t>(begin_)
             << " of an array of " << n_ * sizeof(T) << " bytes was written";
    }
    poison(true);
  }

 private:
  static constexpr uint8_t kGuard = 0xa5;

  void poison([[maybe_unused]] bool on) {
#if defined(__SANITIZE_ADDRESS__)
    uint8_t* const end = bytes_.get() + begin_ + n_ * sizeof(T);
    uint8_t* const last = bytes_.get() + total_;
    if (on) {
      ASAN_POISON_MEMORY_REGION(bytes_.get(), begin_);
      ASAN_POISON_MEMORY_REGION(end, static_cast<size_t>(last - end));
    } else {
      ASAN_UNPOISON_MEMORY_REGION(bytes_.get(), total_);
    }
#endif
  }

  size_t n_;
  size_t total_;
  std::unique_ptr<uint8_t[]> bytes_;
  size_t begin_ = 0;
};

// Names a test's instance by its backend.
inline std::string backend_name(const ::testing::TestParamInfo<const Ops*>& test) {
  return test.param->name;
}

using Random = std::mt19937_64;

enum class Data { kFinite, kSpecial };

// Values over a wide range; kSpecial mixes in zeros, denormals, infinities and NaNs.
inline float random_float(Random& random, Data data) {
  if (data == Data::kSpecial && random() % 8 == 0) {
    constexpr float kInfinity = std::numeric_limits<float>::infinity();
    constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
    constexpr float kSpecials[] = {0.0f,           -0.0f,    kInfinity, -kInfinity, kNan,
                                   -kNan,          1e-42f,   -1e-45f,   3e38f,      -3e38f,
                                   1.1754944e-38f, 65504.0f, 65520.0f,  6e-8f,      -2.9e-8f};
    return kSpecials[random() % std::size(kSpecials)];
  }
  // Exponents -17 to 6, any sign and mantissa.
  const uint64_t bits = random();
  const auto exponent = static_cast<uint32_t>(110 + (bits >> 40) % 24);
  return std::bit_cast<float>((static_cast<uint32_t>(bits) & 0x807fffffu) | (exponent << 23));
}

inline void fill(Guarded<float>& values, Random& random, Data data = Data::kFinite) {
  for (size_t j = 0; j < values.size(); ++j) values[j] = random_float(random, data);
}

inline void fill(Guarded<uint16_t>& values, Random& random) {
  for (size_t j = 0; j < values.size(); ++j) values[j] = static_cast<uint16_t>(random());
}

// A mask of n elements: density 0 is none set, 1 all; runs of full words are mixed in where `runs`.
inline Guarded<uint64_t> random_mask(size_t n, double density, Random& random, bool runs = false) {
  Guarded<uint64_t> mask(mask_words(n));
  const auto threshold = static_cast<uint64_t>(density * 0x1p53);
  for (size_t w = 0; w < mask.size(); ++w) {
    if (density >= 1 || (runs && random() % 3 == 0)) {
      mask[w] = ~uint64_t{0};
    } else {
      for (int i = 0; i < 64; ++i) mask[w] |= uint64_t{(random() >> 11) < threshold} << i;
    }
  }
  if (n % 64 != 0) mask[mask.size() - 1] &= (uint64_t{1} << (n % 64)) - 1;
  return mask;
}

inline size_t bits_set(const Guarded<uint64_t>& mask) {
  size_t count = 0;
  for (size_t w = 0; w < mask.size(); ++w) count += static_cast<size_t>(std::popcount(mask[w]));
  return count;
}

// The same bits; for floats any NaN equals any other, since which operand's NaN an operation hands
// on is not specified (and no NaN enters replicated state).
inline bool same(float a, float b) {
  return std::bit_cast<uint32_t>(a) == std::bit_cast<uint32_t>(b) ||
         (std::isnan(a) && std::isnan(b));
}
template <typename T>
bool same(T a, T b) {
  return a == b;
}

template <typename T>
void expect_same(const Guarded<T>& expected, const Guarded<T>& got, const char* what) {
  ASSERT_EQ(expected.size(), got.size());
  for (size_t j = 0; j < expected.size(); ++j) {
    if (same(expected[j], got[j])) continue;
    FAIL() << what << "[" << j << "] of " << expected.size() << ": " << +got[j]
           << ", the reference has " << +expected[j];
  }
}

inline const std::vector<size_t>& all_sizes() {
  static const std::vector<size_t> sizes = [] {
    std::vector<size_t> values(301);
    for (size_t i = 0; i < values.size(); ++i) values[i] = i;
    values.insert(values.end(), {1023, 4097, 65535, 65536, 65537, 200003, 1000000});
    return values;
  }();
  return sizes;
}

// The parameters of a step: beta1 and the tables' storage.
struct Step {
  explicit Step(double beta1, uint16_t t, bool plain = false, bool with_decay = true)
      : powers(make_power_table(beta1)), decay(40) {
    for (size_t a = 0; a < decay.size(); ++a) decay[a] = std::pow(0.999f, static_cast<float>(a));
    params.t = t;
    params.powers = {powers.data(), static_cast<uint32_t>(powers.size())};
    params.beta1 = static_cast<float>(beta1);
    params.beta2 = 0.95f;
    params.eps = 1e-8f;
    params.lr = 3e-3f;
    params.plain = plain;
    if (with_decay) {
      params.decay = decay.data();
      params.decay_size = static_cast<uint32_t>(decay.size());
    }
  }
  Step(const Step&) = delete;

  std::vector<float> powers;
  std::vector<float> decay;
  StepParams params;
};

inline constexpr Type kTypes[] = {Type::kFloat32, Type::kBfloat16, Type::kFloat16};

}  // namespace scape::kernels::testing
