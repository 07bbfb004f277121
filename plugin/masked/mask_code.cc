#include "plugin/masked/mask_code.h"

#include <cstring>

#include "kernels/kernels.h"

namespace scape::plugin {
namespace {

size_t bitmask_bytes(size_t n) { return kernels::mask_words(n) * sizeof(uint64_t); }

bool padding_is_clear(const uint64_t* mask, size_t n) {
  return n % 64 == 0 || mask[n / 64] >> (n % 64) == 0;
}

}  // namespace

void encode_mask(const uint64_t* mask, size_t n, size_t k, std::byte* out) {
  if (n == 0) return;
  if (mask_code_for(n, k) == MaskCode::kOffsets) {
    kernels::ops().encode_offsets(mask, n, out);
  } else {
    std::memcpy(out, mask, bitmask_bytes(n));
  }
}

bool decode_mask(const std::byte* in, size_t n, size_t k, uint64_t* mask) {
  if (n == 0) return k == 0;
  if (mask_code_for(n, k) == MaskCode::kOffsets) {
    return kernels::ops().decode_offsets(in, kernels::offset_code_bytes(n, k), n, k, mask);
  }
  std::memcpy(mask, in, bitmask_bytes(n));
  return padding_is_clear(mask, n) && kernels::ops().count_bits(mask, kernels::mask_words(n)) == k;
}

}  // namespace scape::plugin
