#include "interposer/registry.h"

#include <gtest/gtest.h>

#include <atomic>
#include <thread>
#include <vector>

namespace scape::interposer {
namespace {

class RegistryTest : public testing::Test {
 protected:
  Status add(void* address, size_t count, const char* name, scape_dtype dtype = SCAPE_FLOAT32) {
    plugin::BufferConfig config;
    config.name = name;
    return registry_.add(address, count, dtype, config, &last_);
  }

  Registry registry_;
  std::shared_ptr<Registration> last_;
  std::vector<float> memory_ = std::vector<float>(1000);
};

TEST_F(RegistryTest, FindsWhatLiesInsideAndNothingElse) {
  float* base = memory_.data();
  ASSERT_TRUE(add(base + 100, 50, "a").ok());
  ASSERT_TRUE(add(base + 200, 50, "b").ok());
  EXPECT_EQ(registry_.find(base + 99), nullptr);
  EXPECT_STREQ(registry_.find(base + 100)->name(), "a");
  EXPECT_STREQ(registry_.find(base + 149)->name(), "a");
  EXPECT_STREQ(registry_.find(reinterpret_cast<char*>(base + 150) - 1)->name(), "a");
  EXPECT_EQ(registry_.find(base + 150), nullptr);  // between the two, inside the outer bounds
  EXPECT_STREQ(registry_.find(base + 200)->name(), "b");
  EXPECT_EQ(registry_.find(base + 250), nullptr);
  EXPECT_EQ(registry_.find(nullptr), nullptr);
}

TEST_F(RegistryTest, RefusesOverlapAndNamesWhatIsThere) {
  float* base = memory_.data();
  ASSERT_TRUE(add(base + 100, 50, "there").ok());
  for (const auto& [offset, count] :
       std::vector<std::pair<size_t, size_t>>{{100, 50}, {99, 2}, {149, 1}, {110, 5}, {50, 200}}) {
    const Status status = add(base + offset, count, "new");
    EXPECT_EQ(status.code(), SCAPE_ERR_ARGUMENT) << offset;
    EXPECT_NE(status.message().find("\"there\""), std::string::npos);
  }
  EXPECT_TRUE(add(base + 150, 1, "right after").ok());
  EXPECT_TRUE(add(base + 99, 1, "right before").ok());
}

TEST_F(RegistryTest, RefusesWhatCannotBeABuffer) {
  float* base = memory_.data();
  EXPECT_EQ(add(nullptr, 10, "null").code(), SCAPE_ERR_ARGUMENT);
  EXPECT_EQ(add(base, 0, "empty").code(), SCAPE_ERR_ARGUMENT);
  EXPECT_EQ(add(base, (size_t{1} << 33) + 1, "huge").code(), SCAPE_ERR_ARGUMENT);
  EXPECT_EQ(add(reinterpret_cast<char*>(base) + 2, 10, "odd").code(), SCAPE_ERR_ARGUMENT);
  EXPECT_EQ(add(reinterpret_cast<void*>(UINTPTR_MAX - 3), 10, "end").code(), SCAPE_ERR_ARGUMENT);
  EXPECT_TRUE(registry_.all().empty());
  EXPECT_TRUE(add(reinterpret_cast<char*>(base) + 2, 10, "half", SCAPE_BFLOAT16).ok());
  EXPECT_TRUE(add(reinterpret_cast<void*>(uintptr_t{1} << 40), size_t{1} << 33, "largest").ok());
}

TEST_F(RegistryTest, RemovedRangesAreFree) {
  float* base = memory_.data();
  ASSERT_TRUE(add(base, 10, "a").ok());
  const uint64_t id = last_->id;
  std::shared_ptr<Registration> removed;
  ASSERT_TRUE(registry_.remove(id, &removed).ok());
  EXPECT_STREQ(removed->name(), "a");
  EXPECT_EQ(registry_.find(base), nullptr);
  EXPECT_EQ(registry_.by_id(id), nullptr);
  EXPECT_EQ(registry_.remove(id, &removed).code(), SCAPE_ERR_NOT_FOUND);
  EXPECT_TRUE(add(base, 10, "again").ok());
  EXPECT_NE(last_->id, id);
}

TEST_F(RegistryTest, NamesARegistrationThatWaitsInVainOnce) {
  ASSERT_TRUE(add(memory_.data(), 100, "waits").ok());
  std::vector<std::shared_ptr<Registration>> unmatched;
  for (uint64_t i = 0; i < kPatience - 1; ++i) registry_.count_miss(400, &unmatched);
  EXPECT_TRUE(unmatched.empty());
  registry_.count_miss(400, &unmatched);
  ASSERT_EQ(unmatched.size(), 1u);
  EXPECT_STREQ(unmatched[0]->name(), "waits");
  for (int i = 0; i < 100; ++i) registry_.count_miss(400, &unmatched);
  EXPECT_EQ(unmatched.size(), 1u);
  EXPECT_EQ(registry_.misses_of(*last_), kPatience + 100);
}

TEST_F(RegistryTest, CallsOfOtherSizesAndHitsDoNotCount) {
  ASSERT_TRUE(add(memory_.data(), 100, "healthy").ok());
  std::vector<std::shared_ptr<Registration>> unmatched;
  for (int i = 0; i < 100; ++i) registry_.count_miss(4, &unmatched);  // a loss, averaged each step
  for (int i = 0; i < 100; ++i) registry_.count_miss(1 << 20, &unmatched);  // a much larger buffer
  for (int step = 0; step < 20; ++step) {
    registry_.count_hit(*last_);
    for (uint64_t i = 0; i < kPatience - 1; ++i) registry_.count_miss(400, &unmatched);
  }
  EXPECT_TRUE(unmatched.empty());
  EXPECT_EQ(registry_.misses_of(*last_), kPatience - 1);
}

TEST_F(RegistryTest, ALateRegistrationWaitsFromItsOwnStart) {
  ASSERT_TRUE(add(memory_.data(), 100, "early").ok());
  std::vector<std::shared_ptr<Registration>> unmatched;
  for (int i = 0; i < 7; ++i) registry_.count_miss(400, &unmatched);
  ASSERT_TRUE(add(memory_.data() + 500, 100, "late").ok());
  for (int i = 0; i < 3; ++i) registry_.count_miss(400, &unmatched);
  ASSERT_EQ(unmatched.size(), 1u);
  EXPECT_STREQ(unmatched[0]->name(), "early");
  for (int i = 0; i < 7; ++i) registry_.count_miss(400, &unmatched);
  ASSERT_EQ(unmatched.size(), 2u);
  EXPECT_STREQ(unmatched[1]->name(), "late");
}

TEST_F(RegistryTest, LookUpsRunBesideRegistrations) {
  float* base = memory_.data();
  ASSERT_TRUE(add(base, 10, "stays").ok());
  std::atomic<bool> stop{false};
  std::atomic<int> wrong{0};
  std::thread reader([&] {
    while (!stop) {
      const auto found = registry_.find(base + 5);
      if (found == nullptr || found->id != 1) ++wrong;
      registry_.find(base + 500);
    }
  });
  for (int i = 0; i < 2000; ++i) {
    std::shared_ptr<Registration> made;
    ASSERT_TRUE(registry_.add(base + 500, 100, SCAPE_FLOAT32, {}, &made).ok());
    ASSERT_TRUE(registry_.remove(made->id, &made).ok());
  }
  stop = true;
  reader.join();
  EXPECT_EQ(wrong, 0);
}

TEST(Cover, AddsUpDisjointRanges) {
  Registration registration;
  registration.count = 1000;
  EXPECT_EQ(cover(registration, 0, 100), 100u);
  EXPECT_EQ(cover(registration, 0, 100), 100u);
  EXPECT_EQ(cover(registration, 200, 100), 200u);
  EXPECT_EQ(cover(registration, 100, 100), 300u);  // closes the gap
  EXPECT_EQ(registration.covered.size(), 1u);
  EXPECT_EQ(cover(registration, 250, 100), 350u);
  EXPECT_EQ(cover(registration, 900, 100), 450u);
  EXPECT_EQ(cover(registration, 50, 900), 1000u);
  EXPECT_EQ(registration.covered.size(), 1u);
}

}  // namespace
}  // namespace scape::interposer
