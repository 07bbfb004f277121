// SCAPE_SIMD: run once for each of its values (CMakeLists.txt), which the environment of the test
// sets.
#include <cstdlib>
#include <string>

#include "base/settings.h"
#include "tests/unit/kernels/kernel_testing.h"

namespace scape::kernels::testing {
namespace {

TEST(Dispatch, TakesWhatWasAskedForOrElseTheBest) {
  ASSERT_TRUE(settings_status().ok()) << settings_status().message();
  const char* const value = std::getenv("SCAPE_SIMD");
  const std::string wanted = value == nullptr ? "auto" : value;
  const Ops* expected = available_ops().front();
  for (const Ops* candidate : available_ops()) {
    if (candidate->name == wanted) expected = candidate;
  }
  const bool missing = wanted != "auto" && expected->name != wanted;

  ::testing::internal::CaptureStderr();
  const Ops& first = ops();
  const Ops& second = ops();
  const std::string lines = ::testing::internal::GetCapturedStderr();
  EXPECT_EQ(&first, expected);
  EXPECT_EQ(&second, expected);
  if (missing) {
    EXPECT_NE(lines.find("SCAPE_SIMD=" + wanted), std::string::npos) << lines;
    EXPECT_EQ(std::count(lines.begin(), lines.end(), '\n'), 1) << lines;
  } else {
    EXPECT_EQ(lines, "");
  }
}

}  // namespace
}  // namespace scape::kernels::testing
