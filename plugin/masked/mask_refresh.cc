#include "plugin/masked/mask_refresh.h"

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

MaskRefresh::MaskRefresh(std::string name, size_t count, int rank, int ranks,
                         std::shared_ptr<const Agreement> agreement)
    : name_(std::move(name)),
      count_(count),
      rank_(rank),
      agreement_(std::move(agreement)),
      parts_(static_cast<size_t>(ranks)),
      bits_(parts_.size()),
      bytes_(parts_.size()) {}

float* MaskRefresh::prepare(const BufferConfig& config, uint64_t t) {
  const int ranks = static_cast<int>(parts_.size());
  for (int r = 0; r < ranks; ++r) {
    const auto i = static_cast<size_t>(r);
    parts_[i] = partition_of(count_, ranks, scored_partition(config.rule, r, t, ranks));
    bits_[i] = bits_at(config, t + 1, parts_[i].size());
    bytes_[i] = mask_code_bytes(parts_[i].size(), bits_[i]);
  }
  scores_.resize(scored().size());
  mask_.resize(kernels::mask_words(count_));
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
  const size_t size = scored().size();
  uint64_t* const mask = mask_.data() + scored().begin / 64;
  sent_.resize(bytes_[mine]);
  received_.resize(std::accumulate(bytes_.begin(), bytes_.end(), size_t{0}));
  if (size > 0) {
    const auto scratch =
        std::make_unique_for_overwrite<std::byte[]>(kernels::select_scratch_bytes());
    kernels::ops().select(scores_.data(), size, bits_[mine], mask, scratch.get());
    encode_mask(mask, size, bits_[mine], sent_.data());
  }
  nanoseconds_ = now_ns() - begin;
  const CallTag tag{.registered = true, .name = name_, .stream = stream};
  SCAPE_RETURN_IF_ERROR(
      side.all_gather_v(sent_.data(), received_.data(), bytes_, DataType::kUint8, tag, work));
  fault_point(Fault::kMasks);
  return Status::Ok();
}

Status MaskRefresh::finish(Stream) {
  const uint64_t begin = now_ns();
  const std::byte* code = received_.data();
  for (size_t r = 0; r < parts_.size(); ++r) {
    const Partition& part = parts_[r];
    if (!decode_mask(code, part.size(), bits_[r], mask_.data() + part.begin / 64)) {
      return error(
          SCAPE_ERR_INTERNAL,
          "buffer '%s': the mask that rank %zu sent for elements %zu .. %zu has not exactly %zu "
          "bits; its memory or the transport is at fault, so restart from the last checkpoint",
          name_.c_str(), r, part.begin, part.end, bits_[r]);
    }
    code += bytes_[r];
  }
  nanoseconds_ += now_ns() - begin;
  return Status::Ok();
}

}  // namespace scape::plugin
