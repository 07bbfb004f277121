#include "plugin/net/worker.h"

#include <algorithm>
#include <cinttypes>
#include <climits>

#include "plugin/net/connection.h"
#include "plugin/net/nccl_log.h"
#include "plugin/net/statistics.h"
#include "plugin/transport/socket.h"

namespace scape::net {
namespace {
constexpr double kFlushSeconds = 2;
}  // namespace

Status Worker::make(const Devices& devices, const Device& device, std::shared_ptr<Worker>* out) {
  std::shared_ptr<Worker> worker(new Worker);
  // A connection has at most this many messages under way on a rail: of each that it receives, the
  // head or a part.
  constexpr size_t kMessages = NET_MAX_REQUESTS * NET_MAX_RECEIVES;
  size_t capacity = INT_MAX;
  for (const int member : device.members) {
    const Device& physical = devices.list[static_cast<size_t>(member)];
    Rail rail;
    rail.counters = &counters_of(devices, physical);
    plugin::TransportOptions options;
    options.device = rail.counters->device();
    options.tracks_all = true;
    SCAPE_RETURN_IF_ERROR(devices.module->make(options, &rail.transport));
    RailAddress address;
    address.speed_mbps = static_cast<uint32_t>(std::max(physical.speed_mbps, 1));
    SCAPE_RETURN_IF_ERROR(rail.transport->address(&address.address));
    capacity = std::clamp<size_t>(rail.transport->room() / kMessages, 1, capacity);
    worker->rails_.push_back(std::move(rail));
    worker->addresses_.push_back(std::move(address));
  }
  worker->capacity_ = static_cast<int>(capacity);
  for (const Rail& rail : worker->rails_) {
    rail.counters->add_transport(Interface::kNet, rail.transport.get());
  }
  worker->counted_ = true;
  *out = std::move(worker);
  return Status::Ok();
}

Worker::~Worker() {
  if (!counted_) return;  // never came about
  if (lost_) {
    for (Rail& rail : rails_) rail.transport->abandon();
  } else {
    flush();
  }
  std::vector<size_t> left;
  for (const Rail& rail : rails_) {
    left.push_back(rail.counters->remove_transport(Interface::kNet, rail.transport.get()));
  }
  for (const auto& [range, registration] : registrations_) deregister(registration);
  counters().registered[Interface::kNet].take(registrations_.size());
  for (Rail& rail : rails_)
    rail.transport.reset();  // before the connections, to which its
                             // messages belong
  closed_.clear();
  for (size_t i = 0; i < rails_.size(); ++i) {
    if (left[i] > 0) continue;
    const DeviceCounters& counters = *rails_[i].counters;
    const plugin::TransportCounters traffic = counters.traffic(Interface::kNet);
    NET_INFO("%s over %s: sent %" PRIu64 " bytes in %" PRIu64 " messages, received %" PRIu64
             " bytes in %" PRIu64 ", %" PRIu64 " retries",
             counters.device().c_str(), library().c_str(), traffic.sent_bytes,
             traffic.sent_messages, traffic.received_bytes, traffic.received_messages,
             counters.retries[Retry::kSend].value() + counters.retries[Retry::kReceive].value());
  }
  if (std::count(left.begin(), left.end(), size_t{0}) > 0) write_statistics();
}

bool Worker::take_place() {
  int taken = places_.load();
  while (taken < capacity_) {
    if (places_.compare_exchange_weak(taken, taken + 1)) return true;
  }
  return false;
}

Status Worker::channels_to(const std::vector<RailAddress>& rails, const std::string& who,
                           uint32_t number, std::vector<Channel>* out) {
  out->clear();
  const size_t count = std::min(rails_.size(), rails.size());
  // The side with more rails has connections begin with another one each.
  const auto rail_of = [&](size_t channel, size_t all) {
    return all == count ? channel : (channel + number) % all;
  };
  for (size_t i = 0; i < count; ++i) {
    Channel channel;
    channel.rail = static_cast<int>(rail_of(i, rails_.size()));
    Rail& rail = rails_[static_cast<size_t>(channel.rail)];
    const RailAddress& theirs = rails[rail_of(i, rails.size())];
    const uint32_t mine = addresses_[static_cast<size_t>(channel.rail)].speed_mbps;
    channel.weight = std::max(1U, std::min(mine, theirs.speed_mbps));
    const auto found = std::find_if(rail.peers.begin(), rail.peers.end(), [&](const auto& known) {
      return known.first == theirs.address;
    });
    if (found != rail.peers.end()) {
      channel.peer = found->second;
    } else {
      SCAPE_RETURN_IF_ERROR(rail.transport->add_peer(theirs.address, who, &channel.peer));
      rail.peers.emplace_back(theirs.address, channel.peer);
    }
    out->push_back(channel);
  }
  return Status::Ok();
}

Status Worker::register_memory(void* data, size_t bytes, Registration** out) {
  const std::pair<uintptr_t, size_t> range(reinterpret_cast<uintptr_t>(data), bytes);
  Registration& registration = registrations_[range];
  if (registration.handles == 0) {
    registration.range = range;
    for (Rail& rail : rails_) {
      void* region = nullptr;
      if (Status status = rail.transport->register_memory(data, bytes, &region); !status.ok()) {
        deregister(registration);
        registrations_.erase(range);
        rail.counters->errors[Error::kRegister].add();
        return status;
      }
      registration.regions.push_back(region);
    }
    counters().registrations[Interface::kNet].add();
    counters().registered[Interface::kNet].add();
  } else {
    counters().registration_hits[Interface::kNet].add();
  }
  ++registration.handles;
  *out = &registration;
  return Status::Ok();
}

void Worker::deregister(const Registration& registration) {
  for (size_t i = 0; i < registration.regions.size(); ++i) {
    rails_[i].transport->deregister_memory(registration.regions[i]);
  }
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
    deregister(*registration);
    registrations_.erase(found);
    counters().registered[Interface::kNet].take();
  }
  return Status::Ok();
}

void Worker::move(Rail* rail, bool* ended) {
  bool moved = false;
  for (plugin::Operation* operation = rail->transport->progress(&moved); operation != nullptr;) {
    plugin::Operation* const next = operation->next;  // the request may be taken again at once
    Connection::ended(operation);
    operation = next;
    *ended = true;
  }
}

void Worker::progress() {
  bool ended = false;
  for (Rail& rail : rails_) move(&rail, &ended);
  if (!ended || closed_.empty()) return;
  std::erase_if(closed_, [](const std::unique_ptr<Connection>& connection) {
    return connection->messages() == 0;
  });
}

void Worker::flush() {
  const plugin::Deadline deadline = plugin::seconds_from_now(kFlushSeconds);
  for (Rail& rail : rails_) {
    if (!lost_) rail.transport->flush(plugin::milliseconds_until(deadline));
  }
  progress();
}

void Worker::keep(std::unique_ptr<Connection> closed) { closed_.push_back(std::move(closed)); }

}  // namespace scape::net
