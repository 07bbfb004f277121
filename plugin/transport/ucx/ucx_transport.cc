// The UCX transport: one UCP worker per transport, tagged messages.
//
// The only code that links libucp. The user's UCX_* settings hold; nothing here writes the
// environment.
#include <poll.h>
#include <sys/statvfs.h>
#include <ucp/api/ucp.h>
#include <ucs/debug/log_def.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <compare>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <map>
#include <mutex>
#include <new>
#include <optional>
#include <sstream>
#include <string>
#include <utility>

#include "base/log.h"
#include "base/settings.h"
#include "plugin/transport/descriptors.h"
#include "plugin/transport/device_filter.h"
#include "plugin/transport/host_digest.h"
#include "plugin/transport/peer_address.h"
#include "plugin/transport/traffic.h"
#include "plugin/transport/transport.h"

namespace scape::plugin {
namespace {

Status ucx_error(const char* what, ucs_status_t status) {
  return error(SCAPE_ERR_SYSTEM, "ucx: %s failed: %s; UCX_LOG_LEVEL=info tells more", what,
               ucs_status_string(status));
}

// What this thread keeps UCX from logging: lines of levels from `first` to `last`. For UCX a fatal
// line is also the end of the process.
struct Silence {
  ucs_log_level_t first = UCS_LOG_LEVEL_LAST;
  ucs_log_level_t last = UCS_LOG_LEVEL_LAST;
};
thread_local Silence silence;

// Silences UCX in this thread for as long as it lives.
class Silenced {
 public:
  Silenced(ucs_log_level_t first, ucs_log_level_t last) : before_(silence) {
    silence = {first, last};
  }
  Silenced(const Silenced&) = delete;
  Silenced& operator=(const Silenced&) = delete;
  ~Silenced() { silence = before_; }

 private:
  const Silence before_;
};

// UCX writes to standard output unless UCX_LOG_FILE says otherwise, which belongs to the program:
// its lines become ours. Those of more detail than warnings come only where UCX_LOG_LEVEL asks for
// them.
ucs_log_func_rc_t take_log(const char*, unsigned, const char*, ucs_log_level_t level,
                           const ucs_log_component_config_t*, const char* message, va_list args) {
  if (level >= silence.first && level <= silence.last) return UCS_LOG_FUNC_RC_STOP;
  static const bool has_own_file = std::getenv("UCX_LOG_FILE") != nullptr;
  if (level == UCS_LOG_LEVEL_FATAL || has_own_file) return UCS_LOG_FUNC_RC_CONTINUE;
  const bool asked_for = level > UCS_LOG_LEVEL_WARN;
  if (asked_for || log_enabled(LogLevel::kWarn)) {
    log(asked_for ? LogLevel::kInfo : LogLevel::kWarn, "ucx: %s", vformat(message, args).c_str());
  }
  return UCS_LOG_FUNC_RC_STOP;
}

// The name under which UCX lists memory that processes share.
constexpr char kMemoryDevice[] = "memory";

// A UCP context costs milliseconds and several descriptors, so the transports of a process that are
// made alike share one for as long as any of them lives.
class Context {
 public:
  struct Traits {
    std::optional<std::string> net_devices;  // as UCX_NET_DEVICES, which decides when there is none
    bool wakeup = false;
    bool posix = true;   // memory in /dev/shm may be used
    bool eager = false;  // over TCP, and no message waits for its receiver
    auto operator<=>(const Traits&) const = default;
  };
  static Status get(const Traits& traits, std::shared_ptr<Context>* out) {
    static std::mutex* const mutex = new std::mutex;  // never destroyed: used until the last moment
    static auto* const contexts = new std::map<Traits, std::weak_ptr<Context>>;
    std::lock_guard<std::mutex> lock(*mutex);
    std::weak_ptr<Context>& kept = (*contexts)[traits];
    *out = kept.lock();
    if (*out != nullptr) return Status::Ok();
    // Once and for good: handlers are a list that UCX does not lock, and this module stays loaded.
    static const bool taking = (ucs_log_push_handler(&take_log), true);
    static_cast<void>(taking);
    SCAPE_RETURN_IF_ERROR(check_descriptors("ucx", 12));
    auto made = std::make_shared<Context>();
    SCAPE_RETURN_IF_ERROR(made->init(traits));
    kept = made;
    *out = std::move(made);
    return Status::Ok();
  }

  ~Context() {
    if (handle_ != nullptr) ucp_cleanup(handle_);
  }
  ucp_context_h handle() const { return handle_; }

 private:
  Status init(const Traits& traits) {
    ucp_config_t* config = nullptr;
    if (const ucs_status_t status = ucp_config_read(nullptr, nullptr, &config); status != UCS_OK) {
      return ucx_error("reading the UCX_* settings", status);
    }
    const Status status = init(traits, config);
    ucp_config_release(config);
    return status;
  }

  Status init(const Traits& traits, ucp_config_t* config) {
    const auto modify = [config](const char* name, const char* value, const char* what) {
      const ucs_status_t status = ucp_config_modify(config, name, value);
      return status == UCS_OK ? Status::Ok() : ucx_error(what, status);
    };
    if (!traits.posix) {
      SCAPE_RETURN_IF_ERROR(modify("TLS", "^posix", "leaving out shared memory in /dev/shm"));
    }
    if (traits.net_devices.has_value()) {
      SCAPE_RETURN_IF_ERROR(
          modify("NET_DEVICES", traits.net_devices->c_str(), "choosing the network device"));
    }
    if (traits.eager) {
      SCAPE_RETURN_IF_ERROR(modify("RNDV_THRESH", "inf", "choosing the protocol"));
      if (std::getenv("UCX_TLS") == nullptr) {
        SCAPE_RETURN_IF_ERROR(modify("TLS", "tcp", "choosing TCP"));
      }
    }
    if (std::getenv("UCX_TCP_CONN_NB") == nullptr) {
      // By default UCX waits for connect() inside the caller, for minutes if a host is silent, and
      // aborts the process where the peer dies between that and the first packet (tcp_ep.c,
      // "Assertion `!(ep->flags & UCT_TCP_EP_FLAG_CTX_TYPE_TX)' failed", 1.13 and later).
      unsigned major, minor, release;
      ucp_get_version(&major, &minor, &release);
      const bool prefixed = std::pair(major, minor) >= std::pair(1u, 17u);
      SCAPE_RETURN_IF_ERROR(modify(prefixed ? "TCP_CONN_NB" : "CONN_NB", "y",
                                   "choosing connections that nobody waits for"));
    }
    ucp_params_t params{};
    params.field_mask = UCP_PARAM_FIELD_FEATURES | UCP_PARAM_FIELD_MT_WORKERS_SHARED;
    params.features = UCP_FEATURE_TAG | (traits.wakeup ? UCP_FEATURE_WAKEUP : 0);
    params.mt_workers_shared = 1;  // communicators have independent owners
    const ucs_status_t status = ucp_init(&params, config, &handle_);
    if (status == UCS_OK) return Status::Ok();
    handle_ = nullptr;
    return ucx_error("ucp_init", status);
  }

  ucp_context_h handle_ = nullptr;
};

// Of the list that UCX prints of a context, the lines "... -- transport/device": it offers no other
// that heeds the UCX_* settings.
std::vector<std::pair<std::string, std::string>> resources_of(ucp_context_h context) {
  std::vector<std::pair<std::string, std::string>> resources;
  char* text = nullptr;
  size_t length = 0;
  std::FILE* const stream = ::open_memstream(&text, &length);
  if (stream == nullptr) return resources;
  ucp_context_print_info(context, stream);
  std::fclose(stream);
  std::istringstream lines{std::string(text, length)};
  std::free(text);
  for (std::string line; std::getline(lines, line);) {
    const size_t dashes = line.find(" -- ");
    if (line.find("resource") == std::string::npos || dashes == std::string::npos) continue;
    const std::string name = line.substr(dashes + 4);
    const size_t slash = name.find('/');
    if (slash == std::string::npos) continue;
    const size_t end = name.find_first_of(" \t\r", slash);
    resources.emplace_back(name.substr(0, slash), name.substr(slash + 1, end - slash - 1));
  }
  return resources;
}

bool is_fabric(std::string_view transport) {
  static constexpr std::string_view kFabrics[] = {"rc", "dc", "ud"};
  return std::any_of(std::begin(kFabrics), std::end(kFabrics),
                     [&](std::string_view start) { return transport.starts_with(start); });
}

// The network devices that UCX has within the user's UCX_* settings, and what is left of them.
struct NetworkDevices {
  DeviceFilter filter = DeviceFilter::of("ucx");
  std::vector<TransportDevice> fabric, ethernet, loopback, memory;
  std::vector<std::string> existing;  // of the network, admitted or not

  Status find() {
    std::shared_ptr<Context> context;
    SCAPE_RETURN_IF_ERROR(Context::get({}, &context));
    for (const auto& [transport, device] : resources_of(context->handle())) {
      const bool of_fabric = is_fabric(transport);
      const bool shared = device == kMemoryDevice;
      if (!of_fabric && transport != "tcp" && !shared) continue;
      if (!shared && std::find(existing.begin(), existing.end(), device) == existing.end()) {
        existing.push_back(device);
      }
      if (!shared && !filter.admits(device, !of_fabric)) continue;
      const bool is_loopback = device == "lo" && !filter.names(device, true);
      auto& list = shared ? memory : of_fabric ? fabric : is_loopback ? loopback : ethernet;
      if (std::none_of(list.begin(), list.end(), [&name = device](const TransportDevice& known) {
            return known.name == name;
          })) {
        list.push_back({device, transport, !shared, of_fabric, SIZE_MAX});
      }
    }
    if (existing.empty() || !fabric.empty() || !ethernet.empty() || !loopback.empty()) {
      return Status::Ok();
    }
    return filter.leaves_none("ucx", existing);
  }
};

Status find_admitted(std::optional<std::string>* out) {
  out->reset();
  NetworkDevices devices;
  if (!devices.filter.restricts()) return Status::Ok();
  if (Status status = devices.find(); !status.ok()) {
    if (devices.existing.empty() || !devices.filter.is_bootstraps()) return status;
    // An interface may be good for the bootstrap and not for UCX, which has no IPv6 in
    // version 1.13. The ranks of one host need none.
    SCAPE_WARN("%s; going on without any, which reaches this host only", status.message().c_str());
    out->emplace();
    return Status::Ok();
  }
  if (devices.existing.empty()) return Status::Ok();
  out->emplace();
  const auto add = [out](const std::vector<TransportDevice>& list) {
    for (const TransportDevice& device : list) **out += ((*out)->empty() ? "" : ",") + device.name;
  };
  add(devices.fabric);
  add(devices.ethernet);
  if ((*out)->empty()) add(devices.loopback);
  return Status::Ok();
}

// What a transport whose device nobody has chosen may use, for Context::get(). Looked for once.
Status admitted_devices(std::optional<std::string>* out) {
  static std::mutex* const mutex = new std::mutex;  // never destroyed: used until the last moment
  static std::optional<std::string>* kept = nullptr;
  std::lock_guard<std::mutex> lock(*mutex);
  if (kept == nullptr) {
    auto found = std::make_unique<std::optional<std::string>>();
    SCAPE_RETURN_IF_ERROR(find_admitted(found.get()));
    kept = found.release();
  }
  *out = *kept;
  return Status::Ok();
}

// One line, once: what the communicators of this process use.
void tell_devices(ucp_context_h context) {
  static std::atomic<bool> told{false};
  if (!log_enabled(LogLevel::kInfo) || told.exchange(true)) return;
  std::vector<std::string> names;
  for (const auto& [transport, device] : resources_of(context)) {
    if (device == kMemoryDevice || transport == "self") continue;
    if (std::find(names.begin(), names.end(), device) == names.end()) names.push_back(device);
  }
  std::string list;
  for (const std::string& name : names) list += (list.empty() ? "" : ", ") + name;
  SCAPE_INFO("ucx: network devices: %s; %s", list.empty() ? "none" : list.c_str(),
             DeviceFilter::of("ucx").text().c_str());
}

class UcxTransport final : public Transport {
 public:
  ~UcxTransport() override {
    // Endpoints are not closed one by one: that would wait for peers, which may be gone. The worker
    // frees them.
    if (address_ != nullptr) ucp_worker_release_address(worker_, address_);
    // After a failure messages are left that nobody will take: no news, and no warnings.
    const bool quiet = in_flight_ > 0 || abandoned_;
    const Silenced scope(UCS_LOG_LEVEL_FATAL,
                         quiet ? UCS_LOG_LEVEL_TRACE_POLL : UCS_LOG_LEVEL_FATAL);
    for (const ucp_worker_h worker : {eager_worker_, worker_}) {
      if (worker != nullptr) ucp_worker_destroy(worker);
    }
  }

  Status init(const TransportOptions& options) {
    // UCX aborts where it runs out of descriptors in the middle of making a worker.
    SCAPE_RETURN_IF_ERROR(check_descriptors("ucx", 24));
    SCAPE_RETURN_IF_ERROR(make_worker(options));
    // One that wakes its owner has one descriptor for it, and one that tracks all is the plugin's,
    // where NCCL says how much is under way.
    may_send_eagerly_ = !options.wakeup && !options.tracks_all;
    if (options.device.empty()) tell_devices(context_->handle());
    ucs_status_t status = ucp_worker_get_address(worker_, &address_, &address_bytes_);
    if (status != UCS_OK) {
      address_ = nullptr;
      return ucx_error("ucp_worker_get_address", status);
    }
    if (options.wakeup) {
      status = ucp_worker_get_efd(worker_, &event_fd_);
      if (status != UCS_OK) return ucx_error("ucp_worker_get_efd", status);
    }
    return Status::Ok();
  }

  std::string_view name() const override { return "ucx"; }

  Status address(std::vector<std::byte>* out) override {
    const auto* bytes = reinterpret_cast<const std::byte*>(address_);
    *out = seal_address({std::string(name()), host_, {bytes, bytes + address_bytes_}});
    return Status::Ok();
  }

  Status connect(std::span<const std::vector<std::byte>> addresses) override {
    SCAPE_RETURN_IF_ERROR(Transport::connect(addresses));
    if (std::count(far_.begin(), far_.end(), true) > 0) make_eager_worker();
    return Status::Ok();
  }

  Status add_peer(const std::vector<std::byte>& address, const std::string& who,
                  int* peer) override {
    PeerAddress theirs;
    SCAPE_RETURN_IF_ERROR(unseal_address(address, who, &theirs));
    if (theirs.provider != name()) {
      return error(SCAPE_ERR_MISMATCH,
                   "ucx: %s has an address of %s; set SCAPE_TRANSPORT "
                   "and SCAPE_NET_IF alike",
                   who.c_str(), theirs.provider.c_str());
    }
    *peer = static_cast<int>(addresses_.size());
    addresses_.push_back(std::move(theirs.bytes));
    endpoints_.push_back(nullptr);
    eager_endpoints_.push_back(nullptr);
    far_.push_back(theirs.host != host_);
    return Status::Ok();
  }

  Status register_memory(void* data, size_t bytes, void** region) override {
    *region = nullptr;
    ucp_mem_map_params_t params{};
    params.field_mask = UCP_MEM_MAP_PARAM_FIELD_ADDRESS | UCP_MEM_MAP_PARAM_FIELD_LENGTH;
    params.address = data;
    params.length = bytes;
    ucp_mem_h handle = nullptr;
    if (const ucs_status_t status = ucp_mem_map(context_->handle(), &params, &handle);
        status != UCS_OK) {
      return ucx_error("ucp_mem_map", status);
    }
    *region = handle;
    return Status::Ok();
  }

  void deregister_memory(void* region) override {
    if (region != nullptr) ucp_mem_unmap(context_->handle(), static_cast<ucp_mem_h>(region));
  }

  void send(int peer, uint64_t tag, const void* data, size_t bytes, Operation* operation) override {
    begin(operation);
    const bool eagerly = goes_eagerly(peer, bytes);
    ucp_ep_h endpoint = eagerly ? eager_endpoint_to(peer) : endpoint_to(peer);
    if (endpoint == nullptr) return end(operation, Outcome::kFailed);
    ucp_request_param_t param{};
    param.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA;
    param.cb.send = &UcxTransport::on_sent;
    param.user_data = operation;
    if (operation->region != nullptr && !eagerly) {
      param.op_attr_mask |= UCP_OP_ATTR_FIELD_MEMH;
      param.memh = static_cast<ucp_mem_h>(operation->region);
    }
    const ucs_status_ptr_t request = ucp_tag_send_nbx(endpoint, data, bytes, tag, &param);
    sent_.add(bytes);
    if (request == nullptr) return end(operation, Outcome::kDone);
    if (UCS_PTR_IS_ERR(request)) return end(operation, Outcome::kFailed);
    operation->handle = request;
  }

  void recv(int peer, uint64_t tag, void* data, size_t bytes, Operation* operation) override {
    begin(operation);
    // An endpoint that UCX made by itself for a peer's messages is freed when the peer dies, while
    // messages that name it are still in memory. One that was asked for stays. Eager messages name
    // none.
    if (!goes_eagerly(peer, bytes) && endpoint_to(peer) == nullptr) {
      return end(operation, Outcome::kFailed);
    }
    ucp_request_param_t param{};
    // Without immediate completion the length always comes through the callback; UCX 1.13 leaves it
    // out of recv_info for messages that are there already.
    param.op_attr_mask =
        UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FLAG_NO_IMM_CMPL;
    param.cb.recv = &UcxTransport::on_received;
    param.user_data = operation;
    if (operation->region != nullptr) {
      param.op_attr_mask |= UCP_OP_ATTR_FIELD_MEMH;
      param.memh = static_cast<ucp_mem_h>(operation->region);
    }
    const ucs_status_ptr_t request =
        ucp_tag_recv_nbx(worker_, data, bytes, tag, ~uint64_t{0}, &param);
    if (UCS_PTR_IS_ERR(request)) {
      end(operation, Outcome::kFailed);
    } else if (operation->outcome == Outcome::kPending) {
      operation->handle = request;
    }
  }

  Operation* progress(bool* moved) override {
    *moved = worker_progress();
    Operation* ended = ended_;
    ended_ = nullptr;
    return ended;
  }

  void cancel(Operation* operation) override {
    if (operation->outcome == Outcome::kPending) ucp_request_cancel(worker_, operation->handle);
  }

  void abandon() override { abandoned_ = true; }

  void flush(int timeout_ms) override {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::milliseconds(timeout_ms);
    for (const ucp_worker_h worker : {worker_, eager_worker_}) {
      if (worker == nullptr) continue;
      ucp_request_param_t param{};
      ucs_status_ptr_t request = ucp_worker_flush_nbx(worker, &param);
      if (!UCS_PTR_IS_PTR(request)) continue;
      while (ucp_request_check_status(request) == UCS_INPROGRESS &&
             std::chrono::steady_clock::now() < deadline) {
        if (!worker_progress()) ::poll(nullptr, 0, 0);
      }
      ucp_request_free(request);
    }
  }

  int event_fd() const override { return event_fd_; }
  bool arm() override { return ucp_worker_arm(worker_) == UCS_OK; }
  size_t room() const override { return SIZE_MAX; }
  TransportCounters counters() const override {
    return {sent_.bytes, received_.bytes, sent_.messages, received_.messages, 0};
  }

 private:
  static double free_in_dev_shm() {
    struct statvfs space {};
    if (::statvfs("/dev/shm", &space) != 0) return 0;
    return static_cast<double>(space.f_bavail) * static_cast<double>(space.f_frsize) / (1 << 20);
  }

  static long free_huge_pages() {
    std::ifstream file("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages");
    long pages = 0;
    return file >> pages ? pages : 0;
  }

  // Memory in /dev/shm is what containers are short of. Where it does not do, and the user has not
  // chosen the transports, System V memory serves as well.
  Status make_worker(const TransportOptions& options) {
    static std::atomic<bool> posix{true};
    const bool free_to_choose = std::getenv("UCX_TLS") == nullptr;
    traits_.wakeup = options.wakeup;
    if (options.device.empty()) {
      SCAPE_RETURN_IF_ERROR(admitted_devices(&traits_.net_devices));
    } else if (options.device != kMemoryDevice) {
      traits_.net_devices = options.device;
    }
    ucs_status_t status = UCS_OK;
    if (posix.load() || !free_to_choose) {
      const Silenced scope(free_to_choose ? UCS_LOG_LEVEL_ERROR : UCS_LOG_LEVEL_LAST,
                           free_to_choose ? UCS_LOG_LEVEL_WARN : UCS_LOG_LEVEL_LAST);
      SCAPE_RETURN_IF_ERROR(Context::get(traits_, &context_));
      status = create_worker(*context_, &worker_);
      if (status == UCS_OK) return Status::Ok();
    }
    if (free_to_choose) {
      traits_.posix = false;
      SCAPE_RETURN_IF_ERROR(Context::get(traits_, &context_));
      const ucs_status_t first = std::exchange(status, create_worker(*context_, &worker_));
      if (status == UCS_OK) {
        if (posix.exchange(false)) {
          SCAPE_WARN(
              "ucx: shared memory in /dev/shm does not do (%s; %.1f MiB are free there), going on "
              "with System V memory; enlarge /dev/shm, or set UCX_TLS=^posix",
              ucs_status_string(first), free_in_dev_shm());
        }
        return Status::Ok();
      }
    }
    return error(SCAPE_ERR_SYSTEM,
                 "ucx: ucp_worker_create failed: %s; see whether /dev/shm has room (%.1f MiB are "
                 "free), whether huge pages are demanded (UCX_SYSV_HUGETLB_MODE, "
                 "UCX_POSIX_HUGETLB_MODE; %ld are free) and what UCX_TLS leaves; "
                 "UCX_LOG_LEVEL=info tells more",
                 ucs_status_string(status), free_in_dev_shm(), free_huge_pages());
  }

  static ucs_status_t create_worker(const Context& context, ucp_worker_h* worker) {
    ucp_worker_params_t params{};
    params.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE;
    params.thread_mode = UCS_THREAD_MODE_SERIALIZED;
    const ucs_status_t status = ucp_worker_create(context.handle(), &params, worker);
    if (status != UCS_OK) *worker = nullptr;
    return status;
  }

  // Over TCP, UCX has a message of some ten KB wait until its receiver has taken notice and asked
  // for it: between hosts that is a round trip for each chunk, and where the receiver still packs,
  // a standstill. A context has one threshold for all its peers, and on one host the same protocol
  // saves a copy; so messages to other hosts leave from a second worker, whose messages go at once.
  // They arrive at the peers' first ones.
  void make_eager_worker() {
    if (!may_send_eagerly_ || std::getenv("UCX_RNDV_THRESH") != nullptr) return;
    const auto resources = resources_of(context_->handle());
    const auto on_fabric = [](const auto& resource) { return is_fabric(resource.first); };
    if (std::any_of(resources.begin(), resources.end(), on_fabric)) return;
    Context::Traits traits = traits_;
    traits.eager = true;
    Status status = check_descriptors("ucx", 12);
    if (status.ok()) status = Context::get(traits, &eager_context_);
    if (status.ok()) {
      const ucs_status_t made = create_worker(*eager_context_, &eager_worker_);
      if (made != UCS_OK) status = ucx_error("ucp_worker_create", made);
    }
    if (!status.ok()) {
      SCAPE_INFO("%s; messages to other hosts wait for their receivers", status.message().c_str());
    }
  }

  // UCX copies large messages out of the sender's memory. Where that process is gone it logs a
  // fatal line, which would end this one too; kept back, the operation fails as it should. Its own
  // remedy, the error handling mode for peers, gives these copies up (UCX 1.13).
  bool worker_progress() {
    const Silenced scope(UCS_LOG_LEVEL_FATAL, UCS_LOG_LEVEL_FATAL);
    const bool moved = ucp_worker_progress(worker_) != 0;
    if (eager_worker_ == nullptr) return moved;
    // Nothing comes here but the end of connections, which is no sign of a peer's life: what counts
    // are sends that end.
    const size_t before = in_flight_;
    ucp_worker_progress(eager_worker_);
    return moved || in_flight_ < before;
  }

  void begin(Operation* operation) {
    operation->outcome = Outcome::kPending;
    operation->received = 0;
    operation->transport = this;
    operation->handle = nullptr;
    ++in_flight_;
  }

  void end(Operation* operation, Outcome outcome) {
    operation->outcome = outcome;
    operation->handle = nullptr;
    operation->next = ended_;
    ended_ = operation;
    --in_flight_;
  }

  void received(Operation* operation, ucs_status_t status, const ucp_tag_recv_info_t* info) {
    if (status == UCS_OK) {
      operation->received = info->length;
      received_.add(info->length);
    }
    end(operation, status == UCS_OK                      ? Outcome::kDone
                   : status == UCS_ERR_MESSAGE_TRUNCATED ? Outcome::kTruncated
                   : status == UCS_ERR_CANCELED          ? Outcome::kCancelled
                                                         : Outcome::kFailed);
  }

  static void on_sent(void* request, ucs_status_t status, void* user_data) {
    auto* operation = static_cast<Operation*>(user_data);
    static_cast<UcxTransport*>(operation->transport)
        ->end(operation, status == UCS_OK             ? Outcome::kDone
                         : status == UCS_ERR_CANCELED ? Outcome::kCancelled
                                                      : Outcome::kFailed);
    ucp_request_free(request);
  }

  static void on_received(void* request, ucs_status_t status, const ucp_tag_recv_info_t* info,
                          void* user_data) {
    auto* operation = static_cast<Operation*>(user_data);
    static_cast<UcxTransport*>(operation->transport)->received(operation, status, info);
    ucp_request_free(request);
  }

  // The same at both ends, but where one could not make the worker.
  bool goes_eagerly(int peer, size_t bytes) const {
    return eager_worker_ != nullptr && bytes <= kEagerBytes && far_[static_cast<size_t>(peer)];
  }

  // Endpoints are made at the first message to a peer: most schedules talk to few of them.
  ucp_ep_h endpoint_to(int peer) { return endpoint(worker_, &endpoints_, peer); }
  ucp_ep_h eager_endpoint_to(int peer) { return endpoint(eager_worker_, &eager_endpoints_, peer); }
  ucp_ep_h endpoint(ucp_worker_h worker, std::vector<ucp_ep_h>* endpoints, int peer) {
    ucp_ep_h& endpoint = (*endpoints)[static_cast<size_t>(peer)];
    if (endpoint != nullptr) return endpoint;
    ucp_ep_params_t params{};
    params.field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS;
    params.address =
        reinterpret_cast<const ucp_address_t*>(addresses_[static_cast<size_t>(peer)].data());
    if (ucp_ep_create(worker, &params, &endpoint) != UCS_OK) endpoint = nullptr;
    return endpoint;
  }

  // Longer messages wait for their receiver in any case: those that come before it wants them are
  // kept in its memory.
  static constexpr size_t kEagerBytes = size_t{1} << 20;

  Context::Traits traits_;
  bool may_send_eagerly_ = false;
  const std::string host_ = format("%016llx", static_cast<unsigned long long>(host_digest()));
  std::shared_ptr<Context> context_;
  ucp_worker_h worker_ = nullptr;
  std::shared_ptr<Context> eager_context_;
  ucp_worker_h eager_worker_ = nullptr;
  ucp_address_t* address_ = nullptr;
  size_t address_bytes_ = 0;
  int event_fd_ = -1;
  std::vector<std::vector<std::byte>> addresses_;
  std::vector<ucp_ep_h> endpoints_, eager_endpoints_;
  std::vector<bool> far_;  // on another host
  Operation* ended_ = nullptr;
  size_t in_flight_ = 0;
  bool abandoned_ = false;
  Traffic sent_, received_;
};

Status make(const TransportOptions& options, std::unique_ptr<Transport>* out) {
  auto transport = std::make_unique<UcxTransport>();
  SCAPE_RETURN_IF_ERROR(transport->init(options));
  *out = std::move(transport);
  return Status::Ok();
}

Status devices(std::vector<TransportDevice>* out) {
  out->clear();
  NetworkDevices found;
  SCAPE_RETURN_IF_ERROR(found.find());
  // With InfiniBand or RoCE there, TCP over the other interfaces is not what anybody wants.
  *out = !found.fabric.empty()     ? found.fabric
         : !found.ethernet.empty() ? found.ethernet
         : !found.loopback.empty() ? found.loopback
                                   : found.memory;
  if (!out->empty()) return Status::Ok();
  return error(SCAPE_ERR_SYSTEM,
               "ucx: no network device is left by UCX_TLS and UCX_NET_DEVICES; unset them, or see "
               "what ucx_info -d lists");
}

}  // namespace
}  // namespace scape::plugin

extern "C" __attribute__((visibility("default")))
const scape::plugin::TransportModule scape_transport_module = {
    scape::plugin::kTransportAbi, "ucx", &scape::plugin::make, &scape::plugin::devices};
