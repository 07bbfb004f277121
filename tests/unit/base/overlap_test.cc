#include "base/overlap.h"

#include <gtest/gtest.h>

namespace scape {
namespace {

TEST(Overlap, IsAByteThatBothHave) {
  const char memory[16] = {};
  EXPECT_TRUE(overlap(memory, 4, memory, 1));
  EXPECT_TRUE(overlap(memory, 5, memory + 4, 8));
  EXPECT_TRUE(overlap(memory + 4, 8, memory, 5));
  EXPECT_TRUE(overlap(memory, 16, memory + 3, 1));
  EXPECT_FALSE(overlap(memory, 4, memory + 4, 4));
  EXPECT_FALSE(overlap(memory + 4, 4, memory, 4));
  EXPECT_FALSE(overlap(memory, 0, memory, 16));
  EXPECT_FALSE(overlap(memory + 3, 4, memory + 5, 0));
  EXPECT_FALSE(overlap(nullptr, 16, memory, 16));
  const auto* const last = reinterpret_cast<const char*>(UINTPTR_MAX);
  EXPECT_TRUE(overlap(last - 7, 8, last, 1));
  EXPECT_FALSE(overlap(last - 7, 7, last, 1));
}

}  // namespace
}  // namespace scape
