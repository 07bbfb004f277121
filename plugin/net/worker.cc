#include "plugin/net/worker.h"

#include <algorithm>
#include <cinttypes>
#include <climits>

#include "plugin/net/connection.h"
#include "plugin/net/nccl_log.h"
#include "plugin/net/statistics.h"

namespace scape::net {
namespace {
constexpr int kFlushMs = 2000;
}  // namespace

Status Worker::make(const Devices& devices, int device, std::shared_ptr<Worker>* out) {
  std::shared_ptr<Worker> worker(new Worker);
  worker->counters_ = &counters_of(devices, device);
  plugin::TransportOptions options;
  options.device = worker->counters_->device();
  options.tracks_all = true;
  SCAPE_RETURN_IF_ERROR(devices.module->make(options, &worker->transport_));
  SCAPE_RETURN_IF_ERROR(worker->transport_->address(&worker->address_));
  // A connection has at most this many messages under way.
  constexpr size_t kMessages = NET_MAX_REQUESTS * NET_MAX_RECEIVES;
  const size_t capacity = worker->transport_->room() / kMessages;
  worker->capacity_ = static_cast<int>(std::clamp<size_t>(capacity, 1, INT_MAX));
  worker->counters_->add_transport(Interface::kNet, worker->transport_.get());
  worker->counted_ = true;
  *out = std::move(worker);
  return Status::Ok();
}

Worker::~Worker() {
  if (!counted_) return;  // never came about
  if (lost_) {
    transport_->abandon();
  } else {
    flush();
  }
  const size_t left = counters_->remove_transport(Interface::kNet, transport_.get());
  for (auto& [range, registration] : registrations_) {
    transport_->deregister_memory(registration.region);
  }
  counters_->registered[Interface::kNet].take(registrations_.size());
  transport_.reset();  // before the connections, to which its messages belong
  closed_.clear();
  if (left > 0) return;
  const plugin::TransportCounters traffic = counters_->traffic(Interface::kNet);
  NET_INFO("%s over %s: sent %" PRIu64 " bytes in %" PRIu64 " messages, received %" PRIu64
           " bytes in %" PRIu64 ", %" PRIu64 " retries",
           counters_->device().c_str(), library().c_str(), traffic.sent_bytes,
           traffic.sent_messages, traffic.received_bytes, traffic.received_messages,
           counters_->retries[Retry::kSend].value() + counters_->retries[Retry::kReceive].value());
  write_statistics();
}

bool Worker::take_place() {
  int taken = places_.load();
  while (taken < capacity_) {
    if (places_.compare_exchange_weak(taken, taken + 1)) return true;
  }
  return false;
}

Status Worker::peer(const std::vector<std::byte>& address, const std::string& who, int* out) {
  const auto found = std::find_if(peers_.begin(), peers_.end(),
                                  [&](const auto& known) { return known.first == address; });
  if (found != peers_.end()) {
    *out = found->second;
    return Status::Ok();
  }
  SCAPE_RETURN_IF_ERROR(transport_->add_peer(address, who, out));
  peers_.emplace_back(address, *out);
  return Status::Ok();
}

Status Worker::register_memory(void* data, size_t bytes, Registration** out) {
  const std::pair<uintptr_t, size_t> range(reinterpret_cast<uintptr_t>(data), bytes);
  Registration& registration = registrations_[range];
  if (registration.handles == 0) {
    registration.range = range;
    if (Status status = transport_->register_memory(data, bytes, &registration.region);
        !status.ok()) {
      registrations_.erase(range);
      counters_->errors[Error::kRegister].add();
      return status;
    }
    counters_->registrations[Interface::kNet].add();
    counters_->registered[Interface::kNet].add();
  } else {
    counters_->registration_hits[Interface::kNet].add();
  }
  ++registration.handles;
  *out = &registration;
  return Status::Ok();
}

Status Worker::deregister_memory(Registration* registration) {
  const auto found = std::find_if(registrations_.begin(), registrations_.end(),
                                  [&](const auto& entry) { return &entry.second == registration; });
  if (found == registrations_.end()) {
    return error(SCAPE_ERR_ARGUMENT,
                 "the memory handle %p is not of this device; deregister a handle once, with a "
                 "connection of the device it was registered on",
                 static_cast<void*>(registration));
  }
  if (--registration->handles == 0) {
    transport_->deregister_memory(registration->region);
    registrations_.erase(found);
    counters_->registered[Interface::kNet].take();
  }
  return Status::Ok();
}

void Worker::progress() {
  bool moved = false;
  bool ended = false;
  for (plugin::Operation* operation = transport_->progress(&moved); operation != nullptr;) {
    plugin::Operation* const next = operation->next;  // the request may be taken again at once
    Connection::ended(operation);
    operation = next;
    ended = true;
  }
  if (!ended || closed_.empty()) return;
  std::erase_if(closed_, [](const std::unique_ptr<Connection>& connection) {
    return connection->messages() == 0;
  });
}

void Worker::flush() {
  if (!lost_) transport_->flush(kFlushMs);
  progress();
}

void Worker::keep(std::unique_ptr<Connection> closed) { closed_.push_back(std::move(closed)); }

}  // namespace scape::net
