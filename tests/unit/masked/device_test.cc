// The masked all-reduce on simulated devices against the simulation, bit for bit.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "device_ranks.h"

namespace scape::plugin::test {
namespace {

constexpr scape_role kRoles[] = {SCAPE_ROLE_FUSED, SCAPE_ROLE_FIRST_MOMENT,
                                 SCAPE_ROLE_GRADIENT_HOOKED, SCAPE_ROLE_GRADIENT};

// All on one communicator, one after another.
void expect_equal(int ranks, const std::vector<Scenario>& scenarios) {
  run_device_ranks(ranks, [&](const DeviceRank& rank) {
    for (Scenario scenario : scenarios) {
      scenario.blind = true;
      const std::string difference = run_scenario(rank, scenario);
      EXPECT_EQ(difference, "") << "rank " << rank.communicator->rank() << " of "
                                << describe(scenario, ranks);
      if (!difference.empty()) return;
    }
  });
}

TEST(DeviceBuffer, EqualsTheSimulationInEveryRole) {
  for (const int ranks : {1, 2, 3}) {
    std::vector<Scenario> scenarios;
    for (const scape_role role : kRoles) {
      for (const scape_dtype payload : {SCAPE_FLOAT32, SCAPE_BFLOAT16}) {
        Scenario scenario{.config = short_config(0.9, role), .steps = 16};
        scenario.config.payload = payload;
        scenario.inject_nonfinite = payload == SCAPE_BFLOAT16;
        scenarios.push_back(scenario);
      }
    }
    expect_equal(ranks, scenarios);
  }
}

TEST(DeviceBuffer, EqualsTheSimulationWithTheResidualInPlace) {
  std::vector<Scenario> scenarios;
  for (const scape_dtype payload : {SCAPE_FLOAT32, SCAPE_BFLOAT16}) {
    Scenario scenario{.config = short_config(0.9, SCAPE_ROLE_FUSED), .steps = 24};
    scenario.config.payload = payload;
    scenario.config.residual = SCAPE_RESIDUAL_IN_PLACE;
    scenarios.push_back(scenario);
    scenario.inject_nonfinite = true;
    scenario.flush_at = 12;
    scenario.reload_at = 17;
    scenarios.push_back(scenario);
  }
  expect_equal(2, scenarios);
}

// Several chunks of SCAPE_RESIDUAL_CHUNK, of which the last is not whole.
constexpr size_t kChunks = 4 * 2048 + 515;

TEST(DeviceBuffer, EqualsTheSimulationWithTheResidualInHostMemory) {
  std::vector<Scenario> scenarios;
  for (const scape_role role : kRoles) {
    for (const scape_dtype payload : {SCAPE_FLOAT32, SCAPE_BFLOAT16}) {
      Scenario scenario{.config = short_config(0.9, role), .count = kChunks, .steps = 11};
      scenario.config.payload = payload;
      scenario.config.residual = SCAPE_RESIDUAL_HOST;
      scenario.config.dtype = payload;  // narrow buffers, too
      scenario.inject_nonfinite = true;
      scenario.flush_at = 9;
      scenarios.push_back(scenario);
    }
  }
  expect_equal(2, scenarios);
}

TEST(DeviceBuffer, EqualsTheSimulationWithResidualsInHostMemoryAtOddCounts) {
  std::vector<Scenario> scenarios;
  for (const size_t count : {0, 1, 63, 65, 2047, 2048, 2049, 4096, 4097}) {
    scenarios.push_back(
        {.config = short_config(0.9, SCAPE_ROLE_FUSED), .count = count, .steps = 6});
    scenarios.back().config.residual = SCAPE_RESIDUAL_HOST;
  }
  expect_equal(3, scenarios);
}

TEST(DeviceBuffer, EqualsTheSimulationWhereStateIsLoadedWithAnotherPlaceOfTheResidual) {
  constexpr scape_residual kPlaces[] = {SCAPE_RESIDUAL_INTERNAL, SCAPE_RESIDUAL_IN_PLACE,
                                        SCAPE_RESIDUAL_HOST};
  std::vector<Scenario> scenarios;
  for (const scape_residual from : kPlaces) {
    for (const scape_residual to : kPlaces) {
      Scenario scenario{.config = short_config(0.9, SCAPE_ROLE_FUSED), .count = 2500, .steps = 9};
      scenario.config.residual = from;
      scenario.reload_at = 6;
      scenario.reload_to = to;
      scenarios.push_back(scenario);
    }
  }
  expect_equal(2, scenarios);
}

TEST(DeviceBuffer, EqualsTheSimulationAtOddCounts) {
  std::vector<Scenario> scenarios;
  for (const size_t count : {0, 1, 5, 63, 64, 65, 130, 1000, 4097}) {
    for (const scape_role role : {SCAPE_ROLE_FUSED, SCAPE_ROLE_GRADIENT})
      scenarios.push_back({.config = short_config(0.9, role), .count = count, .steps = 8});
  }
  // Large enough that masks travel as offsets, and over several blocks of them.
  scenarios.push_back(
      {.config = short_config(0.99, SCAPE_ROLE_FUSED), .count = 200001, .steps = 6});
  scenarios.back().config.ramp_steps = 4;
  expect_equal(3, scenarios);
}

TEST(DeviceBuffer, EqualsTheSimulationInHalfPrecisionBuffers) {
  std::vector<Scenario> scenarios;
  for (const scape_dtype dtype : {SCAPE_BFLOAT16, SCAPE_FLOAT16}) {
    for (const scape_role role : kRoles) {
      Scenario scenario{.config = short_config(0.9, role), .steps = 14, .inject_nonfinite = true};
      scenario.config.dtype = dtype;
      scenarios.push_back(scenario);
    }
  }
  expect_equal(2, scenarios);
}

TEST(DeviceBuffer, EqualsTheSimulationWithEveryReduction) {
  std::vector<Scenario> scenarios;
  for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kPremulSum}) {
    for (const scape_role role : kRoles) {
      scenarios.push_back({.config = short_config(0.9, role),
                           .steps = 12,
                           .op = op,
                           .out_of_place = role != SCAPE_ROLE_FUSED});
    }
  }
  expect_equal(2, scenarios);
}

TEST(DeviceBuffer, EqualsTheSimulationThroughFlushAndReload) {
  std::vector<Scenario> scenarios;
  for (const scape_role role : kRoles) {
    for (const int at : {1, 2, 9}) {
      Scenario scenario{.config = short_config(0.9, role), .steps = 12, .inject_nonfinite = true};
      scenario.flush_at = at;
      scenarios.push_back(scenario);
      scenario.flush_at = -1;
      scenario.reload_at = at;
      scenarios.push_back(scenario);
    }
  }
  expect_equal(2, scenarios);
}

TEST(DeviceBuffer, EqualsTheSimulationUnderThePlainRuleAndAtSparsityZero) {
  std::vector<Scenario> scenarios;
  for (const scape_role role : kRoles) {
    Scenario scenario{.config = short_config(0.9, role), .steps = 12, .inject_nonfinite = true};
    scenario.config.rule = SCAPE_RULE_PLAIN;
    scenarios.push_back(scenario);
    scenario.config = short_config(0, role);
    scenarios.push_back(scenario);
  }
  expect_equal(2, scenarios);
}

}  // namespace
}  // namespace scape::plugin::test
