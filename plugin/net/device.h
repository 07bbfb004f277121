// The network devices that NCCL is shown, and which network library drives them.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/status.h"
#include "plugin/transport/transport.h"

namespace scape::net {

struct Device {
  plugin::TransportDevice transport;  // of several: the first one's, under the names of all
  std::string pci_path;               // of sysfs; empty where there is none
  uint64_t guid = 0;
  int speed_mbps = 0;
  int port = 1;
  std::vector<int> members;  // the physical ones it is made of: itself, or several
};

struct Devices {
  std::string library;  // "ucx" or "ofi"
  const plugin::TransportModule* module = nullptr;
  std::vector<Device> list;  // the physical ones
};

// The net plugin and CollNet number their devices apart: NCCL counts each one's before and after it
// joins some.
enum class Face { kNet, kCollective };

// What SCAPE_NET chooses of what is there; found at the first call and the same from then on, but
// for a failure, which is looked into again. Thread-safe. Says once, through NCCL's logger, what
// was chosen and why.
Status find_devices(const Devices** out);

// The device of this number: physical ones come first, then those made of several. It stays for
// good. Thread-safe.
Status find_device(Face face, int number, const Devices** devices, const Device** out);
Status count_devices(Face face, int* out);

// Makes one device of `count` physical ones; the same ones give the same number, and one is itself.
// At most `limit` can be joined. Thread-safe.
Status join_devices(Face face, const int* numbers, int count, int limit, int* number);
// NCCL has let go of the plugin: devices of several are not counted until they are joined again.
void uncount_joined_devices();

// What several devices look like as one: speeds are summed, names joined by '+', and what cannot be
// summed is the first one's.
Device join(const std::vector<Device>& list, std::span<const int> members);

// What sysfs (below `root`, "/sys" but for tests) says of the device of this name.
Device describe_device(const plugin::TransportDevice& transport, const std::string& root);

}  // namespace scape::net
