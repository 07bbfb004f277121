// Every operation of every backend that this CPU can run against the scalar reference, bit for bit,
// over lengths, addresses and masks.
#include <cstdio>

#include "tests/unit/kernels/kernel_testing.h"

namespace scape::kernels::testing {
namespace {

class Backend : public ::testing::TestWithParam<const Ops*> {
 protected:
  const Ops& ops() const { return *GetParam(); }
  const Ops& reference() const { return scalar_ops(); }

  // Calls check(n, offset, mask) over all shapes: every short length at every offset, long ones at
  // one.
  template <typename Check>
  void over_shapes(Check&& check) {
    constexpr double kDensities[] = {0, 0.01, 0.1, 0.5, 1};
    size_t turn = 0;
    for (const size_t n : all_sizes()) {
      for (size_t offset = 0; offset < 4; ++offset, ++turn) {
        if (n > 5000 && offset != n % 4) continue;
        const double density = kDensities[turn % std::size(kDensities)];
        const Guarded<uint64_t> mask = random_mask(n, density, random_, turn % 2 == 1);
        SCOPED_TRACE(::testing::Message()
                     << "n=" << n << " offset=" << offset << " density=" << density);
        check(n, offset, mask);
        if (HasFatalFailure()) return;
      }
    }
  }

  Random random_{12345};
};

INSTANTIATE_TEST_SUITE_P(Kernels, Backend, ::testing::ValuesIn(available_ops()), backend_name);

TEST(Backends, AreListed) {
  std::printf("kernel backends here:");
  for (const Ops* ops : available_ops()) std::printf(" %s", ops->name);
  std::printf("\n");
  ASSERT_FALSE(available_ops().empty());
  EXPECT_EQ(available_ops().back(), &scalar_ops());
}

TEST_P(Backend, ConvertsToFloat) {
  over_shapes([&](size_t n, size_t offset, const auto&) {
    for (const Type type : {Type::kBfloat16, Type::kFloat16}) {
      Guarded<uint16_t> in(n, offset);
      fill(in, random_);
      Guarded<float> expected(n), got(n, offset);
      reference().to_float(type, in.data(), expected.data(), n);
      ops().to_float(type, in.data(), got.data(), n);
      expect_same(expected, got, "out");
      got.check_guards();
    }
  });
}

TEST_P(Backend, ConvertsFromFloat) {
  over_shapes([&](size_t n, size_t offset, const auto&) {
    Guarded<float> in(n, offset);
    fill(in, random_, Data::kSpecial);
    for (const Type type : {Type::kBfloat16, Type::kFloat16}) {
      Guarded<uint16_t> expected(n), got(n, offset);
      reference().from_float(type, in.data(), expected.data(), n);
      ops().from_float(type, in.data(), got.data(), n);
      expect_same(expected, got, "out");
      got.check_guards();
    }
  });
}

TEST_P(Backend, CopiesFloatsBitForBit) {
  Guarded<float> in(1000, 1), there(1000), back(1000, 3);
  for (size_t j = 0; j < in.size(); ++j) {
    in[j] =
        std::bit_cast<float>(static_cast<uint32_t>(random_()) | 0x7f800000u);  // NaNs of all kinds
  }
  ops().to_float(Type::kFloat32, in.data(), there.data(), in.size());
  ops().from_float(Type::kFloat32, there.data(), back.data(), in.size());
  EXPECT_EQ(std::memcmp(in.data(), back.data(), in.size() * sizeof(float)), 0);
}

// A caller's buffer of any type, made from `values`.
Guarded<uint16_t> as_type(Type type, const Guarded<float>& values, size_t offset) {
  Guarded<uint16_t> out(values.size() * size_of(type) / 2, offset * size_of(type) / 2);
  scalar_ops().from_float(type, values.data(), out.data(), values.size());
  return out;
}

TEST_P(Backend, AccumulatesAndPacks) {
  over_shapes([&](size_t n, size_t offset, const auto& mask) {
    for (const Type type : kTypes) {
      Guarded<float> values(n), residual(n, offset), expected_residual(n);
      fill(values, random_, Data::kSpecial);
      fill(residual, random_, Data::kSpecial);
      expected_residual.assign(residual);
      const auto gradient = as_type(type, values, offset);
      const size_t k = bits_set(mask);
      Guarded<float> expected(k), payload(k, offset);
      ASSERT_EQ(reference().accumulate_pack(type, gradient.data(), expected_residual.data(),
                                            mask.data(), n, expected.data()),
                k);
      ASSERT_EQ(ops().accumulate_pack(type, gradient.data(), residual.data(), mask.data(), n,
                                      payload.data()),
                k);
      expect_same(expected_residual, residual, "residual");
      expect_same(expected, payload, "payload");
      residual.check_guards();
      payload.check_guards();
    }
  });
}

TEST_P(Backend, AccumulatesAndPacksMoments) {
  over_shapes([&](size_t n, size_t offset, const auto& mask) {
    for (const Type type : kTypes) {
      Guarded<float> values(n), residual(n, offset), expected_residual(n), m(n, offset);
      fill(values, random_, Data::kSpecial);
      fill(residual, random_);
      fill(m, random_);
      expected_residual.assign(residual);
      const auto x = as_type(type, values, offset);
      const size_t k = bits_set(mask);
      Guarded<float> expected(k), payload(k, offset);
      ASSERT_EQ(reference().accumulate_pack_moment(type, x.data(), m.data(), 0.9f,
                                                   expected_residual.data(), mask.data(), n,
                                                   expected.data()),
                k);
      ASSERT_EQ(ops().accumulate_pack_moment(type, x.data(), m.data(), 0.9f, residual.data(),
                                             mask.data(), n, payload.data()),
                k);
      expect_same(expected_residual, residual, "residual");
      expect_same(expected, payload, "payload");
      residual.check_guards();
      payload.check_guards();
    }
  });
}

TEST_P(Backend, GathersAndScatters) {
  over_shapes([&](size_t n, size_t offset, const auto& mask) {
    Guarded<float> values(n, offset), expected_back(n), back(n, offset);
    fill(values, random_, Data::kSpecial);
    fill(back, random_);
    expected_back.assign(back);
    const size_t k = bits_set(mask);
    Guarded<float> expected(k), payload(k, offset);
    ASSERT_EQ(reference().gather(values.data(), mask.data(), n, expected.data()), k);
    ASSERT_EQ(ops().gather(values.data(), mask.data(), n, payload.data()), k);
    expect_same(expected, payload, "payload");
    payload.check_guards();
    ASSERT_EQ(reference().scatter(payload.data(), mask.data(), n, expected_back.data()), k);
    ASSERT_EQ(ops().scatter(payload.data(), mask.data(), n, back.data()), k);
    expect_same(expected_back, back, "values");
    back.check_guards();
  });
}

TEST_P(Backend, ClearsMasked) {
  over_shapes([&](size_t n, size_t offset, const auto& mask) {
    Guarded<float> got(n, offset), expected(n);
    fill(got, random_, Data::kSpecial);
    expected.assign(got);
    ASSERT_EQ(reference().clear_masked_nonfinite(expected.data(), mask.data(), n),
              ops().clear_masked_nonfinite(got.data(), mask.data(), n));
    expect_same(expected, got, "values without non-finite ones");
    got.check_guards();
    reference().clear_masked(expected.data(), mask.data(), n);
    ops().clear_masked(got.data(), mask.data(), n);
    expect_same(expected, got, "values");
    got.check_guards();
  });
}

TEST_P(Backend, GathersAgesAndRestamps) {
  over_shapes([&](size_t n, size_t offset, const auto& mask) {
    Guarded<uint16_t> last(n, offset), expected_last(n);
    fill(last, random_);
    expected_last.assign(last);
    const auto t = static_cast<uint16_t>(random_());
    const size_t k = bits_set(mask);
    Guarded<uint16_t> expected(k), ages(k, offset);
    ASSERT_EQ(reference().gather_ages(mask.data(), n, last.data(), t, expected.data()), k);
    ASSERT_EQ(ops().gather_ages(mask.data(), n, last.data(), t, ages.data()), k);
    expect_same(expected, ages, "ages");
    ages.check_guards();
    reference().restamp(expected_last.data(), n, t);
    ops().restamp(last.data(), n, t);
    expect_same(expected_last, last, "last");
    last.check_guards();
  });
}

TEST_P(Backend, CodesBfloat16) {
  for (const bool plain : {false, true}) {
    const Step step(plain ? 0.0 : 0.9, 7, plain);
    over_shapes([&](size_t n, size_t offset, const auto&) {
      Guarded<float> u(n, offset), expected_error(n), error(n, offset), expected_u(n),
          got_u(n, offset);
      Guarded<uint16_t> ages(n, offset), expected(n), encoded(n, offset);
      fill(u, random_, Data::kSpecial);
      for (size_t i = 0; i < n; ++i) ages[i] = static_cast<uint16_t>(1 + random_() % 3000);
      reference().encode_bf16(u.data(), ages.data(), n, step.params, expected.data(),
                              expected_error.data());
      ops().encode_bf16(u.data(), ages.data(), n, step.params, encoded.data(), error.data());
      expect_same(expected, encoded, "encoded");
      expect_same(expected_error, error, "error");
      encoded.check_guards();
      error.check_guards();
      reference().decode_bf16(encoded.data(), ages.data(), n, step.params, expected_u.data());
      ops().decode_bf16(encoded.data(), ages.data(), n, step.params, got_u.data());
      expect_same(expected_u, got_u, "u");
      got_u.check_guards();
    });
  }
}

TEST_P(Backend, FindsNonfiniteValues) {
  constexpr float kBad[] = {std::numeric_limits<float>::infinity(),
                            -std::numeric_limits<float>::infinity(),
                            std::numeric_limits<float>::quiet_NaN()};
  for (const size_t n : all_sizes()) {
    Guarded<float> values(n, n % 4);
    fill(values, random_);
    ASSERT_FALSE(ops().any_nonfinite(values.data(), n)) << n;
    if (n == 0) continue;
    for (const size_t at : {size_t{0}, n / 2, n - 1, static_cast<size_t>(random_() % n)}) {
      const float held = values[at];
      values[at] = kBad[random_() % 3];
      ASSERT_TRUE(ops().any_nonfinite(values.data(), n)) << at << " of " << n;
      values[at] = std::numeric_limits<float>::max();
      ASSERT_FALSE(ops().any_nonfinite(values.data(), n)) << at << " of " << n;
      values[at] = held;
    }
  }
}

// Ages 1 to 8, some far older; `now` is a step near the wrap.
void fill_last(Guarded<uint16_t>& last, uint16_t now, Random& random) {
  for (size_t j = 0; j < last.size(); ++j) {
    const auto age = random() % 16 == 0 ? 1 + random() % 0x8000 : 1 + random() % 8;
    last[j] = static_cast<uint16_t>(now - age);
  }
}

TEST_P(Backend, Steps) {
  struct Case {
    double beta1;
    bool plain, decay;
  };
  for (const Case c : {Case{0.9, false, true}, Case{0.999, false, false}, Case{0.9, true, true},
                       Case{0.0, false, true}}) {
    const Step step(c.beta1, 3, c.plain, c.decay);
    over_shapes([&](size_t n, size_t offset, const auto& mask) {
      const size_t k = bits_set(mask);
      Guarded<float> payload(k, offset), m(n, offset), param(n, offset);
      Guarded<float> expected_m(n), expected_param(n);
      Guarded<uint16_t> last(n, offset), expected_last(n);
      fill(payload, random_);
      fill(m, random_);
      fill(param, random_);
      fill_last(last, step.params.t, random_);
      expected_m.assign(m);
      expected_param.assign(param);
      expected_last.assign(last);
      reference().adams_step(payload.data(), mask.data(), n, step.params, expected_m.data(),
                             expected_last.data(), expected_param.data());
      ops().adams_step(payload.data(), mask.data(), n, step.params, m.data(), last.data(),
                       param.data());
      expect_same(expected_m, m, "m");
      expect_same(expected_last, last, "last");
      expect_same(expected_param, param, "param");
      m.check_guards();
      last.check_guards();
      param.check_guards();

      fill_last(last, step.params.t, random_);
      expected_last.assign(last);
      reference().moment_step(payload.data(), mask.data(), n, step.params, expected_m.data(),
                              expected_last.data());
      ops().moment_step(payload.data(), mask.data(), n, step.params, m.data(), last.data());
      expect_same(expected_m, m, "m of the moment step");
      expect_same(expected_last, last, "last of the moment step");
      m.check_guards();
      last.check_guards();
    });
  }
}

TEST_P(Backend, StepsHooked) {
  const Step step(0.9, 65535);
  over_shapes([&](size_t n, size_t offset, const auto& mask) {
    const Guarded<uint64_t> before = random_mask(n, 0.3, random_);
    const size_t k = bits_set(mask);
    for (const Type type : kTypes) {
      Guarded<float> payload(k, offset), m(n, offset), expected_m(n);
      Guarded<uint16_t> last(n, offset), expected_last(n);
      Guarded<uint16_t> out(n * size_of(type) / 2, offset * size_of(type) / 2),
          expected(out.size());
      fill(payload, random_);
      fill(m, random_);
      fill_last(last, step.params.t, random_);
      expected_m.assign(m);
      expected_last.assign(last);
      reference().hooked_step(payload.data(), mask.data(), before.data(), n, step.params, type,
                              expected.data(), expected_m.data(), expected_last.data());
      ops().hooked_step(payload.data(), mask.data(), before.data(), n, step.params, type,
                        out.data(), m.data(), last.data());
      expect_same(expected, out, "out");
      expect_same(expected_m, m, "m");
      expect_same(expected_last, last, "last");
      out.check_guards();
      m.check_guards();
      last.check_guards();
    }
  });
}

TEST_P(Backend, ExpandsAndStepsAfterwards) {
  over_shapes([&](size_t n, size_t offset, const auto& mask) {
    const size_t k = bits_set(mask);
    Guarded<float> payload(k, offset);
    fill(payload, random_, Data::kSpecial);
    for (const Type type : kTypes) {
      Guarded<uint16_t> out(n * size_of(type) / 2, offset * size_of(type) / 2),
          expected(out.size());
      fill(out, random_);
      reference().expand(type, payload.data(), mask.data(), n, expected.data());
      ops().expand(type, payload.data(), mask.data(), n, out.data());
      expect_same(expected, out, "out");
      out.check_guards();
    }
    Guarded<float> before(n, offset), param(n, offset), expected_param(n);
    Guarded<uint16_t> ages(k, offset);
    fill(before, random_);
    fill(param, random_);
    fill(ages, random_);
    expected_param.assign(param);
    reference().post_step(before.data(), mask.data(), ages.data(), n, 0.99f, 100,
                          expected_param.data());
    ops().post_step(before.data(), mask.data(), ages.data(), n, 0.99f, 100, param.data());
    expect_same(expected_param, param, "param");
    param.check_guards();
  });
}

TEST_P(Backend, Scores) {
  for (const bool plain : {false, true}) {
    for (const double beta1 : {0.9, 0.9999}) {
      const Step step(beta1, 65535, plain);
      over_shapes([&](size_t n, size_t offset, const auto&) {
        Guarded<float> m(n, offset), residual(n, offset), expected_residual(n);
        Guarded<float> out(n, offset), expected(n);
        Guarded<uint16_t> last(n, offset);
        fill(m, random_);
        fill(residual, random_, random_() % 2 == 0 ? Data::kSpecial : Data::kFinite);
        fill(last, random_);
        expected_residual.assign(residual);
        const size_t cleared = reference().score(m.data(), last.data(), expected_residual.data(), n,
                                                 step.params, 4.0f, expected.data());
        ASSERT_EQ(
            ops().score(m.data(), last.data(), residual.data(), n, step.params, 4.0f, out.data()),
            cleared);
        expect_same(expected_residual, residual, "residual");
        expect_same(expected, out, "scores");
        ASSERT_FALSE(reference().any_nonfinite(out.data(), n));
        residual.check_guards();
        out.check_guards();
      });
    }
  }
}

TEST_P(Backend, CountsBits) {
  for (size_t words = 0; words < 200; ++words) {
    const Guarded<uint64_t> a = random_mask(words * 64, 0.4, random_);
    const Guarded<uint64_t> b = random_mask(words * 64, 0.4, random_, true);
    EXPECT_EQ(ops().count_bits(a.data(), words), bits_set(a));
    EXPECT_EQ(ops().count_common_bits(a.data(), b.data(), words),
              reference().count_common_bits(a.data(), b.data(), words));
  }
}

TEST_P(Backend, CodesOffsets) {
  over_shapes([&](size_t n, size_t, const auto& mask) {
    const size_t k = bits_set(mask);
    const size_t bytes = offset_code_bytes(n, k);
    Guarded<uint8_t> expected(bytes), code(bytes, 1);
    Guarded<uint64_t> decoded(mask.size());
    ASSERT_EQ(reference().encode_offsets(mask.data(), n, expected.data()), bytes);
    ASSERT_EQ(ops().encode_offsets(mask.data(), n, code.data()), bytes);
    expect_same(expected, code, "code");
    code.check_guards();
    ASSERT_TRUE(ops().decode_offsets(code.data(), bytes, n, k, decoded.data()));
    expect_same(mask, decoded, "decoded mask");
    decoded.check_guards();
  });
}

}  // namespace
}  // namespace scape::kernels::testing
