// The step against AdamS itself: dense where nothing is left out, and in double precision where
// ages vary.
#include "tests/unit/kernels/kernel_testing.h"

namespace scape::kernels::testing {
namespace {

class AdamS : public ::testing::TestWithParam<const Ops*> {
 protected:
  Random random_{7};
};

INSTANTIATE_TEST_SUITE_P(Kernels, AdamS, ::testing::ValuesIn(available_ops()), backend_name);

// With every age 1 the step is dense AdamS, bit for bit:
//   v = beta2 m^2 + (1 - beta2) g^2;  m = beta1 m + (1 - beta1) g;
//   theta = (1 - lr lambda) theta - lr m / (sqrt(v) + eps).
TEST_P(AdamS, IsDenseAdamSWhenNothingIsLeftOut) {
  constexpr size_t kN = 333;
  constexpr float kDecay = 0.1f;
  Guarded<float> m(kN), param(kN), gradient(kN), dense_m(kN), dense_param(kN);
  Guarded<uint16_t> last(kN);
  fill(param, random_);
  dense_param.assign(param);
  std::fill_n(last.data(), kN, uint16_t{65535});
  const Guarded<uint64_t> mask = random_mask(kN, 1, random_);
  Step step(0.9, 0);
  const float per_step = 1.0f - step.params.lr * kDecay;
  const float decay[] = {1.0f, per_step, per_step * per_step};
  step.params.decay = decay;
  step.params.decay_size = 3;
  for (uint16_t t = 0; t < 50; ++t) {
    step.params.t = t;
    fill(gradient, random_);
    GetParam()->adams_step(gradient.data(), mask.data(), kN, step.params, m.data(), last.data(),
                           param.data());
    for (size_t j = 0; j < kN; ++j) {
      const float g = gradient[j];
      const float v = 0.95f * (dense_m[j] * dense_m[j]) + (1.0f - 0.95f) * (g * g);
      dense_m[j] = 0.9f * dense_m[j] + (1.0f - 0.9f) * g;
      dense_param[j] =
          per_step * dense_param[j] - step.params.lr * dense_m[j] / (std::sqrt(v) + 1e-8f);
      ASSERT_EQ(last[j], t);
    }
    expect_same(dense_m, m, "m");
    expect_same(dense_param, param, "param");
  }
}

// An element left out for `age` steps: its moment is what dense steps with the mean gradient would
// have made, its update is the age times that step, its decay that of all the steps.
TEST_P(AdamS, CatchesUpWithTheStepsLeftOut) {
  const Step step(0.9, 1000);
  const uint64_t mask[] = {uint64_t{1} << 7};
  for (const int age : {1, 2, 3, 10, 39, 150}) {
    const double mean = 0.25;
    float m[64] = {}, param[64] = {};
    uint16_t last[64] = {};
    m[7] = -0.5f;
    param[7] = 2.0f;
    last[7] = static_cast<uint16_t>(1000 - age);
    const float u = static_cast<float>(mean * age);
    GetParam()->adams_step(&u, mask, 64, step.params, m, last, param);
    double moment = -0.5, prior = 0;
    for (int i = 0; i < age; ++i) {
      prior = moment;
      moment = 0.9 * moment + 0.1 * mean;
    }
    const double v = 0.95 * prior * prior + 0.05 * mean * mean;
    const double decay = std::pow(0.999, std::min(age, 39));
    const double expected = decay * 2 - 3e-3 * std::min(age, 100) * moment / (std::sqrt(v) + 1e-8);
    EXPECT_NEAR(m[7], moment, 1e-6) << age;
    EXPECT_NEAR(param[7], expected, 1e-5) << age;
    EXPECT_EQ(last[7], 1000);
  }
}

// Under the plain rule an age has no effect.
TEST_P(AdamS, PlainRuleCountsEveryAgeAsOne) {
  const Step plain(0.9, 500, true);
  const Step lazy(0.9, 500);
  const uint64_t mask[] = {~uint64_t{0}};
  Guarded<float> u(64), m(64), param(64), expected_m(64), expected_param(64);
  Guarded<uint16_t> last(64), recent(64);
  fill(u, random_);
  fill(m, random_);
  fill(param, random_);
  fill(last, random_);
  std::fill_n(recent.data(), 64, uint16_t{499});
  expected_m.assign(m);
  expected_param.assign(param);
  GetParam()->adams_step(u.data(), mask, 64, lazy.params, expected_m.data(), recent.data(),
                         expected_param.data());
  GetParam()->adams_step(u.data(), mask, 64, plain.params, m.data(), last.data(), param.data());
  expect_same(expected_m, m, "m");
  expect_same(expected_param, param, "param");
}

// What bf16 loses goes back into the residual: decoded value plus error is what was to be sent.
TEST_P(AdamS, Bfloat16LosesNothing) {
  constexpr size_t kN = 1000;
  const Step step(0.9, 0);
  Guarded<float> u(kN), error(kN), decoded(kN);
  Guarded<uint16_t> ages(kN), encoded(kN);
  fill(u, random_);
  for (size_t i = 0; i < kN; ++i) ages[i] = static_cast<uint16_t>(1 + random_() % 500);
  GetParam()->encode_bf16(u.data(), ages.data(), kN, step.params, encoded.data(), error.data());
  GetParam()->decode_bf16(encoded.data(), ages.data(), kN, step.params, decoded.data());
  for (size_t i = 0; i < kN; ++i) {
    EXPECT_NEAR(decoded[i] + error[i], u[i], 1e-6 * std::fabs(u[i])) << "age " << ages[i];
    EXPECT_LE(std::fabs(error[i]), std::fabs(u[i]) / 250);
  }
}

TEST(PowerTable, IsRoundedOnceFromDouble) {
  for (const double beta1 : {0.5, 0.9, 0.95, 0.99}) {
    const std::vector<float> table = make_power_table(beta1);
    EXPECT_EQ(table[0], 1.0f);
    EXPECT_EQ(table[1], static_cast<float>(beta1));
    EXPECT_EQ(table.back(), 0.0f);
    for (size_t a = 0; a < table.size(); ++a) {
      const double exact = std::pow(beta1, static_cast<double>(a));
      EXPECT_NEAR(table[a], exact, exact * 1e-7 + 1e-45) << beta1 << "^" << a;
    }
  }
  EXPECT_EQ(make_power_table(0.0), (std::vector<float>{1.0f, 0.0f}));
  const std::vector<float> longest = make_power_table(0.99999);
  EXPECT_EQ(longest.size(), 65536u);
  EXPECT_NEAR(longest.back(), std::pow(0.99999, 65535), 1e-7);
}

}  // namespace
}  // namespace scape::kernels::testing
