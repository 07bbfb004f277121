// How the bits of one partition travel: raw, or as 16-bit offsets where that is shorter.
//
// Which of the two follows from (n, k) alone, so that ranks never need to tell each other, and so
// does the size. Offsets win below about 1/16 of the bits set (docs/algorithm.md).
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/kernels.h"

namespace scape::plugin {

enum class MaskCode { kBitmask, kOffsets };

// The code of a partition of n elements with k bits set, and the bytes it takes.
inline MaskCode mask_code_for(size_t n, size_t k) {
  return kernels::offset_code_bytes(n, k) < kernels::mask_words(n) * sizeof(uint64_t)
             ? MaskCode::kOffsets
             : MaskCode::kBitmask;
}
inline size_t mask_code_bytes(size_t n, size_t k) {
  return mask_code_for(n, k) == MaskCode::kOffsets ? kernels::offset_code_bytes(n, k)
                                                   : kernels::mask_words(n) * sizeof(uint64_t);
}

// Writes mask_code_bytes(n, k) bytes to out: the mask (words of 64 bits, exactly k of them set).
void encode_mask(const uint64_t* mask, size_t n, size_t k, std::byte* out);

// The reverse. False when the bytes are no such code of exactly k bits below n; mask is then
// unspecified.
bool decode_mask(const std::byte* in, size_t n, size_t k, uint64_t* mask);

}  // namespace scape::plugin
