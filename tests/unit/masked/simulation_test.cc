// The masked all-reduce over the real communicator, one process a rank, against the simulation:
// outputs, masks, ages, residuals, moments and parameters bit for bit over 50 steps, and twice the
// same.
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "host_ranks.h"
#include "scenario.h"

namespace scape::plugin::test {
namespace {

constexpr double kSparsities[] = {0.5, 0.9, 0.99, 0.999};
constexpr double kRepeated = 0.9;
constexpr size_t kLarge = 150001;

std::vector<Scenario> everything() {
  std::vector<Scenario> scenarios;
  for (const double sparsity : kSparsities) {
    for (const scape_dtype payload : {SCAPE_FLOAT32, SCAPE_BFLOAT16}) {
      for (const scape_role role : {SCAPE_ROLE_FUSED, SCAPE_ROLE_FIRST_MOMENT,
                                    SCAPE_ROLE_GRADIENT_HOOKED, SCAPE_ROLE_GRADIENT}) {
        Scenario scenario{.config = short_config(sparsity, role), .count = 2000};
        scenario.config.payload = payload;
        scenarios.push_back(scenario);
        if (role != SCAPE_ROLE_FUSED) continue;
        scenario.config.residual = SCAPE_RESIDUAL_IN_PLACE;
        scenario.inject_nonfinite = true;
        scenario.flush_at = 30;
        scenario.reload_at = 17;
        scenarios.push_back(scenario);
      }
    }
  }
  // Large enough that the dense steps and the payload go round the ring.
  scenarios.push_back(
      {.config = short_config(0.5, SCAPE_ROLE_FUSED), .count = kLarge, .steps = 12});
  return scenarios;
}

// Runs every scenario on one communicator, some of them twice; empty when all is equal.
std::string run_all(std::shared_ptr<Communicator> communicator, bool shared) {
  for (Scenario scenario : everything()) {
    // Where nothing is shared, what ranks that are threads do is the same code.
    if (!shared && scenario.count < kLarge && scenario.config.sparsity != kRepeated) continue;
    scenario.shared = shared;
    uint32_t first = 0, second = 0;
    std::string difference = run_scenario(Rank(communicator), scenario, &first);
    if (difference.empty() && scenario.config.sparsity == kRepeated) {
      difference = run_scenario(Rank(communicator), scenario, &second);
      if (difference.empty() && first != second) difference = "two runs differ";
    }
    if (!difference.empty()) return describe(scenario, communicator->size()) + ": " + difference;
  }
  return {};
}

class Simulated : public testing::TestWithParam<int> {};

TEST_P(Simulated, IsWhatRealRanksCompute) {
  for (const bool shared : {true, false}) {
    run_host_ranks(GetParam(),
                   [shared](std::shared_ptr<Communicator> communicator) {
                     return run_all(std::move(communicator), shared);
                   },
                   400, {{"SCAPE_SHARED_MEMORY", shared ? "1" : "0"}});
  }
}

INSTANTIATE_TEST_SUITE_P(Ranks, Simulated, testing::Range(1, 6));

}  // namespace
}  // namespace scape::plugin::test
