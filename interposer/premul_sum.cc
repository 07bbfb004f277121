#include "interposer/premul_sum.h"

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

namespace scape::interposer {
namespace {

using plugin::DataType;

// A small float: sign, `exponent` bits, `mantissa` bits; `finite_only`: e4m3's rule, where the top
// exponent holds numbers and all ones is NaN.
double decode_small_float(unsigned bits, int exponent, int mantissa, bool finite_only) {
  const unsigned sign = bits >> (exponent + mantissa) & 1;
  const unsigned exponent_bits = bits >> mantissa & ((1u << exponent) - 1);
  const unsigned mantissa_bits = bits & ((1u << mantissa) - 1);
  const unsigned top = (1u << exponent) - 1;
  const int bias = (1 << (exponent - 1)) - 1;
  double value;
  if (exponent_bits == top && !finite_only) {
    value = mantissa_bits == 0 ? std::numeric_limits<double>::infinity()
                               : std::numeric_limits<double>::quiet_NaN();
  } else if (exponent_bits == top && mantissa_bits == (1u << mantissa) - 1) {
    value = std::numeric_limits<double>::quiet_NaN();
  } else if (exponent_bits == 0) {
    value = std::ldexp(mantissa_bits, 1 - bias - mantissa);
  } else {
    value = std::ldexp((1u << mantissa) + mantissa_bits,
                       static_cast<int>(exponent_bits) - bias - mantissa);
  }
  return sign != 0 ? -value : value;
}

template <typename T>
T read_as(const void* address) {
  T value;
  std::memcpy(&value, address, sizeof value);
  return value;
}

}  // namespace

void read_scalar(const void* scalar, DataType type, plugin::Reduction* out) {
  out->op = plugin::ReduceOp::kPremulSum;
  switch (type) {
    case DataType::kInt8:
      out->integer_factor = read_as<int8_t>(scalar);
      break;
    case DataType::kUint8:
      out->integer_factor = read_as<uint8_t>(scalar);
      break;
    case DataType::kInt32:
      out->integer_factor = read_as<int32_t>(scalar);
      break;
    case DataType::kUint32:
      out->integer_factor = read_as<uint32_t>(scalar);
      break;
    case DataType::kInt64:
    case DataType::kUint64:
      out->integer_factor = read_as<int64_t>(scalar);
      break;
    case DataType::kFloat16:
      out->factor = decode_small_float(read_as<uint16_t>(scalar), 5, 10, false);
      return;
    case DataType::kBfloat16:
      out->factor = decode_small_float(read_as<uint16_t>(scalar), 8, 7, false);
      return;
    case DataType::kFloat8e4m3:
      out->factor = decode_small_float(read_as<uint8_t>(scalar), 4, 3, true);
      return;
    case DataType::kFloat8e5m2:
      out->factor = decode_small_float(read_as<uint8_t>(scalar), 5, 2, false);
      return;
    case DataType::kFloat32:
      out->factor = read_as<float>(scalar);
      return;
    case DataType::kFloat64:
      out->factor = read_as<double>(scalar);
      return;
  }
  out->factor = static_cast<double>(out->integer_factor);
}

}  // namespace scape::interposer
