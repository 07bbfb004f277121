#include "plugin/device/proxied_communicator.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <thread>
#include <utility>
#include <vector>

#include "base/exit_guard.h"
#include "base/settings.h"
#include "plugin/host_communicator.h"
#include "plugin/transport/transport.h"

namespace scape::plugin {
namespace {

// How often the device is asked whether the offers are there.
constexpr std::chrono::microseconds kAskAgain{50};

}  // namespace

// As it travels, all bytes of it.
struct ProxiedCommunicator::Offer {
  UniqueId id;             // of rank 0
  char problem[384] = {};  // why this rank cannot take part; empty where it can
};

ProxiedCommunicator::ProxiedCommunicator(const ProxiedCommunicator& other)
    : device_(other.device_),
      nccl_(other.nccl_),
      channel_(HostProxy::kSide),
      proxy_(other.proxy_) {}

// ---- how it is made ----

ProxiedCommunicator::Offer ProxiedCommunicator::make_offer() const {
  Offer offer;
  const TransportModule* module = nullptr;
  Status status = load_transport_module(chosen_transport(), &module);
  if (status.ok() && rank() == 0) status = make_unique_id(&offer.id);
  const std::string text = status.ok() ? "" : status.message();
  text.copy(offer.problem, sizeof offer.problem - 1);
  return offer;
}

Status ProxiedCommunicator::exchange(const Offer& mine, std::vector<Offer>* all) {
  const Stream side = device_->side_stream();
  const auto ranks = static_cast<size_t>(size());
  std::shared_ptr<Engine> memory;
  SCAPE_RETURN_IF_ERROR(device_->make_engine(&memory));
  std::unique_ptr<Fence> fence;
  SCAPE_RETURN_IF_ERROR(device_->make_fence(&fence));
  Array<Offer> offers(*memory);
  offers.resize(ranks + 1);
  memory->copy_in(side, offers.data(), &mine, sizeof mine);
  SCAPE_RETURN_IF_ERROR(memory->failure());
  WorkPtr work;
  SCAPE_RETURN_IF_ERROR(nccl_->all_gather(offers.data(), offers.data() + 1, sizeof mine,
                                          DataType::kUint8, {.stream = side}, &work));
  SCAPE_RETURN_IF_ERROR(fence->mark(side));
  const double seconds = settings().timeout_s;
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  for (bool passed = false; !passed; std::this_thread::sleep_for(kAskAgain)) {
    SCAPE_RETURN_IF_ERROR(failure());
    SCAPE_RETURN_IF_ERROR(nccl_->async_error());
    SCAPE_RETURN_IF_ERROR(fence->passed(&passed));
    if (!passed && std::chrono::steady_clock::now() > end) {
      return error(
          SCAPE_ERR_TIMEOUT,
          "%s: not all ranks took part in the making of the host communicator within %g s "
          "(SCAPE_TIMEOUT); see whether a rank died or is stopped, and set SCAPE_TRANSPORT "
          "alike on all ranks",
          std::string(name()).c_str(), seconds);
    }
  }
  all->resize(ranks);
  memory->copy_out(side, all->data(), offers.data() + 1, ranks * sizeof mine);
  return memory->failure();
}

Status ProxiedCommunicator::connect(const std::vector<Offer>& all) {
  std::shared_ptr<Communicator> main;
  SCAPE_RETURN_IF_ERROR(all.empty() ? join_communicator({}, &main)
                                    : create_communicator(all[0].id, rank(), size(), &main));
  {
    // From here on abort() ends it.
    const std::lock_guard lock(mutex_);
    if (!failure_.ok()) {
      main->abort(failure_);
      return failure_;
    }
    in_making_ = main;
  }
  std::shared_ptr<Communicator> side;
  WorkPtr work;
  const ExitGuard guard;
  SCAPE_RETURN_IF_ERROR(main->side_channel(&side, &work));
  SCAPE_RETURN_IF_ERROR(wait(*main, *work));
  std::shared_ptr<HostProxy> proxy;
  SCAPE_RETURN_IF_ERROR(HostProxy::start(device_, std::move(main), std::move(side), &proxy));
  const std::lock_guard lock(mutex_);
  in_making_.reset();
  proxy_ = std::move(proxy);
  return failure_;
}

Status ProxiedCommunicator::settle(std::string* obstacle) {
  SCAPE_RETURN_IF_ERROR(failure());
  if (proxy_ != nullptr) return Status::Ok();
  std::vector<Offer> all;
  if (size() > 1) {
    const Offer mine = make_offer();
    Status status = exchange(mine, &all);
    const auto without = std::find_if(all.begin(), all.end(),
                                      [](const Offer& offer) { return offer.problem[0] != '\0'; });
    if (rank() == 0 && (!status.ok() || without != all.end())) drop_unique_id(mine.id);
    if (!status.ok()) {
      abort(status);
      return status;
    }
    if (without != all.end()) {
      without->problem[sizeof without->problem - 1] = '\0';
      *obstacle = format("rank %td: %s", without - all.begin(), without->problem);
      return Status::Ok();
    }
  }
  const Status status = connect(all);
  if (!status.ok()) abort(status);
  return status;
}

// ---- what it does ----

Status ProxiedCommunicator::failure() const {
  const std::lock_guard lock(mutex_);
  return failure_.ok() && proxy_ != nullptr ? proxy_->failure() : failure_;
}

Status ProxiedCommunicator::async_error() const {
  SCAPE_RETURN_IF_ERROR(failure());
  const std::lock_guard lock(mutex_);
  return proxy_ == nullptr ? nccl_->async_error() : Status::Ok();
}

void ProxiedCommunicator::abort(const Status& why) {
  std::shared_ptr<Communicator> in_making;
  std::shared_ptr<HostProxy> proxy;
  {
    const std::lock_guard lock(mutex_);
    proxy = proxy_;
    in_making = in_making_;
    // With a proxy, that knows more.
    if (failure_.ok() && proxy == nullptr) failure_ = why;
  }
  if (in_making != nullptr) in_making->abort(why);
  if (proxy != nullptr) proxy->abort(why);
}

ByteCounters ProxiedCommunicator::counters() const {
  const std::lock_guard lock(mutex_);
  return proxy_ != nullptr ? proxy_->main().counters() : ByteCounters{};
}

Status ProxiedCommunicator::submit(HostProxy::Job job, const void* send, void* recv,
                                   const CallTag& tag, WorkPtr* work) {
  SCAPE_RETURN_IF_ERROR(failure());
  job.registered = tag.registered;
  job.name = tag.name;
  job.learning_rate = tag.learning_rate;
  job.weight_decay = tag.weight_decay;
  SCAPE_RETURN_IF_ERROR(proxy_->submit(channel_, tag.stream, send, recv, std::move(job)));
  *work = enqueued_work();
  return Status::Ok();
}

Status ProxiedCommunicator::all_reduce(const void* send, void* recv, size_t count, DataType type,
                                       Reduction reduction, const CallTag& tag, WorkPtr* work) {
  return submit({.count = count, .type = type, .reduction = reduction}, send, recv, tag, work);
}

Status ProxiedCommunicator::all_gather(const void* send, void* recv, size_t send_count,
                                       DataType type, const CallTag& tag, WorkPtr* work) {
  return submit({.gathers = true, .count = send_count, .type = type}, send, recv, tag, work);
}

Status ProxiedCommunicator::side_channel(std::shared_ptr<Communicator>* side, WorkPtr* work) {
  SCAPE_RETURN_IF_ERROR(failure());
  *side = std::shared_ptr<Communicator>(new ProxiedCommunicator(*this));
  *work = enqueued_work();
  return Status::Ok();
}

}  // namespace scape::plugin
