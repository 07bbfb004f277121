// The perf programs' reference against reductions written out here: whatever order the ranks are
// taken in, fp32 accumulation with one rounding, or a rounding after every step, gives its result.
#include "perf/common/pattern.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>

namespace scape::perf {
namespace {

constexpr double kUnbounded = std::numeric_limits<double>::infinity();

struct Inputs {
  std::vector<std::vector<uint64_t>> of_rank;
  std::vector<uint64_t> expected;
};

Inputs make_inputs(Type type, Op op, int ranks, size_t count, size_t first) {
  const size_t size = size_of(type);
  Inputs inputs;
  std::vector<std::byte> raw(count * size);
  auto elements = [&](const Pattern& pattern) {
    pattern.fill(raw.data(), first, count);
    EXPECT_EQ(pattern.count_wrong(raw.data(), first, count), 0u);
    std::vector<uint64_t> bits(count);
    for (size_t i = 0; i < count; ++i) bits[i] = load(raw.data(), i, size);
    return bits;
  };
  for (int rank = 0; rank < ranks; ++rank) {
    ReductionCase reduction;
    const Status status = make_reduction_case(type, op, rank, ranks, 42, kUnbounded, &reduction);
    EXPECT_TRUE(status.ok()) << status.message();
    inputs.of_rank.push_back(elements(reduction.input));
    inputs.expected = elements(reduction.expected);
  }
  return inputs;
}

double combine(Op op, double a, double b) {
  switch (op) {
    case Op::kProd:
      return a * b;
    case Op::kMax:
      return std::max(a, b);
    case Op::kMin:
      return std::min(a, b);
    default:
      return a + b;
  }
}

class FloatingPatternTest : public testing::TestWithParam<Type> {};
INSTANTIATE_TEST_SUITE_P(Types, FloatingPatternTest,
                         testing::Values(Type::kHalf, Type::kFloat, Type::kDouble, Type::kBfloat16,
                                         Type::kFp8E4m3, Type::kFp8E5m2),
                         [](const auto& instance) { return std::string(name_of(instance.param)); });

TEST_P(FloatingPatternTest, ResultsAreExactInAnyOrder) {
  const Type type = GetParam();
  for (const int ranks : {1, 2, 3, 4, 7, 20}) {
    for (const Op op : {Op::kSum, Op::kProd, Op::kMax, Op::kMin, Op::kAvg, Op::kMulSum}) {
      const Inputs inputs = make_inputs(type, op, ranks, 2000, 3000);
      for (size_t i = 0; i < inputs.expected.size(); ++i) {
        std::vector<double> values;
        for (int rank = 0; rank < ranks; ++rank) {
          const double factor = op == Op::kMulSum ? decode(type, premul_factor(type, rank)) : 1;
          values.push_back(decode(type, inputs.of_rank[static_cast<size_t>(rank)][i]) * factor);
        }
        for (int order = 0; order < 2; ++order) {
          double total = values[0];
          for (size_t rank = 1; rank < values.size(); ++rank) {
            total = combine(op, total, values[rank]);
            // Any partial result, not just the last, is a number of the type (an average's need
            // only be exact in fp32).
            uint64_t bits = 0;
            if (op == Op::kAvg) {
              ASSERT_EQ(static_cast<float>(total), total);
            } else {
              ASSERT_TRUE(encode(type, total, &bits))
                  << name_of(op) << " over " << ranks << " ranks passes " << total;
            }
          }
          if (op == Op::kAvg) total /= ranks;
          ASSERT_EQ(total, decode(type, inputs.expected[i])) << name_of(op) << " of " << ranks;
          std::reverse(values.begin(), values.end());
        }
      }
    }
  }
}

template <typename Integer>
void expect_integer_results(Type type) {
  using Unsigned = std::make_unsigned_t<Integer>;
  for (const int ranks : {1, 2, 3, 7}) {
    for (const Op op : {Op::kSum, Op::kProd, Op::kMax, Op::kMin, Op::kAvg, Op::kMulSum}) {
      const Inputs inputs = make_inputs(type, op, ranks, 2000, 0);
      for (size_t i = 0; i < inputs.expected.size(); ++i) {
        Unsigned total = 0;
        for (int rank = 0; rank < ranks; ++rank) {
          auto value = static_cast<Unsigned>(inputs.of_rank[static_cast<size_t>(rank)][i]);
          if (op == Op::kMulSum) value = static_cast<Unsigned>(value * premul_factor(type, rank));
          if (rank == 0) {
            total = value;
          } else if (op == Op::kProd) {
            total = static_cast<Unsigned>(uint64_t{total} * uint64_t{value});
          } else if (op == Op::kMax) {
            total = static_cast<Unsigned>(
                std::max(static_cast<Integer>(total), static_cast<Integer>(value)));
          } else if (op == Op::kMin) {
            total = static_cast<Unsigned>(
                std::min(static_cast<Integer>(total), static_cast<Integer>(value)));
          } else {
            total = static_cast<Unsigned>(total + value);
          }
        }
        Integer result = static_cast<Integer>(total);
        if (op == Op::kAvg) {
          ASSERT_EQ(result % static_cast<Integer>(ranks), 0);
          result = static_cast<Integer>(result / static_cast<Integer>(ranks));
        }
        ASSERT_EQ(static_cast<Unsigned>(result), static_cast<Unsigned>(inputs.expected[i]))
            << name_of(type) << " " << name_of(op) << " of " << ranks;
      }
    }
  }
}

TEST(PatternTest, IntegerResultsWrapAround) {
  expect_integer_results<int8_t>(Type::kInt8);
  expect_integer_results<uint8_t>(Type::kUint8);
  expect_integer_results<int32_t>(Type::kInt32);
  expect_integer_results<uint32_t>(Type::kUint32);
  expect_integer_results<int64_t>(Type::kInt64);
  expect_integer_results<uint64_t>(Type::kUint64);
}

TEST(PatternTest, FiniteNumbersSurviveDecodingAndEncoding) {
  for (const Type type : {Type::kHalf, Type::kBfloat16, Type::kFp8E4m3, Type::kFp8E5m2}) {
    for (uint64_t bits = 0; bits < uint64_t{1} << (8 * size_of(type)); ++bits) {
      const double value = decode(type, bits);
      if (!std::isfinite(value)) continue;
      uint64_t again = 0;
      ASSERT_TRUE(encode(type, value, &again)) << name_of(type) << " " << bits;
      ASSERT_EQ(again, bits) << name_of(type);
    }
  }
  EXPECT_EQ(decode(Type::kFp8E4m3, 0x7e), 448);
  EXPECT_EQ(decode(Type::kFp8E5m2, 0x7b), 57344);
  EXPECT_EQ(decode(Type::kHalf, 0x7bff), 65504);
  EXPECT_EQ(decode(Type::kBfloat16, 0x3f80), 1);
  EXPECT_EQ(decode(Type::kFloat, 0x40490fdb), 3.1415927410125732);
  uint64_t bits = 0;
  EXPECT_FALSE(encode(Type::kFp8E4m3, 17, &bits));
}

TEST(PatternTest, OneChangedOrMisplacedElementIsSeen) {
  const Pattern pattern = make_copy_pattern(Type::kInt32, 7);
  const size_t count = 3 * Pattern::kBlock + 17;
  std::vector<int32_t> data(count);
  pattern.fill(data.data(), 100, count);
  ASSERT_EQ(pattern.count_wrong(data.data(), 100, count), 0u);
  for (const size_t at : {size_t{0}, count / 2, count - 1}) {
    data[at] ^= 1;
    EXPECT_EQ(pattern.count_wrong(data.data(), 100, count), 1u);
    data[at] ^= 1;
  }
  std::rotate(data.begin(), data.begin() + static_cast<long>(Pattern::kBlock), data.end());
  EXPECT_GT(pattern.count_wrong(data.data(), 100, count), count / 2);
}

}  // namespace
}  // namespace scape::perf
