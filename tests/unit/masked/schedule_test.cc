// Options, schedule and partitions.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>

#include "plugin/masked/mask_code.h"
#include "plugin/masked/mask_refresh.h"
#include "plugin/masked/masked_buffer.h"

namespace scape::plugin {
namespace {

BufferConfig with_sparsity(double sparsity) {
  BufferConfig config;
  config.sparsity = sparsity;
  config.dense_steps = 2;
  config.ramp_steps = 5;
  config.ramp_sparsity = 0.5;
  return config;
}

TEST(Schedule, GoesFromDenseOverTheRampToTheSparsityAskedFor) {
  const BufferConfig config = with_sparsity(0.9);
  EXPECT_EQ(sparsity_at(config, 0), 0);
  EXPECT_EQ(sparsity_at(config, 1), 0);
  EXPECT_EQ(sparsity_at(config, 2), 0.5);
  EXPECT_EQ(sparsity_at(config, 4), 0.5);
  EXPECT_EQ(sparsity_at(config, 5), 0.9);
  EXPECT_EQ(sparsity_at(with_sparsity(0.3), 3), 0.3) << "the ramp never asks for more than the end";
}

TEST(Schedule, KeepsAtLeastOneElementAndRoundsHalfToEven) {
  for (const size_t n : {1, 2, 3, 5, 31, 100})
    EXPECT_EQ(bits_at(with_sparsity(0.99), 9, n), 1u) << n;
  EXPECT_EQ(bits_at(with_sparsity(0.99), 9, 1000), 10u);
  EXPECT_EQ(bits_at(with_sparsity(0.5), 9, 5), 2u);
  EXPECT_EQ(bits_at(with_sparsity(0.5), 9, 7), 4u);
  EXPECT_EQ(bits_at(with_sparsity(0.5), 9, 0), 0u);
  EXPECT_EQ(bits_at(with_sparsity(0), 9, 1000), 1000u);
  EXPECT_EQ(bits_at(with_sparsity(0.9), 0, 1000), 1000u) << "dense step";
}

TEST(Schedule, CountsBeyond32Bits) {
  const size_t n = size_t{1} << 33;
  EXPECT_EQ(bits_at(with_sparsity(0.5), 9, n), n / 2);
  for (const size_t count : {(size_t{1} << 31) - 1, size_t{1} << 31, (size_t{1} << 32) + 5, n}) {
    const size_t words = (count + 63) / 64;
    for (const int ranks : {1, 2, 3, 7}) {
      const size_t share =
          (words + static_cast<size_t>(ranks) - 1) / static_cast<size_t>(ranks) * 64;
      size_t end = 0;
      for (int q = 0; q < ranks; ++q) {
        const Partition part = partition_of(count, ranks, q);
        EXPECT_EQ(part.begin, end);
        EXPECT_EQ(part.end, std::min(count, share * static_cast<size_t>(q + 1)));
        end = part.end;
      }
      EXPECT_EQ(end, count);
    }
    EXPECT_EQ(mask_code_bytes(count, count / 2), words * 8);
    EXPECT_EQ(mask_code_bytes(count, 1000), (count + 65535) / 65536 * 4 + 2000);
  }
}

TEST(Schedule, CutsPartitionsInWholeWordsAndLeavesTheLastShortOrEmpty) {
  EXPECT_EQ(partition_of(130, 5, 0).size(), 64u);
  EXPECT_EQ(partition_of(130, 5, 2).size(), 2u);
  EXPECT_EQ(partition_of(130, 5, 3).size(), 0u);
  EXPECT_EQ(partition_of(130, 5, 4).begin, 130u);
  EXPECT_EQ(partition_of(1000, 3, 0).end, 384u);
  EXPECT_EQ(partition_of(1000, 3, 2).end, 1000u);
  EXPECT_EQ(partition_of(0, 3, 1).size(), 0u);
}

TEST(Schedule, RotatesOwnersUnlessTheRuleIsPlain) {
  EXPECT_EQ(scored_partition(SCAPE_RULE_LAZY, 2, 0, 3), 2);
  EXPECT_EQ(scored_partition(SCAPE_RULE_LAZY, 2, 1, 3), 0);
  EXPECT_EQ(scored_partition(SCAPE_RULE_LAZY, 0, std::numeric_limits<uint64_t>::max(), 3), 0);
  EXPECT_EQ(scored_partition(SCAPE_RULE_PLAIN, 2, 1, 3), 2);
}

TEST(Config, FillsInDefaults) {
  BufferConfig config;
  ASSERT_TRUE(resolve_config(nullptr, SCAPE_FLOAT32, &config).ok());
  EXPECT_EQ(config.name, "buffer");
  EXPECT_EQ(config.role, SCAPE_ROLE_FUSED);
  EXPECT_EQ(config.sparsity, 0.99);
  EXPECT_EQ(config.dense_steps, 20u);
  EXPECT_EQ(config.ramp_steps, 200u);

  scape_config given;
  default_config(&given);
  given.total_steps = 5000;
  ASSERT_TRUE(resolve_config(&given, SCAPE_FLOAT32, &config).ok());
  EXPECT_EQ(config.dense_steps, 50u);
  EXPECT_EQ(config.ramp_steps, 500u);
  given.total_steps = 10;
  given.ramp_steps = 7;
  ASSERT_TRUE(resolve_config(&given, SCAPE_FLOAT32, &config).ok());
  EXPECT_EQ(config.dense_steps, 1u) << "never none";
  EXPECT_EQ(config.ramp_steps, 7u);
}

TEST(Config, TakesAStructOfAnOlderHeader) {
  scape_config given;
  default_config(&given);
  given.size = offsetof(scape_config, sparsity);
  given.role = SCAPE_ROLE_GRADIENT;
  given.sparsity = 7;  // beyond what it has
  BufferConfig config;
  ASSERT_TRUE(resolve_config(&given, SCAPE_FLOAT32, &config).ok());
  EXPECT_EQ(config.role, SCAPE_ROLE_GRADIENT);
  EXPECT_EQ(config.sparsity, 0.99);
}

// Sets one field to something impossible and expects a message that names it.
void expect_refused(const char* field, void (*spoil)(scape_config*),
                    scape_dtype dtype = SCAPE_FLOAT32) {
  scape_config given;
  default_config(&given);
  spoil(&given);
  BufferConfig config;
  config.name = "untouched";
  const Status status = resolve_config(&given, dtype, &config);
  EXPECT_EQ(status.code(), SCAPE_ERR_ARGUMENT) << field;
  EXPECT_NE(status.message().find(field), std::string::npos) << status.message();
  EXPECT_EQ(config.name, "untouched");
}

TEST(Config, RefusesWhatIsOutOfRangeByName) {
  expect_refused("sparsity", [](scape_config* c) { c->sparsity = 1; });
  expect_refused("sparsity", [](scape_config* c) { c->sparsity = -0.1; });
  expect_refused("sparsity", [](scape_config* c) { c->sparsity = 1.5; });
  expect_refused("sparsity", [](scape_config* c) { c->sparsity = std::nan(""); });
  expect_refused("ramp_sparsity", [](scape_config* c) { c->ramp_sparsity = 1; });
  expect_refused("beta1", [](scape_config* c) { c->beta1 = 1; });
  expect_refused("beta1", [](scape_config* c) { c->beta1 = 1 - 1e-12; });  // 1 in fp32
  expect_refused("beta2", [](scape_config* c) { c->beta2 = -1; });
  expect_refused("eps", [](scape_config* c) { c->eps = 0; });
  expect_refused("eps", [](scape_config* c) { c->eps = 1e-60; });  // 0 in fp32
  expect_refused("age_cap", [](scape_config* c) { c->age_cap = 0.5; });
  expect_refused("total_steps", [](scape_config* c) { c->total_steps = UINT64_MAX; });
  expect_refused("dense_steps", [](scape_config* c) { c->dense_steps = (uint64_t{1} << 48) + 1; });
  expect_refused("ramp_steps", [](scape_config* c) { c->ramp_steps = UINT64_MAX; });
  expect_refused("role", [](scape_config* c) { c->role = static_cast<scape_role>(4); });
  expect_refused("rule", [](scape_config* c) { c->rule = static_cast<scape_rule>(-1); });
  expect_refused("residual", [](scape_config* c) { c->residual = static_cast<scape_residual>(3); });
  expect_refused("payload", [](scape_config* c) { c->payload = SCAPE_FLOAT16; });
  expect_refused("size", [](scape_config* c) { c->size = 0; });
  expect_refused("size", [](scape_config* c) { c->size = SIZE_MAX; });
  expect_refused("name", [](scape_config* c) {
    c->name = "a name that is one byte longer than the sixty-three bytes it may be";
  });
  expect_refused("name", [](scape_config* c) { c->name = ""; });
  expect_refused("name has the control character 0x0a at byte 4",
                 [](scape_config* c) { c->name = "line\nbreak"; });
  expect_refused(
      "dtype", [](scape_config*) {}, static_cast<scape_dtype>(3));
}

TEST(Config, KeepsTheResidualInPlaceOnlyWhereThatCanWork) {
  const auto in_place = [](scape_config* c) { c->residual = SCAPE_RESIDUAL_IN_PLACE; };
  expect_refused("residual", in_place, SCAPE_BFLOAT16);
  expect_refused("residual", [](scape_config* c) {
    c->residual = SCAPE_RESIDUAL_IN_PLACE;
    c->role = SCAPE_ROLE_GRADIENT;
  });
  scape_config given;
  default_config(&given);
  in_place(&given);
  BufferConfig config;
  EXPECT_TRUE(resolve_config(&given, SCAPE_FLOAT32, &config).ok());
}

}  // namespace
}  // namespace scape::plugin
