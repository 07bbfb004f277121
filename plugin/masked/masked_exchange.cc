// What a call does to the elements: steps 1 and 2, the result's way back, and step 6.
#include <algorithm>
#include <array>
#include <limits>

#include "base/clock.h"
#include "plugin/masked/masked_buffer_impl.h"

namespace scape::plugin {
namespace {

using kernels::Type;

// Elements converted at once where a whole converted copy would be wasteful; a multiple of 64.
constexpr size_t kChunk = 4096;

// A sweep over `last` visits each element once in so many steps, soon enough that no age wraps.
constexpr size_t kRestampSteps = size_t{1} << 14;

template <typename Visit>
void for_each_chunk(size_t n, Visit&& visit) {
  for (size_t begin = 0; begin < n; begin += kChunk) visit(begin, std::min(kChunk, n - begin));
}

std::byte* at(void* base, Type type, size_t index) {
  return static_cast<std::byte*>(base) + index * kernels::size_of(type);
}
const std::byte* at(const void* base, Type type, size_t index) {
  return static_cast<const std::byte*>(base) + index * kernels::size_of(type);
}

}  // namespace

// ---- there ----

Status MaskedBufferImpl::start_direct(WorkPtr* work) {
  void* target = call_.recv;
  if (fused_ && type_ == Type::kFloat32) {
    payload_.resize(count_);
    target = payload_.data();
  } else if (fused_) {
    direct_.resize(count_);
    target = direct_.data();
  } else if (!always_dense_ && call_.send == call_.recv) {
    // The exchange overwrites u, which a skipped step has to keep.
    ops_.to_float(type_, call_.send, state_.residual.data(), count_);
  }
  if (in_place_ && !always_dense_) {
    ages_.resize(count_);
    ops_.gather_ages(state_.mask.data(), count_, age_gather(0, 0));
  }
  count_stats([&](scape_stats& stats) { stats.payload_bytes += count_ * kernels::size_of(type_); });
  return communicator_->all_reduce(call_.send, target, count_, data_type_of(config_.dtype),
                                   call_.reduction, tag(), work);
}

Status MaskedBufferImpl::start_packed(WorkPtr* work) {
  PayloadCodec& codec = call_.dense ? *exact_codec_ : *codec_;
  const size_t bytes = (masked_ + 1) * size_of(codec.wire_type());
  travels_shared_ = shared_ != nullptr && !call_.dense && bytes <= shared_->capacity() &&
                    shared_->can_reduce(codec.wire_type(), call_.reduction.op);
  payload_.resize(travels_shared_ && codec.plain() ? 0 : masked_ + 1);
  if (payload_.capacity() / 2 > payload_.size())
    payload_.shrink_to_fit();  // the dense steps are over
  if (!travels_shared_ && !codec.plain()) wire_.resize(bytes);
  void* const wire = travels_shared_ ? shared_->operand()
                     : codec.plain() ? static_cast<void*>(payload_.data())
                                     : wire_.data();
  float* const values = codec.plain() ? static_cast<float*>(wire) : payload_.data();
  ages_.resize(masked_);
  pack(values);
  codec.encode(values, ages_.data(), masked_, state_.flag_pending, step_params(), wire);
  error_ = codec.error();
  count_stats([&](scape_stats& stats) { stats.payload_bytes += bytes; });
  if (travels_shared_) {
    return communicator_->all_reduce(*shared_, masked_ + 1, codec.wire_type(), call_.reduction,
                                     tag(), work);
  }
  return communicator_->all_reduce(wire, wire, masked_ + 1, codec.wire_type(), call_.reduction,
                                   tag(), work);
}

// The ages of the masked elements from `begin` on, to ages_ from `packed` on.
kernels::AgeGather MaskedBufferImpl::age_gather(size_t begin, size_t packed) {
  return {state_.last.data() + begin, static_cast<uint16_t>(state_.step), ages_.data() + packed};
}

size_t MaskedBufferImpl::pack(float* payload) {
  const uint64_t* mask = state_.mask.data();
  if (in_place_ || call_.send == nullptr) {
    return ops_.gather(residual(), mask, count_, payload, age_gather(0, 0));
  }
  if (config_.role != SCAPE_ROLE_FIRST_MOMENT) {
    return ops_.accumulate_pack(type_, call_.send, state_.residual.data(), mask, count_, payload,
                                age_gather(0, 0));
  }
  if (type_ == Type::kFloat32) {
    return ops_.accumulate_pack_moment(type_, call_.send, state_.moment.data(),
                                       static_cast<float>(config_.beta1), state_.residual.data(),
                                       mask, count_, payload, age_gather(0, 0));
  }
  // What the caller put into x is m as it was returned: rounded to the buffer's type.
  size_t packed = 0;
  std::array<float, kChunk> returned;
  std::array<uint16_t, kChunk> narrow;
  for_each_chunk(count_, [&](size_t begin, size_t size) {
    ops_.from_float(type_, state_.moment.data() + begin, narrow.data(), size);
    ops_.to_float(type_, narrow.data(), returned.data(), size);
    packed += ops_.accumulate_pack_moment(type_, at(call_.send, type_, begin), returned.data(),
                                          static_cast<float>(config_.beta1),
                                          state_.residual.data() + begin, mask + begin / 64, size,
                                          payload + packed, age_gather(begin, packed));
  });
  return packed;
}

// ---- and back ----

void MaskedBufferImpl::finish_direct() {
  if (fused_) {
    if (type_ != Type::kFloat32) {
      payload_.resize(count_);
      ops_.to_float(type_, direct_.data(), payload_.data(), count_);
      direct_ = {};
    }
    reduced_ = payload_.data();
    skipped_ = ops_.any_nonfinite(payload_.data(), count_);
  } else if (!always_dense_) {
    skipped_ = direct_output_nonfinite();
  }
  if (always_dense_) return;

  if (skipped_) {
    if (!in_place_ && (fused_ || call_.send != call_.recv)) {
      ops_.to_float(type_, call_.send, state_.residual.data(), count_);
    }
    keep_skipped_residual();
  } else if (!fused_) {
    update_moment_directly();
    if (call_.send == call_.recv) std::fill(state_.residual.begin(), state_.residual.end(), 0.0f);
  }
}

bool MaskedBufferImpl::direct_output_nonfinite() const {
  if (type_ == Type::kFloat32)
    return ops_.any_nonfinite(static_cast<const float*>(call_.recv), count_);
  bool found = false;
  std::array<float, kChunk> chunk;
  for_each_chunk(count_, [&](size_t begin, size_t size) {
    ops_.to_float(type_, at(call_.recv, type_, begin), chunk.data(), size);
    found = found || ops_.any_nonfinite(chunk.data(), size);
  });
  return found;
}

// Gradient roles, direct: all ages are 1, the caller's buffer holds the mean, and m follows it.
void MaskedBufferImpl::update_moment_directly() {
  const kernels::StepParams params = step_params();
  std::array<float, kChunk> chunk;
  for_each_chunk(count_, [&](size_t begin, size_t size) {
    ops_.to_float(type_, at(call_.recv, type_, begin), chunk.data(), size);
    ops_.moment_step(chunk.data(), state_.mask.data() + begin / 64, size, params,
                     state_.moment.data() + begin, state_.last.data() + begin);
  });
  if (config_.role == SCAPE_ROLE_GRADIENT_HOOKED) state_.before = state_.mask;
}

void MaskedBufferImpl::finish_packed() {
  PayloadCodec& codec = call_.dense ? *exact_codec_ : *codec_;
  const void* const wire = travels_shared_ ? shared_->result()
                           : codec.plain() ? static_cast<const void*>(payload_.data())
                                           : wire_.data();
  reduced_ = codec.decode(wire, ages_.data(), masked_, step_params(), payload_.data());
  skipped_ = ops_.any_nonfinite(reduced_, masked_ + 1);
  state_.flag_pending = false;
  if (skipped_) keep_skipped_residual();
  if (fused_) return;
  if (skipped_) {
    write_skipped_output();
  } else {
    write_output();
    clear_sent_residual();
  }
}

void MaskedBufferImpl::write_output() {
  const kernels::StepParams params = step_params();
  const uint64_t* mask = state_.mask.data();
  switch (config_.role) {
    case SCAPE_ROLE_FIRST_MOMENT:
      ops_.moment_step(reduced_, mask, count_, params, state_.moment.data(), state_.last.data());
      ops_.from_float(type_, state_.moment.data(), call_.recv, count_);
      break;
    case SCAPE_ROLE_GRADIENT_HOOKED:
      ops_.hooked_step(reduced_, mask, state_.before.data(), count_, params, type_, call_.recv,
                       state_.moment.data(), state_.last.data());
      state_.before = state_.mask;
      break;
    case SCAPE_ROLE_GRADIENT:
      ops_.moment_step(reduced_, mask, count_, params, state_.moment.data(), state_.last.data());
      ops_.expand(type_, reduced_, mask, count_, call_.recv);
      break;
    case SCAPE_ROLE_FUSED:
      break;
  }
}

// Every masked element is NaN: none of a skipped step's values may be used.
void MaskedBufferImpl::write_skipped_output() {
  payload_.assign(masked_, std::numeric_limits<float>::quiet_NaN());
  if (config_.role != SCAPE_ROLE_FIRST_MOMENT) {
    ops_.expand(type_, payload_.data(), state_.mask.data(), count_, call_.recv);
    return;
  }
  std::array<float, kChunk> chunk;
  for_each_chunk(count_, [&](size_t begin, size_t size) {
    std::copy_n(state_.moment.data() + begin, size, chunk.data());
    ops_.scatter(payload_.data(), state_.mask.data() + begin / 64, size, chunk.data());
    ops_.from_float(type_, chunk.data(), at(call_.recv, type_, begin), size);
  });
}

// ---- what both, and the local steps, need ----

CallTag MaskedBufferImpl::tag() const {
  return {.registered = !always_dense_,
          .name = config_.name,
          .learning_rate = last_rate_,
          .weight_decay = last_decay_,
          .stream = stream_};
}

kernels::StepParams MaskedBufferImpl::step_params() const {
  kernels::StepParams params;
  params.t = static_cast<uint16_t>(state_.step);
  params.powers = {powers_.data(), static_cast<uint32_t>(powers_.size())};
  params.beta1 = static_cast<float>(config_.beta1);
  params.beta2 = static_cast<float>(config_.beta2);
  params.eps = static_cast<float>(config_.eps);
  params.age_cap = static_cast<float>(config_.age_cap);
  params.plain = always_dense_ || config_.rule == SCAPE_RULE_PLAIN;
  return params;
}

float* MaskedBufferImpl::residual() { return in_place_ ? place_ : state_.residual.data(); }

// A skipped step: u stays where it is finite. Off the mask the next scoring sees to that.
void MaskedBufferImpl::keep_skipped_residual() {
  ops_.clear_masked_nonfinite(residual(), state_.mask.data(), count_);
  state_.residual_dirty = true;
}

void MaskedBufferImpl::clear_sent_residual() {
  if (always_dense_ && !in_place_) return;
  if (error_ != nullptr) {
    ops_.scatter(error_, state_.mask.data(), count_, residual());
  } else {
    ops_.clear_masked(residual(), state_.mask.data(), count_);
  }
  if (call_.dense) state_.residual_dirty = false;
}

// Step 6, and on to the next step.
void MaskedBufferImpl::end_step() {
  if (!always_dense_) {
    const uint64_t began = now_ns();
    const size_t begin = state_.restamp_at;
    const size_t end = std::min(count_, begin + count_ / kRestampSteps + 1);
    ops_.restamp(state_.last.data() + begin, end - begin, static_cast<uint16_t>(state_.step));
    state_.restamp_at = end == count_ ? 0 : end;

    if (!dense_at(state_.step + 1)) {
      const double factor =
          state_.reduction.op == ReduceOp::kPremulSum ? state_.reduction.factor : 1;
      const bool mean = state_.reduction.op == ReduceOp::kAvg;
      float* scores = refresh_->prepare(config_, state_.step);
      const Partition part = refresh_->scored();
      const size_t cleared =
          score_view_.score({.moment = state_.moment.data() + part.begin,
                             .last = state_.last.data() + part.begin,
                             .residual = residual() + part.begin,
                             .size = part.size(),
                             .scale = mean ? 1.0f : static_cast<float>(ranks_ * factor)},
                            step_params(), scores);
      if (cleared > 0) state_.flag_pending = true;
      refresher_->ready(refresh_, stream_);
      refresh_pending_ = true;
      count_stats([&](scape_stats& stats) {
        stats.nonfinite_values += cleared;
        ++stats.refreshes;
        stats.score_ns += now_ns() - began;
      });
    }
  }
  ++state_.step;
}

}  // namespace scape::plugin
