// The saved state of one buffer, its checksum made right: what is accepted must do for reading, a
// step and saving. First the buffer (role, type, residual, rule and schedule, 16 bits; elements, 16
// bits), then the state.
#include "plugin/masked/buffer_state.h"
#include "base/crc.h"
#include "kernels/kernels.h"
#include "plugin/masked/engine.h"
#include "plugin/masked/refresher.h"
#include "tests/fuzz/input.h"
#include "tests/unit/masked/local_group.h"

namespace {

using namespace scape::plugin;
using scape::fuzz::require;

constexpr int kRanks = 2;
constexpr size_t kRankField = 12;  // of the state's header (plugin/masked/buffer_state.cc)

// The state as this rank would have saved it.
std::vector<std::byte> of_rank(int32_t rank, std::vector<std::byte> state) {
  uint32_t crc;
  if (state.size() < kRankField + sizeof rank + sizeof crc) return state;
  std::memcpy(state.data() + kRankField, &rank, sizeof rank);
  crc = scape::crc32(0, state.data(), state.size() - sizeof crc);
  std::memcpy(state.data() + state.size() - sizeof crc, &crc, sizeof crc);
  return state;
}

void read_all(MaskedBuffer& buffer) {
  const size_t n = buffer.count();
  std::vector<uint64_t> mask(scape::kernels::mask_words(n));
  std::vector<uint16_t> ages(n);
  std::vector<float> values(n);
  require(buffer.read_mask(mask.data(), mask.size()).ok(), "no mask");
  require(buffer.read_ages(ages.data(), n).ok(), "no ages");
  require(buffer.read_residual(values.data(), n).ok(), "no residual");
  static_cast<void>(buffer.read_moment(values.data(), n));  // not every role has one
  static_cast<void>(buffer.residual_l1());
}

void use(const std::shared_ptr<Communicator>& communicator, const BufferConfig& config,
         size_t count, const std::vector<std::byte>& state) {
  const auto refresher = make_refresher(communicator);
  const auto buffer =
      make_masked_buffer(make_host_engine(), communicator, refresher, config, count);
  require(buffer->load(state.data(), state.size()).ok(), "accepted by one rank alone");
  read_all(*buffer);
  std::vector<std::byte> saved;
  require(buffer->save(&saved).ok(), "loaded, and cannot be saved");
  const size_t bytes = count * size_of(data_type_of(config.dtype));
  std::vector<std::byte> gradient(bytes + 1, std::byte{0x3c});
  std::vector<float> before(count + 1, 1.0f), param(count + 1, 2.0f);  // never null
  for (int step = 0; step < 2; ++step) {
    const scape::Status begun = buffer->begin_all_reduce(gradient.data(), gradient.data(), {});
    require(begun.ok(), begun.message().c_str());
    drive(*communicator, [&] { return buffer->poll(); });
    require(buffer->status().ok(), buffer->status().message().c_str());
    if (config.role == SCAPE_ROLE_FUSED) {
      require(buffer->adams_step(param.data(), 0.01, 0.1).ok(), "no step");
    } else if (config.role == SCAPE_ROLE_GRADIENT_HOOKED) {
      require(buffer->post_step(0, count, before.data(), param.data(), 0.01, 0.1).ok(), "no step");
    }
    static_cast<void>(buffer->clear_masked(gradient.data()));
    read_all(*buffer);
  }
  float* const stepped = config.role == SCAPE_ROLE_FUSED ? param.data() : nullptr;
  const scape::Status flushed = buffer->flush(gradient.data(), stepped, 0.01, 0.1);
  require(flushed.ok(), flushed.message().c_str());
  require(buffer->save(&saved).ok(), "used, and cannot be saved");
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  scape::fuzz::Input input(data, size);
  const auto choice = input.number<uint16_t>();
  const size_t count = input.number<uint16_t>() % 1000;
  BufferConfig config;
  config.name = "b";
  config.role = static_cast<scape_role>(choice & 3);
  config.dtype = static_cast<scape_dtype>((choice >> 2) % 3);
  if (config.role == SCAPE_ROLE_FUSED && config.dtype == SCAPE_FLOAT32 && (choice & 0x10) != 0) {
    config.residual = SCAPE_RESIDUAL_IN_PLACE;
  }
  config.rule = (choice & 0x20) != 0 ? SCAPE_RULE_PLAIN : SCAPE_RULE_LAZY;
  config.payload = (choice & 0x40) != 0 ? SCAPE_BFLOAT16 : SCAPE_FLOAT32;
  config.sparsity = (choice & 0x80) != 0 ? 0 : 0.9;
  config.dense_steps = 2;
  config.ramp_steps = 3;
  config.ramp_sparsity = 0.5;

  const std::vector<std::byte> state = of_rank(0, scape::fuzz::copy_of(input.rest()));
  const auto engine = make_host_engine();
  BufferState loaded(*engine);
  if (!load_state({config, count, 0, kRanks}, state.data(), state.size(), &loaded).ok()) return 0;
  test::run_local(kRanks, [&](const std::shared_ptr<Communicator>& communicator) {
    use(communicator, config, count, of_rank(communicator->rank(), state));
  });
  return 0;
}
