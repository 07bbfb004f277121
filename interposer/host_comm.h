// Communicators of host mode, and the table of those that live.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "base/status.h"
#include "interposer/masked_comm.h"
#include "interposer/premul_sum.h"
#include "nccl/api.h"
#include "plugin/communicator.h"
#include "plugin/masked/masked_buffer.h"

namespace scape::interposer {

class HostComm final : public MaskedComm {
 public:
  enum class State : int { kReady, kFinalized, kRevoked };

  HostComm(std::shared_ptr<plugin::Communicator> communicator, int device);

  plugin::Communicator& communicator() const { return *communicator_; }
  int device() const { return device_; }

  int rank() const override { return communicator_->rank(); }
  int size() const override { return communicator_->size(); }
  Status find_obstacle(const AllReduceCall&, Obstacle*) override { return {}; }
  const std::shared_ptr<plugin::Communicator>& shared() const override { return communicator_; }
  // The progress thread's handle for masked buffers, made at first need.
  std::shared_ptr<plugin::Refresher> refresher() override;
  Status make_engine(std::shared_ptr<plugin::Engine>* out) override;
  Status begin_step(void*, std::initializer_list<const void*>, plugin::Stream*) override {
    return {};
  }
  Hold hold() override { return {}; }
  bool on_host() const override { return true; }

  State state() const { return state_.load(std::memory_order_relaxed); }
  void set_state(State state) { state_.store(state, std::memory_order_relaxed); }
  // Ok when collectives may be called.
  Status usable() const;

  // Operations made at run time, numbered from ncclNumOps.
  nccl::ncclRedOp_t add_op(const PremulSum& op);
  Status remove_op(nccl::ncclRedOp_t op);
  Status find_op(nccl::ncclRedOp_t op, plugin::DataType type, PremulSum* out) const;

  // Memory that ncclCommRegister named. Host memory needs no registration: only handles are kept.
  void* add_memory(size_t size);
  Status remove_memory(void* handle);

  // An id for growing that no ncclCommGrow has used yet; false when there is one already.
  bool begin_grow() { return !growing_.exchange(true); }
  void end_grow() { growing_.store(false); }

 private:
  const std::shared_ptr<plugin::Communicator> communicator_;
  const int device_;
  std::atomic<State> state_{State::kReady};
  std::atomic<bool> growing_{false};
  mutable std::mutex mutex_;  // guards what follows
  std::map<int, PremulSum> ops_;
  int next_op_ = nccl::ncclNumOps;
  std::map<uintptr_t, size_t> memory_;
  uintptr_t next_memory_ = 1;
  std::shared_ptr<plugin::Refresher> refresher_;
};

// Handles are numbers in pointers' clothes, and never used twice: a destroyed or invented handle is
// recognised, not followed.
nccl::ncclComm_t add_comm(std::shared_ptr<HostComm> comm);
Status find_comm(nccl::ncclComm_t handle, std::shared_ptr<HostComm>* out);
// Also takes it out of the table.
Status remove_comm(nccl::ncclComm_t handle, std::shared_ptr<HostComm>* out);

std::vector<std::shared_ptr<HostComm>> all_comms();

}  // namespace scape::interposer
