#include "plugin/net/device.h"

#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <climits>
#include <cstdlib>
#include <fstream>
#include <memory>
#include <mutex>

#include "base/settings.h"
#include "plugin/net/nccl_log.h"
#include "plugin/transport/device_filter.h"

namespace scape::net {
namespace {

// What NCCL's own plugin for sockets takes where the system does not say.
constexpr int kUnknownSpeed = 10000;

std::string read_line(const std::string& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

bool exists(const std::string& path) { return ::access(path.c_str(), F_OK) == 0; }

// dddd:bb:dd.f
bool is_pci_address(const std::string& name) {
  if (name.size() != 12) return false;
  for (size_t i = 0; i < name.size(); ++i) {
    const bool digit = std::isxdigit(static_cast<unsigned char>(name[i])) != 0;
    if (i == 4 || i == 7 ? name[i] != ':' : i == 10 ? name[i] != '.' : !digit) return false;
  }
  return true;
}

// The PCI function that a device's link in sysfs leads to: of a virtual one the function it is
// part of.
std::string pci_path_of(const std::string& link) {
  char* const resolved = ::realpath(link.c_str(), nullptr);
  if (resolved == nullptr) return {};
  std::string path = resolved;
  std::free(resolved);
  while (!path.empty()) {
    const size_t slash = path.rfind('/');
    if (slash == std::string::npos) return {};
    if (is_pci_address(path.substr(slash + 1))) return path;
    path.resize(slash);
  }
  return {};
}

uint64_t hex_digits(const std::string& text) {
  std::string digits;
  for (const char c : text) {
    if (std::isxdigit(static_cast<unsigned char>(c))) digits += c;
  }
  return std::strtoull(digits.c_str(), nullptr, 16);
}

std::string list_of(const Devices& devices) {
  std::string text;
  for (const Device& device : devices.list) {
    text += (text.empty() ? "" : ", ") + device.transport.name + " (" + device.transport.protocol +
            format(", %g Gb/s)", device.speed_mbps / 1000.0);
  }
  return text + "; " + plugin::DeviceFilter::of(devices.library).text();
}

Status look(const std::string& library, Devices* out) {
  out->library = library;
  out->list.clear();
  SCAPE_RETURN_IF_ERROR(plugin::load_transport_module(library, &out->module));
  std::vector<plugin::TransportDevice> found;
  SCAPE_RETURN_IF_ERROR(out->module->devices(&found));
  for (const plugin::TransportDevice& device : found) {
    out->list.push_back(describe_device(device, "/sys"));
  }
  // Rails are paired by number.
  std::stable_sort(out->list.begin(), out->list.end(), [](const Device& a, const Device& b) {
    return plugin::device_comes_before(a.transport.name, b.transport.name);
  });
  for (size_t i = 0; i < out->list.size(); ++i) {
    Device& device = out->list[i];
    device.members = {static_cast<int>(i)};
    // Without one of its own, its place among the others has to tell it apart.
    if (device.guid == 0) device.guid = i + 1;
  }
  return Status::Ok();
}

bool has_fabric(const Devices& devices) {
  return !devices.list.empty() && devices.list.front().transport.fabric;
}

Status choose(Devices* out) {
  if (settings().net != 0) {  // auto, then the transports
    const auto chosen = static_cast<size_t>(settings().net - 1);
    SCAPE_RETURN_IF_ERROR(look(std::string(plugin::transport_names()[chosen]), out));
    NET_INFO("%s, chosen by SCAPE_NET, on %s", out->library.c_str(), list_of(*out).c_str());
    return Status::Ok();
  }
  // UCX is at its best on InfiniBand and RoCE, libfabric on what it alone drives (EFA, Slingshot,
  // Omni-Path). Over plain TCP and within a host UCX is the quicker one.
  Devices ofi;
  const Status ucx_status = look("ucx", out);
  if (ucx_status.ok() && has_fabric(*out)) {
    NET_INFO("ucx, for the InfiniBand or RoCE devices, on %s", list_of(*out).c_str());
    return Status::Ok();
  }
  const Status ofi_status = look("ofi", &ofi);
  if (ofi_status.ok() && (has_fabric(ofi) || !ucx_status.ok())) {
    *out = ofi;
    if (ucx_status.ok()) {
      NET_INFO("ofi, for the devices of %s, on %s", ofi.list.front().transport.protocol.c_str(),
               list_of(*out).c_str());
    } else {
      NET_WARN("ofi, on %s; UCX is not to be had: %s", list_of(*out).c_str(),
               ucx_status.message().c_str());
    }
    return Status::Ok();
  }
  if (ucx_status.ok()) {
    if (ofi_status.ok()) {
      NET_INFO("ucx, with no RDMA device here, on %s", list_of(*out).c_str());
    } else {
      NET_INFO("ucx, on %s; libfabric is not to be had: %s", list_of(*out).c_str(),
               ofi_status.message().c_str());
    }
    return Status::Ok();
  }
  return error(SCAPE_ERR_SYSTEM, "no network library is to be had: %s; %s",
               ucx_status.message().c_str(), ofi_status.message().c_str());
}

// The devices that NCCL has had made of several. Never destroyed: connections and NCCL refer to
// them until the last moment.
struct Joined {
  std::mutex mutex;
  std::vector<std::unique_ptr<Device>> list;
  size_t counted = 0;  // of the list, those that NCCL is told of

  static Joined& of(Face face) {
    static auto* const net = new Joined;
    static auto* const collective = new Joined;
    return face == Face::kNet ? *net : *collective;
  }
};

}  // namespace

Device describe_device(const plugin::TransportDevice& transport, const std::string& root) {
  Device device;
  device.transport = transport;
  // UCX says "mlx5_0:1", libfabric "mlx5_0" or "rdmap0s6-rdm".
  std::string name = transport.name;
  if (const size_t colon = name.find(':'); colon != std::string::npos) {
    device.port = std::max(1, std::atoi(name.c_str() + colon + 1));
    name.resize(colon);
  }
  std::string rdma = root + "/class/infiniband/" + name;
  if (const size_t dash = name.rfind('-'); !exists(rdma) && dash != std::string::npos) {
    rdma = root + "/class/infiniband/" + name.substr(0, dash);
  }
  const std::string interface = root + "/class/net/" + name;
  double speed = 0;
  if (transport.network && exists(rdma)) {
    device.pci_path = pci_path_of(rdma + "/device");
    device.guid = hex_digits(read_line(rdma + "/node_guid"));
    // "100 Gb/sec (4X EDR)"
    speed = 1000 *
            std::atof(read_line(rdma + "/ports/" + std::to_string(device.port) + "/rate").c_str());
  } else if (transport.network && exists(interface)) {
    device.pci_path = pci_path_of(interface + "/device");
    device.guid = hex_digits(read_line(interface + "/address"));
    speed = std::atof(read_line(interface + "/speed").c_str());
  }
  device.speed_mbps = speed >= 1 && speed < INT_MAX ? static_cast<int>(speed) : kUnknownSpeed;
  return device;
}

Status find_devices(const Devices** out) {
  static std::mutex* const mutex = new std::mutex;  // never destroyed: used until the last moment
  static Devices* kept = nullptr;
  std::lock_guard<std::mutex> lock(*mutex);
  if (kept == nullptr) {
    auto made = std::make_unique<Devices>();
    SCAPE_RETURN_IF_ERROR(choose(made.get()));
    kept = made.release();
  }
  *out = kept;
  return Status::Ok();
}

Device join(const std::vector<Device>& list, std::span<const int> members) {
  Device joined = list[static_cast<size_t>(members.front())];
  joined.members.assign(members.begin(), members.end());
  for (const int number : members.subspan(1)) {
    const Device& member = list[static_cast<size_t>(number)];
    joined.transport.name += "+" + member.transport.name;
    joined.transport.largest_message =
        std::min(joined.transport.largest_message, member.transport.largest_message);
    joined.speed_mbps += std::min(member.speed_mbps, INT_MAX - joined.speed_mbps);
  }
  return joined;
}

Status find_device(Face face, int number, const Devices** devices, const Device** out) {
  SCAPE_RETURN_IF_ERROR(find_devices(devices));
  const std::vector<Device>& physical = (*devices)->list;
  Joined& joined = Joined::of(face);
  std::lock_guard<std::mutex> lock(joined.mutex);
  const size_t all = physical.size() + joined.list.size();
  if (number >= 0 && static_cast<size_t>(number) < all) {
    const auto at = static_cast<size_t>(number);
    *out = at < physical.size() ? &physical[at] : joined.list[at - physical.size()].get();
    return Status::Ok();
  }
  return error(SCAPE_ERR_ARGUMENT, "device %d is none of the %zu there are", number, all);
}

Status count_devices(Face face, int* out) {
  const Devices* devices = nullptr;
  SCAPE_RETURN_IF_ERROR(find_devices(&devices));
  Joined& joined = Joined::of(face);
  std::lock_guard<std::mutex> lock(joined.mutex);
  *out = static_cast<int>(devices->list.size() + joined.counted);
  return Status::Ok();
}

Status join_devices(Face face, const int* numbers, int count, int limit, int* number) {
  const Devices* devices = nullptr;
  SCAPE_RETURN_IF_ERROR(find_devices(&devices));
  if (count < 1 || count > limit) {
    return error(SCAPE_ERR_ARGUMENT, "makeVDevice: %d devices; 1 to %d can be joined", count,
                 limit);
  }
  const std::span<const int> members(numbers, static_cast<size_t>(count));
  for (size_t i = 0; i < members.size(); ++i) {
    const Device* member = nullptr;
    if (const Status status = find_device(face, members[i], &devices, &member); !status.ok()) {
      return error(SCAPE_ERR_ARGUMENT, "makeVDevice: %s", status.message().c_str());
    }
    if (member->members.size() > 1) {
      return error(SCAPE_ERR_ARGUMENT,
                   "makeVDevice: device %d, %s, is made of several; join the physical ones",
                   members[i], member->transport.name.c_str());
    }
    if (std::find(members.begin(), members.begin() + static_cast<ptrdiff_t>(i), members[i]) !=
        members.begin() + static_cast<ptrdiff_t>(i)) {
      return error(SCAPE_ERR_ARGUMENT, "makeVDevice: device %d, %s, is named twice", members[i],
                   member->transport.name.c_str());
    }
  }
  if (members.size() == 1) {
    *number = members.front();
    return Status::Ok();
  }
  Joined& joined = Joined::of(face);
  std::lock_guard<std::mutex> lock(joined.mutex);
  size_t at = 0;
  while (at < joined.list.size() &&
         !std::equal(members.begin(), members.end(), joined.list[at]->members.begin(),
                     joined.list[at]->members.end())) {
    ++at;
  }
  if (at == joined.list.size()) {
    joined.list.push_back(std::make_unique<Device>(join(devices->list, members)));
  }
  if (at >= joined.counted) {
    const Device& made = *joined.list[at];
    NET_INFO("device %zu is %s (%g Gb/s)%s", devices->list.size() + at, made.transport.name.c_str(),
             made.speed_mbps / 1000.0,
             face == Face::kNet ? ": large messages go over all of them"
                                : ", of which collectives use the first");
    joined.counted = at + 1;
  }
  *number = static_cast<int>(devices->list.size() + at);
  return Status::Ok();
}

void uncount_joined_devices() {
  for (const Face face : {Face::kNet, Face::kCollective}) {
    Joined& joined = Joined::of(face);
    std::lock_guard<std::mutex> lock(joined.mutex);
    joined.counted = 0;
  }
}

}  // namespace scape::net
