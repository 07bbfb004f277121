// What a call does to the elements: steps 1 and 2, the result's way back, and step 6.
#include <algorithm>

#include "base/clock.h"
#include "plugin/masked/masked_buffer_impl.h"

namespace scape::plugin {
namespace {

// A sweep over `last` visits each element once in so many steps, soon enough that no age wraps.
constexpr size_t kRestampSteps = size_t{1} << 14;

}  // namespace

// ---- there ----

Status MaskedBufferImpl::start_direct(WorkPtr* work) {
  void* target = call_.recv;
  if (fused_ && type_ == kernels::Type::kFloat32) {
    payload_.resize(count_);
    target = payload_.data();
  } else if (fused_) {
    direct_.resize(count_);
    target = direct_.data();
  } else if (!always_dense_ && call_.send == call_.recv) {
    // The exchange overwrites u, which a skipped step has to keep.
    engine_->to_float(stream_, type_, call_.send, state_.residual.data(), count_);
  }
  if (in_place_ && !always_dense_) {
    gather_ages();
  }
  count_stats([&](scape_stats& stats) { stats.payload_bytes += count_ * kernels::size_of(type_); });
  return communicator_->all_reduce(call_.send, target, count_, data_type_of(config_.dtype),
                                   call_.reduction, tag(), work);
}

Status MaskedBufferImpl::start_packed(WorkPtr* work) {
  const size_t bytes = (masked_ + 1) * size_of(codec().wire_type());
  travels_shared_ = shared_ != nullptr && !call_.dense && bytes <= shared_->capacity() &&
                    shared_->can_reduce(codec().wire_type(), call_.reduction.op);
  payload_.resize(travels_shared_ && codec().plain() ? 0 : masked_ + 1);
  if (!travels_shared_ && !codec().plain()) wire_.resize(bytes);
  void* const wire = travels_shared_   ? shared_->operand()
                     : codec().plain() ? static_cast<void*>(payload_.data())
                                       : wire_.data();
  float* const values = codec().plain() ? static_cast<float*>(wire) : payload_.data();
  // Of a mask that no refresh just made: all ones, or from a saved state.
  if (ages_.empty()) gather_ages();
  const StepView step = step_view();
  engine_->pack(step, in_place_ ? nullptr : call_.send, values);
  codec().encode(step, values, wire);
  error_ = codec().error();
  count_stats([&](scape_stats& stats) { stats.payload_bytes += bytes; });
  if (travels_shared_) {
    return communicator_->all_reduce(*shared_, masked_ + 1, codec().wire_type(), call_.reduction,
                                     tag(), work);
  }
  return communicator_->all_reduce(wire, wire, masked_ + 1, codec().wire_type(), call_.reduction,
                                   tag(), work);
}

// ---- and back ----

void MaskedBufferImpl::finish_direct() {
  if (fused_) {
    if (type_ != kernels::Type::kFloat32) {
      payload_.resize(count_);
      engine_->to_float(stream_, type_, direct_.data(), payload_.data(), count_);
      direct_.resize(0);
    }
    reduced_ = payload_.data();
    engine_->judge(stream_, kernels::Type::kFloat32, reduced_, count_);
  } else if (!always_dense_) {
    engine_->judge(stream_, type_, call_.recv, count_);
  }
  if (always_dense_) return;
  const bool kept = in_place_ || (!fused_ && call_.send == call_.recv);
  engine_->finish_direct(step_view(), kept ? nullptr : call_.send, fused_ ? nullptr : call_.recv);
  if (engine_->may_have_skipped()) state_.residual_dirty = true;
}

void MaskedBufferImpl::finish_packed() {
  const void* const wire = travels_shared_   ? shared_->result()
                           : codec().plain() ? static_cast<const void*>(payload_.data())
                                             : wire_.data();
  const StepView step = step_view();
  reduced_ = codec().decode(step, wire, payload_.data());
  engine_->judge(stream_, kernels::Type::kFloat32, reduced_, masked_ + 1);
  engine_->finish_packed(step, reduced_, error_, fused_ ? nullptr : call_.recv);
  if (engine_->may_have_skipped()) {
    state_.residual_dirty = true;
  } else if (call_.dense && !fused_) {
    state_.residual_dirty = false;
  }
}

// ---- what both, and the local steps, need ----

CallTag MaskedBufferImpl::tag() const {
  return {.registered = !always_dense_,
          .name = config_.name,
          .learning_rate = last_rate_,
          .weight_decay = last_decay_,
          .stream = stream_};
}

StepView MaskedBufferImpl::step_view() {
  return {.stream = stream_,
          .params = {.t = static_cast<uint16_t>(state_.step),
                     .powers = {powers_.data(), static_cast<uint32_t>(powers_.size())},
                     .beta1 = static_cast<float>(config_.beta1),
                     .beta2 = static_cast<float>(config_.beta2),
                     .eps = static_cast<float>(config_.eps),
                     .age_cap = static_cast<float>(config_.age_cap),
                     .plain = always_dense_ || config_.rule == SCAPE_RULE_PLAIN},
          .role = config_.role,
          .type = type_,
          .count = count_,
          .moment = state_.moment.data(),
          .last = state_.last->data(),
          .residual = residual(),
          .mask = state_.mask.data(),
          .before = state_.before.data(),
          .masked = masked_,
          .ages = ages_.data()};
}

void MaskedBufferImpl::gather_ages() {
  ages_.resize(masked_);
  engine_->gather_ages(stream_, state_.mask.data(), count_, state_.last->data(),
                       static_cast<uint16_t>(state_.step), ages_.data());
}

// Step 6, and on to the next step.
void MaskedBufferImpl::end_step() {
  if (!always_dense_) {
    const uint64_t began = now_ns();
    const size_t begin = state_.restamp_at;
    const size_t end = std::min(count_, begin + count_ / kRestampSteps + 1);
    const StepView step = step_view();
    engine_->restamp(step, begin, end);
    state_.restamp_at = end == count_ ? 0 : end;

    if (!dense_at(state_.step + 1)) {
      const double factor =
          state_.reduction.op == ReduceOp::kPremulSum ? state_.reduction.factor : 1;
      const bool mean = state_.reduction.op == ReduceOp::kAvg;
      float* scores = refresh_->prepare(config_, state_.step, state_.last);
      score_view_.score(*engine_, step, refresh_->scored(),
                        mean ? 1.0f : static_cast<float>(ranks_ * factor), scores);
      refresher_->ready(refresh_, stream_);
      refresh_pending_ = true;
      count_stats([&](scape_stats& stats) {
        ++stats.refreshes;
        stats.score_ns += now_ns() - began;
      });
    }
  }
  ++state_.step;
}

}  // namespace scape::plugin
