// What hangs on the communicators of the real NCCL: callers keep its handles, and a table on the
// side knows those that were made through this library.
#pragma once

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "base/status.h"
#include "interposer/masked_comm.h"
#include "interposer/premul_sum.h"
#include "nccl/functions.h"
#include "plugin/device/device_channel.h"

namespace scape::interposer {

class DeviceComm final : public MaskedComm {
 public:
  // `real` made the communicator, and outlives this.
  DeviceComm(const nccl::Functions& real, nccl::ncclComm_t handle) : real_(real), handle_(handle) {}

  nccl::ncclComm_t handle() const { return handle_; }
  // -1 where the real NCCL does not tell.
  int device() const;

  int rank() const override;
  int size() const override;
  // Opens the channel at the first call. Where it cannot be, all calls go dense, and one line says
  // why.
  Status find_obstacle(const AllReduceCall& call, Obstacle* out) override;
  const std::shared_ptr<plugin::Communicator>& shared() const override {
    return channel_->communicator();
  }
  std::shared_ptr<plugin::Refresher> refresher() override { return channel_->refresher(); }
  Status make_engine(std::shared_ptr<plugin::Engine>* out) override {
    return channel_->make_engine(out);
  }
  Status begin_step(void* stream, std::initializer_list<const void*> addresses,
                    plugin::Stream* out) override;
  Hold hold() override { return Hold(mutex_); }
  bool on_host() const override { return false; }

  // Before the first masked call is launched, with hold(): what all ranks have to do together.
  // Where *obstacle is not empty the call, and all later ones, go dense on every rank, and one line
  // has said why.
  Status settle(std::string* obstacle);
  // An all-reduce by the real NCCL.
  Status all_reduce_dense(const void* send, void* recv, size_t count, nccl::ncclDataType_t type,
                          nccl::ncclRedOp_t op, plugin::Stream stream);

  // Whether the real NCCL takes calls of it now: it is made, nothing failed, nobody ended it. What
  // a masked call would do in vain is then the real NCCL's to refuse, unless refuse_masked() was
  // told why.
  bool takes_calls() const;
  // Waits until the real NCCL has taken what a non-blocking communicator was given before.
  Status wait_until_taken() const;

  // The real NCCL's operations.
  void add_op(nccl::ncclRedOp_t op, const PremulSum& sum);
  void remove_op(nccl::ncclRedOp_t op);
  // False where `op` is none of this communicator for this type.
  bool find_op(nccl::ncclRedOp_t op, plugin::DataType type, PremulSum* out) const;

  // No masked call from now on: the communicator is finalized, or about to end.
  void close() { closed_.store(true, std::memory_order_relaxed); }
  // The same, and masked calls of other threads return `why`. `end_real` ends in the real NCCL what
  // is under way; it runs beside the abort of the side channel, whose work may stand behind the
  // callers' streams, and so behind what only the real NCCL can end.
  void interrupt(const Status& why, const std::function<void()>& end_real);
  // Of masked calls alone: the real NCCL goes on taking what is none, as after an aborting shrink.
  void refuse_masked(const Status& why, const std::function<void()>& end_real);
  // Drops its buffers and its channel, before the real NCCL destroys the communicator. Waits for
  // the end of the side channel, in which all ranks take part, unless it was interrupted.
  void end();
  // Aborts the communicator, in the real NCCL too, and ends this.
  nccl::ncclResult_t abort();

  // What a masked call failed with, or what has ended them since, for ncclCommGetAsyncError.
  void set_failure(const Status& failure);
  Status failure() const;

 private:
  const nccl::Functions& real_;
  const nccl::ncclComm_t handle_;
  std::atomic<bool> closed_{false};

  std::recursive_mutex mutex_;  // hold()
  std::shared_ptr<plugin::DeviceChannel> channel_;
  std::string unopened_;  // why there is none, or none that could be used
  Status refused_;        // the same, where SCAPE_REQUIRED makes calls fail for it

  mutable std::mutex facts_mutex_;                      // guards what follows
  std::shared_ptr<plugin::Communicator> communicator_;  // of the channel
  std::map<int, PremulSum> ops_;
  Status failure_;
  Status refused_masked_;
};

// Puts a communicator that the real NCCL just made into the table. One of the same handle that is
// still there has ended unseen, and is dropped.
void add_device_comm(const nccl::Functions& real, nccl::ncclComm_t handle);
// Null where it is not there. take: also takes it out.
std::shared_ptr<DeviceComm> find_device_comm(nccl::ncclComm_t handle);
std::shared_ptr<DeviceComm> take_device_comm(nccl::ncclComm_t handle);
std::vector<std::shared_ptr<DeviceComm>> all_device_comms();

}  // namespace scape::interposer
