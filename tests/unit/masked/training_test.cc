// Training in the small: guards against a slip in the algebra that the simulation would share.
//
// A least-squares problem whose gradients are noisy and differ by rank. Dense AdamS is written here
// from its definition (arXiv 2505.16363), with nothing of this project's equations for waiting
// elements.
#include <gtest/gtest.h>

#include <cmath>
#include <memory>
#include <numbers>
#include <random>
#include <thread>
#include <vector>

#include "local_group.h"
#include "plugin/masked/masked_buffer.h"

namespace scape::plugin::test {
namespace {

constexpr size_t kCount = 512;
constexpr int kSteps = 1500;
constexpr int kRanks = 2;
constexpr double kBeta1 = 0.9, kBeta2 = 0.95, kEps = 1e-8;

double rate(int t) { return 0.02 * 0.5 * (1 + std::cos(std::numbers::pi * t / kSteps)); }

// Curvatures over two orders of magnitude; the minimum is at target.
struct Problem {
  std::vector<float> curvature, target;

  Problem() {
    std::mt19937 random(5);
    std::normal_distribution<float> normal;
    for (size_t j = 0; j < kCount; ++j) {
      curvature.push_back(std::pow(10.0f, -2.0f * static_cast<float>(j) / kCount));
      target.push_back(normal(random));
    }
  }

  double loss(const std::vector<float>& param) const {
    double sum = 0;
    for (size_t j = 0; j < kCount; ++j) {
      const double distance = param[j] - target[j];
      sum += 0.5 * curvature[j] * distance * distance;
    }
    return sum / kCount;
  }

  std::vector<float> gradient(const std::vector<float>& param, int rank, int t) const {
    std::mt19937 random(static_cast<uint32_t>(t * kRanks + rank));
    std::normal_distribution<float> noise(0, 0.1f);
    std::vector<float> g(kCount);
    for (size_t j = 0; j < kCount; ++j)
      g[j] = curvature[j] * (param[j] - target[j] + noise(random));
    return g;
  }
};

double train_dense(const Problem& problem) {
  std::vector<float> param(kCount);
  std::vector<double> m(kCount);
  for (int t = 0; t < kSteps; ++t) {
    std::vector<double> mean(kCount);
    for (int rank = 0; rank < kRanks; ++rank) {
      const std::vector<float> g = problem.gradient(param, rank, t);
      for (size_t j = 0; j < kCount; ++j) mean[j] += g[j] / kRanks;
    }
    for (size_t j = 0; j < kCount; ++j) {
      const double v = kBeta2 * m[j] * m[j] + (1 - kBeta2) * mean[j] * mean[j];
      m[j] = kBeta1 * m[j] + (1 - kBeta1) * mean[j];
      param[j] -= static_cast<float>(rate(t) * m[j] / (std::sqrt(v) + kEps));
    }
  }
  return problem.loss(param);
}

// The final loss of each rank.
std::vector<double> train_masked(const Problem& problem, BufferConfig config) {
  config.beta1 = kBeta1;
  config.beta2 = kBeta2;
  config.eps = kEps;
  config.dense_steps = 15;
  config.ramp_steps = 15;
  std::vector<double> losses(kRanks);
  run_local(kRanks, [&](std::shared_ptr<Communicator> communicator) {
    const int rank = communicator->rank();
    const auto buffer = make_masked_buffer(make_host_engine(), communicator,
                                           make_refresher(communicator), config, kCount);
    std::vector<float> param(kCount), place(kCount);
    for (int t = 0; t < kSteps; ++t) {
      const std::vector<float> g = problem.gradient(param, rank, t);
      if (config.residual == SCAPE_RESIDUAL_INTERNAL) std::fill(place.begin(), place.end(), 0.0f);
      for (size_t j = 0; j < kCount; ++j) place[j] += g[j];
      ASSERT_TRUE(buffer->begin_all_reduce(place.data(), place.data(), {ReduceOp::kAvg}).ok());
      while (!buffer->poll()) std::this_thread::yield();
      ASSERT_TRUE(buffer->status().ok());
      ASSERT_TRUE(buffer->adams_step(param.data(), rate(t), 0).ok());
    }
    losses[static_cast<size_t>(rank)] = problem.loss(param);
  });
  return losses;
}

TEST(Training, At90PercentReachesWhatDenseAdamSReaches) {
  const Problem problem;
  const double begin = problem.loss(std::vector<float>(kCount));
  const double dense = train_dense(problem);
  ASSERT_LT(dense, begin / 10000);
  for (const scape_dtype payload : {SCAPE_FLOAT32, SCAPE_BFLOAT16}) {
    for (const scape_residual residual : {SCAPE_RESIDUAL_INTERNAL, SCAPE_RESIDUAL_IN_PLACE}) {
      BufferConfig config;
      config.sparsity = 0.9;
      config.payload = payload;
      config.residual = residual;
      const std::vector<double> losses = train_masked(problem, config);
      EXPECT_EQ(losses[0], losses[1]);
      EXPECT_LT(losses[0], 3 * dense + begin / 1000)
          << "dense " << dense << ", payload " << payload;
    }
  }
}

TEST(Training, WithNothingLeftOutIsDenseAdamS) {
  const Problem problem;
  const double dense = train_dense(problem);
  BufferConfig config;
  config.sparsity = 0;
  EXPECT_NEAR(train_masked(problem, config)[0], dense, dense * 1e-3);
}

}  // namespace
}  // namespace scape::plugin::test
