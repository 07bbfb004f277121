// Which network devices messages may use, of those that a network library has.
//
// The library's own variables (UCX_NET_DEVICES, FI_TCP_IFACE, ...) are obeyed by the library.
// SCAPE_NET_IF narrows what they leave, whatever the kind of device. Where it is empty, and none of
// the library's own is set, NCCL_SOCKET_IFNAME chooses among the Ethernet interfaces.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "plugin/transport/socket.h"

namespace scape::plugin {

class DeviceFilter {
 public:
  // The texts of SCAPE_NET_IF and NCCL_SOCKET_IFNAME; `own`: those of the library's own variables
  // that choose, as NAME="value", or nothing.
  DeviceFilter(const std::string& net_if, const std::string& socket_ifname, std::string own);

  // Of this process's settings, for the library "ucx" or "ofi".
  static DeviceFilter of(std::string_view library);

  // "mlx5_0" names "mlx5_0:1", too. `ethernet`: an interface of the system, not RDMA.
  bool admits(const std::string& device, bool ethernet) const;
  // A list that names what may be used, this device included: enough for loopback to be meant.
  bool names(const std::string& device, bool ethernet) const;
  // Whether any device may be refused.
  bool restricts() const { return !filter_.names.empty(); }

  // It is NCCL_SOCKET_IFNAME's.
  bool is_bootstraps() const { return ethernet_only_ && restricts(); }

  // SCAPE_NET_IF="eth" and the library's own; "no filter" where there is none.
  std::string text() const;

  // That it admits none of the devices that `library` has here.
  Status leaves_none(const char* library, const std::vector<std::string>& existing) const;

 private:
  bool ethernet_only_;
  std::string value_;  // of SCAPE_NET_IF, or of NCCL_SOCKET_IFNAME where that counts
  InterfaceFilter filter_;
  std::string own_;
};

// "eth2" before "eth10": hosts that are alike number their devices alike, however their libraries
// list them.
bool device_comes_before(const std::string& one, const std::string& other);

}  // namespace scape::plugin
