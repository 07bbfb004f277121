// What the tables of the net plugin and of CollNet have in common.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <type_traits>

#include "plugin/net/abi/common.h"
#include "plugin/net/engine.h"

namespace scape::net {

inline constexpr char kPluginName[] = "scape";

template <Face face>
int get_devices(int* count) {
  return devices(face, count);
}

// Fields that a version does not have are left out.
template <Face face, typename P>
int get_properties(int device, P* out) {
  if (out == nullptr) return NET_INVALID_ARGUMENT;
  Properties found{};
  if (const int result = properties(face, device, &found); result != NET_SUCCESS) return result;
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
    // A device of more than an older version has room for was made by a newer one.
    out->members.count = std::min<int>(found.member_count, std::size(out->members.devices));
    std::copy_n(found.members, out->members.count, out->members.devices);
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

template <Face face, typename Members>
int make_virtual_device(int* device, Members* members) {
  constexpr int kLimit = sizeof(Members::devices) / sizeof(int);
  return make_device(face, members != nullptr ? members->devices : nullptr,
                     members != nullptr ? members->count : 0, kLimit, device);
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
