#include "plugin/collectives/reduce.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "tests/unit/plugin/testing.h"

namespace scape::plugin::test {
namespace {

std::vector<const detail::ReduceOps*> variants() {
  std::vector<const detail::ReduceOps*> list = {&detail::reduce_baseline()};
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2")) list.push_back(&detail::reduce_avx2());
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
    list.push_back(&detail::reduce_avx512());
  }
#endif
  return list;
}

struct Format {
  DataType type;
  int exponent_bits, mantissa_bits;
  bool finite;  // no infinities
};
constexpr Format kFormats[] = {{DataType::kFloat16, 5, 10, false},
                               {DataType::kBfloat16, 8, 7, false},
                               {DataType::kFloat8e4m3, 4, 3, true},
                               {DataType::kFloat8e5m2, 5, 2, false}};

// The value of a pattern, from the definition.
double value_of(const Format& format, uint32_t bits) {
  const uint32_t mantissa_mask = (1u << format.mantissa_bits) - 1,
                 exponent_mask = (1u << format.exponent_bits) - 1;
  const int bias = (1 << (format.exponent_bits - 1)) - 1;
  const uint32_t mantissa = bits & mantissa_mask,
                 exponent = (bits >> format.mantissa_bits) & exponent_mask;
  const double sign = (bits >> (format.mantissa_bits + format.exponent_bits)) & 1 ? -1 : 1;
  if (format.finite ? (exponent == exponent_mask && mantissa == mantissa_mask)
                    : (exponent == exponent_mask && mantissa != 0)) {
    return std::numeric_limits<double>::quiet_NaN();
  }
  if (!format.finite && exponent == exponent_mask)
    return sign * std::numeric_limits<double>::infinity();
  if (exponent == 0) return sign * std::ldexp(mantissa, 1 - bias - format.mantissa_bits);
  return sign * std::ldexp(1 + std::ldexp(mantissa, -format.mantissa_bits),
                           static_cast<int>(exponent) - bias);
}

// One operand through the reduction of one: widened with fp32 operands, or narrowed into the
// result.
float widen(const detail::ReduceOps& ops, DataType type, uint32_t bits) {
  float out = 0;
  Reduction one;
  ops.scale(type, one, &out, &bits, 1);
  return out;
}
uint32_t narrow(const detail::ReduceOps& ops, DataType type, float value) {
  uint32_t out = 0;
  const void* const in[] = {&value};
  ReduceCall call;
  call.result = type;
  call.operand = DataType::kFloat32;
  call.out = &out;
  call.in = in;
  call.operands = 1;
  call.n = 1;
  ops.reduce(call);
  return out;
}

TEST(SmallFloats, EveryPatternWidensToItsValueAndBack) {
  for (const detail::ReduceOps* ops : variants()) {
    for (const Format& format : kFormats) {
      const uint32_t patterns = 1u << (1 + format.exponent_bits + format.mantissa_bits);
      for (uint32_t bits = 0; bits < patterns; ++bits) {
        const double value = value_of(format, bits);
        const float wide = widen(*ops, format.type, bits);
        if (std::isnan(value)) {
          ASSERT_TRUE(std::isnan(wide)) << name_of(format.type) << " " << bits;
          ASSERT_TRUE(std::isnan(value_of(format, narrow(*ops, format.type, wide)))) << bits;
        } else {
          ASSERT_EQ(static_cast<double>(wide), value) << name_of(format.type) << " " << bits;
          ASSERT_EQ(narrow(*ops, format.type, wide), bits) << name_of(format.type);
        }
      }
    }
  }
}

TEST(SmallFloats, RoundToTheNearestEven) {
  for (const detail::ReduceOps* ops : variants()) {
    for (const Format& format : kFormats) {
      const uint32_t half =
          1u << (format.exponent_bits + format.mantissa_bits);  // patterns without sign
      for (uint32_t bits = 0; bits + 1 < half; ++bits) {
        const double low = value_of(format, bits), high = value_of(format, bits + 1);
        if (!std::isfinite(low) || !std::isfinite(high)) continue;
        const float middle = static_cast<float>((low + high) / 2);
        ASSERT_EQ(static_cast<double>(middle), (low + high) / 2);
        const uint32_t even = bits % 2 == 0 ? bits : bits + 1;
        ASSERT_EQ(narrow(*ops, format.type, middle), even) << name_of(format.type) << " " << bits;
        ASSERT_EQ(narrow(*ops, format.type, std::nextafter(middle, 0.0f)), bits);
        ASSERT_EQ(narrow(*ops, format.type,
                         std::nextafter(middle, std::numeric_limits<float>::infinity())),
                  bits + 1);
        ASSERT_EQ(narrow(*ops, format.type, -middle), even | half);
      }
      // Beyond the largest number.
      const double beyond = value_of(format, narrow(*ops, format.type, 3e38f));
      EXPECT_TRUE(format.finite ? std::isnan(beyond)
                                : (std::isinf(beyond) || format.type == DataType::kBfloat16));
      const double infinite =
          value_of(format, narrow(*ops, format.type, std::numeric_limits<float>::infinity()));
      EXPECT_TRUE(format.finite ? std::isnan(infinite) : std::isinf(infinite));
    }
  }
}

TEST(Reduce, AllVariantsGiveTheSameBits) {
  const size_t n = 3001;
  const auto list = variants();
  for (int type = 0; type < kDataTypes; ++type) {
    const auto data_type = static_cast<DataType>(type);
    std::vector<std::vector<std::byte>> inputs;
    std::vector<const void*> in;
    for (uint64_t r = 0; r < 5; ++r) inputs.push_back(rough_values(data_type, n, r));
    for (const auto& input : inputs) in.push_back(input.data());
    for (int op = 0; op < 5; ++op) {
      for (const int operands : {2, 5}) {
        std::vector<std::byte> first;
        for (const detail::ReduceOps* ops : list) {
          std::vector<std::byte> out(n * size_of(data_type));
          ReduceCall call;
          call.result = call.operand = data_type;
          call.op = static_cast<ReduceOp>(op);
          call.divisor = call.op == ReduceOp::kAvg ? operands : 0;
          call.out = out.data();
          call.in = in.data();
          call.operands = operands;
          call.n = n;
          ops->reduce(call);
          if (first.empty()) first = out;
          ASSERT_EQ(out, first) << name_of(data_type) << " " << name_of(call.op);
        }
      }
    }
  }
}

template <typename T>
T reduced(ReduceOp op, std::vector<T> operands, DataType type, int divisor = 0) {
  T out{};
  std::vector<const void*> in;
  for (const T& operand : operands) in.push_back(&operand);
  ReduceCall call;
  call.result = call.operand = type;
  call.op = op;
  call.divisor = divisor;
  call.out = &out;
  call.in = in.data();
  call.operands = static_cast<int>(operands.size());
  call.n = 1;
  reduce(call);
  return out;
}

TEST(Reduce, IntegersWrapAndAveragesTruncate) {
  EXPECT_EQ(reduced<int8_t>(ReduceOp::kSum, {127, 1}, DataType::kInt8), -128);
  EXPECT_EQ(reduced<int32_t>(ReduceOp::kProd, {1 << 30, 4}, DataType::kInt32), 0);
  EXPECT_EQ(reduced<int64_t>(ReduceOp::kSum, {INT64_MAX, 1}, DataType::kInt64), INT64_MIN);
  EXPECT_EQ(reduced<int32_t>(ReduceOp::kAvg, {-3, -4}, DataType::kInt32, 2), -3);
  EXPECT_EQ(reduced<uint64_t>(ReduceOp::kAvg, {UINT64_MAX, 0}, DataType::kUint64, 2),
            UINT64_MAX / 2);
  EXPECT_EQ(reduced<uint8_t>(ReduceOp::kMax, {3, 200}, DataType::kUint8), 200);
  EXPECT_EQ(reduced<int8_t>(ReduceOp::kMin, {3, -56}, DataType::kInt8), -56);
}

TEST(Reduce, MinAndMaxPreferNumbersAndTheLowerRank) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (const ReduceOp op : {ReduceOp::kMin, ReduceOp::kMax}) {
    EXPECT_EQ(reduced<float>(op, {nan, 2}, DataType::kFloat32), 2);
    EXPECT_EQ(reduced<float>(op, {2, nan}, DataType::kFloat32), 2);
    EXPECT_TRUE(std::isnan(reduced<float>(op, {nan, nan}, DataType::kFloat32)));
    EXPECT_FALSE(std::signbit(reduced<float>(op, {0.0f, -0.0f}, DataType::kFloat32)));
    EXPECT_TRUE(std::signbit(reduced<float>(op, {-0.0f, 0.0f}, DataType::kFloat32)));
  }
}

// F12
TEST(Reduce, HalvesAreSummedWide) {
  const uint16_t forty_thousand = 0x78e2;  // fp16
  EXPECT_EQ(reduced<uint16_t>(ReduceOp::kAvg,
                              {forty_thousand, forty_thousand, forty_thousand, forty_thousand},
                              DataType::kFloat16, 4),
            forty_thousand);
  const uint16_t one = 0x3f80, two_hundred_fifty_six = 0x4380, two_hundred_sixty = 0x4382;  // bf16
  EXPECT_EQ(reduced<uint16_t>(ReduceOp::kSum, {two_hundred_fifty_six, one, one, one},
                              DataType::kBfloat16),
            two_hundred_sixty);
}

}  // namespace
}  // namespace scape::plugin::test
