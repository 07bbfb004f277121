// The masked all-reduce against the simulation, over ranks that are threads: many shapes, roles and
// events.
#include "plugin/masked/masked_buffer.h"

#include <gtest/gtest.h>

#include <mutex>
#include <string>
#include <vector>

#include "local_group.h"
#include "scenario.h"

namespace scape::plugin::test {
namespace {

void expect_equal(int ranks, const Scenario& scenario) {
  std::mutex mutex;
  run_local(ranks, [&](std::shared_ptr<Communicator> communicator) {
    const int rank = communicator->rank();
    const std::string difference = run_scenario(Rank(std::move(communicator)), scenario);
    std::lock_guard lock(mutex);
    EXPECT_EQ(difference, "") << "rank " << rank << " of " << describe(scenario, ranks);
  });
}

constexpr scape_role kRoles[] = {SCAPE_ROLE_FUSED, SCAPE_ROLE_FIRST_MOMENT,
                                 SCAPE_ROLE_GRADIENT_HOOKED, SCAPE_ROLE_GRADIENT};
constexpr double kSparsities[] = {0.5, 0.9, 0.99, 0.999};

TEST(MaskedBuffer, EqualsTheSimulationInEveryRole) {
  for (const scape_role role : kRoles) {
    for (const scape_dtype payload : {SCAPE_FLOAT32, SCAPE_BFLOAT16}) {
      for (int ranks = 1; ranks <= 5; ++ranks) {
        for (const double sparsity : kSparsities) {
          Scenario scenario{.config = short_config(sparsity, role)};
          scenario.config.payload = payload;
          expect_equal(ranks, scenario);
        }
      }
    }
  }
}

TEST(MaskedBuffer, EqualsTheSimulationWithTheResidualInPlace) {
  for (const scape_dtype payload : {SCAPE_FLOAT32, SCAPE_BFLOAT16}) {
    for (int ranks = 1; ranks <= 5; ++ranks) {
      for (const double sparsity : kSparsities) {
        Scenario scenario{.config = short_config(sparsity, SCAPE_ROLE_FUSED)};
        scenario.config.payload = payload;
        scenario.config.residual = SCAPE_RESIDUAL_IN_PLACE;
        for (const bool nonfinite : {false, true}) {
          scenario.inject_nonfinite = nonfinite;
          expect_equal(ranks, scenario);
        }
      }
    }
  }
}

TEST(MaskedBuffer, EqualsTheSimulationAtOddCounts) {
  for (const size_t count : {1, 5, 63, 64, 65, 127, 1000, 4097}) {
    for (const int ranks : {2, 3, 5}) {
      for (const scape_role role : kRoles) {
        expect_equal(ranks, {.config = short_config(0.9, role), .count = count, .steps = 20});
      }
    }
  }
}

TEST(MaskedBuffer, EqualsTheSimulationWithEmptyPartitions) {
  expect_equal(5, {.config = short_config(0.9, SCAPE_ROLE_FUSED), .count = 130});
  expect_equal(7, {.config = short_config(0.5, SCAPE_ROLE_GRADIENT), .count = 64 * 3 + 1});
}

TEST(MaskedBuffer, EqualsTheSimulationInHalfPrecisionBuffers) {
  for (const scape_dtype dtype : {SCAPE_BFLOAT16, SCAPE_FLOAT16}) {
    for (const scape_role role : kRoles) {
      for (const int ranks : {1, 2, 3}) {
        for (const bool nonfinite : {false, true}) {
          Scenario scenario{
              .config = short_config(0.9, role), .steps = 30, .inject_nonfinite = nonfinite};
          scenario.config.dtype = dtype;
          expect_equal(ranks, scenario);
        }
      }
    }
  }
}

TEST(MaskedBuffer, EqualsTheSimulationWithEveryReduction) {
  for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kAvg, ReduceOp::kPremulSum}) {
    for (const scape_role role : kRoles) {
      for (const int ranks : {1, 2, 4}) {
        for (const bool out_of_place : {false, true}) {
          expect_equal(ranks,
                       {.config = short_config(0.9, role), .op = op, .out_of_place = out_of_place});
        }
      }
    }
  }
}

TEST(MaskedBuffer, EqualsTheSimulationThroughNonFiniteValues) {
  for (const scape_role role : kRoles) {
    for (const scape_dtype payload : {SCAPE_FLOAT32, SCAPE_BFLOAT16}) {
      for (const int ranks : {1, 2, 3, 5}) {
        for (const bool out_of_place : {false, true}) {
          Scenario scenario{.config = short_config(0.9, role),
                            .out_of_place = out_of_place,
                            .inject_nonfinite = true};
          scenario.config.payload = payload;
          expect_equal(ranks, scenario);
        }
      }
    }
  }
}

TEST(MaskedBuffer, EqualsTheSimulationThroughFlushAndReload) {
  for (const scape_role role : kRoles) {
    for (const int at : {1, 2, 3, 9, 20}) {
      for (const bool nonfinite : {false, true}) {
        Scenario scenario{
            .config = short_config(0.9, role), .steps = 30, .inject_nonfinite = nonfinite};
        scenario.flush_at = at;
        expect_equal(3, scenario);
        scenario.flush_at = -1;
        scenario.reload_at = at;
        expect_equal(3, scenario);
        scenario.config.payload = SCAPE_BFLOAT16;
        scenario.flush_at = at;
        expect_equal(2, scenario);
        if (role != SCAPE_ROLE_FUSED) continue;
        scenario.config.residual = SCAPE_RESIDUAL_IN_PLACE;
        expect_equal(2, scenario);
      }
    }
  }
}

// As on a device: every dense step but the first travels packed, and the decay goes as far back as
// ages could.
TEST(MaskedBuffer, EqualsTheSimulationWhereTheHostLearnsNothingOfTheData) {
  for (const scape_role role : kRoles) {
    for (const scape_dtype dtype : {SCAPE_FLOAT32, SCAPE_BFLOAT16}) {
      for (const bool nonfinite : {false, true}) {
        Scenario scenario{.config = short_config(0.9, role),
                          .steps = 30,
                          .inject_nonfinite = nonfinite,
                          .blind = true};
        scenario.config.dtype = dtype;
        expect_equal(1, scenario);
        expect_equal(3, scenario);
        scenario.config.payload = SCAPE_BFLOAT16;
        scenario.out_of_place = true;
        expect_equal(2, scenario);
        scenario.config.payload = SCAPE_FLOAT32;
        scenario.out_of_place = false;
        scenario.flush_at = 9;
        expect_equal(2, scenario);
        scenario.flush_at = -1;
        scenario.reload_at = 2;
        expect_equal(3, scenario);
        if (role != SCAPE_ROLE_FUSED || dtype != SCAPE_FLOAT32) continue;
        scenario.config.residual = SCAPE_RESIDUAL_IN_PLACE;
        expect_equal(3, scenario);
      }
    }
  }
}

TEST(MaskedBuffer, EqualsTheSimulationUnderThePlainRule) {
  for (const scape_role role : kRoles) {
    Scenario scenario{.config = short_config(0.9, role)};
    scenario.config.rule = SCAPE_RULE_PLAIN;
    expect_equal(3, scenario);
    scenario.inject_nonfinite = true;
    scenario.config.payload = SCAPE_BFLOAT16;
    expect_equal(2, scenario);
  }
}

TEST(MaskedBuffer, EqualsTheSimulationAtSparsityZero) {
  for (const scape_role role : kRoles) {
    for (const bool nonfinite : {false, true}) {
      Scenario scenario{
          .config = short_config(0, role), .steps = 20, .inject_nonfinite = nonfinite};
      expect_equal(3, scenario);
      scenario.config.dtype = SCAPE_BFLOAT16;
      expect_equal(2, scenario);
    }
  }
}

}  // namespace
}  // namespace scape::plugin::test
