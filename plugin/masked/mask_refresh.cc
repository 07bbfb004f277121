#include "plugin/masked/mask_refresh.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "base/clock.h"
#include "base/fault.h"
#include "kernels/kernels.h"
#include "plugin/masked/mask_code.h"

namespace scape::plugin {

int scored_partition(scape_rule rule, int rank, uint64_t t, int ranks) {
  if (rule == SCAPE_RULE_PLAIN) return rank;
  const auto count = static_cast<uint64_t>(ranks);
  return static_cast<int>((static_cast<uint64_t>(rank) + t % count) % count);
}

MaskRefresh::MaskRefresh(std::shared_ptr<Engine> engine, std::string name, size_t count, int rank,
                         int ranks, std::shared_ptr<const Agreement> agreement)
    : engine_(std::move(engine)),
      name_(std::move(name)),
      count_(count),
      rank_(rank),
      agreement_(std::move(agreement)),
      parts_(static_cast<size_t>(ranks)),
      bits_(parts_.size()),
      bytes_(parts_.size()),
      scores_(*engine_),
      mask_(*engine_),
      ages_(*engine_),
      sent_(*engine_),
      received_(*engine_) {}

float* MaskRefresh::prepare(const BufferConfig& config, uint64_t t,
                            std::shared_ptr<const Array<uint16_t>> last) {
  step_ = t + 1;
  last_ = std::move(last);
  const int ranks = static_cast<int>(parts_.size());
  for (int r = 0; r < ranks; ++r) {
    const auto i = static_cast<size_t>(r);
    parts_[i] = partition_of(count_, ranks, scored_partition(config.rule, r, t, ranks));
    bits_[i] = bits_at(config, step_, parts_[i].size());
    bytes_[i] = mask_code_bytes(parts_[i].size(), bits_[i]);
  }
  scores_.resize(scored().size());
  mask_.resize(kernels::mask_words(count_));
  ages_.resize(std::accumulate(bits_.begin(), bits_.end(), size_t{0}));
  return scores_.data();
}

bool MaskRefresh::may_start(Status* obstacle) {
  if (!agreement_) return true;
  if (!agreement_->done()) return false;
  *obstacle = agreement_->status().ok() ? agreement_->verdict() : agreement_->status();
  return true;
}

Status MaskRefresh::start(Communicator& side, Stream stream, WorkPtr* work) {
  fault_point(Fault::kSelect);
  const uint64_t begin = now_ns();
  const auto mine = static_cast<size_t>(rank_);
  const size_t longest = *std::max_element(bytes_.begin(), bytes_.end());
  sent_.resize(longest);
  received_.resize(longest * bytes_.size());
  engine_->choose(stream, scores_.data(), scored().size(), bits_[mine],
                  mask_.data() + scored().begin / 64, sent_.data());
  nanoseconds_ = now_ns() - begin;
  const CallTag tag{.registered = true, .name = name_, .stream = stream};
  SCAPE_RETURN_IF_ERROR(
      side.all_gather(sent_.data(), received_.data(), longest, DataType::kUint8, tag, work));
  fault_point(Fault::kMasks);
  return Status::Ok();
}

Status MaskRefresh::finish(Stream stream) {
  const uint64_t begin = now_ns();
  const int damaged =
      engine_->take_masks(stream, parts_, bits_, received_.data(), sent_.size(), mask_.data());
  if (damaged >= 0) {
    const auto r = static_cast<size_t>(damaged);
    return error(
        SCAPE_ERR_INTERNAL,
        "buffer '%s': the mask that rank %zu sent for elements %zu .. %zu has not exactly %zu "
        "bits; its memory or the transport is at fault, so restart from the last checkpoint",
        name_.c_str(), r, parts_[r].begin, parts_[r].end, bits_[r]);
  }
  engine_->gather_ages(stream, mask_.data(), count_, last_->data(), static_cast<uint16_t>(step_),
                       ages_.data());
  nanoseconds_ += now_ns() - begin;
  return Status::Ok();
}

}  // namespace scape::plugin
