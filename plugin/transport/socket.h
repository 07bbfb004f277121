// TCP for the bootstrap and the lifelines: descriptors, addresses, the choice of interface, and
// transfers that end by a deadline. Every descriptor is close-on-exec, non-blocking, and closed in
// a forked child: a data loader that outlives its parent must not keep the parent's connections
// open.
#pragma once

#include <netinet/in.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "base/status.h"

namespace scape::plugin {

using Clock = std::chrono::steady_clock;
using Deadline = Clock::time_point;

// Milliseconds left, at least 0, for poll().
int milliseconds_until(Deadline deadline);
Deadline seconds_from_now(double seconds);

// Grows in every forked child: who remembers it can tell a child from the process that it was made
// in, at the price of a load. Forks are seen from the first call on.
uint64_t fork_count();

// Owns a descriptor.
class Socket {
 public:
  Socket() = default;
  explicit Socket(int fd);
  ~Socket() { close(); }
  Socket(Socket&& other) noexcept : fd_(other.fd_) { other.fd_ = -1; }
  Socket& operator=(Socket&& other) noexcept;
  Socket(const Socket&) = delete;
  Socket& operator=(const Socket&) = delete;

  int fd() const { return fd_; }
  bool valid() const { return fd_ >= 0; }
  void close();

 private:
  int fd_ = -1;
};

// An IPv4 or IPv6 address without a port.
struct Address {
  bool v6 = false;
  uint8_t bytes[16] = {};
  uint32_t scope = 0;  // of a link-local IPv6 address

  std::string text() const;
  bool operator==(const Address& other) const;
};

// Where a rank listens: all its addresses, best first, and one port.
struct Endpoint {
  std::vector<Address> addresses;
  uint16_t port = 0;

  std::string text() const;  // "10.0.0.5, fd00::1 port 4711"
};
inline constexpr size_t kMaxAddresses = 4;

// What NCCL_SOCKET_IFNAME says: "eth,ib" prefixes, "=eth0" exact, "^docker" all but these.
struct InterfaceFilter {
  bool exclude = false, exact = false;
  std::vector<std::string> names;

  explicit InterfaceFilter(const std::string& text);
  // One of the names is, or begins, this one.
  bool lists(const std::string& interface_name) const;
  bool admits(const std::string& interface_name) const;
};

// The addresses of this host that NCCL_SOCKET_IFNAME's text and the family (0 any, 1 IPv4, 2 IPv6,
// as NCCL_SOCKET_FAMILY) admit; loopback only where nothing else is there, or where it is named. At
// most kMaxAddresses.
Status choose_addresses(const std::string& interfaces, int family, std::vector<Address>* out);

// Listens on all of them, on one port: of SCAPE_PORT_RANGE, or one that the system chooses.
// Connections to other addresses of the host are dropped by accept_connection().
Status listen_on(const std::vector<Address>& addresses, Socket* listener, uint16_t* port);

// Takes one waiting connection; false when there is none (any more).
bool accept_connection(const Socket& listener, const std::vector<Address>& addresses, Socket* out);

// A peer's addresses as this host writes them. A scope is a number of an interface of the peer's; a
// link-local address may be behind each interface of this host that NCCL_SOCKET_IFNAME admits.
std::vector<Address> seen_from_here(const std::vector<Address>& addresses);

// Tries the addresses, seen from here, in turn until one answers. `refused` tells whether at the
// end all refused.
Status connect_to(const Endpoint& endpoint, Deadline deadline, Socket* out,
                  bool* refused = nullptr);

// The same without waiting, for one address as this host writes it. 0 when the connection is under
// way (or made), else the system's reason why not.
int begin_connection(const Address& address, uint16_t port, Socket* out);
// EINPROGRESS while it is under way, 0 once it is made, else the reason.
int connection_state(const Socket& socket);

// All bytes or an error (SYSTEM when the other side closed, TIMEOUT).
Status send_all(const Socket& socket, const void* data, size_t bytes, Deadline deadline);
Status recv_all(const Socket& socket, void* data, size_t bytes, Deadline deadline);

}  // namespace scape::plugin
