#include "base/large_pages.h"

#include <gtest/gtest.h>
#include <sys/mman.h>

#include <cstring>
#include <vector>

#include "tests/support/large_pages.h"

namespace scape {
namespace {

using testing::bytes_on_large_pages;

constexpr size_t kBytes = 4 * kLargePage + 12345;

// Written memory on small pages, which a mapping of its own has.
class SmallPages : public ::testing::Test {
 protected:
  void SetUp() override {
    void* const mapped =
        ::mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    ASSERT_NE(mapped, MAP_FAILED);
    data_ = static_cast<unsigned char*>(mapped);
    ASSERT_EQ(::madvise(data_, kBytes, MADV_NOHUGEPAGE), 0);
    for (size_t i = 0; i < kBytes; ++i) data_[i] = static_cast<unsigned char>(i * 7);
    ASSERT_EQ(bytes_on_large_pages(data_, kBytes), 0u);
  }
  void TearDown() override { ::munmap(data_, kBytes); }

  void expect_contents() const {
    for (size_t i = 0; i < kBytes; ++i) ASSERT_EQ(data_[i], static_cast<unsigned char>(i * 7)) << i;
  }

  unsigned char* data_ = nullptr;
};

TEST_F(SmallPages, MoveWithTheirContents) {
  move_to_large_pages(data_ + 1, kBytes - 1);
  expect_contents();
  const size_t found = bytes_on_large_pages(data_, kBytes);
  if (found == 0) GTEST_SKIP() << "this system gives no large pages on demand";
  EXPECT_GE(found, 3 * kLargePage);  // all whole ones, wherever the mapping began
}

// What is not whole large pages is left alone: also the neighbour's memory is.
TEST_F(SmallPages, AreKeptByShortRanges) {
  move_to_large_pages(data_ + 1, kLargePage - 1);
  move_to_large_pages(data_, 0);
  move_to_large_pages(nullptr, 0);
  EXPECT_EQ(bytes_on_large_pages(data_, kBytes), 0u);
  expect_contents();
}

}  // namespace
}  // namespace scape
