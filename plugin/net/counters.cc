#include "plugin/net/counters.h"

namespace scape::net {
namespace {

void add(plugin::TransportCounters* sum, const plugin::TransportCounters& more) {
  sum->sent_bytes += more.sent_bytes;
  sum->received_bytes += more.received_bytes;
  sum->sent_messages += more.sent_messages;
  sum->received_messages += more.received_messages;
  sum->posted_again += more.posted_again;
}

}  // namespace

void DeviceCounters::add_transport(Interface::Kind interface, const plugin::Transport* transport) {
  std::lock_guard<std::mutex> lock(mutex_);
  transports_[interface].push_back(transport);
}

size_t DeviceCounters::remove_transport(Interface::Kind interface,
                                        const plugin::Transport* transport) {
  std::lock_guard<std::mutex> lock(mutex_);
  add(&past_[interface], transport->counters());
  std::erase(transports_[interface], transport);
  return transports_[interface].size();
}

plugin::TransportCounters DeviceCounters::traffic(Interface::Kind interface) const {
  std::lock_guard<std::mutex> lock(mutex_);
  plugin::TransportCounters sum = past_[interface];
  for (const plugin::Transport* transport : transports_[interface]) {
    add(&sum, transport->counters());
  }
  return sum;
}

const std::vector<std::unique_ptr<DeviceCounters>>& all_counters(const Devices& devices) {
  static const auto* const all = [&] {
    auto* const made = new std::vector<std::unique_ptr<DeviceCounters>>;
    for (const Device& device : devices.list) {
      made->push_back(std::make_unique<DeviceCounters>(device.transport.name, devices.library));
    }
    return made;
  }();
  return *all;
}

}  // namespace scape::net
