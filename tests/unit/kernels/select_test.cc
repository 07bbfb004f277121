// Selection: exactly k, the largest, ties to the lower index, whatever the scores are like.
#include <numeric>

#include "tests/unit/kernels/kernel_testing.h"

namespace scape::kernels::testing {
namespace {

class Select : public ::testing::TestWithParam<const Ops*> {
 protected:
  Guarded<uint64_t> select(const Guarded<float>& scores, size_t k) {
    const size_t n = scores.size();
    Guarded<uint64_t> mask(mask_words(n));
    std::fill_n(mask.data(), mask.size(), ~uint64_t{0});  // what was there must not matter
    threshold_ = GetParam()->select(scores.data(), n, k, mask.data(), scratch_.data());
    mask.check_guards();
    scratch_.check_guards();
    return mask;
  }

  // By sorting: larger first, then lower index.
  static Guarded<uint64_t> oracle(const Guarded<float>& scores, size_t k) {
    std::vector<uint32_t> order(scores.size());
    std::iota(order.begin(), order.end(), 0u);
    const auto before = [&](uint32_t a, uint32_t b) {
      return scores[a] != scores[b] ? scores[a] > scores[b] : a < b;
    };
    if (k < order.size()) {
      std::nth_element(order.begin(), order.begin() + static_cast<std::ptrdiff_t>(k), order.end(),
                       before);
    }
    Guarded<uint64_t> mask(mask_words(scores.size()));
    for (size_t i = 0; i < k; ++i) mask[order[i] / 64] |= uint64_t{1} << (order[i] % 64);
    return mask;
  }

  void expect_right(const Guarded<float>& scores, size_t k) {
    SCOPED_TRACE(::testing::Message() << "n=" << scores.size() << " k=" << k);
    const Guarded<uint64_t> mask = select(scores, k);
    ASSERT_EQ(bits_set(mask), k);
    expect_same(oracle(scores, k), mask, "mask");
    if (k == 0) return;
    float smallest = std::numeric_limits<float>::infinity();
    for (size_t j = 0; j < scores.size(); ++j) {
      if ((mask[j / 64] >> (j % 64)) & 1) smallest = std::min(smallest, scores[j]);
    }
    EXPECT_EQ(threshold_, smallest);
  }

  static std::vector<size_t> some_k(size_t n) {
    std::vector<size_t> ks;
    for (const size_t k : {size_t{0}, size_t{1}, size_t{2}, n / 1000, n / 100, n / 10, n / 2,
                           n - n / 10, n - std::min<size_t>(n, 1), n}) {
      if (k <= n) ks.push_back(k);
    }
    std::sort(ks.begin(), ks.end());
    ks.erase(std::unique(ks.begin(), ks.end()), ks.end());
    return ks;
  }

  Random random_{99};
  Guarded<uint8_t> scratch_{select_scratch_bytes()};
  float threshold_ = 0;
};

INSTANTIATE_TEST_SUITE_P(Kernels, Select, ::testing::ValuesIn(available_ops()), backend_name);

TEST_P(Select, TakesTheLargestAtEverySize) {
  for (const size_t n : all_sizes()) {
    Guarded<float> scores(n, n % 4);
    for (size_t j = 0; j < n; ++j) scores[j] = std::fabs(random_float(random_, Data::kFinite));
    for (const size_t k : some_k(n)) {
      if (n > 300000 && k % 10 != 0) continue;
      expect_right(scores, k);
      if (HasFatalFailure()) return;
    }
  }
}

// Few distinct values: most of a selection is decided by ties.
TEST_P(Select, BreaksTiesToTheLowerIndex) {
  for (const size_t n :
       {size_t{63}, size_t{64}, size_t{1000}, size_t{32767}, size_t{32768}, size_t{70001}}) {
    for (const int distinct : {1, 2, 5, 300}) {
      Guarded<float> scores(n, 1);
      for (size_t j = 0; j < n; ++j) {
        scores[j] = static_cast<float>(random_() % static_cast<uint64_t>(distinct));
      }
      for (const size_t k : some_k(n)) expect_right(scores, k);
      if (HasFatalFailure()) return;
    }
  }
}

// Data that a sample misjudges: sorted, in blocks, periodic with the sampling stride, nearly all
// zero.
TEST_P(Select, IsExactWhereASampleMisleads) {
  constexpr size_t kN = 300000;
  Guarded<float> scores(kN);
  const auto check = [&] {
    for (const size_t k : {size_t{1}, size_t{64}, size_t{3000}, size_t{150000}, kN - 1}) {
      expect_right(scores, k);
    }
  };
  for (size_t j = 0; j < kN; ++j) scores[j] = static_cast<float>(j);
  check();
  for (size_t j = 0; j < kN; ++j) scores[j] = static_cast<float>(kN - j);
  check();
  for (size_t j = 0; j < kN; ++j)
    scores[j] = j < 5000 ? static_cast<float>(random_() % 1000) : 0.0f;
  check();
  for (size_t j = 0; j < kN; ++j)
    scores[j] = j % 64 == 0 ? 1000.0f : static_cast<float>(random_() % 1000);
  check();
  for (size_t j = 0; j < kN; ++j) {
    scores[j] = j % (kN / (kN / 64)) == 0 ? 0.0f : static_cast<float>(random_() % 100000);
  }
  check();
}

// More scores in the sample's bracket than the scratch memory holds.
TEST_P(Select, IsExactWhenTheBracketOverflows) {
  constexpr size_t kN = 1000000;
  Guarded<float> scores(kN);
  for (size_t j = 0; j < kN; ++j)
    scores[j] = j % 2 == 0 ? 1.0f : std::ldexp(1.0f, random_() % 2 ? 3 : -3);
  for (const size_t k : {size_t{250000}, size_t{400000}, size_t{600000}}) expect_right(scores, k);
}

TEST_P(Select, HandlesExtremeScores) {
  for (const size_t n : {size_t{100}, size_t{40000}}) {
    Guarded<float> scores(n);
    constexpr float kValues[] = {0.0f, -0.0f, 1e-45f, 1e-40f, 1.1754944e-38f, 3.4028235e38f, 1.0f};
    for (size_t j = 0; j < n; ++j) scores[j] = kValues[random_() % std::size(kValues)];
    for (const size_t k : some_k(n)) expect_right(scores, k);
  }
}

// Ties and zeros: field case F09. Each 20 times: what lay in scratch memory and mask must not
// matter.
TEST_P(Select, IsTheSameEveryTimeOnTiesAndZeros) {
  constexpr size_t kN = 96;
  constexpr size_t kK = 24;
  std::vector<std::vector<float>> cases;
  cases.emplace_back(kN, 3.0f);
  cases.emplace_back(kN, 0.0f);
  cases.emplace_back(kN, 0.0f);
  for (const size_t j : {3, 17, 40, 64, 95}) cases.back()[j] = 1.0f + static_cast<float>(j);
  cases.emplace_back(kN, 2.0f);  // +2 and -2: scores are magnitudes
  cases.emplace_back(kN, 1.0f);
  for (size_t j = 0; j < 30; ++j) cases.back()[j * 3 + 2] = 5.0f;
  for (size_t j = 0; j < 10; ++j) cases.back()[j * 9] = 7.0f;
  for (const auto& values : cases) {
    Guarded<float> scores(kN);
    std::copy(values.begin(), values.end(), scores.data());
    const Guarded<uint64_t> expected = oracle(scores, kK);
    for (int repeat = 0; repeat < 20; ++repeat) {
      for (size_t i = 0; i < scratch_.size(); i += 61)
        scratch_[i] = static_cast<uint8_t>(random_());
      const Guarded<uint64_t> mask = select(scores, kK);
      ASSERT_EQ(bits_set(mask), kK);
      expect_same(expected, mask, "mask");
    }
  }
}

// Field case F10: magnitudes, not signed values; small tensors.
TEST_P(Select, ComparesMagnitudes) {
  Guarded<float> residual(4), m(4), scores(4);
  Guarded<uint16_t> last(4);
  const float values[] = {-9, 1, 2, -8};
  std::copy_n(values, 4, residual.data());
  const Step step(0.9, 0);
  std::fill_n(last.data(), 4, uint16_t{65535});
  EXPECT_EQ(
      GetParam()->score(m.data(), last.data(), residual.data(), 4, step.params, 1, scores.data()),
      0u);
  EXPECT_EQ(select(scores, 2)[0], 0b1001u);
  for (const size_t n : {1, 2, 3, 5, 31, 100}) {
    Guarded<float> few(n);
    few[n - 1] = 1;
    const Guarded<uint64_t> mask = select(few, 1);
    EXPECT_EQ(bits_set(mask), 1u);
    EXPECT_EQ(mask[(n - 1) / 64] >> ((n - 1) % 64), 1u);
  }
}

// Field case F11: the largest is the last element, at every length and address.
TEST_P(Select, TakesTheLastElementAtEveryLength) {
  std::vector<size_t> sizes = {255, 256, 257, 1023, 4097};
  for (size_t n = 1; n <= 130; ++n) sizes.push_back(n);
  for (const size_t n : sizes) {
    for (size_t offset = 0; offset < 4; ++offset) {
      Guarded<float> scores(n, offset);
      for (size_t j = 0; j < n; ++j) scores[j] = static_cast<float>(random_() % 100);
      scores[n - 1] = 1000;
      const size_t k = std::max<size_t>(1, n * 3 / 10);
      const Guarded<uint64_t> mask = select(scores, k);
      ASSERT_EQ(bits_set(mask), k);
      ASSERT_TRUE((mask[(n - 1) / 64] >> ((n - 1) % 64)) & 1) << n;
      if (n % 64 != 0) {
        ASSERT_EQ(mask[(n - 1) / 64] >> (n % 64), 0u) << "padding of " << n;
      }
    }
  }
}

// Field case F08: non-finite values are cleared, counted, and score as zero.
TEST_P(Select, NeverChoosesNonfiniteValuesByAccident) {
  constexpr size_t kN = 64;
  constexpr size_t kK = 8;
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const float infinity = std::numeric_limits<float>::infinity();
  const Step step(0.9, 0);
  Guarded<float> m(kN), scores(kN);
  Guarded<uint16_t> last(kN);
  std::fill_n(last.data(), kN, uint16_t{65535});
  const auto masked = [&](Guarded<float>& residual, size_t bad) {
    EXPECT_EQ(GetParam()->score(m.data(), last.data(), residual.data(), kN, step.params, 1,
                                scores.data()),
              bad);
    EXPECT_FALSE(GetParam()->any_nonfinite(residual.data(), kN));
    const Guarded<uint64_t> mask = select(scores, kK);
    EXPECT_EQ(bits_set(mask), kK);
    return mask[0];
  };
  Guarded<float> residual(kN);
  const auto ramp = [&] {
    for (size_t j = 0; j < kN; ++j) residual[j] = static_cast<float>(j + 1);
  };
  ramp();
  residual[5] = nan;
  residual[9] = infinity;
  residual[10] = -infinity;
  EXPECT_EQ(masked(residual, 3), uint64_t{0xff} << 56);
  ramp();
  for (size_t j = 44; j < kN; ++j) residual[j] = infinity;
  EXPECT_EQ(masked(residual, 20), uint64_t{0xff} << 36);
  for (const float bad : {nan, -nan}) {
    std::fill_n(residual.data(), kN, bad);
    EXPECT_EQ(masked(residual, kN), 0xffu);
  }
  // A score that overflows although its residual is finite.
  ramp();
  residual[20] = 3e38f;
  EXPECT_EQ(GetParam()->score(m.data(), last.data(), residual.data(), kN, step.params, 100,
                              scores.data()),
            0u);
  EXPECT_EQ(scores[20], 0.0f);
  EXPECT_EQ(residual[20], 3e38f);
}

}  // namespace
}  // namespace scape::kernels::testing
