#include "base/cpu_set.h"

#include <gtest/gtest.h>

#include <string>
#include <thread>
#include <vector>

namespace scape {
namespace {

TEST(CpuSet, ListsAreReadAndWritten) {
  const std::vector<std::pair<std::string, std::string>> lists = {
      {"0", "0"},       {"3,1,2", "1-3"},     {"0-3,8", "0-3,8"},
      {"5-5,5", "5"},   {"65535", "65535"},   {"1,3-4,2,9-10", "1-4,9-10"},
      {"007-9", "7-9"}, {"0-1023", "0-1023"},
  };
  for (const auto& [text, written] : lists) {
    CpuSet set;
    EXPECT_TRUE(CpuSet::parse(text, &set)) << text;
    EXPECT_EQ(set.text(), written);
  }
  for (const std::string bad : {"", ",", "0,", ",0", "-", "-1", "1-", "3-2", "a", "0 1", "0x1",
                                " 0", "0-1-2", "65536", "99999999999", "0--1", "+1", "1,,2"}) {
    CpuSet set(std::vector<int>{7});
    EXPECT_FALSE(CpuSet::parse(bad, &set)) << bad;
    EXPECT_EQ(set.text(), "7");
  }
  EXPECT_EQ(CpuSet().text(), "");
}

TEST(CpuSet, SetsAreCombined) {
  const CpuSet a({0, 1, 2, 3}), b({2, 3, 4});
  EXPECT_EQ((a & b).text(), "2-3");
  EXPECT_EQ((a | b).text(), "0-4");
  EXPECT_EQ((a - b).text(), "0-1");
  EXPECT_TRUE(a.overlaps(b));
  EXPECT_FALSE((a - b).overlaps(b));
}

TEST(CpuSet, AThreadIsPutWhereItIsToldAndTheProcessIsAllOfThem) {
  const CpuSet before = cpus_of_thread(0);
  ASSERT_FALSE(before.empty());
  std::thread([&] {
    const CpuSet one({before.cpus().back()});
    EXPECT_TRUE(run_this_thread_on(one));
    EXPECT_EQ(cpus_of_thread(0), one);
    EXPECT_EQ(cpus_of_process(), before);
  }).join();
  EXPECT_EQ(cpus_of_thread(0), before);
  EXPECT_FALSE(run_this_thread_on(CpuSet()));
}

}  // namespace
}  // namespace scape
