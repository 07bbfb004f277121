// The local steps after a call, and the flush.
#include <algorithm>
#include <cmath>
#include <new>

#include "base/clock.h"
#include "base/fault.h"
#include "base/log.h"
#include "base/overlap.h"
#include "plugin/masked/masked_buffer_impl.h"

namespace scape::plugin {
namespace {

Status check_rates(const char* name, double lr, double weight_decay) {
  // The step is taken in fp32.
  if (!(lr >= 0) || !(weight_decay >= 0) || !std::isfinite(static_cast<float>(lr)) ||
      !std::isfinite(static_cast<float>(weight_decay)) || !(lr * weight_decay < 1)) {
    return error(SCAPE_ERR_ARGUMENT,
                 "buffer '%s': lr is %g and weight_decay %g; both must be finite in fp32 and not "
                 "negative, and their product less than 1",
                 name, lr, weight_decay);
  }
  return Status::Ok();
}

}  // namespace

// Of a step of `param` with what came for the buffer at `data`.
Status MaskedBufferImpl::check_step(const void* data, const float* param, double lr,
                                    double weight_decay) const {
  const char* name = config_.name.c_str();
  if (count_ > 0 && param == nullptr)
    return error(SCAPE_ERR_ARGUMENT, "buffer '%s': param is null", name);
  if (overlap(data, count_ * kernels::size_of(type_), param, count_ * sizeof(float))) {
    return error(SCAPE_ERR_ARGUMENT,
                 "buffer '%s': param (%p) overlaps the buffer that is reduced (%p); pass the "
                 "parameters' address",
                 name, static_cast<const void*>(param), data);
  }
  return check_rates(name, lr, weight_decay);
}

Status MaskedBufferImpl::adams_step(float* param, double lr, double weight_decay, Stream stream) {
  const char* name = config_.name.c_str();
  if (!fused_) {
    return error(SCAPE_ERR_USAGE,
                 "buffer '%s': scape_adams_step() is for the fused role, its role is \"%s\"", name,
                 role_text(config_.role).c_str());
  }
  if (!failure_.ok()) return failure_;
  if (phase_ != Phase::kIdle || !step_owed_) {
    const std::string dense = dense_reason();
    return error(SCAPE_ERR_USAGE,
                 "buffer '%s': scape_adams_step() needs a masked all-reduce of it before%s%s", name,
                 dense.empty() ? "" : "; the last call that was not one went dense because ",
                 dense.c_str());
  }
  SCAPE_RETURN_IF_ERROR(check_step(call_.send, param, lr, weight_decay));
  stream_ = stream;
  try {
    do_adams_step(param, lr, weight_decay);
  } catch (const std::bad_alloc&) {
    run_out_of_memory("scape_adams_step()");
  }
  return end_local_step();
}

void MaskedBufferImpl::do_adams_step(float* param, double lr, double weight_decay) {
  if (!call_.dense) fault_point(Fault::kStep);
  const uint64_t began = now_ns();
  state_.decay.push(lr, weight_decay);
  last_rate_ = static_cast<float>(lr);
  last_decay_ = static_cast<float>(weight_decay);
  StepView step = step_view();
  step.params.lr = static_cast<float>(lr);
  // No element has waited since before the first step, nor counts as older than the table is long.
  const auto bound =
      static_cast<uint16_t>(std::min<uint64_t>(state_.step + 1, DecayTable::kLongest));
  const uint16_t oldest = step.params.plain || ages_.empty()
                              ? uint16_t{1}
                              : engine_->oldest_age(stream_, ages_.data(), ages_.size(), bound);
  const std::vector<float>& decay = state_.decay.table(oldest);
  step.params.decay = decay.empty() ? nullptr : decay.data();
  step.params.decay_size = static_cast<uint32_t>(decay.size());
  engine_->adams_step(step, reduced_, param);
  if (!always_dense_) {
    engine_->clear_sent(step, error_);
    if (call_.dense && !engine_->may_have_skipped()) state_.residual_dirty = false;
  } else if (in_place_) {
    // Nothing is kept; a skipped gradient is dropped as well.
    engine_->set(stream_, place_, std::byte{0}, count_ * sizeof(float));
  }
  step_owed_ = false;
  if (!dense_at(state_.step + 1)) refresher_->submit(refresh_);
  end_step();
  const uint64_t ended = now_ns();
  count_stats([&](scape_stats& stats) { stats.step_ns += ended - began; });
}

Status MaskedBufferImpl::post_step(size_t offset, size_t length, const float* before, float* param,
                                   double lr, double weight_decay, Stream stream) {
  const char* name = config_.name.c_str();
  if (config_.role != SCAPE_ROLE_GRADIENT_HOOKED) {
    return error(
        SCAPE_ERR_USAGE,
        "buffer '%s': scape_post_step() is for the hooked gradient role, its role is \"%s\"", name,
        role_text(config_.role).c_str());
  }
  if (offset > count_ || length > count_ - offset) {
    return error(SCAPE_ERR_ARGUMENT,
                 "buffer '%s': elements %zu .. %zu + %zu are not within its %zu", name, offset,
                 offset, length, count_);
  }
  if (length > 0 && (before == nullptr || param == nullptr)) {
    return error(SCAPE_ERR_ARGUMENT, "buffer '%s': %s is null", name,
                 before == nullptr ? "before" : "param");
  }
  SCAPE_RETURN_IF_ERROR(check_rates(name, lr, weight_decay));
  if (phase_ != Phase::kIdle) return owed_or_running("scape_post_step()");
  stream_ = stream;
  // A dense step has its right length already, and nothing is off its mask.
  if (ages_.empty()) return Status::Ok();
  const StepView step = step_view();
  const float age_cap = step.params.plain ? 1.0f : step.params.age_cap;
  engine_->post_step(step, offset, length, before, param, static_cast<float>(1 - lr * weight_decay),
                     age_cap);
  return end_local_step();
}

Status MaskedBufferImpl::clear_masked(void* buffer, Stream stream) {
  if (buffer == nullptr && count_ > 0) {
    return error(SCAPE_ERR_ARGUMENT, "buffer '%s': buffer is null", config_.name.c_str());
  }
  if (phase_ != Phase::kIdle) return owed_or_running("scape_clear_masked()");
  stream_ = stream;
  if (!in_place_ || always_dense_ || place_ == nullptr) {
    // No residual in it: all of it is gradient.
    engine_->set(stream_, buffer, std::byte{0}, count_ * kernels::size_of(type_));
    return end_local_step();
  }
  if (buffer != place_) {
    return error(SCAPE_ERR_USAGE, "buffer '%s' keeps its residual in place at %p, not at %p",
                 config_.name.c_str(), static_cast<void*>(place_), buffer);
  }
  engine_->clear_sent(step_view(), error_);
  return end_local_step();
}

Status MaskedBufferImpl::flush(void* buffer, float* param, double lr, double weight_decay,
                               Stream stream) {
  if (always_dense_ || state_.step == 0) return owed_or_running("a flush");
  if (fused_) {
    SCAPE_RETURN_IF_ERROR(
        check_step(buffer, param, lr, weight_decay));  // before other ranks take part
  } else if (param != nullptr) {
    return error(SCAPE_ERR_ARGUMENT,
                 "buffer '%s': param is %p, but only the fused role's flush steps; pass null",
                 config_.name.c_str(), static_cast<void*>(param));
  }
  SCAPE_RETURN_IF_ERROR(begin({.send = in_place_ ? buffer : nullptr,
                               .recv = buffer,
                               .reduction = state_.reduction,
                               .flush = true},
                              stream));
  drive(*communicator_, [this] { return poll(); });
  SCAPE_RETURN_IF_ERROR(status_);
  return fused_ ? adams_step(param, lr, weight_decay, stream) : Status::Ok();
}

void MaskedBufferImpl::note_dense(const char* why) {
  bool first;
  {
    std::lock_guard lock(stats_mutex_);
    ++stats_.intercepted_calls;
    ++stats_.dense_calls;
    ++stats_.fallback_calls;
    first = dense_reasons_.note(why);
  }
  if (first) SCAPE_WARN("buffer '%s' travels dense in this call: %s", config_.name.c_str(), why);
}

std::string MaskedBufferImpl::dense_reason() const {
  std::lock_guard lock(stats_mutex_);
  return dense_reasons_.last();
}

Status MaskedBufferImpl::failure() const {
  std::lock_guard lock(stats_mutex_);
  return failure_;
}

}  // namespace scape::plugin
