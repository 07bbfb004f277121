#include <dlfcn.h>
#include <limits.h>
#include <stdlib.h>

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "perf/common/nccl_library.h"
#include "perf/net/carrier.h"
#include "plugin/net/abi/net_api.h"

namespace scape::perf {
namespace {

std::string last_warning;  // of the plugin: its codes say little

void log_line(int level, unsigned long, const char*, int, const char* text, ...) {
  static const char* const wanted = getenv("NCCL_DEBUG");
  va_list args;
  va_start(args, text);
  const std::string line = vformat(text, args);
  va_end(args);
  if (level == NET_LOG_WARN) last_warning = line;
  const bool shown = wanted != nullptr && (strcmp(wanted, "INFO") == 0 || level == NET_LOG_WARN);
  if (shown) std::fprintf(stderr, "%s\n", line.c_str());
}

Status call_failed(const char* call, int result) {
  return error(SCAPE_ERR_SYSTEM, "the plugin's %s gives %d%s%s", call, result,
               last_warning.empty() ? "" : ": ", last_warning.c_str());
}

#define RETURN_IF_REFUSED(name, call)                                                \
  do {                                                                               \
    if (const int result_ = (call); result_ != 0) return call_failed(name, result_); \
  } while (0)

class PluginCarrier final : public Carrier {
 public:
  ~PluginCarrier() override {
    if (api_.library != nullptr) api_close(&api_);
  }

  Status load(const PluginChoice& choice, PluginInfo* info) {
    const int newest = choice.version != 0 ? choice.version : NEWEST_VERSION;
    const int oldest = choice.version != 0 ? choice.version : OLDEST_VERSION;
    const std::string path =
        choice.path.empty() ? library_beside_program("libnccl-net-scape.so") : choice.path;
    if (const char* const reason = api_load(&api_, path.c_str()); reason != nullptr) {
      return error(
          SCAPE_ERR_NOT_FOUND,
          "no plugin to measure: %s; build the target scape_net, or name one with --plugin",
          reason);
    }
    int version = newest;
    while (version >= oldest && api_choose(&api_, version) != 0) --version;
    if (version < oldest) {
      return error(SCAPE_ERR_NOT_FOUND, "%s has no table ncclNetPlugin_v%d%s", path.c_str(), newest,
                   newest != oldest ? ", nor an older one" : "; leave --abi out");
    }
    RETURN_IF_REFUSED("init", api_init(&api_, log_line));
    int devices = 0;
    RETURN_IF_REFUSED("devices", api_devices(&api_, &devices));
    for (const int device : choice.devices) {
      if (device >= devices) {
        return error(SCAPE_ERR_ARGUMENT, "--device %d: the plugin has %d", device, devices);
      }
    }
    device_ = choice.devices.front();
    if (choice.devices.size() > 1) {
      RETURN_IF_REFUSED("makeVDevice", api_make_device(&api_, &device_, choice.devices.data(),
                                                       static_cast<int>(choice.devices.size())));
    }
    RETURN_IF_REFUSED("getProperties", api_properties(&api_, device_, &properties_));
    char real[PATH_MAX];
    info->path = realpath(path.c_str(), real) != nullptr ? real : path;
    info->version = api_.version;
    info->number = device_;
    info->device = properties_.name;
    info->speed_mbps = properties_.speed;
    return Status::Ok();
  }

  const std::string& name() const override { return name_; }

  Status open(Control& control, const Areas& areas) override {
    if (api_.version <= 8 && areas.bytes > INT_MAX) {
      return error(
          SCAPE_ERR_ARGUMENT,
          "version %d of the interface has sizes of 31 bits: a connection's buffers of %zu "
          "bytes are too large; lower -e or --slots",
          api_.version, areas.bytes);
    }
    const size_t connections = static_cast<size_t>(areas.connections);
    links_.resize(connections);
    std::string mine, theirs;
    for (Link& link : links_) {
      char handle[NET_HANDLE_BYTES] = {};
      RETURN_IF_REFUSED("listen", api_listen(&api_, device_, handle, &link.listener));
      mine.append(handle, sizeof handle);
    }
    SCAPE_RETURN_IF_ERROR(exchange(control, mine, &theirs));
    if (theirs.size() != mine.size()) {
      return error(SCAPE_ERR_MISMATCH, "the ranks differ in --connections");
    }
    // Both ends in steps, as NCCL takes them.
    for (size_t open = 0; open < connections;) {
      open = 0;
      for (size_t i = 0; i < connections; ++i) {
        Link& link = links_[i];
        if (link.sender == nullptr) {
          RETURN_IF_REFUSED(
              "connect", api_connect(&api_, device_, &theirs[i * NET_HANDLE_BYTES], &link.sender));
        }
        if (link.receiver == nullptr) {
          RETURN_IF_REFUSED("accept", api_accept(&api_, link.listener, &link.receiver));
        }
        open += link.sender != nullptr && link.receiver != nullptr;
      }
    }
    for (size_t i = 0; i < connections; ++i) {
      Link& link = links_[i];
      RETURN_IF_REFUSED("closeListen",
                        api_close_listen(&api_, std::exchange(link.listener, nullptr)));
      RETURN_IF_REFUSED("regMr", api_register(&api_, link.sender, areas.send + i * areas.bytes,
                                              areas.bytes, NET_POINTER_HOST, &link.send_memory));
      RETURN_IF_REFUSED("regMr", api_register(&api_, link.receiver, areas.receive + i * areas.bytes,
                                              areas.bytes, NET_POINTER_HOST, &link.receive_memory));
    }
    return Status::Ok();
  }

  Status close(Control& control) override {
    SCAPE_RETURN_IF_ERROR(control.barrier());
    for (Link& link : links_) {
      RETURN_IF_REFUSED("deregMr", api_deregister(&api_, link.sender, link.send_memory));
      RETURN_IF_REFUSED("closeSend", api_close_send(&api_, link.sender));
      RETURN_IF_REFUSED("deregMr", api_deregister(&api_, link.receiver, link.receive_memory));
      RETURN_IF_REFUSED("closeRecv", api_close_receive(&api_, link.receiver));
    }
    links_.clear();
    RETURN_IF_REFUSED("finalize", api_finalize(&api_));
    return Status::Ok();
  }

  Answer send(int connection, void* data, size_t bytes, int tag, Request* request) override {
    Link& link = links_[static_cast<size_t>(connection)];
    request->receives = false;
    request->count = 1;
    const int result =
        api_isend(&api_, link.sender, data, bytes, tag, link.send_memory, &request->handles[0]);
    if (result != 0) return fail("isend", result);
    return request->handles[0] != nullptr ? Answer::kDone : Answer::kNotNow;
  }

  Answer receive(int connection, int count, void** data, const size_t* bytes, int* tags,
                 Request* request) override {
    Link& link = links_[static_cast<size_t>(connection)];
    void* memories[kMaxGroup];
    std::fill_n(memories, count, link.receive_memory);
    request->receives = true;
    request->count = count;
    const int result =
        api_irecv(&api_, link.receiver, count, data, bytes, tags, memories, &request->handles[0]);
    if (result != 0) return fail("irecv", result);
    return request->handles[0] != nullptr ? Answer::kDone : Answer::kNotNow;
  }

  Answer test(Request* request) override {
    int done = 0;
    int sizes[kMaxGroup] = {};
    const int result = api_test(&api_, request->handles[0], &done, sizes);
    if (result != 0) return fail("test", result);
    if (done == 0) return Answer::kNotNow;
    for (int i = 0; i < request->count; ++i) request->sizes[i] = static_cast<size_t>(sizes[i]);
    return Answer::kDone;
  }

  Status failure() const override { return failure_; }

 private:
  struct Link {
    void* listener = nullptr;
    void* sender = nullptr;
    void* receiver = nullptr;
    void* send_memory = nullptr;
    void* receive_memory = nullptr;
  };

  Answer fail(const char* call, int result) {
    failure_ = call_failed(call, result);
    return Answer::kFailed;
  }

  const std::string name_ = "plugin";
  api api_ = {};
  net_properties_v12 properties_ = {};
  int device_ = 0;
  std::vector<Link> links_;
  Status failure_;
};

}  // namespace

Status make_plugin_carrier(const PluginChoice& choice, PluginInfo* info,
                           std::unique_ptr<Carrier>* out) {
  auto carrier = std::make_unique<PluginCarrier>();
  SCAPE_RETURN_IF_ERROR(carrier->load(choice, info));
  *out = std::move(carrier);
  return Status::Ok();
}

Status exchange(Control& control, const std::string& mine, std::string* theirs) {
  std::vector<size_t> sizes;
  SCAPE_RETURN_IF_ERROR(control.all_gather(mine.size(), &sizes));
  const size_t most = *std::max_element(sizes.begin(), sizes.end());
  std::string padded = mine;
  padded.resize(most);
  std::vector<std::byte> all;
  SCAPE_RETURN_IF_ERROR(control.all_gather(padded.data(), most, &all));
  const size_t other = control.rank() == 0 ? 1 : 0;
  theirs->assign(reinterpret_cast<const char*>(all.data()) + other * most, sizes[other]);
  return Status::Ok();
}

}  // namespace scape::perf
