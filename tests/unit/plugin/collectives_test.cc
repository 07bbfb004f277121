// All collectives over real UCX between real processes, against the single-process simulation.
#include <gtest/gtest.h>

#include <algorithm>

#include "plugin/collectives/order.h"
#include "tests/unit/plugin/testing.h"

namespace scape::plugin::test {
namespace {

using scape::test::all_well;
using scape::test::run_ranks;
using scape::test::text_of;

constexpr ReduceOp kOps[] = {ReduceOp::kSum, ReduceOp::kProd, ReduceOp::kMax,
                             ReduceOp::kMin, ReduceOp::kAvg,  ReduceOp::kPremulSum};

Reduction reduction_of(ReduceOp op, int rank) {
  Reduction reduction;
  reduction.op = op;
  reduction.factor = rank % 2 == 0 ? 0.5 : 2;
  reduction.integer_factor = rank + 1;
  return reduction;
}

// What all ranks put in, as every rank can compute it.
struct Inputs {
  std::vector<std::vector<std::byte>> bytes;
  std::vector<const void*> pointers;
  std::vector<Reduction> reductions;

  Inputs(int size, size_t count, DataType type, ReduceOp op, uint64_t seed) {
    for (int r = 0; r < size; ++r) {
      bytes.push_back(rough_values(type, count, seed + static_cast<uint64_t>(r) * 101));
      reductions.push_back(reduction_of(op, r));
    }
    for (const auto& each : bytes) pointers.push_back(each.data());
  }
};

std::string all_reduces(Communicator& communicator, DataType type, ReduceOp op, size_t count) {
  const int rank = communicator.rank(), size = communicator.size();
  const Inputs inputs(size, count, type, op, count + 1);
  const auto& mine = inputs.bytes[static_cast<size_t>(rank)];
  std::vector<std::byte> expected(mine.size());
  SCAPE_RANK_OK(
      simulate_all_reduce(inputs.pointers, expected.data(), count, type, inputs.reductions));
  // Out of place with guards, then in place.
  const std::byte guard{0x5a};
  std::vector<std::byte> result(mine.size() + 128, guard);
  const std::vector<std::byte> send = mine;
  WorkPtr work;
  SCAPE_RANK_OK(
      finish(communicator,
             communicator.all_reduce(send.data(), result.data() + 64, count, type,
                                     inputs.reductions[static_cast<size_t>(rank)], {}, &work),
             work));
  SCAPE_RANK_EXPECT(std::equal(expected.begin(), expected.end(), result.begin() + 64));
  for (size_t i = 0; i < 64; ++i)
    SCAPE_RANK_EXPECT(result[i] == guard && result[64 + mine.size() + i] == guard);
  SCAPE_RANK_EXPECT(send == mine);
  std::vector<std::byte> in_place = mine;
  SCAPE_RANK_OK(
      finish(communicator,
             communicator.all_reduce(in_place.data(), in_place.data(), count, type,
                                     inputs.reductions[static_cast<size_t>(rank)], {}, &work),
             work));
  SCAPE_RANK_EXPECT(in_place == expected);
  return "";
}

class Collectives : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, Collectives, testing::Values(1, 2, 3, 4, 7));

TEST_P(Collectives, AllReduceOfEveryTypeAndOpGivesTheSimulatedBits) {
  const UniqueId id = new_id();
  const auto results = run_ranks(
      GetParam(),
      [&](int rank, int size) -> std::string {
        std::shared_ptr<Communicator> communicator;
        SCAPE_RANK_OK(create_communicator(id, rank, size, &communicator));
        for (int type = 0; type < kDataTypes; ++type) {
          for (const ReduceOp op : kOps) {
            for (const size_t count : {0, 1, 2, 17, 20011}) {
              const std::string problem =
                  all_reduces(*communicator, static_cast<DataType>(type), op, count);
              if (!problem.empty()) {
                return problem + " " + name_of(static_cast<DataType>(type)) + " " + name_of(op) +
                       " " + std::to_string(count);
              }
            }
          }
        }
        return "";
      },
      60);
  EXPECT_TRUE(all_well(results)) << text_of(results);
}

}  // namespace
}  // namespace scape::plugin::test
