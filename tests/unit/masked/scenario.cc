#include "scenario.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <thread>
#include <vector>

#include "base/crc.h"
#include "plugin/masked/host_engine.h"
#include "simulation.h"

namespace scape::plugin::test {
namespace {

uint64_t mixed(uint64_t value) {
  value += 0x9e3779b97f4a7c15u;
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9u;
  value = (value ^ (value >> 27)) * 0x94d049bb133111ebu;
  return value ^ (value >> 31);
}

// Gradients over several magnitudes, with many exact ties and zeros among them.
std::vector<float> gradient(const Scenario& scenario, int rank, int t) {
  std::vector<float> values(scenario.count);
  for (size_t j = 0; j < values.size(); ++j) {
    const uint64_t h =
        mixed(scenario.seed * 1000003 +
              mixed(static_cast<uint64_t>(rank) * 7919 + static_cast<uint64_t>(t)) + j * 31);
    const double unit = static_cast<double>(h >> 40) / static_cast<double>(1 << 24) - 0.5;
    double value = std::ldexp(unit, static_cast<int>(mixed(j) % 7) - 3);
    if (h % 5 == 0) value = std::round(unit * 4) / 4;
    if (h % 11 == 0) value = 0;
    values[j] = narrowed(scenario.config.dtype, static_cast<float>(value));
  }
  return values;
}

// At every fifth step some rank has a value that is not finite, on the mask or off it.
void inject(int t, int ranks, std::vector<std::vector<float>>* inputs) {
  if (t % 5 != 2) return;
  auto& values = (*inputs)[static_cast<size_t>(t / 5 % ranks)];
  const uint64_t h = mixed(static_cast<uint64_t>(t));
  const float bad[] = {std::numeric_limits<float>::quiet_NaN(),
                       std::numeric_limits<float>::infinity(),
                       -std::numeric_limits<float>::infinity()};
  for (uint64_t i = 0; i <= h % 3; ++i)
    values[mixed(h + i) % values.size()] = bad[mixed(h + i) / 7 % 3];
}

bool same(float a, float b) {
  return std::memcmp(&a, &b, sizeof(a)) == 0 || (std::isnan(a) && std::isnan(b));
}

std::string differ(const char* what, int t, const std::vector<float>& got,
                   const std::vector<float>& expected) {
  for (size_t j = 0; j < expected.size(); ++j) {
    if (same(got[j], expected[j])) continue;
    return format("step %d, %s of element %zu: %.9g (%a), expected %.9g (%a)", t, what, j, got[j],
                  got[j], expected[j], expected[j]);
  }
  return {};
}

// Host memory, of which the host is told as little as a device would tell it.
class BlindEngine final : public HostEngine {
 public:
  bool may_have_skipped() const override { return true; }
  uint16_t oldest_age(Stream, const uint16_t*, size_t, uint16_t bound) override { return bound; }
};

struct Run {
  const Rank& rank;
  const Scenario& scenario;
  std::unique_ptr<MaskedBuffer> buffer;
  Simulation simulation;
  uint32_t digest = 0;

  template <typename T>
  void add(const std::vector<T>& values) {
    digest = crc32(digest, values.data(), values.size() * sizeof(T));
  }
};

Status complete(Run* run, const void* send, void* recv, const Reduction& reduction) {
  SCAPE_RETURN_IF_ERROR(run->buffer->begin_all_reduce(send, recv, reduction, run->rank.stream));
  while (!run->buffer->poll()) {
    if (!run->rank.communicator->progress()) std::this_thread::yield();
  }
  return run->buffer->status();
}

std::string compare_state(Run* run, int t) {
  const Simulation& expected = run->simulation;
  const size_t n = run->scenario.count;
  const auto rank = static_cast<size_t>(run->rank.communicator->rank());
  const BufferConfig& config = run->scenario.config;
  std::vector<uint64_t> words((n + 63) / 64);
  std::vector<uint16_t> ages(n);
  std::vector<float> residual(n), moment(n);
  if (Status status = run->buffer->read_mask(words.data(), words.size()); !status.ok())
    return status.message();
  if (Status status = run->buffer->read_ages(ages.data(), n); !status.ok()) return status.message();
  if (Status status = run->buffer->read_residual(residual.data(), n); !status.ok())
    return status.message();
  const bool plain_dense = run->rank.communicator->size() == 1 || config.sparsity == 0;
  const bool has_moment = config.role == SCAPE_ROLE_FUSED || !plain_dense;
  if (has_moment) {
    if (Status status = run->buffer->read_moment(moment.data(), n); !status.ok())
      return status.message();
  }
  for (size_t j = 0; j < n && has_moment; ++j) {
    const bool bit = (words[j / 64] >> (j % 64)) & 1;
    if (bit != expected.mask[j]) return format("step %d, mask of element %zu: %d", t, j, bit);
    if (ages[j] != expected.ages[j]) {
      return format("step %d, age of element %zu: %u, expected %u", t, j, ages[j],
                    expected.ages[j]);
    }
  }
  run->add(words);
  run->add(ages);
  run->add(residual);
  run->add(moment);
  if (std::string difference = differ("residual", t, residual, expected.r[rank]);
      !difference.empty()) {
    return difference;
  }
  return has_moment ? differ("moment", t, moment, expected.m) : std::string();
}

std::string reload(Run* run) {
  std::vector<std::byte> saved;
  if (Status status = run->buffer->save(&saved); !status.ok()) return status.message();
  BufferConfig config = run->scenario.config;
  config.residual = run->scenario.reload_to.value_or(config.residual);
  run->buffer = run->rank.make(config, run->scenario.count);
  return run->buffer->load(saved.data(), saved.size()).message();
}

}  // namespace

Rank::Rank(std::shared_ptr<Communicator> host)
    : communicator(std::move(host)),
      refresher(make_refresher(communicator)),
      make_engine(make_host_engine) {}

BufferConfig short_config(double sparsity, scape_role role) {
  BufferConfig config;
  config.name = "weights.0";
  config.role = role;
  config.sparsity = sparsity;
  config.dense_steps = 3;
  config.ramp_steps = 8;
  config.ramp_sparsity = 0.4;
  return config;
}

std::string describe(const Scenario& s, int ranks) {
  return format(
      "%d ranks, n %zu, role %d, type %d, payload %d, residual %d, rule %d, sparsity %g, op "
      "%s%s%s, flush at %d, "
      "reload at %d to residual %d%s",
      ranks, s.count, s.config.role, s.config.dtype, s.config.payload, s.config.residual,
      s.config.rule, s.config.sparsity, name_of(s.op), s.out_of_place ? ", out of place" : "",
      s.inject_nonfinite ? ", non-finite values" : "", s.flush_at, s.reload_at,
      s.reload_to.value_or(s.config.residual), s.blind ? ", blind" : "");
}

std::string run_scenario(const Rank& given, const Scenario& scenario, uint32_t* digest) {
  Rank place = given;
  if (scenario.blind && place.stream.handle == nullptr)
    place.make_engine = [] { return std::make_shared<BlindEngine>(); };
  const BufferConfig& config = scenario.config;
  const size_t n = scenario.count;
  const int ranks = place.communicator->size();
  const auto rank = static_cast<size_t>(place.communicator->rank());
  const bool fused = config.role == SCAPE_ROLE_FUSED;
  bool in_place = config.residual == SCAPE_RESIDUAL_IN_PLACE;
  Run run{place, scenario, place.make(config, n),
          Simulation(config, n, ranks, scenario.shared, scenario.blind)};

  std::vector<Reduction> reductions;
  for (int i = 0; i < ranks; ++i)
    reductions.push_back({.op = scenario.op, .factor = 0.5 + 0.25 * i});

  // What the caller owns, in the buffer's place.
  const std::shared_ptr<Engine> memory = place.make_engine();
  const Stream stream = place.stream;
  Array<std::byte> send(*memory), apart(*memory);
  Array<float> param(*memory), grad(*memory);  // grad: in place, the gradient buffer

  std::vector<float> expected_param(n);
  for (size_t j = 0; j < n; ++j)
    expected_param[j] = static_cast<float>(static_cast<double>(mixed(j) % 2000) / 1000 - 1);
  param.assign(expected_param.data(), n, stream);
  grad.fill(n, std::byte{0}, stream);
  std::vector<float> returned(n);  // first moment: m as last returned

  for (int t = 0; t < scenario.steps; ++t) {
    const double lr = 1e-2 / (1 + 0.1 * t);
    std::vector<std::vector<float>> inputs;
    for (int i = 0; i < ranks; ++i) {
      inputs.push_back(gradient(scenario, i, t));
      if (config.role != SCAPE_ROLE_FIRST_MOMENT) continue;
      const auto beta1 = static_cast<float>(config.beta1);
      for (size_t j = 0; j < n; ++j) {
        inputs.back()[j] =
            narrowed(config.dtype, beta1 * returned[j] + (1 - beta1) * inputs.back()[j]);
      }
    }
    if (scenario.inject_nonfinite && n > 0) inject(t, ranks, &inputs);
    run.simulation.step(inputs, reductions, &expected_param, lr, scenario.weight_decay);

    const std::vector<std::byte> sent = to_bytes(config.dtype, inputs[rank]);
    send.assign(sent.data(), sent.size(), stream);
    apart.resize(scenario.out_of_place ? sent.size() : 0);
    std::byte* const recv = scenario.out_of_place ? apart.data() : send.data();
    Status status;
    if (in_place) {
      std::vector<float> values = grad.to_host(stream);
      for (size_t j = 0; j < n; ++j) values[j] += inputs[rank][j];
      grad.assign(values.data(), n, stream);
      status = complete(&run, grad.data(), grad.data(), reductions[rank]);
    } else {
      status = complete(&run, send.data(), recv, reductions[rank]);
    }
    if (!status.ok()) return format("step %d: ", t) + status.message();
    if (fused) {
      if (send.to_host(stream) != sent)
        return format("step %d: the caller's buffer was changed", t);
      status = run.buffer->adams_step(param.data(), lr, scenario.weight_decay, stream);
      if (!status.ok()) return format("step %d: ", t) + status.message();
      if (in_place && !run.buffer->clear_masked(grad.data(), stream).ok())
        return "clear_masked failed";
      const std::vector<float> got = param.to_host(stream);
      if (auto difference = differ("parameter", t, got, expected_param); !difference.empty())
        return difference;
      run.add(got);
    } else {
      const std::vector<std::byte> bytes = (scenario.out_of_place ? apart : send).to_host(stream);
      if (scenario.out_of_place && send.to_host(stream) != sent)
        return format("step %d: send was changed", t);
      const std::vector<float> expected = from_bytes(config.dtype, run.simulation.output);
      if (auto difference = differ("output", t, from_bytes(config.dtype, bytes), expected);
          !difference.empty()) {
        return difference;
      }
      if (!run.simulation.skipped) returned = expected;
      if (!run.simulation.skipped) run.add(bytes);
    }
    if (auto difference = compare_state(&run, t); !difference.empty()) return difference;

    // A buffer that is always dense has nothing to flush.
    if (t + 1 == scenario.flush_at && ranks > 1 && config.sparsity > 0) {
      const std::vector<std::vector<float>> nothing(static_cast<size_t>(ranks),
                                                    std::vector<float>(n));
      send.assign(sent.data(), sent.size(), stream);  // its content must not matter
      run.simulation.step(nothing, reductions, &expected_param, lr, scenario.weight_decay, true);
      void* buffer = in_place ? static_cast<void*>(grad.data()) : send.data();
      status = run.buffer->flush(buffer, fused ? param.data() : nullptr, lr, scenario.weight_decay,
                                 stream);
      if (!status.ok()) return "flush: " + status.message();
      if (auto difference = differ("flushed parameter", t, param.to_host(stream), expected_param);
          fused && !difference.empty()) {
        return difference;
      }
      if (!fused) {
        const std::vector<float> expected = from_bytes(config.dtype, run.simulation.output);
        if (auto difference = differ("flushed output", t,
                                     from_bytes(config.dtype, send.to_host(stream)), expected);
            !difference.empty()) {
          return difference;
        }
        if (!run.simulation.skipped) returned = expected;
      }
      if (auto difference = compare_state(&run, t); !difference.empty())
        return "after the flush: " + difference;
    }
    if (t + 1 == scenario.reload_at) {
      if (std::string problem = reload(&run); !problem.empty()) return problem;
      grad.fill(n, std::byte{0}, stream);
      in_place = run.buffer->config().residual == SCAPE_RESIDUAL_IN_PLACE;
    }
  }
  const scape_stats stats = run.buffer->stats();
  if (stats.nonfinite_values != run.simulation.nonfinite[rank] && scenario.reload_at < 0) {
    return format("%llu non-finite values counted, expected %llu",
                  static_cast<unsigned long long>(stats.nonfinite_values),
                  static_cast<unsigned long long>(run.simulation.nonfinite[rank]));
  }
  if (digest != nullptr) *digest = run.digest;
  return {};
}

}  // namespace scape::plugin::test
