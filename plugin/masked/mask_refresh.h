// One mask refresh: this rank chooses the bits of its partition, all ranks gather them, and each
// gathers the ages of what the mask has, so that the call has less to do.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "plugin/masked/agreement.h"
#include "plugin/masked/array.h"
#include "plugin/masked/engine.h"
#include "plugin/masked/masked_buffer.h"
#include "plugin/masked/refresher.h"

namespace scape::plugin {

// Which partition a rank scores at a step. Lazy: ownership rotates; plain: it does not.
int scored_partition(scape_rule rule, int rank, uint64_t t, int ranks);

// Reusable: fill in with prepare() before each submission.
class MaskRefresh final : public SideJob {
 public:
  // `agreement` may be null; where it finds a mismatch, the refresh ends without any traffic.
  MaskRefresh(std::shared_ptr<Engine> engine, std::string name, size_t count, int rank, int ranks,
              std::shared_ptr<const Agreement> agreement);

  // For the mask of step t + 1, chosen in step t; `last` does not change before that step's call.
  // Returns where the scores of this rank's partition are to be written, scored().size() of them.
  float* prepare(const BufferConfig& config, uint64_t t,
                 std::shared_ptr<const Array<uint16_t>> last);
  const Partition& scored() const { return parts_[static_cast<size_t>(rank_)]; }

  // Once done() with an ok status(): the mask and the masked elements' ages at its step, which may
  // be swapped away, and what it took.
  Array<uint64_t>& mask() { return mask_; }
  Array<uint16_t>& ages() { return ages_; }
  size_t sent_bytes() const { return sent_.size(); }
  uint64_t nanoseconds() const { return nanoseconds_; }

  bool may_start(Status* obstacle) override;
  Status start(Communicator& side, Stream stream, WorkPtr* work) override;
  Status finish(Stream stream) override;

 private:
  const std::shared_ptr<Engine> engine_;  // a refresh may outlive its buffer
  const std::string name_;
  const size_t count_;
  const int rank_;
  const std::shared_ptr<const Agreement> agreement_;

  uint64_t step_ = 0;  // of the mask
  std::shared_ptr<const Array<uint16_t>> last_;

  // By rank: the partition it scores, the bits it sets there, the bytes of their code.
  std::vector<Partition> parts_;
  std::vector<size_t> bits_;
  std::vector<size_t> bytes_;

  Array<float> scores_;
  Array<uint64_t> mask_;
  Array<uint16_t> ages_;
  Array<std::byte> sent_;
  Array<std::byte> received_;
  uint64_t nanoseconds_ = 0;
};

}  // namespace scape::plugin
