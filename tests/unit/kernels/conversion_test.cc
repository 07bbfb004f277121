// Conversions against independent arithmetic: every 16-bit value, and the rounding of what lies
// between.
#include "tests/unit/kernels/kernel_testing.h"

namespace scape::kernels::testing {
namespace {

class Conversion : public ::testing::TestWithParam<const Ops*> {
 protected:
  std::vector<float> widened(Type type) const {
    std::vector<uint16_t> in(65536);
    for (size_t i = 0; i < in.size(); ++i) in[i] = static_cast<uint16_t>(i);
    std::vector<float> out(in.size());
    GetParam()->to_float(type, in.data(), out.data(), in.size());
    return out;
  }
  uint16_t narrowed(Type type, float value) const {
    // Sixty-four copies: the value goes through the vector path.
    std::vector<float> in(64, value);
    std::vector<uint16_t> out(in.size());
    GetParam()->from_float(type, in.data(), out.data(), in.size());
    EXPECT_EQ(std::count(out.begin(), out.end(), out[0]), 64);
    return out[0];
  }
};

INSTANTIATE_TEST_SUITE_P(Kernels, Conversion, ::testing::ValuesIn(available_ops()), backend_name);

// The value by its definition: sign, exponent and mantissa of the format.
double value_of(Type type, uint16_t bits) {
  const int mantissa_bits = type == Type::kFloat16 ? 10 : 7;
  const int bias = type == Type::kFloat16 ? 15 : 127;
  const int mantissa = bits & ((1 << mantissa_bits) - 1);
  const int exponent = (bits & 0x7fff) >> mantissa_bits;
  const double magnitude =
      exponent == 0 ? std::ldexp(mantissa, 1 - bias - mantissa_bits)
                    : std::ldexp(mantissa + (1 << mantissa_bits), exponent - bias - mantissa_bits);
  return bits & 0x8000 ? -magnitude : magnitude;
}

uint16_t infinity_of(Type type) { return type == Type::kFloat16 ? 0x7c00 : 0x7f80; }

TEST_P(Conversion, WidensEveryValue) {
  for (const Type type : {Type::kBfloat16, Type::kFloat16}) {
    const std::vector<float> out = widened(type);
    for (size_t i = 0; i < out.size(); ++i) {
      const auto bits = static_cast<uint16_t>(i);
      const uint16_t magnitude = bits & 0x7fff;
      EXPECT_EQ(std::signbit(out[i]), (bits & 0x8000) != 0);
      if (magnitude > infinity_of(type)) {
        EXPECT_TRUE(std::isnan(out[i])) << i;
      } else if (magnitude == infinity_of(type)) {
        EXPECT_TRUE(std::isinf(out[i])) << i;
      } else {
        EXPECT_EQ(static_cast<double>(out[i]), value_of(type, bits)) << i;
      }
    }
  }
}

TEST_P(Conversion, KeepsEveryValueThereAndBack) {
  for (const Type type : {Type::kBfloat16, Type::kFloat16}) {
    const std::vector<float> wide = widened(type);
    std::vector<uint16_t> back(wide.size());
    GetParam()->from_float(type, wide.data(), back.data(), wide.size());
    for (size_t i = 0; i < wide.size(); ++i) {
      if (std::isnan(wide[i])) {
        EXPECT_GT(back[i] & 0x7fff, infinity_of(type)) << i;
      } else {
        EXPECT_EQ(back[i], i);
      }
    }
  }
}

// Between two neighbours: below the middle down, above it up, the middle itself to the even one.
TEST_P(Conversion, RoundsToNearestEven) {
  for (const Type type : {Type::kBfloat16, Type::kFloat16}) {
    std::vector<float> in;
    std::vector<uint16_t> expected;
    for (uint32_t i = 0; i + 1 < infinity_of(type); ++i) {
      const auto low = static_cast<uint16_t>(i);
      const auto high = static_cast<uint16_t>(i + 1);
      const double middle = (value_of(type, low) + value_of(type, high)) / 2;
      const auto at = static_cast<float>(middle);
      ASSERT_EQ(at, middle);
      for (const float sign : {1.0f, -1.0f}) {
        const uint16_t sign_bit = sign < 0 ? 0x8000 : 0;
        in.insert(in.end(), {sign * std::nextafter(at, 0.0f), sign * at,
                             sign * std::nextafter(at, std::numeric_limits<float>::infinity())});
        expected.insert(expected.end(),
                        {static_cast<uint16_t>(low | sign_bit),
                         static_cast<uint16_t>((i % 2 == 0 ? low : high) | sign_bit),
                         static_cast<uint16_t>(high | sign_bit)});
      }
    }
    std::vector<uint16_t> out(in.size());
    GetParam()->from_float(type, in.data(), out.data(), in.size());
    for (size_t i = 0; i < in.size(); ++i) ASSERT_EQ(out[i], expected[i]) << in[i];
  }
}

TEST_P(Conversion, OverflowsToInfinityAndKeepsNan) {
  const float infinity = std::numeric_limits<float>::infinity();
  EXPECT_EQ(narrowed(Type::kFloat16, 65504.0f), 0x7bff);
  EXPECT_EQ(narrowed(Type::kFloat16, std::nextafter(65520.0f, 0.0f)), 0x7bff);
  EXPECT_EQ(narrowed(Type::kFloat16, 65520.0f), 0x7c00);
  EXPECT_EQ(narrowed(Type::kFloat16, -1e30f), 0xfc00);
  EXPECT_EQ(narrowed(Type::kFloat16, infinity), 0x7c00);
  EXPECT_EQ(narrowed(Type::kBfloat16, std::numeric_limits<float>::max()), 0x7f80);
  EXPECT_EQ(narrowed(Type::kBfloat16, -infinity), 0xff80);
  EXPECT_EQ(narrowed(Type::kFloat16, std::bit_cast<float>(0x00000001u)), 0);  // far below
  // A NaN whose payload lies only in the bits that are dropped.
  EXPECT_EQ(narrowed(Type::kFloat16, std::bit_cast<float>(0xff800001u)), 0xfe00);
  EXPECT_EQ(narrowed(Type::kBfloat16, std::bit_cast<float>(0xff800001u)), 0xffc0);
}

// Field case F12, the part of the kernels: sums and residuals are fp32, rounded once where they
// leave.
TEST_P(Conversion, AccumulatesInFloat) {
  const Ops& ops = *GetParam();
  // bf16: 256 + 1 + 1 + 1 is 260 when rounded once, 256 when rounded at every step.
  const uint64_t all[] = {~uint64_t{0}};
  std::vector<float> residual(64), payload(64);
  for (const float addend : {256.0f, 1.0f, 1.0f, 1.0f}) {
    const std::vector<uint16_t> gradient(64, narrowed(Type::kBfloat16, addend));
    ASSERT_EQ(ops.accumulate_pack(Type::kBfloat16, gradient.data(), residual.data(), all, 64,
                                  payload.data()),
              64u);
  }
  EXPECT_EQ(payload[63], 259.0f);
  EXPECT_EQ(narrowed(Type::kBfloat16, payload[63]), narrowed(Type::kBfloat16, 260.0f));

  // fp16: 5000 gradients of 1e-4 that are never sent make a residual of 0.5.
  const uint64_t none[] = {0};
  const std::vector<uint16_t> small(64, narrowed(Type::kFloat16, 1e-4f));
  std::fill(residual.begin(), residual.end(), 0.0f);
  for (int step = 0; step < 5000; ++step) {
    ops.accumulate_pack(Type::kFloat16, small.data(), residual.data(), none, 64, payload.data());
  }
  EXPECT_NEAR(residual[0], 0.5, 0.005);
  EXPECT_NEAR(residual[63], 0.5, 0.005);
}

}  // namespace
}  // namespace scape::kernels::testing
