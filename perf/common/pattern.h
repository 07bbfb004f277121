// Test data that is cheap to write and to check at any size, and exact.
//
// A table of kTable elements is computed slowly and exactly; a buffer of any length is made of
// blocks copied from it, each from a pseudo-random place that the block's number gives. Filling and
// checking then run at the speed of memory, and a block that lands anywhere else is seen. Since the
// places depend on the seed alone, the sum (product, ...) of the ranks' buffers is the buffer of
// the table of sums.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/status.h"
#include "perf/common/types.h"

namespace scape::perf {

class Pattern {
 public:
  static constexpr size_t kTable = 16381;  // a prime: no power-of-two distance maps onto itself
  static constexpr size_t kBlock = 2048;

  Pattern() = default;
  // `elements`: the bits of kTable elements. `tolerance`: relative difference that check() allows.
  Pattern(Type type, const std::vector<uint64_t>& elements, uint64_t seed, double tolerance = 0);

  // The same table in other places.
  void set_seed(uint64_t seed) { seed_ = seed; }

  // Elements first .. first + count of the endless buffer, to dst.
  void fill(void* dst, size_t first, size_t count) const;
  // How many of data[0 .. count) differ from the elements first .. first + count.
  size_t count_wrong(const void* data, size_t first, size_t count) const;

 private:
  template <typename Visit>
  void for_each_block(size_t first, size_t count, const Visit& visit) const;

  Type type_ = Type::kFloat;
  uint64_t seed_ = 0;
  double tolerance_ = 0;
  std::vector<std::byte> table_;  // kTable + kBlock elements: a block never wraps around
};

// Input of one rank and the result of the reduction, exact whatever order the ranks are taken in:
// every partial result is representable in the type. Averages are exact both as sum / ranks and as
// sum * (1 / ranks) wherever fp32 has ranks * (1 / ranks) == 1 (else one ulp is allowed). Integer
// sums and products wrap around. `most` bounds the magnitude of a floating sum, so that several may
// be added up exactly.
struct ReductionCase {
  Pattern input;
  Pattern expected;
};
Status make_reduction_case(Type type, Op op, int rank, int ranks, uint64_t seed, double most,
                           ReductionCase* out);

// Arbitrary bits, the same on all ranks, for collectives that only move data.
Pattern make_copy_pattern(Type type, uint64_t seed);

// Rank r's factor of Op::kMulSum, as the bits of one element.
uint64_t premul_factor(Type type, int rank);

// A 64-bit mix of two numbers.
uint64_t hash(uint64_t a, uint64_t b);

}  // namespace scape::perf
