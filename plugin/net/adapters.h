// What the tables of the net plugin and of CollNet have in common.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "plugin/net/abi/common.h"
#include "plugin/net/engine.h"

namespace scape::net {

inline constexpr char kPluginName[] = "scape";

// Fields that a version does not have are left out.
template <typename P>
int get_properties(int device, P* out) {
  if (out == nullptr) return NET_INVALID_ARGUMENT;
  Properties found{};
  if (const int result = properties(device, &found); result != NET_SUCCESS) return result;
  *out = {};
  out->name = const_cast<char*>(found.name);
  out->pci_path = const_cast<char*>(found.pci_path);
  out->guid = found.guid;
  out->pointer_support = NET_POINTER_HOST;
  out->speed = found.speed_mbps;
  out->port = found.port;
  out->latency = found.latency_us;
  out->max_comms = found.max_comms;
  out->max_receives = NET_MAX_RECEIVES;
  if constexpr (requires { out->device_type; }) {
    out->device_type = NET_DEVICE_HOST;
    out->device_version = NET_DEVICE_INVALID_VERSION;
  }
  if constexpr (requires { out->members; }) {
    out->members.count = 1;
    out->members.devices[0] = device;
    out->max_p2p_bytes = found.max_bytes;
    out->max_collective_bytes = found.max_bytes;
  }
  if constexpr (requires { out->max_multi_request_size; }) out->max_multi_request_size = 1;
  if constexpr (requires { out->rail_id; }) out->rail_id = out->plane_id = NET_ID_UNDEFINED;
  return NET_SUCCESS;
}

// Where sizes are ints, a negative one is refused for what it is, not taken for a huge one.
template <typename Size>
bool is_negative(Size size) {
  if constexpr (std::is_signed_v<Size>) return size < 0;
  return false;
}

inline int register_dmabuf(void*, void*, size_t, int, uint64_t, int, void**) {
  return refuse("regMrDmaBuf");
}

// A device of one is that one; devices are not joined.
template <typename Members>
int make_virtual_device(int* device, Members* members) {
  int count = 0;
  if (const int result = devices(&count); result != NET_SUCCESS) return result;
  if (device == nullptr || members == nullptr || members->count != 1 || members->devices[0] < 0 ||
      members->devices[0] >= count) {
    return refuse("makeVDevice of other than one device there is");
  }
  *device = members->devices[0];
  return NET_SUCCESS;
}

// Gives a slot the one candidate of its signature.
template <typename Slot, typename... Candidates>
constexpr void fit(Slot& slot, Candidates... candidates) {
  static_assert((std::is_same_v<Slot, Candidates> + ...) == 1);
  const auto take = [&](auto candidate) {
    if constexpr (std::is_same_v<Slot, decltype(candidate)>) slot = candidate;
  };
  (take(candidates), ...);
}

}  // namespace scape::net
