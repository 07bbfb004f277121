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
  std::copy(state_.mask.begin(), state_.mask.end(), words);
  if (state_.mask.empty()) std::fill_n(words, needed, uint64_t{0});
  return Status::Ok();
}

Status MaskedBufferImpl::read_ages(uint16_t* ages, size_t capacity) {
  if (capacity < count_) {
    return error(SCAPE_ERR_MEMORY, "buffer '%s': capacity is %zu elements; it has %zu",
                 config_.name.c_str(), capacity, count_);
  }
  if (state_.last.empty() || always_dense_) {
    std::fill_n(ages, count_, uint16_t{1});
    return Status::Ok();
  }
  // Of the last call's step; between a fused call and its scape_adams_step() that is still the
  // current one.
  const auto t = static_cast<uint16_t>(state_.step - (step_owed_ ? 0 : 1));
  for (size_t j = 0; j < count_; ++j) ages[j] = static_cast<uint16_t>(t - state_.last[j]);
  size_t i = 0;
  for (size_t w = 0; w < state_.mask.size(); ++w) {
    for (uint64_t word = state_.mask[w]; word != 0; word &= word - 1, ++i) {
      const size_t j = w * 64 + static_cast<size_t>(std::countr_zero(word));
      ages[j] = ages_.empty() ? uint16_t{1} : ages_[i];
    }
  }
  return Status::Ok();
}

Status MaskedBufferImpl::read_residual(float* out, size_t capacity) {
  if (capacity < count_) {
    return error(SCAPE_ERR_MEMORY, "buffer '%s': capacity is %zu elements; it has %zu",
                 config_.name.c_str(), capacity, count_);
  }
  const float* from = in_place_ && place_ != nullptr ? place_ : state_.residual.data();
  if (always_dense_ || from == nullptr) {
    std::fill_n(out, count_, 0.0f);
  } else {
    std::copy_n(from, count_, out);
  }
  return Status::Ok();
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
  std::copy(state_.moment.begin(), state_.moment.end(), out);
  if (state_.moment.empty()) std::fill_n(out, count_, 0.0f);
  return Status::Ok();
}

scape_stats MaskedBufferImpl::stats() const {
  std::lock_guard lock(stats_mutex_);
  scape_stats copy = stats_;
  copy.size = sizeof(copy);
  return copy;
}

double MaskedBufferImpl::residual_l1() {
  if (always_dense_) return 0;
  const float* from = in_place_ && place_ != nullptr ? place_ : state_.residual.data();
  if (from == nullptr) return 0;
  double sum = 0;
  for (size_t j = 0; j < count_; ++j) sum += std::fabs(from[j]);
  return sum;
}

// ---- saving and loading ----

Status MaskedBufferImpl::save(std::vector<std::byte>* out) {
  SCAPE_RETURN_IF_ERROR(owed_or_running("saving"));
  if (!failure_.ok()) return failure_;
  try {
    if (refresh_pending_) {
      SCAPE_RETURN_IF_ERROR(refresher_->wait(refresh_));
      std::swap(state_.next, refresh_->mask());
      refresh_pending_ = false;
    }
    const float* kept = in_place_ && place_ != nullptr ? place_ : state_.residual.data();
    save_state(owner(), state_, always_dense_ ? nullptr : kept, out);
  } catch (const std::bad_alloc&) {
    return error(SCAPE_ERR_MEMORY, "buffer '%s': no memory to save %zu elements",
                 config_.name.c_str(), count_);
  }
  return Status::Ok();
}

Status MaskedBufferImpl::load(const std::byte* data, size_t size) {
  SCAPE_RETURN_IF_ERROR(owed_or_running("loading"));
  if (!failure_.ok()) return failure_;
  try {
    BufferState loaded;
    SCAPE_RETURN_IF_ERROR(load_state(owner(), data, size, &loaded));
    state_ = std::move(loaded);
  } catch (const std::bad_alloc&) {
    return error(SCAPE_ERR_MEMORY, "buffer '%s': no memory to load %zu elements",
                 config_.name.c_str(), count_);
  }
  masked_ = ops_.count_bits(state_.mask.data(), state_.mask.size());
  allocated_ = false;
  loaded_ = true;
  count_stats([&](scape_stats& stats) { stats.step = state_.step; });
  place_ = nullptr;
  last_rate_ = last_decay_ = 0;
  refresh_pending_ = false;
  refresh_.reset();
  agreement_.reset();
  agreed_ = false;
  skipped_ = false;
  ages_.clear();
  return Status::Ok();
}

}  // namespace scape::plugin
