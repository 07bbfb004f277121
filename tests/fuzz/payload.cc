// The reduced payload of a step: the codec (8 bits), the ages (16 bits each) and the elements as
// the all-reduce left them.
#include "kernels/kernels.h"
#include "plugin/masked/engine.h"
#include "plugin/masked/payload_codec.h"
#include "tests/fuzz/input.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace scape;
  fuzz::Input input(data, size);
  const uint8_t choice = input.number<uint8_t>();
  const size_t k = input.number<uint8_t>();
  const auto engine = plugin::make_host_engine();
  const auto codec =
      plugin::make_payload_codec(*engine, (choice & 1) != 0 ? SCAPE_BFLOAT16 : SCAPE_FLOAT32);
  const std::vector<float> powers = kernels::make_power_table(0.9);
  plugin::StepView step;
  step.params.powers = {powers.data(), static_cast<uint32_t>(powers.size())};
  step.params.beta1 = 0.9f;
  step.params.plain = (choice & 2) != 0;
  step.masked = k;
  std::vector<uint16_t> ages(k);
  for (uint16_t& age : ages) age = input.number<uint16_t>();
  step.ages = ages.data();
  std::vector<float> values(k + 1);
  std::vector<uint16_t> encoded(k + 1);
  void* const wire = codec->plain() ? static_cast<void*>(values.data()) : encoded.data();
  engine->restore({}, (choice & 4) != 0);
  codec->encode(step, values.data(), wire);
  const std::span<const std::byte> reduced = input.take((k + 1) * size_of(codec->wire_type()));
  if (!reduced.empty()) std::memcpy(wire, reduced.data(), reduced.size());
  const float* const decoded = codec->decode(step, wire, values.data());
  engine->judge({}, kernels::Type::kFloat32, decoded, k + 1);
  return 0;
}
