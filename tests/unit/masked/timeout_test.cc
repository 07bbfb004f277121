// What ends by the clock. The setting is short and read once per process, hence a program of its
// own.
#include <gtest/gtest.h>

#include <cstdlib>
#include <vector>

#include "local_group.h"
#include "plugin/masked/masked_buffer.h"
#include "scenario.h"

namespace scape::plugin::test {
namespace {

// Before anything looks at the settings.
[[maybe_unused]] const int environment_is_set = ::setenv("SCAPE_TIMEOUT", "1", 1);

TEST(Timeout, EndsAFlushThatAnotherRankNeverCalls) {
  BufferConfig config = short_config(0.9, SCAPE_ROLE_GRADIENT);
  std::vector<std::unique_ptr<MaskedBuffer>> buffers;
  for (const auto& communicator : make_local_group(2)) {
    buffers.push_back(make_masked_buffer(make_host_engine(), communicator,
                                         make_refresher(communicator), config, 100));
  }
  std::vector<std::vector<float>> data(2, std::vector<float>(100, 1));
  for (size_t r = 0; r < 2; ++r) {
    ASSERT_TRUE(
        buffers[r]->begin_all_reduce(data[r].data(), data[r].data(), {ReduceOp::kAvg}).ok());
  }
  while (!buffers[0]->poll() || !buffers[1]->poll()) {
  }
  ASSERT_TRUE(buffers[0]->status().ok()) << buffers[0]->status().message();
  const Status status = buffers[0]->flush(data[0].data(), nullptr, 0, 0);
  EXPECT_EQ(status.code(), SCAPE_ERR_TIMEOUT) << status.message();
  EXPECT_NE(status.message().find("SCAPE_TIMEOUT"), std::string::npos) << status.message();
}

}  // namespace
}  // namespace scape::plugin::test
