#include "plugin/net/counters.h"

#include <map>
#include <utility>

namespace scape::net {

void DeviceCounters::add_transport(Interface::Kind interface, const plugin::Transport* transport) {
  std::lock_guard<std::mutex> lock(mutex_);
  transports_[interface].push_back(transport);
}

size_t DeviceCounters::remove_transport(Interface::Kind interface,
                                        const plugin::Transport* transport) {
  std::lock_guard<std::mutex> lock(mutex_);
  past_[interface] += transport->counters();
  std::erase(transports_[interface], transport);
  return transports_[interface].size();
}

plugin::TransportCounters DeviceCounters::traffic(Interface::Kind interface) const {
  std::lock_guard<std::mutex> lock(mutex_);
  plugin::TransportCounters sum = past_[interface];
  for (const plugin::Transport* transport : transports_[interface]) sum += transport->counters();
  return sum;
}

DeviceCounters& counters_of(const Devices& devices, const Device& device) {
  using Known = std::map<std::pair<std::string, std::string>, std::unique_ptr<DeviceCounters>>;
  static std::mutex* const mutex = new std::mutex;  // never destroyed: used until the last moment
  static auto* const known = new Known;
  const Device& physical = devices.list[static_cast<size_t>(device.members.front())];
  std::lock_guard<std::mutex> lock(*mutex);
  std::unique_ptr<DeviceCounters>& counters = (*known)[{devices.library, physical.transport.name}];
  if (counters == nullptr) {
    counters = std::make_unique<DeviceCounters>(physical.transport.name, devices.library);
  }
  return *counters;
}

}  // namespace scape::net
