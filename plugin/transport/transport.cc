#include "plugin/transport/transport.h"

#include <dlfcn.h>

#include <algorithm>
#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "base/log.h"
#include "base/module.h"
#include "base/settings.h"
#include "plugin/transport/device_filter.h"
#include "plugin/transport/rails.h"

namespace scape::plugin {
namespace {

Status open_transport(const std::string& name, const TransportModule** out) {
  void* handle = nullptr;
  if (const Status status = open_module(name, &handle); !status.ok()) {
    return error(status.code(),
                 "transport %s: %s; install the transport's library, or keep the module beside the "
                 "scape library",
                 name.c_str(), status.message().c_str());
  }
  const auto* module = static_cast<const TransportModule*>(dlsym(handle, kTransportModuleSymbol));
  if (module == nullptr || module->abi != kTransportAbi) {
    return error(SCAPE_ERR_SYSTEM,
                 "transport %s: libscape_%s.so is of another build of scape (interface %u, not "
                 "%u); reinstall "
                 "it",
                 name.c_str(), name.c_str(), module != nullptr ? module->abi : 0, kTransportAbi);
  }
  *out = module;
  return Status::Ok();
}

// The devices that a communicator's large messages are cut over: those that SCAPE_NET_IF names, if
// there are several. A list of what is left out names none: it may leave interfaces that reach no
// other host. Among InfiniBand and RoCE devices UCX does so by itself. Looked for once.
Status named_rails(const TransportModule& module, std::vector<std::string>* out) {
  static std::mutex* const mutex = new std::mutex;  // never destroyed: used until the last moment
  static std::vector<std::string>* kept = nullptr;
  std::lock_guard<std::mutex> lock(*mutex);
  if (kept == nullptr) {
    auto found = std::make_unique<std::vector<std::string>>();
    const InterfaceFilter named(settings().net_if);
    if (!named.exclude && !named.names.empty()) {
      std::vector<TransportDevice> devices;
      SCAPE_RETURN_IF_ERROR(module.devices(&devices));
      for (const TransportDevice& device : devices) {
        if (device.network && !(device.fabric && chosen_transport() == "ucx")) {
          found->push_back(device.name);
        }
      }
      // The same order on hosts that are alike, however the library lists them.
      std::sort(found->begin(), found->end(), device_comes_before);
    }
    if (found->size() > 1) {
      std::string list;
      for (const std::string& name : *found) list += (list.empty() ? "" : ", ") + name;
      SCAPE_INFO("%s: network devices: %s, which share large messages; %s", module.name,
                 list.c_str(), DeviceFilter::of(module.name).text().c_str());
    }
    kept = found.release();
  }
  *out = *kept;
  return Status::Ok();
}

}  // namespace

Status load_transport_module(std::string_view name, const TransportModule** out) {
  static std::mutex* const mutex = new std::mutex;  // never destroyed: used until the last moment
  static auto* const modules = new std::map<std::string, const TransportModule*>;
  std::lock_guard<std::mutex> lock(*mutex);
  const TransportModule*& slot = (*modules)[std::string(name)];
  if (slot == nullptr) {
    const TransportModule* module = nullptr;
    SCAPE_RETURN_IF_ERROR(open_transport(std::string(name), &module));
    slot = module;
  }
  *out = slot;
  return Status::Ok();
}

std::span<const std::string_view> transport_names() {
  // In the order of SCAPE_TRANSPORT's choices, behind auto.
  static constexpr std::string_view kNames[] = {"ucx", "ofi"};
  return kNames;
}

bool transport_is_named() { return settings().transport != 0; }

std::string_view chosen_transport() {
  return transport_names()[transport_is_named() ? static_cast<size_t>(settings().transport) - 1
                                                : 0];
}

Status make_transport(const TransportOptions& options, std::unique_ptr<Transport>* out) {
  const TransportModule* module = nullptr;
  SCAPE_RETURN_IF_ERROR(load_transport_module(chosen_transport(), &module));
  std::vector<std::string> rails;
  SCAPE_RETURN_IF_ERROR(named_rails(*module, &rails));
  if (rails.size() > 1) return make_rails(*module, options, rails, out);
  return module->make(options, out);
}

}  // namespace scape::plugin
