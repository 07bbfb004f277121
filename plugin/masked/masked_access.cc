// Reading, saving and loading the state of a masked buffer.
#include <algorithm>
#include <bit>
#include <cmath>
#include <new>
#include <utility>

#include "plugin/masked/masked_buffer_impl.h"

namespace scape::plugin {

// ---- reading ----

Status MaskedBufferImpl::read_mask(uint64_t* words, size_t capacity) {
  const size_t needed = kernels::mask_words(count_);
  if (capacity < needed) {
    return error(SCAPE_ERR_MEMORY, "buffer '%s': capacity is %zu words; its mask has %zu",
                 config_.name.c_str(), capacity, needed);
  }
  state_.mask.copy_to(words, stream_);
  if (state_.mask.empty()) std::fill_n(words, needed, uint64_t{0});
  return engine_->failure();
}

Status MaskedBufferImpl::read_ages(uint16_t* ages, size_t capacity) {
  if (capacity < count_) {
    return error(SCAPE_ERR_MEMORY, "buffer '%s': capacity is %zu elements; it has %zu",
                 config_.name.c_str(), capacity, count_);
  }
  if (state_.last->empty() || always_dense_) {
    std::fill_n(ages, count_, uint16_t{1});
    return Status::Ok();
  }
  // Of the last call's step; between a fused call and its scape_adams_step() that is still the
  // current one.
  const auto t = static_cast<uint16_t>(state_.step - (step_owed_ ? 0 : 1));
  state_.last->copy_to(ages, stream_);
  for (size_t j = 0; j < count_; ++j) ages[j] = static_cast<uint16_t>(t - ages[j]);
  const std::vector<uint64_t> mask = state_.mask.to_host(stream_);
  const std::vector<uint16_t> masked = ages_.to_host(stream_);
  size_t i = 0;
  for (size_t w = 0; w < mask.size(); ++w) {
    for (uint64_t word = mask[w]; word != 0; word &= word - 1, ++i) {
      const size_t j = w * 64 + static_cast<size_t>(std::countr_zero(word));
      ages[j] = masked.empty() ? uint16_t{1} : masked[i];
    }
  }
  return engine_->failure();
}

Status MaskedBufferImpl::read_residual(float* out, size_t capacity) {
  if (capacity < count_) {
    return error(SCAPE_ERR_MEMORY, "buffer '%s': capacity is %zu elements; it has %zu",
                 config_.name.c_str(), capacity, count_);
  }
  if (always_dense_ || residual() == nullptr) {
    std::fill_n(out, count_, 0.0f);
  } else {
    engine_->copy_out(stream_, out, residual(), count_ * sizeof(float));
  }
  return engine_->failure();
}

Status MaskedBufferImpl::read_moment(float* out, size_t capacity) {
  if (capacity < count_) {
    return error(SCAPE_ERR_MEMORY, "buffer '%s': capacity is %zu elements; it has %zu",
                 config_.name.c_str(), capacity, count_);
  }
  if (!has_state()) {
    return error(SCAPE_ERR_USAGE,
                 "buffer '%s' is always dense (one rank, or sparsity 0), and its role keeps no "
                 "first moment then",
                 config_.name.c_str());
  }
  state_.moment.copy_to(out, stream_);
  if (state_.moment.empty()) std::fill_n(out, count_, 0.0f);
  return engine_->failure();
}

scape_stats MaskedBufferImpl::stats() const {
  const Counters counters = engine_->counters();
  std::lock_guard lock(stats_mutex_);
  scape_stats copy = stats_;
  copy.skipped_steps = counters.skipped_steps;
  copy.nonfinite_values = counters.nonfinite_values;
  if (!overlap_known_) copy.mask_overlap = counters.mask_overlap;
  copy.size = sizeof(copy);
  return copy;
}

double MaskedBufferImpl::residual_l1() {
  if (always_dense_ || residual() == nullptr) return 0;
  double sum = 0;
  visit_on_host(*engine_, stream_, residual(), count_, [&](const float* part, size_t n) {
    for (size_t j = 0; j < n; ++j) sum += std::fabs(part[j]);
  });
  return sum;
}

// ---- saving and loading ----

Status MaskedBufferImpl::save(std::vector<std::byte>* out) {
  SCAPE_RETURN_IF_ERROR(owed_or_running("saving"));
  if (!failure_.ok()) return failure_;
  try {
    if (refresh_pending_) {
      SCAPE_RETURN_IF_ERROR(refresher_->wait(refresh_));
      state_.next.swap(refresh_->mask());
      refresh_pending_ = false;
    }
    state_.flag_pending = engine_->flag(stream_);
    save_state(owner(), state_, always_dense_ ? nullptr : residual(), stream_, out);
  } catch (const std::bad_alloc&) {
    return error(SCAPE_ERR_MEMORY, "buffer '%s': no memory to save %zu elements",
                 config_.name.c_str(), count_);
  }
  return engine_->failure();
}

Status MaskedBufferImpl::load(const std::byte* data, size_t size) {
  SCAPE_RETURN_IF_ERROR(owed_or_running("loading"));
  if (!failure_.ok()) return failure_;
  try {
    BufferState loaded(*engine_, state_.residual.home());
    SCAPE_RETURN_IF_ERROR(load_state(owner(), data, size, &loaded));
    const std::vector<uint64_t> mask = loaded.mask.to_host(stream_);
    masked_ = kernels::ops().count_bits(mask.data(), mask.size());
    state_ = std::move(loaded);
  } catch (const std::bad_alloc&) {
    return error(SCAPE_ERR_MEMORY, "buffer '%s': no memory to load %zu elements",
                 config_.name.c_str(), count_);
  }
  engine_->restore(stream_, state_.flag_pending);
  allocated_ = false;
  loaded_ = true;
  count_stats([&](scape_stats& stats) { stats.step = state_.step; });
  place_ = nullptr;
  last_rate_ = last_decay_ = 0;
  refresh_pending_ = false;
  refresh_.reset();
  agreement_.reset();
  agreed_ = false;
  ages_.clear();
  return engine_->failure();
}

}  // namespace scape::plugin
