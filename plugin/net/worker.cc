#include "plugin/net/worker.h"

#include <algorithm>
#include <cinttypes>
#include <climits>

#include "plugin/net/connection.h"
#include "plugin/net/nccl_log.h"

namespace scape::net {
namespace {
constexpr int kFlushMs = 2000;

// Of a device, over all its workers in this process, past ones included.
struct Totals {
  int workers = 0;
  plugin::TransportCounters traffic;
  uint64_t retries = 0;
};
struct AllTotals {
  std::mutex mutex;
  std::map<std::string, Totals> by_device;

  static AllTotals& instance() {
    static auto* const totals = new AllTotals;  // never destroyed: used until the last moment
    return *totals;
  }
};

}  // namespace

Status Worker::make(const Devices& devices, int device, std::shared_ptr<Worker>* out) {
  const std::string& name = devices.list[static_cast<size_t>(device)].transport.name;
  std::shared_ptr<Worker> worker(new Worker);
  plugin::TransportOptions options;
  options.device = name;
  options.tracks_all = true;
  SCAPE_RETURN_IF_ERROR(devices.module->make(options, &worker->transport_));
  SCAPE_RETURN_IF_ERROR(worker->transport_->address(&worker->address_));
  worker->library_ = devices.library;
  worker->name_ = name + " over " + devices.library;
  // A connection has at most this many messages under way.
  constexpr size_t kMessages = NET_MAX_REQUESTS * NET_MAX_RECEIVES;
  const size_t capacity = worker->transport_->room() / kMessages;
  worker->capacity_ = static_cast<int>(std::clamp<size_t>(capacity, 1, INT_MAX));
  {
    AllTotals& totals = AllTotals::instance();
    std::lock_guard<std::mutex> lock(totals.mutex);
    ++totals.by_device[worker->name_].workers;
  }
  worker->counted_ = true;
  *out = std::move(worker);  // without the lock: a worker that ends here takes it
  return Status::Ok();
}

Worker::~Worker() {
  if (!counted_) return;  // never came about
  if (lost_) {
    transport_->abandon();
  } else {
    flush();
  }
  const plugin::TransportCounters counters = transport_->counters();
  for (auto& [range, registration] : registrations_) {
    transport_->deregister_memory(registration.region);
  }
  transport_.reset();  // before the connections, to which its messages belong
  closed_.clear();
  AllTotals& all = AllTotals::instance();
  std::lock_guard<std::mutex> lock(all.mutex);
  Totals& totals = all.by_device[name_];
  totals.traffic.sent_bytes += counters.sent_bytes;
  totals.traffic.sent_messages += counters.sent_messages;
  totals.traffic.received_bytes += counters.received_bytes;
  totals.traffic.received_messages += counters.received_messages;
  totals.retries += retries_.load();
  if (--totals.workers > 0) return;
  NET_INFO("%s: sent %" PRIu64 " bytes in %" PRIu64 " messages, received %" PRIu64
           " bytes in %" PRIu64 ", %" PRIu64 " retries",
           name_.c_str(), totals.traffic.sent_bytes, totals.traffic.sent_messages,
           totals.traffic.received_bytes, totals.traffic.received_messages, totals.retries);
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
      return status;
    }
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
