// Communicators of the real NCCL. A work is done once NCCL has taken it.
#pragma once

#include <sys/types.h>

#include <array>
#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "nccl/functions.h"
#include "plugin/device/device_communicator.h"

namespace scape::plugin {

// One thread at a time, but for abort() and async_error(), which end a call that another thread is
// in.
class NcclCommunicator final : public DeviceCommunicator {
 public:
  // The caller's communicator, which is never ended here. `real` must outlive it.
  static Status wrap(const nccl::Functions& real, nccl::ncclComm_t comm,
                     std::shared_ptr<NcclCommunicator>* out);
  ~NcclCommunicator() override;

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  std::string_view name() const override { return name_; }

  using DeviceCommunicator::all_reduce;
  Status all_reduce(const void* send, void* recv, size_t count, DataType type, Reduction reduction,
                    const CallTag& tag, WorkPtr* work) override;
  Status all_gather(const void* send, void* recv, size_t send_count, DataType type,
                    const CallTag& tag, WorkPtr* work) override;
  // By ncclCommSplit. The side communicator is non-blocking, so that no call on it holds its thread
  // for longer than SCAPE_TIMEOUT, and takes few of the device's multiprocessors.
  Status side_channel(std::shared_ptr<Communicator>* side, WorkPtr* work) override;

  Status async_error() const override;
  // Ends this side of it, and the side communicator with all that is under way there.
  void abort(const Status& why) override;
  ByteCounters counters() const override { return {}; }

 private:
  class SplitWork;
  enum class Owner { kCaller, kThis };

  NcclCommunicator(const nccl::Functions& real, nccl::ncclComm_t comm, Owner owner);

  // What a call came to, once NCCL is done taking it.
  Status taken(nccl::ncclResult_t result, const char* what) const;
  Status failed(nccl::ncclResult_t result, const char* what) const;
  // The operation for a reduction, made where NCCL has none of its own.
  Status operation(const Reduction& reduction, DataType type, nccl::ncclRedOp_t* out);
  Status finish_split();
  Status failure() const;

  const nccl::Functions& real_;
  std::atomic<nccl::ncclComm_t> comm_;  // null once this side of it was aborted
  const Owner owner_;
  const pid_t process_;  // a forked child must not end what is the parent's
  int rank_ = -1;
  int size_ = 0;
  std::string name_;
  bool made_ = false;  // a side communicator: its split is over

  // The last premultiplied sum of each type.
  struct Premultiplied {
    double factor;
    nccl::ncclRedOp_t op;
  };
  std::array<std::optional<Premultiplied>, kDataTypes> premultiplied_;

  mutable std::mutex mutex_;  // guards what follows
  Status failure_;
  std::weak_ptr<NcclCommunicator> side_;
};

}  // namespace scape::plugin
