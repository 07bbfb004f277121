#include "perf/common/types.h"

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

namespace scape::perf {
namespace {

struct TypeRow {
  const char* name;
  size_t size;
  bool floating;
  bool is_signed;
  int exponent_bits;
  int mantissa_bits;
};
constexpr TypeRow kTypeRows[kTypes] = {
    {"int8", 1, false, true, 0, 0},    {"uint8", 1, false, false, 0, 0},
    {"int32", 4, false, true, 0, 0},   {"uint32", 4, false, false, 0, 0},
    {"int64", 8, false, true, 0, 0},   {"uint64", 8, false, false, 0, 0},
    {"half", 2, true, true, 5, 10},    {"float", 4, true, true, 8, 23},
    {"double", 8, true, true, 11, 52}, {"bfloat16", 2, true, true, 8, 7},
    {"f8e4m3", 1, true, true, 4, 3},   {"f8e5m2", 1, true, true, 5, 2},
};
constexpr const char* kOpNames[] = {"sum", "prod", "max", "min", "avg", "mulsum"};

const TypeRow& row(Type type) { return kTypeRows[static_cast<int>(type)]; }

struct Alias {
  const char* name;
  Type type;
};
constexpr Alias kAliases[] = {
    {"char", Type::kInt8},        {"int", Type::kInt32},        {"float16", Type::kHalf},
    {"float32", Type::kFloat},    {"float64", Type::kDouble},   {"fp16", Type::kHalf},
    {"fp32", Type::kFloat},       {"fp64", Type::kDouble},      {"bf16", Type::kBfloat16},
    {"fp8_e4m3", Type::kFp8E4m3}, {"fp8_e5m2", Type::kFp8E5m2},
};

}  // namespace

size_t size_of(Type type) { return row(type).size; }
bool is_floating(Type type) { return row(type).floating; }
bool is_signed(Type type) { return row(type).is_signed; }
const char* name_of(Type type) { return row(type).name; }
const char* name_of(Op op) { return op == Op::kNone ? "none" : kOpNames[static_cast<int>(op)]; }

Status parse_types(const std::string& text, std::vector<Type>* out) {
  out->clear();
  std::string known;
  for (int i = 0; i < kTypes; ++i) {
    if (text == "all" || text == kTypeRows[i].name) out->push_back(static_cast<Type>(i));
    known += std::string(kTypeRows[i].name) + ", ";
  }
  for (const Alias& alias : kAliases) {
    if (text == alias.name) out->push_back(alias.type);
  }
  if (!out->empty()) return Status::Ok();
  return error(SCAPE_ERR_ARGUMENT, "-d %s is no type; there are: %sall", text.c_str(),
               known.c_str());
}

Status parse_ops(const std::string& text, std::vector<Op>* out) {
  out->clear();
  std::string known;
  for (int i = 0; i < static_cast<int>(std::size(kOpNames)); ++i) {
    if (text == "all" || text == kOpNames[i]) out->push_back(static_cast<Op>(i));
    known += std::string(kOpNames[i]) + ", ";
  }
  if (!out->empty()) return Status::Ok();
  return error(SCAPE_ERR_ARGUMENT, "-o %s is no operator; there are: %sall", text.c_str(),
               known.c_str());
}

double decode(Type type, uint64_t bits) {
  if (type == Type::kDouble) return std::bit_cast<double>(bits);
  const TypeRow& format = row(type);
  const int exponent_mask = (1 << format.exponent_bits) - 1;
  const int bias = exponent_mask / 2;
  const uint64_t mantissa_mask = (uint64_t{1} << format.mantissa_bits) - 1;
  const uint64_t mantissa = bits & mantissa_mask;
  const int exponent = static_cast<int>(bits >> format.mantissa_bits) & exponent_mask;
  const bool negative = ((bits >> (format.mantissa_bits + format.exponent_bits)) & 1) != 0;
  // e4m3 has no infinities: its top exponent holds numbers, but for one NaN.
  const bool special =
      exponent == exponent_mask && (type != Type::kFp8E4m3 || mantissa == mantissa_mask);
  double value = 0;
  if (special) {
    value = mantissa == 0 ? std::numeric_limits<double>::infinity()
                          : std::numeric_limits<double>::quiet_NaN();
  } else if (exponent == 0) {
    value = std::ldexp(static_cast<double>(mantissa), 1 - bias - format.mantissa_bits);
  } else {
    value = std::ldexp(static_cast<double>(mantissa | (mantissa_mask + 1)),
                       exponent - bias - format.mantissa_bits);
  }
  return negative ? -value : value;
}

bool encode(Type type, double value, uint64_t* bits) {
  if (type == Type::kDouble) {
    *bits = std::bit_cast<uint64_t>(value);
    return true;
  }
  const TypeRow& format = row(type);
  const int bias = ((1 << format.exponent_bits) - 1) / 2;
  uint64_t magnitude = 0;
  if (value != 0) {
    int exponent = std::ilogb(value);
    if (exponent < 1 - bias) exponent = 1 - bias;
    const double units = std::ldexp(std::fabs(value), format.mantissa_bits - exponent);
    const uint64_t whole = static_cast<uint64_t>(units);
    // A subnormal has no implicit bit, so adding instead of or-ing carries it into the exponent.
    magnitude = (static_cast<uint64_t>(exponent + bias - 1) << format.mantissa_bits) + whole;
  }
  *bits = magnitude | (static_cast<uint64_t>(std::signbit(value))
                       << (format.mantissa_bits + format.exponent_bits));
  return decode(type, *bits) == value;
}

double max_integer(Type type) { return std::ldexp(1.0, row(type).mantissa_bits + 1); }

uint64_t load(const void* data, size_t index, size_t size) {
  uint64_t bits = 0;
  std::memcpy(&bits, static_cast<const char*>(data) + index * size, size);
  return bits;
}

void store(void* data, size_t index, size_t size, uint64_t bits) {
  std::memcpy(static_cast<char*>(data) + index * size, &bits, size);
}

}  // namespace scape::perf
