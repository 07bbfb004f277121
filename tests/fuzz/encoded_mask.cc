// The mask of a partition as another rank encoded it: elements (32 bits), bits set (32 bits), the
// code.
#include "kernels/kernels.h"
#include "plugin/masked/mask_code.h"
#include "tests/fuzz/input.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace scape;
  fuzz::Input input(data, size);
  // Up to five blocks of offsets. A rank's own n and k are right: they follow from the
  // configuration.
  const size_t n = input.number<uint32_t>() % (5 * kernels::kOffsetBlock);
  const size_t k = input.number<uint32_t>() % (n + 1);
  std::vector<std::byte> code = fuzz::copy_of(input.rest());
  code.resize(plugin::mask_code_bytes(n, k));  // the all-gather brings just as many
  std::vector<uint64_t> mask(kernels::mask_words(n));
  if (!plugin::decode_mask(code.data(), n, k, mask.data())) return 0;
  fuzz::require(kernels::ops().count_bits(mask.data(), mask.size()) == k, "other bits than k");
  fuzz::require(n % 64 == 0 || mask.back() >> (n % 64) == 0, "bits beyond the end");
  std::vector<std::byte> again(code.size());
  plugin::encode_mask(mask.data(), n, k, again.data());
  fuzz::require(again == code, "a mask with two codes");
  return 0;
}
