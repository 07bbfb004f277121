#include "base/status.h"

#include <gtest/gtest.h>

namespace scape {
namespace {

TEST(Status, OkIsEmpty) {
  const Status status;
  EXPECT_TRUE(status.ok());
  EXPECT_EQ(status.code(), SCAPE_OK);
  EXPECT_EQ(status.message(), "");
}

TEST(Status, ErrorKeepsCodeAndSentenceWhenCopied) {
  const Status original = error(SCAPE_ERR_ARGUMENT, "count %d is outside %s", -3, "1 .. 8");
  const Status copy = original;
  EXPECT_FALSE(copy.ok());
  EXPECT_EQ(copy.code(), SCAPE_ERR_ARGUMENT);
  EXPECT_EQ(copy.message(), "count -3 is outside 1 .. 8");
}

Status fails_on(int value, int bad) {
  return value == bad ? error(SCAPE_ERR_USAGE, "value %d", value) : Status();
}

Status first_error(int bad, int* reached) {
  for (*reached = 0; *reached < 5; ++*reached) SCAPE_RETURN_IF_ERROR(fails_on(*reached, bad));
  return {};
}

TEST(Status, ReturnIfErrorStopsAtTheFirstError) {
  int reached = -1;
  EXPECT_EQ(first_error(3, &reached).message(), "value 3");
  EXPECT_EQ(reached, 3);
  EXPECT_TRUE(first_error(9, &reached).ok());
  EXPECT_EQ(reached, 5);
}

TEST(Format, GrowsWithItsText) {
  const std::string text(5000, 'x');
  EXPECT_EQ(format("<%s>", text.c_str()), "<" + text + ">");
  EXPECT_EQ(format("%s", ""), "");
}

}  // namespace
}  // namespace scape
