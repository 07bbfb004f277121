// The libfabric transport: one reliable datagram endpoint per transport, tagged messages.
//
// The only code that links libfabric. The user's FI_* settings hold; nothing here writes the
// environment.
#include <netinet/in.h>
#include <poll.h>
#include <rdma/fabric.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_errno.h>
#include <rdma/fi_tagged.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <fstream>
#include <iterator>
#include <map>
#include <mutex>
#include <string>

#include "base/log.h"
#include "base/settings.h"
#include "base/signal_handlers.h"
#include "plugin/transport/descriptors.h"
#include "plugin/transport/device_filter.h"
#include "plugin/transport/peer_address.h"
#include "plugin/transport/socket.h"
#include "plugin/transport/traffic.h"
#include "plugin/transport/transport.h"

namespace scape::plugin {
namespace {

// The oldest libfabric that is spoken to; newer ones serve it as well.
constexpr uint32_t kApi = FI_VERSION(1, 14);
constexpr int kNameAttempts = 16;

Status ofi_error(const char* what, ssize_t status) {
  return error(SCAPE_ERR_SYSTEM, "ofi: %s failed: %s; FI_LOG_LEVEL=warn tells more", what,
               fi_strerror(static_cast<int>(std::abs(status))));
}

struct InfoDeleter {
  void operator()(fi_info* info) const { fi_freeinfo(info); }
};
using InfoPtr = std::unique_ptr<fi_info, InfoDeleter>;

// What this transport asks a provider for, and can live with.
InfoPtr make_hints() {
  InfoPtr hints(fi_allocinfo());
  if (hints == nullptr) return nullptr;
  hints->caps = FI_TAGGED;
  hints->mode = FI_CONTEXT | FI_CONTEXT2;  // each request has the room
  hints->ep_attr->type = FI_EP_RDM;
  // Messages of one tag from one peer arrive in order.
  hints->tx_attr->msg_order = FI_ORDER_SAS;
  hints->rx_attr->msg_order = FI_ORDER_SAS;
  hints->domain_attr->threading = FI_THREAD_DOMAIN;  // a transport has one owner at a time
  hints->domain_attr->resource_mgmt = FI_RM_ENABLED;
  hints->domain_attr->mr_mode = FI_MR_LOCAL | FI_MR_ALLOCATED | FI_MR_PROV_KEY | FI_MR_VIRT_ADDR;
  return hints;
}

std::string_view provider_of(const fi_info& info) {
  const char* name = info.fabric_attr->prov_name;
  return name != nullptr ? name : "";
}

// Lower is better; the providers' own order prefers the host's shared memory, which does not reach
// other hosts, and lists some that are for tests. What is not listed is taken where FI_PROVIDER
// names it.
int rank_of(std::string_view provider) {
  static constexpr std::string_view kOrder[] = {"cxi",           "opx",         "psm2", "efa",
                                                "verbs;ofi_rxm", "tcp;ofi_rxm", "tcp"};
  const auto* found = std::find(std::begin(kOrder), std::end(kOrder), provider);
  return static_cast<int>(found - std::begin(kOrder));
}
constexpr int kUnlisted = 7;

bool has_ip_address(const fi_info& info) {
  return info.addr_format == FI_SOCKADDR_IN || info.addr_format == FI_SOCKADDR_IN6 ||
         info.addr_format == FI_SOCKADDR;
}

bool fits(const fi_info& info) {
  constexpr size_t kLargestMessage = size_t{1} << 30;
  // The format's highest bit is the highest of a tag that is carried; all 64 are needed.
  const uint64_t format = info.ep_attr->mem_tag_format;
  return info.ep_attr->max_msg_size >= kLargestMessage && (format == 0 || (format >> 63) != 0);
}

// The provider, and for those with IP addresses the interface, that transports are made on.
class Choice {
 public:
  // `device`: the domain; the provider's own order decides when it is empty.
  static Status get(const std::string& device, std::shared_ptr<const Choice>* out) {
    static std::mutex* const mutex = new std::mutex;  // never destroyed: used until the last moment
    static auto* const choices = new std::map<std::string, std::shared_ptr<const Choice>>;
    std::lock_guard<std::mutex> lock(*mutex);
    std::shared_ptr<const Choice>& kept = (*choices)[device];
    if (kept == nullptr) {
      auto made = std::make_shared<Choice>();
      SCAPE_RETURN_IF_ERROR(made->find(device));
      kept = std::move(made);
    }
    *out = kept;
    return Status::Ok();
  }

  // The devices of the provider that would be chosen.
  static Status devices(std::vector<TransportDevice>* out) {
    const KeepSignalHandlers handlers;
    out->clear();
    InfoPtr all;
    const fi_info* best = nullptr;
    SCAPE_RETURN_IF_ERROR(list(&all, &best));
    return devices_of(all.get(), provider_of(*best), out);
  }

  fi_info& info() const { return *info_; }
  std::string_view provider() const { return provider_of(*info_); }

 private:
  // Whether the device is an interface of the system: RDMA devices have IP addresses, too.
  static bool is_interface(const fi_info& info) {
    return has_ip_address(info) && rank_of(provider_of(info)) >= rank_of("tcp;ofi_rxm");
  }

  static bool admitted(const DeviceFilter& filter, const fi_info& info) {
    return provider_of(info) == "shm" || filter.admits(info.domain_attr->name, is_interface(info));
  }

  static Status devices_of(const fi_info* all, std::string_view provider,
                           std::vector<TransportDevice>* out) {
    const DeviceFilter filter = DeviceFilter::of("ofi");
    std::vector<TransportDevice> loopback;
    for (const fi_info* info = all; info != nullptr; info = info->next) {
      if (!fits(*info) || provider_of(*info) != provider || !admitted(filter, *info)) continue;
      const std::string name = info->domain_attr->name;
      const bool is_loopback = is_interface(*info) && name == "lo" && !filter.names(name, true);
      auto& devices = is_loopback ? loopback : *out;
      if (std::none_of(devices.begin(), devices.end(),
                       [&](const TransportDevice& known) { return known.name == name; })) {
        const bool fabric = rank_of(provider) < rank_of("tcp;ofi_rxm");
        devices.push_back(
            {name, std::string(provider), provider != "shm", fabric, info->ep_attr->max_msg_size});
      }
    }
    if (out->empty()) *out = loopback;
    return Status::Ok();
  }

  // What there is, and the first admitted entry of the provider to take.
  static Status list(InfoPtr* out, const fi_info** out_best) {
    const bool named = std::getenv("FI_PROVIDER") != nullptr;
    const DeviceFilter filter = DeviceFilter::of("ofi");
    const InfoPtr hints = make_hints();
    if (hints == nullptr) return ofi_error("fi_allocinfo", FI_ENOMEM);
    fi_info* found = nullptr;
    const int status = fi_getinfo(kApi, nullptr, nullptr, 0, hints.get(), &found);
    InfoPtr all(status == 0 ? found : nullptr);
    const fi_info* best = nullptr;
    std::vector<std::string> existing;
    for (const fi_info* info = all.get(); info != nullptr; info = info->next) {
      if (!fits(*info)) continue;
      const int rank = rank_of(provider_of(*info));
      if (!named && rank == kUnlisted) continue;
      const std::string name = info->domain_attr->name;
      if (std::find(existing.begin(), existing.end(), name) == existing.end()) {
        existing.push_back(name);
      }
      if (!admitted(filter, *info)) continue;
      if (best == nullptr || (!named && rank < rank_of(provider_of(*best)))) best = info;
    }
    if (best == nullptr && !existing.empty()) return filter.leaves_none("ofi", existing);
    if (best == nullptr) {
      return error(
          SCAPE_ERR_SYSTEM,
          "ofi: libfabric has no provider here for tagged messages between hosts (%s%s%s); "
          "see fi_info -t FI_EP_RDM -c FI_TAGGED%s",
          status != 0 ? fi_strerror(-status) : "none of those found does",
          named ? ", FI_PROVIDER=" : "", named ? std::getenv("FI_PROVIDER") : "",
          named ? ", or unset FI_PROVIDER" : "");
    }
    *out = std::move(all);
    *out_best = best;
    return Status::Ok();
  }

  Status find(const std::string& device) {
    InfoPtr all;
    const fi_info* best = nullptr;
    SCAPE_RETURN_IF_ERROR(list(&all, &best));
    SCAPE_RETURN_IF_ERROR(has_ip_address(*best) ? find_address(all.get(), *best, device)
                                                : find_domain(best, device));
    // Of a device that the net plugin has chosen, its own line tells.
    if (device.empty()) {
      SCAPE_INFO("ofi: network device: %s (%s); %s", info_->domain_attr->name,
                 info_->fabric_attr->prov_name, DeviceFilter::of("ofi").text().c_str());
    }
    return Status::Ok();
  }

  Status find_domain(const fi_info* best, const std::string& device) {
    const std::string_view provider = provider_of(*best);
    while (best != nullptr && !device.empty() &&
           !(fits(*best) && provider_of(*best) == provider && device == best->domain_attr->name)) {
      best = best->next;
    }
    if (best == nullptr) {
      return error(SCAPE_ERR_ARGUMENT, "ofi: the provider %s has no device %s (any more)",
                   std::string(provider).c_str(), device.c_str());
    }
    info_.reset(fi_dupinfo(best));
    return info_ != nullptr ? Status::Ok() : ofi_error("fi_dupinfo", FI_ENOMEM);
  }

  // The same provider at an address of the named device, or else of one that is admitted: the first
  // that the bootstrap would choose.
  Status find_address(const fi_info* all, const fi_info& best, std::string device) {
    // The addresses of an RDMA device are its network interface's, which has another name.
    std::string interfaces = settings().socket_ifname;
    if (is_interface(best)) {
      std::vector<TransportDevice> admitted;
      SCAPE_RETURN_IF_ERROR(devices_of(all, provider_of(best), &admitted));
      interfaces = "=" + device;
      if (device.empty()) {
        for (const TransportDevice& one : admitted) interfaces += one.name + ",";
      }
    } else if (device.empty() && DeviceFilter::of("ofi").restricts()) {
      device = best.domain_attr->name;
    }
    std::vector<Address> addresses;
    SCAPE_RETURN_IF_ERROR(choose_addresses(interfaces, settings().socket_family, &addresses));
    const InfoPtr hints = make_hints();
    if (hints == nullptr) return ofi_error("fi_allocinfo", FI_ENOMEM);
    hints->fabric_attr->prov_name = ::strdup(best.fabric_attr->prov_name);
    if (!device.empty()) hints->domain_attr->name = ::strdup(device.c_str());
    std::string tried;
    for (const Address& address : addresses) {
      const std::string text = address.text();
      fi_info* found = nullptr;
      if (fi_getinfo(kApi, text.c_str(), nullptr, FI_SOURCE, hints.get(), &found) == 0) {
        const InfoPtr here(found);
        info_.reset(fi_dupinfo(found));
        return info_ != nullptr ? Status::Ok() : ofi_error("fi_dupinfo", FI_ENOMEM);
      }
      tried += (tried.empty() ? "" : ", ") + text;
    }
    return error(SCAPE_ERR_SYSTEM,
                 "ofi: the provider %s has no device at %s; see fi_info -p '%s', and SCAPE_NET_IF "
                 "or NCCL_SOCKET_IFNAME, which choose the interface",
                 best.fabric_attr->prov_name, tried.c_str(), best.fabric_attr->prov_name);
  }

  InfoPtr info_;
};

// What ranks must have in common to reach each other through a provider that stays on its host.
std::string this_host() {
  char name[256] = "";
  ::gethostname(name, sizeof name - 1);
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  std::string boot;
  file >> boot;
  return name + ("/" + boot);
}

// Of what listens.
Status endpoint_error(const char* what, int status) {
  if (status != -FI_EADDRINUSE && status != -FI_EADDRNOTAVAIL) return ofi_error(what, status);
  return error(
      SCAPE_ERR_SYSTEM,
      "ofi: %s failed: %s; where FI_TCP_PORT_LOW_RANGE and FI_TCP_PORT_HIGH_RANGE are set, "
      "widen them: each communicator of each process takes one port, or two with sparse "
      "buffers",
      what, fi_strerror(-status));
}

template <typename Object>
void close_object(Object*& object) {
  if (object != nullptr) fi_close(&object->fid);
  object = nullptr;
}

class OfiTransport final : public Transport {
 public:
  ~OfiTransport() override {
    close_object(endpoint_);
    for (Request& request : requests_) close_object(request.region);
    close_object(queue_);
    close_object(vector_);
    close_object(domain_);
    close_object(fabric_);
  }

  // `taken` tells whether it failed since the port or name that it chose has an owner.
  Status init(const TransportOptions& options, bool* taken) {
    SCAPE_RETURN_IF_ERROR(check_descriptors("ofi", 16));
    SCAPE_RETURN_IF_ERROR(Choice::get(options.device, &choice_));
    fi_info& info = choice_->info();
    if (const int status = fi_fabric(info.fabric_attr, &fabric_, nullptr); status != 0) {
      return ofi_error("fi_fabric", status);
    }
    if (const int status = fi_domain(fabric_, &info, &domain_, nullptr); status != 0) {
      return ofi_error("fi_domain", status);
    }
    fi_av_attr vector_attributes{};
    vector_attributes.type = FI_AV_TABLE;
    vector_attributes.count = static_cast<size_t>(std::max(options.ranks, 1));
    if (const int status = fi_av_open(domain_, &vector_attributes, &vector_, nullptr);
        status != 0) {
      return ofi_error("fi_av_open", status);
    }
    fi_cq_attr queue_attributes{};
    queue_attributes.format = FI_CQ_FORMAT_TAGGED;
    queue_attributes.wait_obj = options.wakeup ? FI_WAIT_FD : FI_WAIT_NONE;
    int opened = fi_cq_open(domain_, &queue_attributes, &queue_, nullptr);
    if (opened == -FI_ENOSYS && options.wakeup) {  // shm of libfabric 1.17 cannot wake anybody
      queue_attributes.wait_obj = FI_WAIT_NONE;
      opened = fi_cq_open(domain_, &queue_attributes, &queue_, nullptr);
    }
    if (opened != 0) return ofi_error("fi_cq_open", opened);
    if (queue_attributes.wait_obj == FI_WAIT_FD) {
      if (const int status = fi_control(&queue_->fid, FI_GETWAIT, &event_fd_); status != 0) {
        return ofi_error("fi_control(FI_GETWAIT)", status);
      }
    }
    if (const int status = fi_endpoint(domain_, &info, &endpoint_, nullptr); status != 0) {
      return endpoint_error("fi_endpoint", status);
    }
    if (const int status = fi_ep_bind(endpoint_, &vector_->fid, 0); status != 0) {
      return ofi_error("fi_ep_bind", status);
    }
    if (const int status = fi_ep_bind(endpoint_, &queue_->fid, FI_TRANSMIT | FI_RECV);
        status != 0) {
      return ofi_error("fi_ep_bind", status);
    }
    if (const int status = fi_enable(endpoint_); status != 0) {
      *taken = status == -FI_EADDRINUSE || status == -FI_EBUSY;
      return endpoint_error("fi_enable", status);
    }
    registers_ = (info.domain_attr->mr_mode & FI_MR_LOCAL) != 0;
    chooses_keys_ = (info.domain_attr->mr_mode & FI_MR_PROV_KEY) == 0;
    injects_ = !options.tracks_all;
    inject_bytes_ = info.tx_attr->inject_size;
    sends_.room = info.tx_attr->size;
    receives_.room = info.rx_attr->size;
    return Status::Ok();
  }

  std::string_view name() const override { return "ofi"; }

  Status address(std::vector<std::byte>* out) override {
    PeerAddress mine{std::string(choice_->provider()), this_host(), {}};
    SCAPE_RETURN_IF_ERROR(own_address(&mine.bytes));
    *out = seal_address(mine);
    return Status::Ok();
  }

  Status add_peer(const std::vector<std::byte>& address, const std::string& who,
                  int* peer) override {
    PeerAddress theirs;
    SCAPE_RETURN_IF_ERROR(unseal_address(address, who, &theirs));
    if (theirs.provider != choice_->provider()) {
      return error(SCAPE_ERR_MISMATCH,
                   "ofi: %s uses the provider %s and this rank %s; set FI_PROVIDER and "
                   "SCAPE_NET_IF to the same everywhere",
                   who.c_str(), theirs.provider.c_str(), std::string(choice_->provider()).c_str());
    }
    const std::string host = this_host();
    if (theirs.provider == "shm" && theirs.host != host) {
      return error(SCAPE_ERR_USAGE,
                   "ofi: %s is on the host %s and this rank on %s, and the provider shm does not "
                   "leave its host; set FI_PROVIDER to another one",
                   who.c_str(), theirs.host.c_str(), host.c_str());
    }
    SCAPE_RETURN_IF_ERROR(check_format(theirs.bytes, who));
    SCAPE_RETURN_IF_ERROR(set_scope(&theirs.bytes));
    fi_addr_t inserted = FI_ADDR_UNSPEC;
    if (fi_av_insert(vector_, theirs.bytes.data(), 1, &inserted, 0, nullptr) != 1) {
      return error(SCAPE_ERR_SYSTEM, "ofi: the address of %s is refused", who.c_str());
    }
    *peer = static_cast<int>(peers_.size());
    peers_.push_back({inserted, {}});
    return Status::Ok();
  }

  Status register_memory(void* data, size_t bytes, void** region) override {
    *region = nullptr;
    if (!registers_ || bytes == 0) return Status::Ok();
    fid_mr* made = nullptr;
    if (const int status = fi_mr_reg(domain_, data, bytes, FI_SEND | FI_RECV, 0,
                                     chooses_keys_ ? next_key_++ : 0, 0, &made, nullptr);
        status != 0) {
      return ofi_error("fi_mr_reg", status);
    }
    *region = made;
    return Status::Ok();
  }

  void deregister_memory(void* region) override {
    auto* made = static_cast<fid_mr*>(region);
    close_object(made);
  }

  void send(int peer, uint64_t tag, const void* data, size_t bytes, Operation* operation) override {
    begin(operation);
    sent_.add(bytes);
    Peer& to = peers_[static_cast<size_t>(peer)];
    if (injects_ && bytes <= inject_bytes_ && to.waiting.empty()) {
      const ssize_t status = fi_tinject(endpoint_, data, bytes, to.address, tag);
      if (status == 0) return end(operation, Outcome::kDone);
      if (status != -FI_EAGAIN) return end(operation, Outcome::kFailed);
    }
    post_in_turn(take_request(operation, true, to.address, tag, const_cast<void*>(data), bytes),
                 &to.waiting);
  }

  void recv(int peer, uint64_t tag, void* data, size_t bytes, Operation* operation) override {
    begin(operation);
    post_in_turn(
        take_request(operation, false, peers_[static_cast<size_t>(peer)].address, tag, data, bytes),
        &waiting_receives_);
  }

  Operation* progress(bool* moved) override {
    *moved = drive();
    Operation* ended = ended_;
    ended_ = nullptr;
    return ended;
  }

  void cancel(Operation* operation) override {
    if (operation->outcome != Outcome::kPending) return;
    auto* request = static_cast<Request*>(operation->handle);
    request->cancelled = true;
    if (request->posted) {
      fi_cancel(&endpoint_->fid, request);
      return;
    }
    if (!drop(request, &waiting_receives_)) {
      for (Peer& peer : peers_) {
        if (drop(request, &peer.waiting)) break;
      }
    }
    finish(request, Outcome::kCancelled, 0);
  }

  void abandon() override {}

  void flush(int timeout_ms) override {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::milliseconds(timeout_ms);
    while (sends_.begun > 0 && std::chrono::steady_clock::now() < deadline) {
      if (!drive()) ::poll(nullptr, 0, 0);
    }
  }

  int event_fd() const override { return event_fd_; }
  bool arm() override {
    if (waiting_ > 0) return false;
    fid* object = &queue_->fid;
    return fi_trywait(fabric_, &object, 1) == FI_SUCCESS;
  }
  size_t room() const override { return std::min(sends_.room, receives_.room); }
  TransportCounters counters() const override {
    return {sent_.bytes, received_.bytes, sent_.messages, received_.messages,
            sent_.posted_again + received_.posted_again};
  }

 private:
  // One message that the provider has, or that waits to be taken by it. The provider's part comes
  // first: completions name the request by its address.
  struct Request {
    fi_context2 context{};
    Operation* operation = nullptr;
    bool sends = false, posted = false, cancelled = false;
    fi_addr_t peer = FI_ADDR_UNSPEC;
    uint64_t tag = 0;
    void* data = nullptr;
    size_t bytes = 0;
    fid_mr* region = nullptr;  // of this message alone, where the provider wants one
    void* descriptor = nullptr;
    Request* next = nullptr;  // of those that wait
  };
  // Requests in their order, linked: a message that waits allocates nothing.
  struct Waiting {
    Request* first = nullptr;
    Request* last = nullptr;

    bool empty() const { return first == nullptr; }
    void push_back(Request* request) {
      request->next = nullptr;
      (first == nullptr ? first : last->next) = request;
      last = request;
    }
    void pop_front() {
      first = first->next;
      if (first == nullptr) last = nullptr;
    }
    bool remove(const Request* request) {
      Request* before = nullptr;
      for (Request* at = first; at != nullptr; before = at, at = at->next) {
        if (at != request) continue;
        (before == nullptr ? first : before->next) = at->next;
        if (last == at) last = before;
        return true;
      }
      return false;
    }
  };
  // Of one direction. Providers differ in what they do when they are asked for more than there is
  // room for, so they are not.
  struct Flight {
    size_t room = 0;    // messages that the provider can have at once
    size_t posted = 0;  // that it has
    size_t begun = 0;   // that are under way, posted or waiting
  };
  struct Peer {
    fi_addr_t address;
    Waiting waiting;  // sends, in order
  };

  Status own_address(std::vector<std::byte>* out) {
    size_t length = 64;
    out->resize(length);
    int status = fi_getname(&endpoint_->fid, out->data(), &length);
    out->resize(length);
    if (status == -FI_ETOOSMALL) status = fi_getname(&endpoint_->fid, out->data(), &length);
    return status == 0 ? Status::Ok() : ofi_error("fi_getname", status);
  }

  // libfabric is not told how long an address is: texts end with a zero, the others are all as long
  // as this rank's.
  Status check_format(const std::vector<std::byte>& theirs, const std::string& who) {
    const uint32_t format = choice_->info().addr_format;
    if (format == FI_ADDR_STR) {
      if (theirs.back() == std::byte{0}) return Status::Ok();
      return error(SCAPE_ERR_MISMATCH, "ofi: the address of %s is a text without an end",
                   who.c_str());
    }
    std::vector<std::byte> own;
    SCAPE_RETURN_IF_ERROR(own_address(&own));
    if (theirs.size() == own.size()) return Status::Ok();
    return error(SCAPE_ERR_MISMATCH,
                 "ofi: the address of %s has %zu bytes and this rank's %zu; choose networks of one "
                 "family with NCCL_SOCKET_IFNAME and NCCL_SOCKET_FAMILY",
                 who.c_str(), theirs.size(), own.size());
  }

  // The scope of a link-local address is a number of the peer's interface; here it is behind the
  // interface that this rank uses.
  Status set_scope(std::vector<std::byte>* theirs) {
    sockaddr_in6 peer{}, mine{};
    if (choice_->info().addr_format == FI_ADDR_STR || theirs->size() != sizeof peer)
      return Status::Ok();
    std::memcpy(&peer, theirs->data(), sizeof peer);
    if (peer.sin6_family != AF_INET6 || !IN6_IS_ADDR_LINKLOCAL(&peer.sin6_addr))
      return Status::Ok();
    std::vector<std::byte> own;
    SCAPE_RETURN_IF_ERROR(own_address(&own));
    std::memcpy(&mine, own.data(), std::min(own.size(), sizeof mine));
    peer.sin6_scope_id = mine.sin6_scope_id;
    std::memcpy(theirs->data(), &peer, sizeof peer);
    return Status::Ok();
  }

  void begin(Operation* operation) {
    operation->outcome = Outcome::kPending;
    operation->received = 0;
    operation->transport = this;
    operation->handle = nullptr;
  }

  void end(Operation* operation, Outcome outcome) {
    operation->outcome = outcome;
    operation->handle = nullptr;
    operation->next = ended_;
    ended_ = operation;
  }

  Request* take_request(Operation* operation, bool sends, fi_addr_t peer, uint64_t tag, void* data,
                        size_t bytes) {
    if (free_.empty()) free_.push_back(&requests_.emplace_back());
    Request* const request = free_.back();
    free_.pop_back();
    *request = {};
    request->operation = operation;
    request->sends = sends;
    request->peer = peer;
    request->tag = tag;
    request->data = data;
    request->bytes = bytes;
    if (operation->region != nullptr) {
      request->descriptor = fi_mr_desc(static_cast<fid_mr*>(operation->region));
    }
    operation->handle = request;
    ++flight_of(*request).begun;
    return request;
  }

  void finish(Request* request, Outcome outcome, size_t received) {
    --flight_of(*request).begun;
    if (request->posted) --flight_of(*request).posted;
    close_object(request->region);
    request->operation->received = received;
    if (!request->sends && outcome == Outcome::kDone) received_.add(received);
    end(request->operation, outcome);
    free_.push_back(request);
  }

  // Hands the request to the provider, behind those that wait for it already.
  void post_in_turn(Request* request, Waiting* waiting) {
    if (waiting->empty() && post(request)) return;
    (request->sends ? sent_ : received_).add_posted_again();
    waiting->push_back(request);
    ++waiting_;
  }

  bool post_waiting(Waiting* waiting) {
    bool moved = false;
    while (!waiting->empty() && post(waiting->first)) {
      waiting->pop_front();
      --waiting_;
      moved = true;
    }
    return moved;
  }

  bool drop(Request* request, Waiting* waiting) {
    if (!waiting->remove(request)) return false;
    --waiting_;
    return true;
  }

  Flight& flight_of(const Request& request) { return request.sends ? sends_ : receives_; }

  // False where the provider has no room now. A request that it refuses is over.
  bool post(Request* request) {
    Flight& flight = flight_of(*request);
    if (flight.posted >= flight.room) return false;
    if (registers_ && request->operation->region == nullptr && request->region == nullptr) {
      const int status =
          fi_mr_reg(domain_, request->data, request->bytes, request->sends ? FI_SEND : FI_RECV, 0,
                    chooses_keys_ ? next_key_++ : 0, 0, &request->region, nullptr);
      if (status != 0) {
        request->region = nullptr;
        finish(request, Outcome::kFailed, 0);
        return true;
      }
      request->descriptor = fi_mr_desc(request->region);
    }
    const ssize_t status =
        request->sends ? fi_tsend(endpoint_, request->data, request->bytes, request->descriptor,
                                  request->peer, request->tag, request)
                       : fi_trecv(endpoint_, request->data, request->bytes, request->descriptor,
                                  FI_ADDR_UNSPEC, request->tag, 0, request);
    if (status == -FI_EAGAIN) return false;
    request->posted = true;
    ++flight.posted;
    if (status != 0) finish(request, Outcome::kFailed, 0);
    return true;
  }

  bool drive() {
    bool moved = false;
    fi_cq_tagged_entry entries[16];
    while (true) {
      const ssize_t count = fi_cq_read(queue_, entries, std::size(entries));
      if (count == -FI_EAVAIL) {
        if (!take_error()) break;
        moved = true;
        continue;
      }
      if (count <= 0) break;
      moved = true;
      for (ssize_t i = 0; i < count; ++i) {
        finish(static_cast<Request*>(entries[i].op_context), Outcome::kDone, entries[i].len);
      }
      if (count < static_cast<ssize_t>(std::size(entries))) break;
    }
    if (waiting_ > 0) {
      moved |= post_waiting(&waiting_receives_);
      for (Peer& peer : peers_) moved |= post_waiting(&peer.waiting);
    }
    return moved;
  }

  bool take_error() {
    fi_cq_err_entry entry{};
    if (fi_cq_readerr(queue_, &entry, 0) != 1) return false;
    if (entry.op_context == nullptr) return true;  // of a message that was injected
    SCAPE_DEBUG("ofi: a message failed: %s", fi_strerror(entry.err));
    auto* request = static_cast<Request*>(entry.op_context);
    const int reason = std::abs(entry.err);  // shm of libfabric 1.17 gives it negated
    // A lost connection "cancels" messages that nobody asked to be cancelled.
    const bool asked = reason == FI_ECANCELED && request->cancelled;
    finish(request,
           reason == FI_ETRUNC ? Outcome::kTruncated
           : asked             ? Outcome::kCancelled
                               : Outcome::kFailed,
           0);
    return true;
  }

  std::shared_ptr<const Choice> choice_;
  fid_fabric* fabric_ = nullptr;
  fid_domain* domain_ = nullptr;
  fid_av* vector_ = nullptr;
  fid_cq* queue_ = nullptr;
  fid_ep* endpoint_ = nullptr;
  int event_fd_ = -1;
  bool registers_ = false, chooses_keys_ = false;
  uint64_t next_key_ = 1;
  bool injects_ = true;
  size_t inject_bytes_ = 0;
  std::vector<Peer> peers_;
  Waiting waiting_receives_;
  size_t waiting_ = 0;  // requests in all of them
  Flight sends_, receives_;
  std::deque<Request> requests_;  // addresses stay
  std::vector<Request*> free_;
  Operation* ended_ = nullptr;
  Traffic sent_, received_;
};

Status make(const TransportOptions& options, std::unique_ptr<Transport>* out) {
  // In a range of ports (FI_TCP_PORT_LOW_RANGE) libfabric tries one at random, and fails when
  // another process takes it at the same time. The provider shm names its memory after the process,
  // and fails when it finds what a killed process of the same number left (it removes that then).
  // An endpoint that failed so cannot be opened again (1.17).
  const KeepSignalHandlers handlers;  // psm2, psm3 and shm install theirs
  Status status;
  bool taken = true;
  for (int attempt = 0; taken && attempt < kNameAttempts; ++attempt) {
    taken = false;
    auto transport = std::make_unique<OfiTransport>();
    status = transport->init(options, &taken);
    if (status.ok()) *out = std::move(transport);
  }
  return status;
}

}  // namespace
}  // namespace scape::plugin

extern "C" __attribute__((visibility("default")))
const scape::plugin::TransportModule scape_transport_module = {
    scape::plugin::kTransportAbi, "ofi", &scape::plugin::make, &scape::plugin::Choice::devices};
