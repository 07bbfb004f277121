// Conversions, pack, the codec and what becomes of the residual, against the scalar reference.
#include "tests/unit/kernels/cuda_testing.h"

namespace scape::kernels::cuda::testing {
namespace {

class CudaPack : public CudaKernels {
 protected:
  // The reference's m in the moment role: what a caller with this type of buffer was given.
  Guarded<float> returned(Type type, const Guarded<float>& m) {
    Guarded<float> rounded(m.size());
    const auto narrow = as_type(type, m, 0);
    reference().to_float(type, narrow.data(), rounded.data(), m.size());
    return rounded;
  }

  void expect_packed(Type type, bool moment, size_t n, size_t offset, const IndexedMask& mask) {
    const size_t k = mask.bits();
    Guarded<float> values(n), residual(n, offset), expected_residual(n), m(n, offset);
    fill(values, random_, Data::kSpecial);
    fill(residual, random_, moment ? Data::kFinite : Data::kSpecial);
    fill(m, random_);
    expected_residual.assign(residual);
    const auto in = as_type(type, values, offset);
    Guarded<float> expected(k), payload(k + 1, offset);
    NonfiniteFlag flag{.cleared = 7, .raised = static_cast<uint32_t>(random_() % 2)};
    const bool raised = flag.raised != 0;
    if (moment) {
      reference().accumulate_pack_moment(type, in.data(), returned(type, m).data(), 0.9f,
                                         expected_residual.data(), mask.words().data(), n,
                                         expected.data());
      ASSERT_RUNS(accumulate_pack_moment(kStream, type, in.data(), m.data(), 0.9f, residual.data(),
                                         mask.view(), payload.data(), &flag));
    } else {
      reference().accumulate_pack(type, in.data(), expected_residual.data(), mask.words().data(), n,
                                  expected.data());
      ASSERT_RUNS(accumulate_pack(kStream, type, in.data(), residual.data(), mask.view(),
                                  payload.data(), &flag));
    }
    expect_same(expected_residual, residual, "residual");
    Guarded<float> packed(k);
    std::copy_n(payload.data(), k, packed.data());
    expect_same(expected, packed, "payload");
    ASSERT_EQ(std::isnan(payload[k]), raised);
    if (!raised) {
      ASSERT_EQ(payload[k], 0.0f);
    }
    ASSERT_EQ(flag.raised, 0u);
    ASSERT_EQ(flag.cleared, 7u);
    residual.check_guards();
    payload.check_guards();
  }
};

SCAPE_CUDA_TESTS(CudaPack);

TEST_P(CudaPack, Converts) {
  over_shapes([&](size_t n, size_t offset, const auto&) {
    Guarded<float> in(n, offset);
    fill(in, random_, Data::kSpecial);
    for (const Type type : kTypes) {
      const size_t units = n * size_of(type) / 2;
      Guarded<uint16_t> expected(units), got(units, offset * size_of(type) / 2);
      reference().from_float(type, in.data(), expected.data(), n);
      ASSERT_RUNS(from_float(kStream, type, in.data(), got.data(), n));
      expect_same(expected, got, "from float");
      got.check_guards();
      for (size_t i = 0; i < units; ++i) got[i] = static_cast<uint16_t>(random_());
      Guarded<float> expected_back(n), back(n, offset);
      reference().to_float(type, got.data(), expected_back.data(), n);
      ASSERT_RUNS(to_float(kStream, type, got.data(), back.data(), n));
      ASSERT_EQ(n == 0 ? 0 : std::memcmp(expected_back.data(), back.data(), n * sizeof(float)), 0);
      back.check_guards();
    }
  });
}

TEST_P(CudaPack, AccumulatesAndPacks) {
  over_shapes([&](size_t n, size_t offset, const auto& mask) {
    for (const Type type : kTypes) expect_packed(type, false, n, offset, mask);
  });
}

TEST_P(CudaPack, AccumulatesAndPacksMoments) {
  over_shapes([&](size_t n, size_t offset, const auto& mask) {
    for (const Type type : kTypes) expect_packed(type, true, n, offset, mask);
  });
}

TEST_P(CudaPack, PacksTenMillionElements) {
  constexpr size_t kN = kTenMillion;
  const IndexedMask mask(random_mask(kN, 0.01, random_), kN);
  expect_packed(GetParam() == 1 ? Type::kBfloat16 : Type::kFloat32, false, kN, 1, mask);
}

TEST_P(CudaPack, GathersAndReplaces) {
  over_shapes([&](size_t n, size_t offset, const auto& mask) {
    const size_t k = mask.bits();
    const uint64_t* words = mask.words().data();
    Guarded<float> values(n, offset), expected_values(n), expected(k), payload(k + 1, offset);
    Guarded<uint16_t> last(n, offset), expected_ages(k), ages(k, offset);
    fill(values, random_, Data::kSpecial);
    fill(last, random_);
    expected_values.assign(values);
    const auto t = static_cast<uint16_t>(random_());
    NonfiniteFlag flag{.cleared = 1, .raised = 1};
    reference().gather(values.data(), words, n, expected.data());
    ASSERT_RUNS(gather(kStream, values.data(), mask.view(), payload.data(), &flag));
    for (size_t i = 0; i < k; ++i) ASSERT_TRUE(same(expected[i], payload[i])) << i;
    ASSERT_TRUE(std::isnan(payload[k]));
    ASSERT_EQ(flag.raised, 0u);
    reference().gather_ages(words, n, last.data(), t, expected_ages.data());
    ASSERT_RUNS(gather_ages(kStream, mask.view(), last.data(), t, ages.data()));
    expect_same(expected_ages, ages, "ages");
    payload.check_guards();
    ages.check_guards();

    Verdict verdict{.skipped = 0};
    fill(expected, random_);
    reference().scatter(expected.data(), words, n, expected_values.data());
    ASSERT_RUNS(scatter(kStream, expected.data(), mask.view(), values.data(), &verdict));
    expect_same(expected_values, values, "scattered");
    fill(values, random_, Data::kSpecial);
    expected_values.assign(values);
    reference().clear_masked(expected_values.data(), words, n);
    ASSERT_RUNS(clear_masked(kStream, values.data(), mask.view(), n % 2 == 0 ? &verdict : nullptr));
    expect_same(expected_values, values, "cleared");

    // Skipped: what was not sent stays, as far as it is finite.
    verdict.skipped = 1;
    for (int way = 0; way < 3; ++way) {
      fill(values, random_, Data::kSpecial);
      expected_values.assign(values);
      const size_t bad = reference().clear_masked_nonfinite(expected_values.data(), words, n);
      unsigned long long cleared = 5;
      if (way == 0) {
        ASSERT_RUNS(clear_masked(kStream, values.data(), mask.view(), &verdict));
      } else if (way == 1) {
        ASSERT_RUNS(scatter(kStream, expected.data(), mask.view(), values.data(), &verdict));
      } else {
        ASSERT_RUNS(clear_masked_nonfinite(kStream, values.data(), mask.view(), &cleared));
        ASSERT_EQ(cleared, 5 + bad);
      }
      expect_same(expected_values, values, "kept");
      values.check_guards();
    }
  });
}

TEST_P(CudaPack, CodesBfloat16) {
  const Step lazy(0.9, 7), plain(0.0, 7, true);
  over_shapes([&](size_t n, size_t offset, const auto&) {
    const StepParams& params = turn_ / 4 % 2 == 0 ? lazy.params : plain.params;
    const bool special = random_() % 2 == 0;
    const bool raised = random_() % 4 == 0;
    Guarded<float> u(n, offset), expected_error(n), error(n, offset), expected_u(n),
        got_u(n, offset);
    Guarded<uint16_t> ages(n, offset), expected(n), encoded(n + 1, offset);
    fill(u, random_, special ? Data::kSpecial : Data::kFinite);
    for (size_t i = 0; i < n; ++i) ages[i] = static_cast<uint16_t>(1 + random_() % 3000);
    NonfiniteFlag flag{.cleared = 0, .raised = raised};
    reference().encode_bf16(u.data(), ages.data(), n, params, expected.data(),
                            expected_error.data());
    ASSERT_RUNS(encode_bf16(kStream, u.data(), ages.data(), n, params, encoded.data(), error.data(),
                            &flag));
    for (size_t i = 0; i < n; ++i) ASSERT_EQ(expected[i], encoded[i]) << i;
    ASSERT_EQ(flag.raised, 0u);
    expect_same(expected_error, error, "error");
    encoded.check_guards();
    error.check_guards();
    OnDevice<Verdict> verdict(1);
    verdict[0].skipped = 9;
    reference().decode_bf16(encoded.data(), ages.data(), n, params, expected_u.data());
    ASSERT_RUNS(
        decode_bf16(kStream, encoded.data(), ages.data(), n, params, got_u.data(), verdict.data()));
    expect_same(expected_u, got_u, "u");
    got_u.check_guards();
    ASSERT_EQ(verdict[0].skipped != 0, raised || reference().any_nonfinite(expected_u.data(), n));
  });
}

TEST_P(CudaPack, FindsNonfiniteValues) {
  constexpr float kBad[] = {std::numeric_limits<float>::infinity(),
                            -std::numeric_limits<float>::infinity(),
                            std::numeric_limits<float>::quiet_NaN()};
  OnDevice<Verdict> verdict(1);
  over_shapes([&](size_t n, size_t offset, const auto&) {
    Guarded<float> values(n);
    fill(values, random_);
    for (const Type type : kTypes) {
      verdict[0].skipped = 3;
      const auto good = as_type(type, values, offset);
      ASSERT_RUNS(any_nonfinite(kStream, type, good.data(), n, verdict.data()));
      ASSERT_EQ(verdict[0].skipped, 0u);
      if (n == 0) continue;
      for (const size_t at : {size_t{0}, n / 2, n - 1}) {
        const float held = values[at];
        values[at] = kBad[random_() % 3];
        const auto bad = as_type(type, values, offset);
        ASSERT_RUNS(any_nonfinite(kStream, type, bad.data(), n, verdict.data()));
        ASSERT_NE(verdict[0].skipped, 0u) << at << " of " << n;
        values[at] = held;
      }
    }
  });
}

TEST_P(CudaPack, Restamps) {
  over_shapes([&](size_t n, size_t offset, const auto&) {
    Guarded<uint16_t> last(n, offset), expected(n);
    fill(last, random_);
    expected.assign(last);
    const auto t = static_cast<uint16_t>(random_());
    reference().restamp(expected.data(), n, t);
    ASSERT_RUNS(restamp(kStream, last.data(), n, t));
    expect_same(expected, last, "last");
    last.check_guards();
  });
}

// Field case F12: what is never chosen adds up in fp32, whatever the buffer's type.
TEST_P(CudaPack, KeepsSmallGradientsOfHalfBuffers) {
  constexpr size_t kN = 32;
  Guarded<uint64_t> words(1);
  words[0] = 1;
  const IndexedMask mask(words, kN);
  for (const Type type : {Type::kFloat16, Type::kBfloat16}) {
    Guarded<float> values(kN), residual(kN), payload(1);
    std::fill_n(values.data(), kN, 1.0f);
    values[5] = 1e-4f;
    const auto gradient = as_type(type, values, 0);
    for (int step = 0; step < 5000 / static_cast<int>(kThinned); ++step) {
      ASSERT_ENQUEUED(accumulate_pack(kStream, type, gradient.data(), residual.data(), mask.view(),
                                      payload.data(), nullptr));
    }
    ASSERT_EQ(cudaStreamSynchronize(kStream), cudaSuccess);
    EXPECT_NEAR(residual[5] * kThinned, 0.5f, 0.005f);
  }
}

}  // namespace
}  // namespace scape::kernels::cuda::testing
