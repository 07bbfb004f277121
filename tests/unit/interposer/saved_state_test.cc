#include "interposer/saved_state.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <string>

namespace scape::interposer {
namespace {

std::vector<std::byte> bytes_of(const std::string& text) {
  const auto* first = reinterpret_cast<const std::byte*>(text.data());
  return {first, first + text.size()};
}

std::vector<SavedBuffer> sample() {
  return {{"grads.0", 0, 400, 1, 2, bytes_of("residual and moments")},
          {std::string(63, 'n'), 128, size_t{1} << 33, 1, 2, bytes_of("")},
          {"third", 5, 7, 0, 1, bytes_of("x")}};
}

void expect_equal(const std::vector<SavedBuffer>& a, const std::vector<SavedBuffer>& b) {
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i) {
    EXPECT_EQ(a[i].name, b[i].name);
    EXPECT_EQ(a[i].offset, b[i].offset);
    EXPECT_EQ(a[i].count, b[i].count);
    EXPECT_EQ(a[i].rank, b[i].rank);
    EXPECT_EQ(a[i].size, b[i].size);
    EXPECT_EQ(a[i].bytes, b[i].bytes);
  }
}

TEST(SavedState, ComesBackAsItWas) {
  std::vector<SavedBuffer> back;
  ASSERT_TRUE(decode_saved(encode_saved(sample()), &back).ok());
  expect_equal(back, sample());
  ASSERT_TRUE(decode_saved(encode_saved({}), &back).ok());
  EXPECT_TRUE(back.empty());
}

TEST(SavedState, AnyDamagedByteIsNoticed) {
  const std::vector<std::byte> whole = encode_saved(sample());
  for (size_t at = 0; at < whole.size(); ++at) {
    std::vector<std::byte> damaged = whole;
    damaged[at] ^= std::byte{0x10};
    std::vector<SavedBuffer> back = {{"untouched", 1, 2, 3, 4, {}}};
    EXPECT_EQ(decode_saved(damaged, &back).code(), SCAPE_ERR_DATA) << "byte " << at;
    ASSERT_EQ(back.size(), 1u);
    EXPECT_EQ(back[0].name, "untouched");
  }
}

TEST(SavedState, AnyCutIsNoticed) {
  const std::vector<std::byte> whole = encode_saved(sample());
  std::vector<SavedBuffer> back;
  for (size_t length = 0; length < whole.size(); ++length) {
    EXPECT_EQ(decode_saved(std::span(whole).first(length), &back).code(), SCAPE_ERR_DATA) << length;
  }
  std::vector<std::byte> longer = whole;
  longer.push_back(std::byte{0});
  EXPECT_EQ(decode_saved(longer, &back).code(), SCAPE_ERR_DATA);
}

TEST(SavedState, FilesAreWrittenAsAWhole) {
  char folder[] = "/tmp/scape_state_test_XXXXXX";
  ASSERT_NE(::mkdtemp(folder), nullptr);
  const std::string path = std::string(folder) + "/rank0";
  ASSERT_TRUE(write_file(path, bytes_of("old")).ok());
  ASSERT_TRUE(write_file(path, bytes_of("new and longer")).ok());
  std::vector<std::byte> back;
  ASSERT_TRUE(read_file(path, &back).ok());
  EXPECT_EQ(back, bytes_of("new and longer"));
  size_t files = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator(folder)) ++files;
  EXPECT_EQ(files, 1u) << "a temporary file was left behind";

  const Status missing = read_file(path + "/none", &back);
  EXPECT_EQ(missing.code(), SCAPE_ERR_SYSTEM);
  EXPECT_NE(missing.message().find(path + "/none"), std::string::npos);
  EXPECT_EQ(write_file(std::string(folder) + "/no/such/place", bytes_of("x")).code(),
            SCAPE_ERR_SYSTEM);
  std::filesystem::remove_all(folder);
}

}  // namespace
}  // namespace scape::interposer
