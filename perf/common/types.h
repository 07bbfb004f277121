// NCCL's element types and reduction operators, as the perf programs name, encode and compare them.
//
// Written apart from the library's own conversions, so that the two check each other.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "base/status.h"

namespace scape::perf {

// Numbered as ncclDataType_t.
enum class Type : int {
  kInt8,
  kUint8,
  kInt32,
  kUint32,
  kInt64,
  kUint64,
  kHalf,
  kFloat,
  kDouble,
  kBfloat16,
  kFp8E4m3,
  kFp8E5m2,
};
inline constexpr int kTypes = 12;

// Numbered as ncclRedOp_t; kMulSum is made with ncclRedOpCreatePreMulSum. kNone: the collective
// reduces nothing.
enum class Op : int { kNone = -1, kSum, kProd, kMax, kMin, kAvg, kMulSum };

size_t size_of(Type type);
bool is_floating(Type type);
bool is_signed(Type type);
const char* name_of(Type type);
const char* name_of(Op op);

// nccl-tests' names; "all" gives every one. Errors list the names.
Status parse_types(const std::string& text, std::vector<Type>* out);
Status parse_ops(const std::string& text, std::vector<Op>* out);

// Floating types. decode() is exact; encode() takes values that the type holds exactly and returns
// false for others. max_integer(): every integer up to it is exact.
double decode(Type type, uint64_t bits);
bool encode(Type type, double value, uint64_t* bits);
double max_integer(Type type);

// The element at data[index] as its bits, zero-extended, and the other way round.
uint64_t load(const void* data, size_t index, size_t size);
void store(void* data, size_t index, size_t size, uint64_t bits);

}  // namespace scape::perf
