// The reduced payload of a step: the codec (8 bits), the ages (16 bits each) and the elements as
// the all-reduce left them.
#include "kernels/kernels.h"
#include "plugin/masked/payload_codec.h"
#include "tests/fuzz/input.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace scape;
  fuzz::Input input(data, size);
  const uint8_t choice = input.number<uint8_t>();
  const size_t k = input.number<uint8_t>();
  const auto codec = plugin::make_payload_codec((choice & 1) != 0 ? SCAPE_BFLOAT16 : SCAPE_FLOAT32);
  const std::vector<float> powers = kernels::make_power_table(0.9);
  kernels::StepParams params;
  params.powers = {powers.data(), static_cast<uint32_t>(powers.size())};
  params.beta1 = 0.9f;
  params.plain = (choice & 2) != 0;
  std::vector<uint16_t> ages(k);
  for (uint16_t& age : ages) age = input.number<uint16_t>();
  std::vector<float> values(k + 1);
  std::vector<std::byte> wire((k + 1) * size_of(codec->wire_type()));
  codec->encode(values.data(), ages.data(), k, (choice & 4) != 0, params, wire.data());
  const std::span<const std::byte> reduced = input.take(wire.size());
  if (!reduced.empty()) std::memcpy(wire.data(), reduced.data(), reduced.size());
  codec->decode(wire.data(), ages.data(), k, params, values.data());
  return 0;
}
