// The network devices that NCCL is shown, and which network library drives them.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/status.h"
#include "plugin/transport/transport.h"

namespace scape::net {

struct Device {
  plugin::TransportDevice transport;
  std::string pci_path;  // of sysfs; empty where there is none
  uint64_t guid = 0;
  int speed_mbps = 0;
  int port = 1;
};

struct Devices {
  std::string library;  // "ucx" or "ofi"
  const plugin::TransportModule* module = nullptr;
  std::vector<Device> list;
};

// What SCAPE_NET chooses of what is there; found at the first call and the same from then on, but
// for a failure, which is looked into again. Thread-safe. Says once, through NCCL's logger, what
// was chosen and why.
Status find_devices(const Devices** out);

// What sysfs (below `root`, "/sys" but for tests) says of the device of this name.
Device describe_device(const plugin::TransportDevice& transport, const std::string& root);

}  // namespace scape::net
