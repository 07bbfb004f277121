// Every schedule of every rank, run in one process without a transport.
#include "plugin/collectives/schedules.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <span>

#include "plugin/collectives/order.h"
#include "tests/unit/plugin/testing.h"

namespace scape::plugin::test {
namespace {

constexpr int kMaxRanks = 9;
constexpr Algorithm kAlgorithms[] = {Algorithm::kFlat, Algorithm::kRecursiveDoubling,
                                     Algorithm::kRing, Algorithm::kDirect};

using Buffers = std::vector<std::vector<int64_t>>;

// Inputs that tell rank and place.
Buffers inputs_of(int ranks, size_t count) {
  Buffers inputs(static_cast<size_t>(ranks), std::vector<int64_t>(count));
  for (size_t r = 0; r < inputs.size(); ++r) {
    for (size_t i = 0; i < count; ++i)
      inputs[r][i] = static_cast<int64_t>((r + 1) * 1000003 + i * 7);
  }
  return inputs;
}

// Runs make(rank)'s schedules; send[r] may be recv[r].
Status run(int ranks, const std::function<std::shared_ptr<const Schedule>(int)>& make,
           const Buffers& send, Buffers* recv, ReduceOp op = ReduceOp::kSum) {
  std::vector<std::shared_ptr<const Schedule>> schedules;
  std::vector<const void*> from;
  std::vector<void*> to;
  for (int r = 0; r < ranks; ++r) {
    schedules.push_back(make(r));
    from.push_back(send[static_cast<size_t>(r)].data());
    to.push_back((*recv)[static_cast<size_t>(r)].data());
  }
  Reduction reduction;
  reduction.op = op;
  reduction.integer_factor = 3;
  return simulate(schedules, from, to, std::span<const Reduction>(&reduction, 1));
}

Shape shape_of(int rank, int ranks, size_t count) {
  return {rank, ranks, count, DataType::kInt64, ReduceOp::kSum, false};
}

class Schedules : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, Schedules, testing::Range(1, kMaxRanks + 1));

// From nothing to several chunks a slice.
const size_t kCounts[] = {0, 1, 2, 7, 8, 9, 63, 65, 1001, 70001, 1300003};
// Longer ones are for few ranks; the thread sanitizer, which has no threads to watch here, makes
// them costly.
#if defined(__SANITIZE_THREAD__)
constexpr size_t kLong = 2000;
#else
constexpr size_t kLong = 100000;
#endif

TEST_P(Schedules, AllReduceSumsEverywhereInAndOutOfPlace) {
  const int ranks = GetParam();
  for (const Algorithm algorithm : kAlgorithms) {
    for (const size_t count : kCounts) {
      if (count > kLong && ranks > 3) continue;
      const Buffers inputs = inputs_of(ranks, count);
      std::vector<int64_t> expected(count);
      for (const auto& input : inputs) {
        for (size_t i = 0; i < count; ++i) expected[i] += input[i];
      }
      const auto make = [&](int r) {
        return all_reduce_schedule(shape_of(r, ranks, count), algorithm);
      };
      Buffers outputs(inputs.size(), std::vector<int64_t>(count, -1));
      const Status status = run(ranks, make, inputs, &outputs);
      ASSERT_TRUE(status.ok()) << name_of(algorithm) << " " << count << ": " << status.message();
      for (const auto& output : outputs)
        ASSERT_EQ(output, expected) << name_of(algorithm) << " " << count;
      Buffers both = inputs;
      ASSERT_TRUE(run(ranks, make, both, &both).ok());
      for (const auto& output : both)
        ASSERT_EQ(output, expected) << name_of(algorithm) << " " << count;
    }
  }
}

TEST_P(Schedules, PremultipliedAndAveragedOnce) {
  const int ranks = GetParam();
  const size_t count = 70001;
  const Buffers inputs = inputs_of(ranks, count);
  for (const ReduceOp op : {ReduceOp::kAvg, ReduceOp::kPremulSum}) {
    std::vector<int64_t> expected(count);
    for (const auto& input : inputs) {
      for (size_t i = 0; i < count; ++i)
        expected[i] += op == ReduceOp::kPremulSum ? 3 * input[i] : input[i];
    }
    if (op == ReduceOp::kAvg) {
      for (int64_t& value : expected) value /= ranks;
    }
    for (const Algorithm algorithm : kAlgorithms) {
      Buffers outputs(inputs.size(), std::vector<int64_t>(count, -1));
      const auto make = [&](int r) {
        Shape shape = shape_of(r, ranks, count);
        shape.op = op;
        return all_reduce_schedule(shape, algorithm);
      };
      ASSERT_TRUE(run(ranks, make, inputs, &outputs, op).ok());
      for (const auto& output : outputs) ASSERT_EQ(output, expected) << name_of(algorithm);
    }
  }
}

TEST_P(Schedules, OthersPutEverythingInItsPlace) {
  const int ranks = GetParam();
  const size_t all = static_cast<size_t>(ranks);
  for (const size_t count : kCounts) {
    if (count > kLong && ranks > 2) continue;
    const Buffers whole = inputs_of(ranks, count * all), own = inputs_of(ranks, count);
    // reduce-scatter
    const std::vector<size_t> equal(all, count);
    Buffers out(all, std::vector<int64_t>(count, -1));
    ASSERT_TRUE(
        run(
            ranks,
            [&](int r) { return reduce_scatter_schedule(shape_of(r, ranks, count * all), equal); },
            whole, &out)
            .ok());
    for (size_t r = 0; r < all; ++r) {
      for (size_t i = 0; i < count; ++i) {
        int64_t sum = 0;
        for (const auto& input : whole) sum += input[r * count + i];
        ASSERT_EQ(out[r][i], sum);
      }
    }
    // all-gather
    out.assign(all, std::vector<int64_t>(count * all, -1));
    ASSERT_TRUE(run(
                    ranks,
                    [&](int r) { return all_gather_schedule(shape_of(r, ranks, count), equal); },
                    own, &out)
                    .ok());
    for (const auto& output : out) {
      for (size_t r = 0; r < all; ++r)
        ASSERT_TRUE(std::equal(own[r].begin(), own[r].end(),
                               output.begin() + static_cast<std::ptrdiff_t>(r * count)));
    }
    // all-gather of unequal parts
    std::vector<size_t> counts(all);
    for (size_t r = 0; r < all; ++r) counts[r] = r % 3 == 1 ? 0 : count / (r + 1);
    const size_t total = std::accumulate(counts.begin(), counts.end(), size_t{0});
    out.assign(all, std::vector<int64_t>(total, -1));
    ASSERT_TRUE(run(
                    ranks,
                    [&](int r) { return all_gather_schedule(shape_of(r, ranks, total), counts); },
                    own, &out)
                    .ok());
    for (const auto& output : out) {
      size_t at = 0;
      for (size_t r = 0; r < all; ++r) {
        for (size_t i = 0; i < counts[r]; ++i) ASSERT_EQ(output[at++], own[r][i]);
      }
    }
    // reduce-scatter of unequal parts
    for (size_t r = 0; r < all; ++r) out[r].assign(counts[r], -1);
    ASSERT_TRUE(
        run(
            ranks,
            [&](int r) { return reduce_scatter_schedule(shape_of(r, ranks, total), counts); },
            whole, &out)
            .ok());
    for (size_t r = 0, at = 0; r < all; ++r) {
      for (size_t i = 0; i < counts[r]; ++i, ++at) {
        int64_t sum = 0;
        for (const auto& input : whole) sum += input[at];
        ASSERT_EQ(out[r][i], sum);
      }
    }
    // all-to-all, in and out of place
    for (const bool in_place : {false, true}) {
      Buffers parts = whole;
      out.assign(all, std::vector<int64_t>(count * all, -1));
      const auto make = [&](int r) {
        Shape shape = shape_of(r, ranks, count);
        shape.in_place = in_place;
        return all_to_all_schedule(shape);
      };
      ASSERT_TRUE(run(ranks, make, parts, in_place ? &parts : &out).ok());
      const Buffers& result = in_place ? parts : out;
      for (size_t r = 0; r < all; ++r) {
        for (size_t s = 0; s < all; ++s) {
          for (size_t i = 0; i < count; ++i)
            ASSERT_EQ(result[r][s * count + i], whole[s][r * count + i]);
        }
      }
    }
    for (int root = 0; root < ranks; ++root) {
      const size_t at_root = static_cast<size_t>(root);
      // broadcast
      out.assign(all, std::vector<int64_t>(count, -1));
      ASSERT_TRUE(run(
                      ranks,
                      [&](int r) { return broadcast_schedule(shape_of(r, ranks, count), root); },
                      own, &out)
                      .ok());
      for (const auto& output : out) ASSERT_EQ(output, own[at_root]);
      // reduce
      out.assign(all, std::vector<int64_t>(count, -1));
      ASSERT_TRUE(run(
                      ranks,
                      [&](int r) { return reduce_schedule(shape_of(r, ranks, count), root); }, own,
                      &out)
                      .ok());
      for (size_t i = 0; i < count; ++i) {
        int64_t sum = 0;
        for (const auto& input : own) sum += input[i];
        ASSERT_EQ(out[at_root][i], sum);
      }
      // gather
      out.assign(all, std::vector<int64_t>(count * all, -1));
      ASSERT_TRUE(run(
                      ranks,
                      [&](int r) { return gather_schedule(shape_of(r, ranks, count), root); }, own,
                      &out)
                      .ok());
      for (size_t r = 0; r < all; ++r)
        ASSERT_TRUE(std::equal(own[r].begin(), own[r].end(),
                               out[at_root].begin() + static_cast<std::ptrdiff_t>(r * count)));
      // scatter
      out.assign(all, std::vector<int64_t>(count, -1));
      ASSERT_TRUE(run(
                      ranks,
                      [&](int r) { return scatter_schedule(shape_of(r, ranks, count), root); },
                      whole, &out)
                      .ok());
      for (size_t r = 0; r < all; ++r)
        ASSERT_TRUE(std::equal(out[r].begin(), out[r].end(),
                               whole[at_root].begin() + static_cast<std::ptrdiff_t>(r * count)));
    }
  }
}

// The order of summation that order.h documents, written out a second time.
TEST_P(Schedules, SumInTheDocumentedOrder) {
  const int ranks = GetParam();
  const size_t all = static_cast<size_t>(ranks);
  for (const size_t count : {size_t{3}, size_t{997}, size_t{200001}}) {
    std::vector<std::vector<float>> inputs(all, std::vector<float>(count));
    std::vector<const void*> pointers;
    for (size_t r = 0; r < all; ++r) {
      const auto bytes = rough_values(DataType::kFloat32, count, r + 1);
      std::memcpy(inputs[r].data(), bytes.data(), bytes.size());
      pointers.push_back(inputs[r].data());
    }
    std::vector<float> in_rank_order = inputs[0];
    for (size_t r = 1; r < all; ++r) {
      for (size_t i = 0; i < count; ++i) in_rank_order[i] += inputs[r][i];
    }
    std::vector<float> doubled(count);
    size_t power = 1;
    while (power * 2 <= all) power *= 2;
    for (size_t i = 0; i < count; ++i) {
      std::vector<float> y(power);
      for (size_t r = 0; r < power; ++r)
        y[r] = r + power < all ? inputs[r][i] + inputs[r + power][i] : inputs[r][i];
      for (size_t width = power; width > 1; width /= 2) {
        for (size_t r = 0; r < width / 2; ++r) y[r] = y[2 * r] + y[2 * r + 1];
      }
      doubled[i] = y[0];
    }
    std::vector<float> round(count);
    for (int q = 0; q < ranks; ++q) {
      const Range slice = slice_of(count, 4, ranks, q);
      for (size_t i = slice.begin; i < slice.end; ++i) {
        float sum = inputs[static_cast<size_t>((q + 1) % ranks)][i];
        for (int d = 2; d <= ranks; ++d) sum += inputs[static_cast<size_t>((q + d) % ranks)][i];
        round[i] = sum;
      }
    }
    for (const Algorithm algorithm : kAlgorithms) {
      std::vector<std::shared_ptr<const Schedule>> schedules;
      std::vector<std::vector<float>> outputs(all, std::vector<float>(count));
      std::vector<void*> to;
      for (int r = 0; r < ranks; ++r) {
        const Shape shape{r, ranks, count, DataType::kFloat32, ReduceOp::kSum, false};
        schedules.push_back(all_reduce_schedule(shape, algorithm));
        to.push_back(outputs[static_cast<size_t>(r)].data());
      }
      const Reduction sum;
      ASSERT_TRUE(simulate(schedules, pointers, to, std::span<const Reduction>(&sum, 1)).ok());
      const std::vector<float>& expected = algorithm == Algorithm::kRing ? round
                                           : algorithm == Algorithm::kRecursiveDoubling
                                               ? doubled
                                               : in_rank_order;
      for (const auto& output : outputs)
        ASSERT_EQ(output, expected) << name_of(algorithm) << " " << count;
    }
    std::vector<float> automatic(count);
    ASSERT_TRUE(
        simulate_all_reduce(pointers, automatic.data(), count, DataType::kFloat32, Reduction{})
            .ok());
    const Algorithm chosen = choose_all_reduce(ranks, count, DataType::kFloat32, ReduceOp::kSum);
    ASSERT_EQ(automatic, ranks == 1                                ? in_rank_order
                         : chosen == Algorithm::kRing              ? round
                         : chosen == Algorithm::kRecursiveDoubling ? doubled
                                                                   : in_rank_order);
  }
}

// ---- in shared memory ----

const std::vector<std::vector<std::vector<int>>> kHosts = {
    {{0, 1}},
    {{0, 1, 2, 3, 4, 5, 6}},
    {{0, 1}, {2, 3}},
    {{0, 2}, {1, 3}},
    {{1, 2, 3}, {0}},
    {{0, 1, 2}, {3, 4}},
    {{0, 1}, {2, 3}, {4, 5}},
    {{0, 4}, {1, 5}, {2, 6}, {3, 7}},
};

// Runs a call over shared memory that holds inputs[r] as rank r's operand; the result of each host.
template <typename T>
std::vector<std::vector<T>> run_shared(const std::vector<std::vector<int>>& hosts,
                                       const std::vector<std::vector<T>>& inputs, DataType type,
                                       Reduction reduction) {
  const size_t count = inputs[0].size();
  SharedLayout layout{hosts, (count * sizeof(T) + 127) / 64 * 64};
  std::vector<std::vector<std::byte>> memory(hosts.size());
  std::vector<std::byte*> shared(inputs.size());
  for (size_t h = 0; h < hosts.size(); ++h) {
    memory[h].resize((hosts[h].size() + 1) * layout.stride);
    for (size_t j = 0; j < hosts[h].size(); ++j) {
      const auto r = static_cast<size_t>(hosts[h][j]);
      shared[r] = memory[h].data();
      const auto bytes = std::as_bytes(std::span(inputs[r]));
      std::copy(bytes.begin(), bytes.end(), memory[h].data() + j * layout.stride);
    }
  }
  std::vector<std::shared_ptr<const Schedule>> schedules;
  for (size_t r = 0; r < inputs.size(); ++r) {
    const Shape shape{
        static_cast<int>(r), static_cast<int>(inputs.size()), count, type, reduction.op, false};
    schedules.push_back(shared_all_reduce_schedule(shape, layout));
  }
  const std::vector<const void*> send(inputs.size());
  const std::vector<void*> recv(inputs.size());
  const Status status =
      simulate(schedules, send, recv, std::span<const Reduction>(&reduction, 1), shared);
  EXPECT_TRUE(status.ok()) << status.message();
  std::vector<std::vector<T>> results(hosts.size(), std::vector<T>(count));
  for (size_t h = 0; h < hosts.size(); ++h) {
    const std::byte* const result = memory[h].data() + hosts[h].size() * layout.stride;
    std::copy_n(result, count * sizeof(T), std::as_writable_bytes(std::span(results[h])).begin());
  }
  return results;
}

int ranks_of(const std::vector<std::vector<int>>& hosts) {
  size_t ranks = 0;
  for (const auto& host : hosts) ranks += host.size();
  return static_cast<int>(ranks);
}

TEST(SharedSchedules, SumEverywhere) {
  for (const auto& hosts : kHosts) {
    const int ranks = ranks_of(hosts);
    for (const size_t count : kCounts) {
      if (count > kLong && ranks > 4) continue;
      const Buffers inputs = inputs_of(ranks, count);
      for (const ReduceOp op :
           {ReduceOp::kSum, ReduceOp::kAvg, ReduceOp::kPremulSum, ReduceOp::kMax}) {
        std::vector<int64_t> expected(count, op == ReduceOp::kMax ? INT64_MIN : 0);
        for (const auto& input : inputs) {
          for (size_t i = 0; i < count; ++i) {
            expected[i] = op == ReduceOp::kMax         ? std::max(expected[i], input[i])
                          : op == ReduceOp::kPremulSum ? expected[i] + 3 * input[i]
                                                       : expected[i] + input[i];
          }
        }
        if (op == ReduceOp::kAvg) {
          for (int64_t& value : expected) value /= ranks;
        }
        const auto results =
            run_shared(hosts, inputs, DataType::kInt64, {.op = op, .integer_factor = 3});
        for (const auto& result : results)
          ASSERT_EQ(result, expected) << hosts.size() << " hosts, " << count << " " << name_of(op);
      }
    }
  }
}

TEST(SharedSchedules, SumInTheDocumentedOrder) {
  for (const auto& hosts : kHosts) {
    const size_t ranks = static_cast<size_t>(ranks_of(hosts));
    size_t owners = SIZE_MAX;
    for (const auto& host : hosts) owners = std::min(owners, host.size());
    for (const size_t count : {size_t{3}, size_t{997}, size_t{200001}}) {
      std::vector<std::vector<float>> inputs(ranks, std::vector<float>(count));
      for (size_t r = 0; r < ranks; ++r) {
        const auto bytes = rough_values(DataType::kFloat32, count, r + 1);
        std::memcpy(inputs[r].data(), bytes.data(), bytes.size());
      }
      std::vector<std::vector<float>> sums;
      for (const auto& host : hosts) {
        sums.push_back(inputs[static_cast<size_t>(host[0])]);
        for (size_t j = 1; j < host.size(); ++j) {
          for (size_t i = 0; i < count; ++i)
            sums.back()[i] += inputs[static_cast<size_t>(host[j])][i];
        }
      }
      std::vector<float> expected(count);
      for (size_t q = 0; q < owners; ++q) {
        const Range slice = slice_of(count, 4, static_cast<int>(owners), static_cast<int>(q));
        std::vector<const void*> operands;
        for (const auto& sum : sums) operands.push_back(sum.data() + slice.begin);
        ASSERT_TRUE(simulate_all_reduce(operands, expected.data() + slice.begin, slice.size(),
                                        DataType::kFloat32, Reduction{})
                        .ok());
      }
      for (const auto& result : run_shared(hosts, inputs, DataType::kFloat32, Reduction{}))
        ASSERT_EQ(result, expected) << hosts.size() << " hosts, " << count;
    }
  }
}

// bf16 of one host: summed in fp32, rounded once.
TEST(SharedSchedules, RoundNarrowTypesOnce) {
  ASSERT_TRUE(shares_all_reduce(1, DataType::kBfloat16, ReduceOp::kAvg));
  EXPECT_FALSE(shares_all_reduce(2, DataType::kBfloat16, ReduceOp::kSum));
  EXPECT_FALSE(shares_all_reduce(1, DataType::kBfloat16, ReduceOp::kPremulSum));
  EXPECT_TRUE(shares_all_reduce(2, DataType::kFloat32, ReduceOp::kPremulSum));
  const size_t count = 70001;
  for (const int ranks : {2, 3, 7}) {
    std::vector<std::vector<uint16_t>> inputs;
    std::vector<const void*> pointers;
    std::vector<int> host;
    for (int r = 0; r < ranks; ++r) {
      const auto bytes = rough_values(DataType::kBfloat16, count, static_cast<uint64_t>(r) + 1);
      inputs.emplace_back(count);
      std::memcpy(inputs.back().data(), bytes.data(), bytes.size());
      host.push_back(r);
    }
    for (const auto& input : inputs) pointers.push_back(input.data());
    for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kAvg}) {
      std::vector<uint16_t> expected(count);
      ASSERT_TRUE(
          simulate_all_reduce(pointers, expected.data(), count, DataType::kBfloat16, {.op = op})
              .ok());
      ASSERT_EQ(run_shared({host}, inputs, DataType::kBfloat16, {.op = op})[0], expected);
    }
  }
}

TEST(Slices, CoverAllInWholeLinesAlsoBeyond32Bits) {
  for (const size_t count :
       {size_t{0}, size_t{1}, size_t{15}, size_t{16}, size_t{17}, size_t{1000},
        (size_t{1} << 31) - 1, size_t{1} << 31, (size_t{1} << 32) + 5, size_t{1} << 33}) {
    for (int ranks = 1; ranks <= kMaxRanks; ++ranks) {
      size_t at = 0;
      for (int q = 0; q < ranks; ++q) {
        const Range slice = slice_of(count, 4, ranks, q);
        ASSERT_EQ(slice.begin, at);
        ASSERT_TRUE(slice.begin % 16 == 0 || slice.begin == count);
        at = slice.end;
      }
      ASSERT_EQ(at, count);
    }
  }
}

TEST(Schedule, OfHugeCountsHasNoMessageBeyondWhatTransportsTake) {
  const size_t count = size_t{1} << 33;
  for (int rank = 0; rank < 2; ++rank) {
    const auto schedule =
        all_reduce_schedule({rank, 2, count, DataType::kBfloat16, ReduceOp::kSum, false});
    size_t sent = 0;
    for (const Step& step : schedule->steps) {
      if (step.kind != StepKind::kSend) continue;
      ASSERT_LT(step.amount, size_t{1} << 30);
      ASSERT_LE(step.from.offset + step.amount, count * 2);
      sent += step.amount;
    }
    EXPECT_EQ(sent, count * 2);  // half as operands, half as results
    EXPECT_LT(schedule->scratch_bytes, size_t{64} << 20);
  }
}

}  // namespace
}  // namespace scape::plugin::test
