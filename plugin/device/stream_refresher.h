// The refresher of a device: background work goes to a side stream, enqueued by the thread of the
// call that makes it ready, so that its order is the same on all ranks.
//
// Fences order it both ways: a job starts on the side stream behind what the caller's stream held
// at ready(), and join() holds the caller's stream behind the job. A job whose dependency is not
// known yet (the first refresh, while the agreement is under way) is enqueued by the join() that
// needs it: never at a moment that only this rank's clock decides.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <memory>
#include <vector>

#include "plugin/device/cuda_module.h"
#include "plugin/masked/refresher.h"

namespace scape::plugin {

// One thread at a time, as NCCL demands it.
class StreamRefresher final : public Refresher {
 public:
  StreamRefresher(std::shared_ptr<CudaDevice> device, std::shared_ptr<Communicator> communicator);

  bool in_owner_process() const override;
  // Its making may use the communicator in the background.
  bool communicator_is_free() const override { return !side_work_ || side_work_->done(); }
  uint64_t take_turn() override { return next_turn_++; }
  bool is_turn(uint64_t turn) const override { return turn_ == turn && communicator_is_free(); }
  void end_turn(uint64_t turn) override { turn_ = turn + 1; }
  Status start_side_channel(const void* data, size_t bytes) override;
  bool side_channel_ready(Status* status) override;
  void submit(const std::shared_ptr<SideJob>& job) override;
  void ready(const std::shared_ptr<SideJob>& job, Stream stream) override;
  void cancel(const std::shared_ptr<SideJob>& job, const Status& why) override;
  bool join(const std::shared_ptr<SideJob>& job, Stream stream) override;
  Status wait(const std::shared_ptr<SideJob>& job) override;

 private:
  struct Entry {
    std::shared_ptr<SideJob> job;
    // Behind what the job needs, then, once it is enqueued, behind the job.
    std::unique_ptr<Fence> fence;
    bool ready = false;
    bool enqueued = false;
  };

  Entry* find(const std::shared_ptr<SideJob>& job);
  void drop(const std::shared_ptr<SideJob>& job);
  bool side_is_there();
  // What can be enqueued now of what is ready, in order.
  void enqueue_ready();
  Status enqueue(Entry* entry);
  // Of a job for the host: ends it when the device has passed it. False where it has not.
  bool conclude(Entry* entry);
  void fail(const Status& why);

  const std::shared_ptr<CudaDevice> device_;
  const std::shared_ptr<Communicator> communicator_;
  const pid_t owner_;
  uint64_t next_turn_ = 0;
  uint64_t turn_ = 0;

  std::shared_ptr<Communicator> side_;
  WorkPtr side_work_;
  bool side_ready_ = false;
  Status failure_;                              // of the side channel; ends every job from then on
  std::vector<Entry> entries_;                  // in the order of submission, until they are joined
  std::vector<std::unique_ptr<Fence>> fences_;  // that no entry uses
};

}  // namespace scape::plugin
