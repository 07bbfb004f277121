// A registration's options checked, the warm-up schedule, and the partitions: pure functions.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <initializer_list>

#include "base/settings.h"
#include "plugin/masked/masked_buffer.h"

namespace scape::plugin {
namespace {

constexpr size_t kNameBytes = 63;
constexpr size_t kLargestConfig = 65536;  // more can only be a size that was never set

// The beginnings of a run that a total stands for, where no count of steps is given.
constexpr double kDenseShare = 0.01;
constexpr double kRampShare = 0.1;

uint64_t steps_or_share(uint64_t steps, uint64_t total, double share, int64_t fallback) {
  if (steps != 0) return steps;
  if (total == 0) return static_cast<uint64_t>(fallback);
  return std::max<uint64_t>(1, static_cast<uint64_t>(share * static_cast<double>(total)));
}

// In [0, 1), still below 1 when rounded to the kernels' fp32.
Status check_fraction(const char* field, double value) {
  if (value >= 0 && static_cast<float>(value) < 1) return Status::Ok();
  return error(SCAPE_ERR_ARGUMENT, "config.%s is %g; it must be in [0, 1)", field, value);
}

Status check_choice(const char* field, int value, int last, const char* choices) {
  if (value >= 0 && value <= last) return Status::Ok();
  return error(SCAPE_ERR_ARGUMENT, "config.%s is %d; it must be one of %s", field, value, choices);
}

Status check_payload(scape_dtype payload) {
  if (payload == SCAPE_FLOAT32 || payload == SCAPE_BFLOAT16) return Status::Ok();
  return error(SCAPE_ERR_ARGUMENT,
               "config.payload is %d; it must be SCAPE_FLOAT32 (0) or SCAPE_BFLOAT16 (1)",
               static_cast<int>(payload));
}

std::string choice(int value, std::initializer_list<const char*> names) {
  const auto index = static_cast<size_t>(value);
  return index < names.size() ? names.begin()[index] : format("%d", value);
}

// A sparsity that is not below 1 keeps nothing: most likely another tool's convention.
Status check_sparsity(const char* field, double value) {
  if (value >= 0 && value < 1) return Status::Ok();
  return error(
      SCAPE_ERR_ARGUMENT,
      "config.%s is %g; it is the fraction not sent and must be in [0, 1): 0.99 sends 1 %%", field,
      value);
}

// A number beyond what a run can have is a negative one, or was never set.
Status check_steps(const char* field, uint64_t steps) {
  constexpr uint64_t kMost = uint64_t{1} << 48;
  if (steps <= kMost) return Status::Ok();
  return error(SCAPE_ERR_ARGUMENT, "config.%s is %llu; it must be in 0 .. 2^48", field,
               static_cast<unsigned long long>(steps));
}

Status check_in_place(const BufferConfig& config) {
  if (config.residual != SCAPE_RESIDUAL_IN_PLACE) return Status::Ok();
  const char* const by_default = settings().residual == SCAPE_RESIDUAL_IN_PLACE
                                     ? " (the default by SCAPE_RESIDUAL=inplace)"
                                     : "";
  if (config.role != SCAPE_ROLE_FUSED) {
    return error(
        SCAPE_ERR_ARGUMENT,
        "config.residual is SCAPE_RESIDUAL_IN_PLACE%s with the role \"%s\"; only the fused role "
        "can keep it in place, so ask for SCAPE_RESIDUAL_INTERNAL or SCAPE_RESIDUAL_HOST",
        by_default, role_text(config.role).c_str());
  }
  if (config.dtype != SCAPE_FLOAT32) {
    return error(SCAPE_ERR_ARGUMENT,
                 "config.residual is SCAPE_RESIDUAL_IN_PLACE%s for elements of type %s; only fp32 "
                 "buffers can hold it, so ask for SCAPE_RESIDUAL_INTERNAL or SCAPE_RESIDUAL_HOST",
                 by_default, type_text(config.dtype).c_str());
  }
  return Status::Ok();
}

}  // namespace

DataType data_type_of(scape_dtype type) {
  switch (type) {
    case SCAPE_FLOAT16:
      return DataType::kFloat16;
    case SCAPE_BFLOAT16:
      return DataType::kBfloat16;
    default:
      return DataType::kFloat32;
  }
}

std::string role_text(int role) {
  return choice(role, {"fused", "first moment", "hooked gradient", "gradient"});
}

std::string rule_text(int rule) { return choice(rule, {"lazy", "plain"}); }

std::string residual_text(int residual) {
  return choice(residual, {"internal", "in place", "host memory"});
}

std::string type_text(int type) { return choice(type, {"fp32", "bf16", "fp16"}); }

void default_config(scape_config* out) {
  const Settings& set = settings();
  *out = {};
  out->size = sizeof(*out);
  out->role = SCAPE_ROLE_FUSED;
  out->payload = static_cast<scape_dtype>(set.payload);
  out->residual = static_cast<scape_residual>(set.residual);
  out->rule = SCAPE_RULE_LAZY;
  out->sparsity = set.sparsity;
  out->beta1 = 0.9;
  out->beta2 = 0.95;
  out->eps = 1e-8;
  out->age_cap = 100;
  out->ramp_sparsity = set.ramp_sparsity;
}

Status check_name(const char* what, std::string_view name) {
  if (name.empty() || name.size() > kNameBytes) {
    return error(SCAPE_ERR_ARGUMENT, "%s has %zu bytes; it must have 1 to %zu", what, name.size(),
                 kNameBytes);
  }
  // A name stands in log lines and reports.
  for (size_t i = 0; i < name.size(); ++i) {
    const auto byte = static_cast<unsigned char>(name[i]);
    if (byte < 0x20 || byte == 0x7f) {
      return error(SCAPE_ERR_ARGUMENT,
                   "%s has the control character 0x%02x at byte %zu; use printable characters",
                   what, byte, i);
    }
  }
  return Status::Ok();
}

Status read_config(const scape_config& config, scape_config* out) {
  if (config.size < sizeof(config.size) || config.size > kLargestConfig) {
    return error(SCAPE_ERR_ARGUMENT, "config.size is %zu; fill the struct with scape_config_init()",
                 config.size);
  }
  // A caller built against an older header has a shorter struct: what it lacks keeps its default.
  std::memcpy(out, &config, std::min(config.size, sizeof(*out)));
  out->size = sizeof(*out);
  return Status::Ok();
}

Status resolve_config(const scape_config* config, scape_dtype dtype, BufferConfig* out) {
  scape_config given;
  default_config(&given);
  if (config != nullptr) SCAPE_RETURN_IF_ERROR(read_config(*config, &given));

  if (dtype < 0 || dtype > SCAPE_FLOAT16) {
    return error(SCAPE_ERR_ARGUMENT, "dtype is %d; it must be one of fp32 (0), bf16 (1), fp16 (2)",
                 static_cast<int>(dtype));
  }
  SCAPE_RETURN_IF_ERROR(
      check_choice("role", given.role, SCAPE_ROLE_GRADIENT,
                   "fused (0), first moment (1), hooked gradient (2), gradient (3)"));
  SCAPE_RETURN_IF_ERROR(check_payload(given.payload));
  SCAPE_RETURN_IF_ERROR(check_choice("residual", given.residual, SCAPE_RESIDUAL_HOST,
                                     "internal (0), in place (1), host memory (2)"));
  SCAPE_RETURN_IF_ERROR(check_choice("rule", given.rule, SCAPE_RULE_PLAIN, "lazy (0), plain (1)"));
  SCAPE_RETURN_IF_ERROR(check_sparsity("sparsity", given.sparsity));
  SCAPE_RETURN_IF_ERROR(check_sparsity("ramp_sparsity", given.ramp_sparsity));
  SCAPE_RETURN_IF_ERROR(check_fraction("beta1", given.beta1));
  SCAPE_RETURN_IF_ERROR(check_fraction("beta2", given.beta2));
  if (!(static_cast<float>(given.eps) > 0) || !std::isfinite(static_cast<float>(given.eps))) {
    return error(SCAPE_ERR_ARGUMENT, "config.eps is %g; it must be a positive fp32 number",
                 given.eps);
  }
  if (!(given.age_cap >= 1) || !std::isfinite(static_cast<float>(given.age_cap))) {
    return error(SCAPE_ERR_ARGUMENT,
                 "config.age_cap is %g; it must be at least 1, and a finite fp32 number",
                 given.age_cap);
  }
  SCAPE_RETURN_IF_ERROR(check_steps("total_steps", given.total_steps));
  SCAPE_RETURN_IF_ERROR(check_steps("dense_steps", given.dense_steps));
  SCAPE_RETURN_IF_ERROR(check_steps("ramp_steps", given.ramp_steps));

  BufferConfig resolved;
  resolved.name = given.name != nullptr ? given.name : "buffer";
  SCAPE_RETURN_IF_ERROR(check_name("config.name", resolved.name));
  resolved.dtype = dtype;
  resolved.role = given.role;
  resolved.payload = given.payload;
  resolved.residual = given.residual;
  resolved.rule = given.rule;
  resolved.sparsity = given.sparsity;
  resolved.beta1 = given.beta1;
  resolved.beta2 = given.beta2;
  resolved.eps = given.eps;
  resolved.age_cap = given.age_cap;
  resolved.dense_steps =
      steps_or_share(given.dense_steps, given.total_steps, kDenseShare, settings().dense_steps);
  resolved.ramp_steps =
      steps_or_share(given.ramp_steps, given.total_steps, kRampShare, settings().ramp_steps);
  resolved.ramp_sparsity = given.ramp_sparsity;
  SCAPE_RETURN_IF_ERROR(check_in_place(resolved));
  *out = std::move(resolved);
  return Status::Ok();
}

double sparsity_at(const BufferConfig& config, uint64_t t) {
  if (t < config.dense_steps) return 0;
  if (t < config.ramp_steps) return std::min(config.ramp_sparsity, config.sparsity);
  return config.sparsity;
}

size_t bits_at(const BufferConfig& config, uint64_t t, size_t partition_size) {
  if (partition_size == 0) return 0;
  const double kept = (1 - sparsity_at(config, t)) * static_cast<double>(partition_size);
  // Half to even whatever rounding mode the program has set.
  double rounded = std::floor(kept);
  const double rest = kept - rounded;
  if (rest > 0.5 || (rest == 0.5 && std::fmod(rounded, 2) != 0)) rounded += 1;
  return std::clamp<size_t>(static_cast<size_t>(rounded), 1, partition_size);
}

Partition partition_of(size_t n, int ranks, int q) {
  const size_t words = kernels::mask_words(n);
  const auto count = static_cast<size_t>(ranks);
  const size_t share = words / count + (words % count != 0);
  // Words first: the product stays small where n is near the end of size_t.
  const auto bound = [&](size_t index) {
    const size_t word = std::min(share * index, words);
    return std::min(n, word * 64);
  };
  return {bound(static_cast<size_t>(q)), bound(static_cast<size_t>(q) + 1)};
}

}  // namespace scape::plugin
