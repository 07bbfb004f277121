// Selection, masks and their codes.
#include <numeric>

#include "kernels/cuda/scan.cuh"
#include "tests/unit/kernels/cuda_testing.h"

namespace scape::kernels::cuda::testing {
namespace {

// ---- selection ----

class CudaSelect : public CudaKernels {
 protected:
  // The mask, with whatever lay in it and in the scratch memory before; the threshold is the
  // reference's to the bit.
  Guarded<uint64_t> select(const Guarded<float>& scores, size_t k, float guess) {
    const size_t n = scores.size();
    OnDevice<uint64_t> mask(mask_words(n));
    Guarded<uint64_t> scratch(select_scratch_bytes(n) / sizeof(uint64_t));
    for (uint64_t* word = mask.data(); word != mask.data() + mask.size(); ++word) *word = random_();
    std::fill_n(scratch.data(), scratch.size(), random_());
    threshold_[0] = guess;
    run_select(scores, k, mask, scratch);
    mask.check_guards();
    scratch.check_guards();
    return mask;
  }

  void expect_right(const Guarded<float>& scores, size_t k) {
    const size_t n = scores.size();
    Guarded<uint64_t> expected(mask_words(n));
    const float threshold =
        reference().select(scores.data(), n, k, expected.data(), reference_scratch_.data());
    // No guess, the right one, near ones, far ones, and what is none.
    const float guesses[] = {0,
                             threshold,
                             threshold * 1.3f,
                             threshold * 0.7f,
                             1e-30f,
                             1e30f,
                             std::numeric_limits<float>::quiet_NaN(),
                             std::numeric_limits<float>::infinity()};
    for (size_t i = 0; i < std::size(guesses); ++i) {
      if ((n > 5000 || kThinned > 1) && i != turn_ % std::size(guesses) && i != 1) continue;
      SCOPED_TRACE(::testing::Message() << "n=" << n << " k=" << k << " guess=" << guesses[i]);
      const Guarded<uint64_t> mask = select(scores, k, guesses[i]);
      if (HasFatalFailure()) return;
      expect_same(expected, mask, "mask");
      ASSERT_EQ(std::bit_cast<uint32_t>(threshold), std::bit_cast<uint32_t>(threshold_[0]));
    }
    ++turn_;
  }

  void expect_right(const Guarded<float>& scores) {
    const size_t n = scores.size();
    size_t previous = n + 1;
    for (const size_t k :
         {size_t{0}, size_t{1}, n / 100, n / 10, n / 2, n - std::min<size_t>(n, 1), n}) {
      if (k == previous || k > n) continue;
      previous = k;
      expect_right(scores, k);
      if (HasFatalFailure()) return;
    }
  }

  OnDevice<float> threshold_{1};

 private:
  void run_select(const Guarded<float>& scores, size_t k, Guarded<uint64_t>& mask,
                  Guarded<uint64_t>& scratch) {
    ASSERT_RUNS(cuda::select(kStream, scores.data(), scores.size(), k, mask.data(),
                             threshold_.data(), scratch.data()));
  }

  Guarded<uint8_t> reference_scratch_{kernels::select_scratch_bytes()};
  size_t turn_ = 0;
};

SCAPE_CUDA_TESTS(CudaSelect);

// Field cases F10 and F11 are among these: small arrays, k of 1, the largest at the end.
TEST_P(CudaSelect, TakesTheLargestAtEverySize) {
  std::vector<size_t> sizes = {1, 2, 3, 5, 31, 63, 64, 65, 100, 127, 128, 129, 130, 255, 256, 257};
  sizes.insert(sizes.end(), {1023, 2048, 2049, 4097, 65537, 200003});
  for (const size_t n : sizes) {
    Guarded<float> scores(n, n % 4);
    for (size_t j = 0; j < n; ++j) scores[j] = std::fabs(random_float(random_, Data::kFinite));
    scores[n - 1] = 1e6f;
    expect_right(scores);
    if (HasFatalFailure()) return;
  }
}

TEST_P(CudaSelect, TakesTheLargestOfTenMillion) {
  constexpr size_t kN = kTenMillion;
  Guarded<float> scores(kN, 1);
  for (size_t j = 0; j < kN; ++j) scores[j] = std::fabs(random_float(random_, Data::kFinite));
  expect_right(scores, kN / 100);
}

// Field case F09: most of a selection is decided by ties, or all of it.
TEST_P(CudaSelect, BreaksTiesToTheLowerIndex) {
  for (const size_t n :
       {size_t{63}, size_t{96}, size_t{1000}, size_t{4096}, size_t{70001}, size_t{600000}}) {
    for (const int distinct : {1, 2, 5, 300}) {
      Guarded<float> scores(n, 1);
      for (size_t j = 0; j < n; ++j) {
        scores[j] = static_cast<float>(random_() % static_cast<uint64_t>(distinct));
      }
      if (n == 600000) {
        if (kThinned == 1) expect_right(scores, n / 7);
      } else {
        expect_right(scores);
      }
      if (HasFatalFailure()) return;
    }
  }
}

TEST_P(CudaSelect, HandlesExtremeScores) {
  for (const size_t n : {size_t{100}, size_t{40000}}) {
    Guarded<float> scores(n);
    constexpr float kValues[] = {0.0f, -0.0f, 1e-45f, 1e-40f, 1.1754944e-38f, 3.4028235e38f, 1.0f};
    for (size_t j = 0; j < n; ++j) scores[j] = kValues[random_() % std::size(kValues)];
    expect_right(scores);
  }
}

// Field case F08: non-finite residuals are cleared, counted, and score as zero.
TEST_P(CudaSelect, NeverChoosesNonfiniteValuesByAccident) {
  constexpr size_t kN = 64;
  const Step step(0.9, 0);
  Guarded<float> m(kN), scores(kN), residual(kN);
  Guarded<uint16_t> last(kN);
  std::fill_n(last.data(), kN, uint16_t{65535});
  for (size_t j = 0; j < kN; ++j) residual[j] = static_cast<float>(j + 1);
  residual[5] = -std::numeric_limits<float>::quiet_NaN();
  residual[9] = std::numeric_limits<float>::infinity();
  residual[60] = -std::numeric_limits<float>::infinity();
  NonfiniteFlag flag{};
  ASSERT_RUNS(score(kStream, m.data(), last.data(), residual.data(), residual.data(), kN,
                    step.params, 1, scores.data(), &flag));
  EXPECT_EQ(flag.cleared, 3u);
  EXPECT_NE(flag.raised, 0u);
  EXPECT_EQ(residual[60], 0.0f);
  EXPECT_EQ(select(scores, 8, 0)[0], uint64_t{0b1110'1111'1000} << 52);
}

// ---- masks ----

class CudaMask : public CudaKernels {
 protected:
  // Whether the code was taken; nothing but the mask is written.
  bool decode(const Guarded<uint16_t>& code, bool offsets, size_t n, size_t k,
              Guarded<uint64_t>& mask) {
    OnDevice<uint64_t> scratch(decode_scratch_bytes(n) / sizeof(uint64_t));
    std::fill_n(mask.data(), mask.size(), ~uint64_t{0});
    uint32_t refused = 0;
    run_decode(code, offsets, n, k, mask, scratch, &refused);
    mask.check_guards();
    scratch.check_guards();
    EXPECT_TRUE(refused == 0 || refused == 77);
    return refused == 0;
  }

 private:
  void run_decode(const Guarded<uint16_t>& code, bool offsets, size_t n, size_t k,
                  Guarded<uint64_t>& mask, Guarded<uint64_t>& scratch, uint32_t* refused) {
    ASSERT_RUNS((offsets ? decode_offsets : decode_words)(kStream, code.data(), n, k, mask.data(),
                                                          scratch.data(), {refused, 77}));
  }
};

SCAPE_CUDA_TESTS(CudaMask);

TEST_P(CudaMask, IndexesRuns) {
  for (const size_t n : {size_t{0}, size_t{1}, size_t{2048}, size_t{2049}, size_t{524288},
                         size_t{524289}, size_t{5'000'001}}) {
    const IndexedMask mask(random_mask(n, 0.1, random_, true), n);
    size_t bits = 0;
    for (size_t w = 0; w < mask.words().size(); ++w) {
      if (w % 32 == 0) {
        ASSERT_EQ(mask.index(w / 32), bits) << "word " << w << " of n = " << n;
      }
      bits += static_cast<size_t>(std::popcount(mask.words()[w]));
    }
    ASSERT_EQ(mask.index(mask_index_runs(n)), bits) << n;
  }
}

// The tiles' sums take several rounds of one block of threads: a mask of more than 2^29 elements.
TEST_P(CudaMask, AddsUpTilesInSeveralRounds) {
  constexpr size_t kRuns = size_t{kScanThreads} * kTileRuns * 2 + kTileRuns + 17;
  Guarded<uint64_t> index(scan_bytes(kRuns) / sizeof(uint64_t));
  uint64_t* const tiles = index.data() + kRuns + 1;
  std::vector<uint64_t> expected(kRuns + 1);
  uint64_t in_tile = 0, sum = 0;
  for (size_t run = 0; run < kRuns; ++run) {
    if (run % kTileRuns == 0) in_tile = 0;
    expected[run] = sum;
    index[run] = in_tile;
    const uint64_t count = random_() % 2049;
    in_tile += count;
    sum += count;
    tiles[run / kTileRuns] = in_tile;
  }
  expected[kRuns] = sum;
  ASSERT_RUNS(finish_scan("a test", kStream, index.data(), kRuns, nullptr));
  index.check_guards();
  for (size_t run = 0; run <= kRuns; ++run) ASSERT_EQ(index[run], expected[run]) << run;
}

// As do the counts of more than 1024 blocks of offsets.
TEST_P(CudaMask, DecodesManyBlocksOfOffsets) {
  constexpr size_t kN = kOffsetBlock * (2 * kScanThreads + 3) - 100;
  Guarded<uint64_t> words(mask_words(kN));
  for (int i = 0; i < 5000; ++i) {
    const size_t j = random_() % kN;
    words[j / 64] |= uint64_t{1} << j % 64;
  }
  const size_t k = bits_set(words);
  Guarded<uint16_t> code(offset_code_bytes(kN, k) / 2);
  reference().encode_offsets(words.data(), kN, code.data());
  Guarded<uint64_t> decoded(words.size());
  ASSERT_TRUE(decode(code, true, kN, k, decoded));
  expect_same(words, decoded, "decoded mask");
}

TEST_P(CudaMask, CopiesAndCounts) {
  over_shapes([&](size_t n, size_t, const auto& mask) {
    const Guarded<uint64_t> other = random_mask(n, 0.4, random_);
    OnDevice<unsigned long long> common(1);
    common[0] = 99;
    ASSERT_RUNS(
        count_common_bits(kStream, mask.words().data(), other.data(), other.size(), common.data()));
    ASSERT_EQ(common[0],
              reference().count_common_bits(mask.words().data(), other.data(), other.size()));
    Guarded<uint64_t> to(other.size());
    const Verdict skipped{1};
    ASSERT_RUNS(copy_mask(kStream, mask.words().data(), n, to.data(), &skipped));
    expect_same(Guarded<uint64_t>(other.size()), to, "left alone");
    ASSERT_RUNS(copy_mask(kStream, mask.words().data(), n, to.data(), nullptr));
    expect_same(mask.words(), to, "copy");
    to.check_guards();
  });
}

TEST_P(CudaMask, CodesMasks) {
  over_shapes([&](size_t n, size_t offset, const auto& mask) {
    const size_t k = mask.bits();
    const size_t bytes = offset_code_bytes(n, k);
    Guarded<uint8_t> expected(bytes);
    Guarded<uint16_t> code(bytes / 2, offset);
    OnDevice<uint16_t> words(mask.words().size() * 4, offset);
    OnDevice<uint64_t> from(mask.words().size());
    from.assign(mask.words());
    reference().encode_offsets(mask.words().data(), n, expected.data());
    ASSERT_RUNS(encode_offsets(kStream, mask.view(), code.data()));
    ASSERT_EQ(bytes == 0 ? 0 : std::memcmp(expected.data(), code.data(), bytes), 0);
    code.check_guards();
    ASSERT_RUNS(encode_words(kStream, from.data(), n, words.data()));
    words.check_guards();
    for (const bool offsets : {true, false}) {
      Guarded<uint64_t> decoded(mask.words().size());
      ASSERT_TRUE(decode(offsets ? code : words, offsets, n, k, decoded));
      expect_same(mask.words(), decoded, "decoded mask");
    }
    // One bit more or less than was agreed on.
    Guarded<uint64_t> decoded(mask.words().size());
    ASSERT_FALSE(decode(words, false, n, k + 1, decoded));
    ASSERT_FALSE(decode(code, true, n, k + 1, decoded));
    if (k > 0) {
      ASSERT_FALSE(decode(code, true, n, k - 1, decoded));
    }
  });
}

// What comes damaged from the network is refused, as the reference does.
TEST_P(CudaMask, ReplacesRefusedMasksOnly) {
  const size_t n = 64 * 5 + 7;
  const MaskParts parts{.size = 64 * 2, .bits = 70, .last_bits = 3};
  const uint64_t kAll = ~uint64_t{0};
  for (const bool refused : {false, true}) {
    OnDevice<uint64_t> words(mask_words(n));
    std::fill_n(words.data(), words.size(), 0xf0f0u);
    OnDevice<uint32_t> code(1);
    code[0] = refused ? 2 : 0;
    ASSERT_RUNS(replace_refused(kStream, words.data(), n, parts, code.data()));
    const std::vector<uint64_t> got(words.data(), words.data() + words.size());
    const std::vector<uint64_t> expected = {kAll, 0x3f, kAll, 0x3f, 7, 0};
    EXPECT_EQ(got, refused ? expected : std::vector<uint64_t>(6, 0xf0f0u));
    words.check_guards();
  }
}

TEST_P(CudaMask, RefusesDamagedCodes) {
  constexpr size_t kN = 2 * kOffsetBlock + 1001;
  const Guarded<uint64_t> words = random_mask(kN, 0.01, random_);
  const size_t k = bits_set(words);
  Guarded<uint16_t> code(offset_code_bytes(kN, k) / 2);
  reference().encode_offsets(words.data(), kN, code.data());
  Guarded<uint64_t> decoded(words.size()), expected(words.size());
  size_t refused = 0;
  for (int i = 0; i < 60; ++i) {
    Guarded<uint16_t> noisy(code.size(), 1);
    noisy.assign(code);
    const size_t changes = random_() % 3;
    for (size_t c = 0; c < changes; ++c) {
      // Among them the counts, and offsets of the short last block.
      const size_t at = random_() % 3 == 0 ? random_() % 6 : random_() % code.size();
      noisy[random_() % 4 == 0 ? code.size() - 1 : at] ^=
          static_cast<uint16_t>(1u << random_() % 16);
    }
    const bool good =
        reference().decode_offsets(noisy.data(), noisy.size() * 2, kN, k, expected.data());
    ASSERT_EQ(decode(noisy, true, kN, k, decoded), good) << i;
    if (good) expect_same(expected, decoded, "mask");
    refused += !good;
  }
  EXPECT_GT(refused, 10u);
  // Offsets that come twice, or not in order, in the first block and the last.
  for (const size_t at : {size_t{6}, code.size() - 2}) {
    Guarded<uint16_t> unordered(code.size());
    unordered.assign(code);
    unordered[at] = unordered[at + 1];
    EXPECT_FALSE(decode(unordered, true, kN, k, decoded));
    unordered.assign(code);
    std::swap(unordered[at], unordered[at + 1]);
    EXPECT_FALSE(decode(unordered, true, kN, k, decoded));
  }
  // Counts whose 32-bit sum is right, and one that no block can have.
  Guarded<uint16_t> wrong(code.size());
  for (const uint32_t shift : {0x80000000u, 0x00010000u}) {
    wrong.assign(code);
    uint32_t counts[2];
    std::memcpy(counts, wrong.data(), sizeof(counts));
    counts[0] += shift;
    counts[1] -= shift;
    std::memcpy(wrong.data(), counts, sizeof(counts));
    EXPECT_FALSE(decode(wrong, true, kN, k, decoded));
  }
  // Bits in the padding of raw words.
  Guarded<uint16_t> raw(4);
  raw[3] = 0x8000;
  Guarded<uint64_t> one(1);
  EXPECT_FALSE(decode(raw, false, 63, 1, one));
  EXPECT_TRUE(decode(raw, false, 64, 1, one));
}

}  // namespace
}  // namespace scape::kernels::cuda::testing
