#include "plugin/transport/device_filter.h"

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <span>
#include <string_view>
#include <utility>

#include "base/settings.h"

namespace scape::plugin {

DeviceFilter::DeviceFilter(const std::string& net_if, const std::string& socket_ifname,
                           std::string own)
    : ethernet_only_(net_if.empty()),
      value_(!ethernet_only_ ? net_if
             : own.empty()   ? socket_ifname
                             : ""),
      filter_(value_),
      own_(std::move(own)) {}

DeviceFilter DeviceFilter::of(std::string_view library) {
  static constexpr const char* kUcx[] = {"UCX_NET_DEVICES"};
  static constexpr const char* kOfi[] = {"FI_TCP_IFACE", "FI_SOCKETS_IFACE", "FI_UDP_IFACE"};
  std::string choices;
  for (const char* name : library == "ucx" ? std::span<const char* const>(kUcx) : kOfi) {
    const char* const value = std::getenv(name);
    if (value == nullptr || *value == '\0' || std::string_view(value) == "all") continue;
    choices += (choices.empty() ? "" : ", ") + format("%s=\"%s\"", name, value);
  }
  return {settings().net_if, settings().socket_ifname, std::move(choices)};
}

bool DeviceFilter::admits(const std::string& device, bool ethernet) const {
  if (!restricts() || (ethernet_only_ && !ethernet)) return true;
  const bool listed = filter_.lists(device) || filter_.lists(device.substr(0, device.find(':')));
  return listed != filter_.exclude;
}

bool DeviceFilter::names(const std::string& device, bool ethernet) const {
  return restricts() && !filter_.exclude && admits(device, ethernet);
}

std::string DeviceFilter::text() const {
  if (!restricts()) return own_.empty() ? "no filter" : own_;
  return format("%s=\"%s\"", ethernet_only_ ? "NCCL_SOCKET_IFNAME" : "SCAPE_NET_IF",
                value_.c_str()) +
         (own_.empty() ? "" : " within " + own_);
}

Status DeviceFilter::leaves_none(const char* library,
                                 const std::vector<std::string>& existing) const {
  std::string list;
  for (const std::string& name : existing) list += (list.empty() ? "" : ", ") + name;
  return error(
      SCAPE_ERR_ARGUMENT,
      "%s: %s admits none of the network devices that there are: %s; name one of them, %s", library,
      text().c_str(), list.c_str(),
      ethernet_only_ ? "unset it, or choose the devices with SCAPE_NET_IF" : "or unset it");
}

bool device_comes_before(const std::string& one, const std::string& other) {
  const auto is_digit = [](char c) { return c >= '0' && c <= '9'; };
  size_t i = 0, j = 0;
  while (i < one.size() && j < other.size()) {
    if (is_digit(one[i]) && is_digit(other[j])) {
      const auto number = [&](const std::string& text, size_t* at) {
        uint64_t value = 0;
        for (; *at < text.size() && is_digit(text[*at]); ++*at) {
          value = value * 10 + static_cast<uint64_t>(text[*at] - '0');
        }
        return value;
      };
      const uint64_t x = number(one, &i), y = number(other, &j);
      if (x != y) return x < y;
    } else {
      if (one[i] != other[j]) return one[i] < other[j];
      ++i, ++j;
    }
  }
  return one.size() - i < other.size() - j;
}

}  // namespace scape::plugin
