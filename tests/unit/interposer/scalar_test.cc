#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>

#include "interposer/premul_sum.h"

namespace scape::interposer {
namespace {

using plugin::DataType;

template <typename T>
plugin::Reduction read(T bits, DataType type) {
  plugin::Reduction reduction;
  read_scalar(&bits, type, &reduction);
  EXPECT_EQ(reduction.op, plugin::ReduceOp::kPremulSum);
  return reduction;
}

TEST(ReadScalar, SmallFloats) {
  EXPECT_EQ(read<uint16_t>(0x3800, DataType::kFloat16).factor, 0.5);
  EXPECT_EQ(read<uint16_t>(0xc000, DataType::kFloat16).factor, -2);
  EXPECT_EQ(read<uint16_t>(0x0001, DataType::kFloat16).factor, std::ldexp(1, -24));
  EXPECT_EQ(read<uint16_t>(0x7bff, DataType::kFloat16).factor, 65504);
  EXPECT_EQ(read<uint16_t>(0x7c00, DataType::kFloat16).factor,
            std::numeric_limits<double>::infinity());
  EXPECT_TRUE(std::isnan(read<uint16_t>(0x7e00, DataType::kFloat16).factor));
  EXPECT_EQ(read<uint16_t>(0x3f00, DataType::kBfloat16).factor, 0.5);
  EXPECT_EQ(read<uint16_t>(0xc2c8, DataType::kBfloat16).factor, -100);
  EXPECT_EQ(read<uint8_t>(0x30, DataType::kFloat8e4m3).factor, 0.5);
  EXPECT_EQ(read<uint8_t>(0x7e, DataType::kFloat8e4m3).factor, 448);
  EXPECT_TRUE(std::isnan(read<uint8_t>(0xff, DataType::kFloat8e4m3).factor));
  EXPECT_EQ(read<uint8_t>(0x01, DataType::kFloat8e4m3).factor, std::ldexp(1, -9));
  EXPECT_EQ(read<uint8_t>(0x38, DataType::kFloat8e5m2).factor, 0.5);
  EXPECT_EQ(read<uint8_t>(0xfc, DataType::kFloat8e5m2).factor,
            -std::numeric_limits<double>::infinity());
}

TEST(ReadScalar, LargeFloatsAndIntegers) {
  EXPECT_EQ(read(0.1f, DataType::kFloat32).factor, double{0.1f});
  EXPECT_EQ(read(0.1, DataType::kFloat64).factor, 0.1);
  EXPECT_EQ(read<int8_t>(-3, DataType::kInt8).integer_factor, -3);
  EXPECT_EQ(read<uint8_t>(253, DataType::kUint8).integer_factor, 253);
  EXPECT_EQ(read<int32_t>(-70000, DataType::kInt32).integer_factor, -70000);
  EXPECT_EQ(read<uint32_t>(4000000000u, DataType::kUint32).integer_factor, 4000000000);
  EXPECT_EQ(read<int64_t>(INT64_MIN, DataType::kInt64).integer_factor, INT64_MIN);
  EXPECT_EQ(static_cast<uint64_t>(read<uint64_t>(UINT64_MAX, DataType::kUint64).integer_factor),
            UINT64_MAX);
}

}  // namespace
}  // namespace scape::interposer
