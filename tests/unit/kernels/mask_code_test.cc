// Sizes of masks and codes, and codes that come damaged from the network.
#include "tests/unit/kernels/kernel_testing.h"

namespace scape::kernels::testing {
namespace {

// Field case F14(a): exact in 64 bits.
TEST(MaskPlan, IsExactBeyond31Bits) {
  EXPECT_EQ(mask_words(0), 0u);
  EXPECT_EQ(mask_words(1), 1u);
  EXPECT_EQ(mask_words(64), 1u);
  EXPECT_EQ(mask_words(65), 2u);
  EXPECT_EQ(mask_words((size_t{1} << 31) - 1), 33554432u);
  EXPECT_EQ(mask_words(size_t{1} << 31), 33554432u);
  EXPECT_EQ(mask_words((size_t{1} << 32) + 5), 67108865u);
  EXPECT_EQ(mask_words(size_t{1} << 33), 134217728u);

  EXPECT_EQ(offset_code_bytes(0, 0), 0u);
  EXPECT_EQ(offset_code_bytes(1, 1), 6u);
  EXPECT_EQ(offset_code_bytes((size_t{1} << 31) - 1, 21474836), 131072u + 42949672u);
  EXPECT_EQ(offset_code_bytes(size_t{1} << 31, 21474836), 131072u + 42949672u);
  EXPECT_EQ(offset_code_bytes((size_t{1} << 32) + 5, (size_t{1} << 32) + 5), 262148u + 8589934602u);
  EXPECT_EQ(offset_code_bytes(size_t{1} << 33, size_t{1} << 32), 524288u + 8589934592u);
}

class OffsetCode : public ::testing::TestWithParam<const Ops*> {
 protected:
  OffsetCode() : mask_(random_mask(kN, 0.01, random_)), k_(bits_set(mask_)) {
    code_.resize(offset_code_bytes(kN, k_));
    GetParam()->encode_offsets(mask_.data(), kN, code_.data());
  }

  // What decode says of the bytes; what it accepts must be a mask of exactly k bits.
  bool decode(const std::vector<uint8_t>& code, size_t n, size_t k) {
    Guarded<uint8_t> in(code.size(), 1);
    std::copy(code.begin(), code.end(), in.data());
    Guarded<uint64_t> mask(mask_words(n));
    const bool good = GetParam()->decode_offsets(in.data(), code.size(), n, k, mask.data());
    mask.check_guards();
    if (good) {
      EXPECT_EQ(bits_set(mask), k);
      if (n % 64 != 0) {
        EXPECT_EQ(mask[n / 64] >> (n % 64), 0u);
      }
    }
    return good;
  }

  void set_count(size_t block, uint32_t count) { std::memcpy(code_.data() + block * 4, &count, 4); }
  uint32_t count(size_t block) const {
    uint32_t value;
    std::memcpy(&value, code_.data() + block * 4, 4);
    return value;
  }
  void set_offset(size_t i, uint16_t offset) {
    std::memcpy(code_.data() + kBlocks * 4 + i * 2, &offset, 2);
  }
  uint16_t offset(size_t i) const {
    uint16_t value;
    std::memcpy(&value, code_.data() + kBlocks * 4 + i * 2, 2);
    return value;
  }

  static constexpr size_t kN = 3 * kOffsetBlock + 1001;
  static constexpr size_t kBlocks = 4;
  Random random_{4};
  Guarded<uint64_t> mask_;
  size_t k_;
  std::vector<uint8_t> code_;
};

INSTANTIATE_TEST_SUITE_P(Kernels, OffsetCode, ::testing::ValuesIn(available_ops()), backend_name);

TEST_P(OffsetCode, RefusesOtherSizes) {
  ASSERT_TRUE(decode(code_, kN, k_));
  EXPECT_FALSE(decode(code_, kN, k_ - 1));
  EXPECT_FALSE(decode(code_, kN, k_ + 1));
  EXPECT_FALSE(decode(code_, kN + kOffsetBlock, k_));
  EXPECT_FALSE(decode({}, kN, k_));
  auto shorter = code_;
  shorter.pop_back();
  EXPECT_FALSE(decode(shorter, kN, k_));
  auto longer = code_;
  longer.push_back(0);
  EXPECT_FALSE(decode(longer, kN, k_));
  EXPECT_FALSE(decode({0, 0, 0, 0}, 10, (size_t{1} << 63)));  // 2 k wraps to 0 bytes
  EXPECT_TRUE(decode({}, 0, 0));
  EXPECT_FALSE(decode({1, 0, 0, 0, 0, 0}, 0, 1));
}

TEST_P(OffsetCode, RefusesWrongCounts) {
  const uint32_t first = count(0);
  const uint32_t second = count(1);
  ASSERT_GT(first, 1u);
  set_count(0, first + 1);
  EXPECT_FALSE(decode(code_, kN, k_));
  set_count(0, first - 1);
  EXPECT_FALSE(decode(code_, kN, k_));
  set_count(0, 0xffffffffu);
  EXPECT_FALSE(decode(code_, kN, k_));
  // Counts whose 32-bit sum is right.
  set_count(0, first + 0x80000000u);
  set_count(1, second + 0x80000000u);
  EXPECT_FALSE(decode(code_, kN, k_));
}

TEST_P(OffsetCode, RefusesWrongOffsets) {
  const uint16_t first = offset(0);
  set_offset(0, offset(1));  // twice the same
  EXPECT_FALSE(decode(code_, kN, k_));
  set_offset(0, static_cast<uint16_t>(offset(1) + 1));  // falling
  EXPECT_FALSE(decode(code_, kN, k_));
  set_offset(0, first);
  ASSERT_TRUE(decode(code_, kN, k_));
  // The last block is short: elements 0 .. 1000.
  const size_t last = k_ - 1;
  ASSERT_GT(count(3), 0u);
  set_offset(last, 1000);
  EXPECT_TRUE(decode(code_, kN, k_));
  set_offset(last, 1001);
  EXPECT_FALSE(decode(code_, kN, k_));
  set_offset(last, 65535);
  EXPECT_FALSE(decode(code_, kN, k_));
}

TEST_P(OffsetCode, NeverWritesOutsideWhateverComes) {
  constexpr size_t kSmall = 200;
  const Guarded<uint64_t> mask = random_mask(kSmall, 0.2, random_);
  const size_t k = bits_set(mask);
  std::vector<uint8_t> code(offset_code_bytes(kSmall, k));
  GetParam()->encode_offsets(mask.data(), kSmall, code.data());
  for (size_t i = 0; i < code.size(); ++i) {
    const uint8_t held = code[i];
    for (int value = 0; value < 256; ++value) {
      code[i] = static_cast<uint8_t>(value);
      decode(code, kSmall, k);
    }
    code[i] = held;
  }
  for (int i = 0; i < 2000; ++i) {
    auto noise = code_;
    for (auto& byte : noise) {
      if (random_() % 50 == 0) byte = static_cast<uint8_t>(random_());
    }
    decode(noise, kN, k_);
  }
}

}  // namespace
}  // namespace scape::kernels::testing
