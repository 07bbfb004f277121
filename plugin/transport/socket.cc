#include "plugin/transport/socket.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <pthread.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <mutex>
#include <set>

#include "base/settings.h"

namespace scape::plugin {
namespace {

// The descriptors that a forked child has to close. The lock is held over fork(), so that the child
// finds the set whole.
struct OpenSockets {
  std::mutex mutex;
  std::set<int> fds;
  std::atomic<uint64_t> forks{0};

  static OpenSockets& instance() {
    static OpenSockets* const sockets = [] {
      auto* made = new OpenSockets;  // never destroyed: fork() may come at the last moment
      pthread_atfork([] { instance().mutex.lock(); }, [] { instance().mutex.unlock(); },
                     [] {
                       for (const int fd : instance().fds) ::close(fd);
                       instance().fds.clear();
                       instance().forks.fetch_add(1);
                       instance().mutex.unlock();
                     });
      return made;
    }();
    return *sockets;
  }
};

union SocketAddress {
  sockaddr any;
  sockaddr_in v4;
  sockaddr_in6 v6;
};

socklen_t to_system(const Address& address, uint16_t port, SocketAddress* out) {
  std::memset(out, 0, sizeof *out);
  if (address.v6) {
    out->v6.sin6_family = AF_INET6;
    out->v6.sin6_port = htons(port);
    out->v6.sin6_scope_id = address.scope;
    std::memcpy(&out->v6.sin6_addr, address.bytes, 16);
    return sizeof out->v6;
  }
  out->v4.sin_family = AF_INET;
  out->v4.sin_port = htons(port);
  std::memcpy(&out->v4.sin_addr, address.bytes, 4);
  return sizeof out->v4;
}

// Also of an IPv4 address in its IPv6 form.
Address from_system(const SocketAddress& in) {
  Address address;
  if (in.any.sa_family == AF_INET6 && IN6_IS_ADDR_V4MAPPED(&in.v6.sin6_addr)) {
    std::memcpy(address.bytes, in.v6.sin6_addr.s6_addr + 12, 4);
  } else if (in.any.sa_family == AF_INET6) {
    address.v6 = true;
    std::memcpy(address.bytes, &in.v6.sin6_addr, 16);
    if (IN6_IS_ADDR_LINKLOCAL(&in.v6.sin6_addr)) address.scope = in.v6.sin6_scope_id;
  } else {
    std::memcpy(address.bytes, &in.v4.sin_addr, 4);
  }
  return address;
}

// Port 0: one that the system chooses. 0, or the system's reason.
int listen_at(const Address& bound, bool both_families, uint16_t wanted, Socket* listener,
              uint16_t* port) {
  Socket socket(
      ::socket(bound.v6 ? AF_INET6 : AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!socket.valid()) return errno;
  SocketAddress system{};
  socklen_t length = to_system(bound, wanted, &system);
  const int on = 1, off = 0;
  if (both_families) ::setsockopt(socket.fd(), IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof off);
  // Connections of the last user of a given port may linger there; they are not in the way.
  if (wanted != 0) ::setsockopt(socket.fd(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  if (::bind(socket.fd(), &system.any, length) != 0 || ::listen(socket.fd(), SOMAXCONN) != 0 ||
      ::getsockname(socket.fd(), &system.any, &length) != 0) {
    return errno;
  }
  *port = ntohs(bound.v6 ? system.v6.sin6_port : system.v4.sin_port);
  *listener = std::move(socket);
  return 0;
}

bool is_link_local(const Address& address) {
  return address.v6 && address.bytes[0] == 0xfe && (address.bytes[1] & 0xc0) == 0x80;
}

void configure_connection(int fd) {
  const int on = 1, idle = 5, interval = 2, probes = 3;
  ::setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  // A host that vanishes sends no goodbye: probe for it.
  ::setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
  ::setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &idle, sizeof idle);
  ::setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &interval, sizeof interval);
  ::setsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &probes, sizeof probes);
}

// Waits until the descriptor is ready; false at the deadline.
bool wait_ready(int fd, short events, Deadline deadline) {
  for (;;) {
    pollfd entry{fd, events, 0};
    const int ready = ::poll(&entry, 1, milliseconds_until(deadline));
    if (ready > 0) return true;
    if (ready == 0 && Clock::now() >= deadline) return false;
    if (ready < 0 && errno != EINTR) return true;  // the transfer will say what is wrong
  }
}

}  // namespace

int milliseconds_until(Deadline deadline) {
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now()).count();
  return static_cast<int>(std::clamp<long long>(left, 0, 1 << 30));
}

Deadline seconds_from_now(double seconds) {
  return Clock::now() +
         std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
}

uint64_t fork_count() { return OpenSockets::instance().forks.load(std::memory_order_relaxed); }

Socket::Socket(int fd) : fd_(fd) {
  if (fd_ < 0) return;
  OpenSockets& open = OpenSockets::instance();
  std::lock_guard<std::mutex> lock(open.mutex);
  open.fds.insert(fd_);
}

Socket& Socket::operator=(Socket&& other) noexcept {
  std::swap(fd_, other.fd_);
  return *this;
}

void Socket::close() {
  if (fd_ < 0) return;
  OpenSockets& open = OpenSockets::instance();
  std::lock_guard<std::mutex> lock(open.mutex);
  // In a forked child the descriptor is closed already, and the number may be another file's.
  if (open.fds.erase(fd_) != 0) ::close(fd_);
  fd_ = -1;
}

std::string Address::text() const {
  char buffer[INET6_ADDRSTRLEN] = "?";
  ::inet_ntop(v6 ? AF_INET6 : AF_INET, bytes, buffer, sizeof buffer);
  return scope != 0 ? format("%s%%%u", buffer, scope) : std::string(buffer);
}

bool Address::operator==(const Address& other) const {
  return v6 == other.v6 && std::memcmp(bytes, other.bytes, v6 ? 16 : 4) == 0;
}

std::string Endpoint::text() const {
  std::string text;
  for (const Address& address : addresses) text += (text.empty() ? "" : ", ") + address.text();
  return text + format(" port %u", port);
}

InterfaceFilter::InterfaceFilter(const std::string& text) {
  size_t begin = 0;
  if (begin < text.size() && text[begin] == '^') exclude = true, ++begin;
  if (begin < text.size() && text[begin] == '=') exact = true, ++begin;
  while (begin < text.size()) {
    const size_t end = std::min(text.find(',', begin), text.size());
    if (end > begin) names.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
}

bool InterfaceFilter::lists(const std::string& interface_name) const {
  return std::any_of(names.begin(), names.end(), [&](const std::string& name) {
    return exact ? interface_name == name : interface_name.starts_with(name);
  });
}

bool InterfaceFilter::admits(const std::string& interface_name) const {
  return names.empty() || lists(interface_name) != exclude;
}

Status choose_addresses(const std::string& interfaces, int family, std::vector<Address>* out) {
  const InterfaceFilter filter(interfaces);
  ifaddrs* list = nullptr;
  if (::getifaddrs(&list) != 0) {
    return error(SCAPE_ERR_SYSTEM, "bootstrap: the network interfaces cannot be listed: %s",
                 std::strerror(errno));
  }
  std::vector<Address> global, link_local, loopback;
  std::string seen;
  for (const ifaddrs* entry = list; entry != nullptr; entry = entry->ifa_next) {
    if (entry->ifa_addr == nullptr || (entry->ifa_flags & IFF_UP) == 0) continue;
    const int kind = entry->ifa_addr->sa_family;
    if (kind != AF_INET && kind != AF_INET6) continue;
    const std::string name = entry->ifa_name;
    if ((", " + seen + ",").find(", " + name + ",") == std::string::npos)
      seen += (seen.empty() ? "" : ", ") + name;
    if ((family == 1 && kind != AF_INET) || (family == 2 && kind != AF_INET6) ||
        !filter.admits(name))
      continue;
    SocketAddress system{};
    std::memcpy(&system, entry->ifa_addr, kind == AF_INET ? sizeof system.v4 : sizeof system.v6);
    const Address address = from_system(system);
    if ((entry->ifa_flags & IFF_LOOPBACK) != 0) {
      loopback.push_back(address);
    } else {
      (is_link_local(address) ? link_local : global).push_back(address);
    }
  }
  ::freeifaddrs(list);
  // IPv4 first: it is what more networks route. A link-local address only where there is no better.
  std::stable_partition(global.begin(), global.end(),
                        [](const Address& address) { return !address.v6; });
  *out = !global.empty() ? global : !link_local.empty() ? link_local : loopback;
  // Loopback that is named beside others counts too.
  if (!filter.exclude && !filter.names.empty()) {
    for (const Address& address : loopback) {
      if (std::find(out->begin(), out->end(), address) == out->end()) out->push_back(address);
    }
  }
  if (out->size() > kMaxAddresses) out->resize(kMaxAddresses);
  if (!out->empty()) return Status::Ok();
  static constexpr const char* kFamilies[] = {"any", "AF_INET", "AF_INET6"};
  return error(SCAPE_ERR_ARGUMENT,
               "bootstrap: no interface matches NCCL_SOCKET_IFNAME=\"%s\" with "
               "NCCL_SOCKET_FAMILY=%s; this host has "
               "%s",
               interfaces.c_str(), kFamilies[family],
               seen.empty() ? "none that is up" : seen.c_str());
}

Status listen_on(const std::vector<Address>& addresses, Socket* listener, uint16_t* port) {
  const bool any_v6 = std::any_of(addresses.begin(), addresses.end(),
                                  [](const Address& address) { return address.v6; });
  Address bound = addresses.front();
  if (addresses.size() > 1) {
    bound = Address{};  // the wildcard; accept_connection() holds to the chosen ones
    bound.v6 = any_v6;
  }
  const PortRange& range = settings().port_range;
  for (uint32_t wanted = range.first; wanted <= range.last; ++wanted) {
    const int problem = listen_at(bound, any_v6, static_cast<uint16_t>(wanted), listener, port);
    if (problem == 0) return Status::Ok();
    if (problem != EADDRINUSE || range.first == 0) {
      return error(SCAPE_ERR_SYSTEM, "bootstrap: cannot listen on %s%s: %s", bound.text().c_str(),
                   range.first == 0 ? "" : format(" port %u", wanted).c_str(),
                   std::strerror(problem));
    }
  }
  return error(SCAPE_ERR_SYSTEM,
               "bootstrap: cannot listen on %s: all ports of SCAPE_PORT_RANGE=%s are in use; widen "
               "it: each communicator of each process takes one, and one more while it is made",
               bound.text().c_str(), range.text().c_str());
}

bool accept_connection(const Socket& listener, const std::vector<Address>& addresses, Socket* out) {
  for (;;) {
    Socket socket(::accept4(listener.fd(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!socket.valid()) {
      if (errno == EINTR || errno == ECONNABORTED) continue;
      return false;
    }
    SocketAddress local{};
    socklen_t length = sizeof local;
    if (::getsockname(socket.fd(), &local.any, &length) != 0) continue;
    const Address address = from_system(local);
    if (std::find(addresses.begin(), addresses.end(), address) == addresses.end()) continue;
    configure_connection(socket.fd());
    *out = std::move(socket);
    return true;
  }
}

std::vector<Address> seen_from_here(const std::vector<Address>& addresses) {
  if (std::none_of(addresses.begin(), addresses.end(), is_link_local)) return addresses;
  const InterfaceFilter filter(settings().socket_ifname);
  std::vector<uint32_t> scopes;
  ifaddrs* list = nullptr;
  if (::getifaddrs(&list) != 0) return addresses;
  for (const ifaddrs* entry = list; entry != nullptr; entry = entry->ifa_next) {
    if (entry->ifa_addr == nullptr || entry->ifa_addr->sa_family != AF_INET6 ||
        (entry->ifa_flags & IFF_UP) == 0 || !filter.admits(entry->ifa_name))
      continue;
    SocketAddress system{};
    std::memcpy(&system, entry->ifa_addr, sizeof system.v6);
    const Address address = from_system(system);
    if (is_link_local(address) &&
        std::find(scopes.begin(), scopes.end(), address.scope) == scopes.end())
      scopes.push_back(address.scope);
  }
  ::freeifaddrs(list);
  std::vector<Address> seen;
  for (const Address& address : addresses) {
    if (!is_link_local(address)) {
      seen.push_back(address);
      continue;
    }
    // The peer may be on this host, where its number is the right one.
    std::stable_partition(scopes.begin(), scopes.end(),
                          [&](uint32_t scope) { return scope == address.scope; });
    for (const uint32_t scope : scopes) {
      seen.push_back(address);
      seen.back().scope = scope;
    }
  }
  return seen.empty() ? addresses : seen;
}

Status connect_to(const Endpoint& endpoint, Deadline deadline, Socket* out, bool* refused) {
  std::string reasons;
  bool all_refused = true;
  const std::vector<Address> addresses = seen_from_here(endpoint.addresses);
  for (size_t i = 0; i < addresses.size(); ++i) {
    const Address& address = addresses[i];
    // Each address gets its share of the time that is left, so that one that swallows packets does
    // not starve the others.
    const auto share = (deadline - Clock::now()) / static_cast<long>(addresses.size() - i);
    const Deadline until = Clock::now() + share;
    Socket socket(
        ::socket(address.v6 ? AF_INET6 : AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    SocketAddress system{};
    const socklen_t length = to_system(address, endpoint.port, &system);
    int reason = socket.valid() ? 0 : errno;
    if (reason == 0 && ::connect(socket.fd(), &system.any, length) != 0) {
      reason = errno;
      if (reason == EINPROGRESS || reason == EINTR) {
        if (wait_ready(socket.fd(), POLLOUT, until)) {
          socklen_t size = sizeof reason;
          ::getsockopt(socket.fd(), SOL_SOCKET, SO_ERROR, &reason, &size);
        } else {
          reason = ETIMEDOUT;
        }
      }
    }
    if (reason == 0) {
      configure_connection(socket.fd());
      *out = std::move(socket);
      return Status::Ok();
    }
    all_refused = all_refused && reason == ECONNREFUSED;
    reasons += (reasons.empty() ? "" : "; ") + address.text() + ": " + std::strerror(reason);
  }
  if (refused != nullptr) *refused = all_refused;
  return error(SCAPE_ERR_SYSTEM, "bootstrap: cannot reach %s (%s)", endpoint.text().c_str(),
               reasons.c_str());
}

int begin_connection(const Address& address, uint16_t port, Socket* out) {
  Socket socket(
      ::socket(address.v6 ? AF_INET6 : AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!socket.valid()) return errno;
  SocketAddress system{};
  const socklen_t length = to_system(address, port, &system);
  if (::connect(socket.fd(), &system.any, length) != 0 && errno != EINPROGRESS && errno != EINTR) {
    return errno;
  }
  *out = std::move(socket);
  return 0;
}

int connection_state(const Socket& socket) {
  pollfd entry{socket.fd(), POLLOUT, 0};
  if (::poll(&entry, 1, 0) <= 0) return EINPROGRESS;
  int reason = 0;
  socklen_t size = sizeof reason;
  if (::getsockopt(socket.fd(), SOL_SOCKET, SO_ERROR, &reason, &size) != 0) return errno;
  if (reason == 0) configure_connection(socket.fd());
  return reason;
}

Status send_all(const Socket& socket, const void* data, size_t bytes, Deadline deadline) {
  const auto* next = static_cast<const std::byte*>(data);
  while (bytes > 0) {
    const ssize_t sent = ::send(socket.fd(), next, bytes, MSG_NOSIGNAL);
    if (sent > 0) {
      next += sent;
      bytes -= static_cast<size_t>(sent);
    } else if (sent < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
      if (!wait_ready(socket.fd(), POLLOUT, deadline)) {
        return error(SCAPE_ERR_TIMEOUT, "bootstrap: the other side takes no data");
      }
    } else if (sent < 0 && errno != EINTR) {
      return error(SCAPE_ERR_SYSTEM, "bootstrap: sending failed: %s", std::strerror(errno));
    }
  }
  return Status::Ok();
}

Status recv_all(const Socket& socket, void* data, size_t bytes, Deadline deadline) {
  auto* next = static_cast<std::byte*>(data);
  while (bytes > 0) {
    const ssize_t got = ::recv(socket.fd(), next, bytes, 0);
    if (got > 0) {
      next += got;
      bytes -= static_cast<size_t>(got);
    } else if (got == 0) {
      return error(SCAPE_ERR_SYSTEM, "bootstrap: the other side closed the connection");
    } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
      if (!wait_ready(socket.fd(), POLLIN, deadline)) {
        return error(SCAPE_ERR_TIMEOUT, "bootstrap: the other side did not answer");
      }
    } else if (errno != EINTR) {
      return error(SCAPE_ERR_SYSTEM, "bootstrap: receiving failed: %s", std::strerror(errno));
    }
  }
  return Status::Ok();
}

}  // namespace scape::plugin
