// Collectives of device memory over a communicator of host memory, by way of the host
// (host_proxy.h), between the ranks of a communicator of the real NCCL.
//
// The host communicator is made by settle(): rank 0's unique id travels over the real NCCL, what
// follows is host mode's bootstrap.
#pragma once

#include <memory>
#include <mutex>
#include <string>

#include "plugin/device/device_communicator.h"
#include "plugin/device/host_proxy.h"
#include "plugin/device/nccl_communicator.h"

namespace scape::plugin {

// One thread at a time, but for abort() and async_error().
class ProxiedCommunicator final : public DeviceCommunicator {
 public:
  ProxiedCommunicator(std::shared_ptr<CudaDevice> device, std::shared_ptr<NcclCommunicator> nccl)
      : device_(std::move(device)), nccl_(std::move(nccl)), channel_(HostProxy::kMain) {}

  // As DeviceChannel::settle(). Has to go well before any other call that moves something.
  Status settle(std::string* obstacle);

  int rank() const override { return nccl_->rank(); }
  int size() const override { return nccl_->size(); }
  std::string_view name() const override { return nccl_->name(); }

  using DeviceCommunicator::all_reduce;
  Status all_reduce(const void* send, void* recv, size_t count, DataType type, Reduction reduction,
                    const CallTag& tag, WorkPtr* work) override;
  Status all_gather(const void* send, void* recv, size_t send_count, DataType type,
                    const CallTag& tag, WorkPtr* work) override;
  // There already: that of the host communicator.
  Status side_channel(std::shared_ptr<Communicator>* side, WorkPtr* work) override;

  Status async_error() const override;
  // Lets every stream that waits go on, with poisoned results.
  void abort(const Status& why) override;
  // Of the host communicator.
  ByteCounters counters() const override;

 private:
  struct Offer;

  // The side channel of `other`.
  explicit ProxiedCommunicator(const ProxiedCommunicator& other);
  Status submit(HostProxy::Job job, const void* send, void* recv, const CallTag& tag,
                WorkPtr* work);
  Status failure() const;
  // What this rank brings to the meeting.
  Offer make_offer() const;
  // Every rank's offer, over the real NCCL.
  Status exchange(const Offer& mine, std::vector<Offer>* all);
  Status connect(const std::vector<Offer>& all);

  const std::shared_ptr<CudaDevice> device_;
  const std::shared_ptr<NcclCommunicator> nccl_;
  const HostProxy::Channel channel_;

  mutable std::mutex mutex_;  // guards what follows
  Status failure_;
  std::shared_ptr<Communicator> in_making_;  // the host communicator, before there is a proxy
  std::shared_ptr<HostProxy> proxy_;
};

}  // namespace scape::plugin
