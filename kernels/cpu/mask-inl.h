// Counting and encoding masks.
#if defined(SCAPE_KERNELS_CPU_MASK_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef SCAPE_KERNELS_CPU_MASK_INL_H_
#undef SCAPE_KERNELS_CPU_MASK_INL_H_
#else
#define SCAPE_KERNELS_CPU_MASK_INL_H_
#endif

#include "kernels/cpu/vec-inl.h"

HWY_BEFORE_NAMESPACE();
namespace scape::kernels::HWY_NAMESPACE {

size_t count_bits(const uint64_t* mask, size_t words) {
  size_t count = 0;
  for (size_t w = 0; w < words; ++w) count += static_cast<size_t>(std::popcount(mask[w]));
  return count;
}

size_t count_common_bits(const uint64_t* a, const uint64_t* b, size_t words) {
  size_t count = 0;
  for (size_t w = 0; w < words; ++w) count += static_cast<size_t>(std::popcount(a[w] & b[w]));
  return count;
}

size_t encode_offsets(const uint64_t* mask, size_t n, void* out) {
  constexpr size_t kBlockWords = kOffsetBlock / 64;
  const size_t words = mask_words(n);
  const size_t blocks = n / kOffsetBlock + (n % kOffsetBlock != 0);
  auto* const counts = static_cast<unsigned char*>(out);
  auto* offsets = counts + blocks * sizeof(uint32_t);
  for (size_t b = 0; b < blocks; ++b) {
    const auto* const begin = offsets;
    const uint64_t* const block = mask + b * kBlockWords;
    const size_t end = std::min(kBlockWords, words - b * kBlockWords);
    for (size_t w = 0; w < end; ++w) {
      for_each_bit(block[w], w * 64, [&](size_t j) {
        const auto offset = static_cast<uint16_t>(j);
        std::memcpy(offsets, &offset, sizeof(offset));
        offsets += sizeof(offset);
      });
    }
    const auto count = static_cast<uint32_t>((offsets - begin) / sizeof(uint16_t));
    std::memcpy(counts + b * sizeof(count), &count, sizeof(count));
  }
  return static_cast<size_t>(offsets - counts);
}

}  // namespace scape::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
