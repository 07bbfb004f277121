// What the fuzz targets share: an input taken apart, the checks that end a run, and a peer that
// says what the input says over TCP.
//
// A target is one file with one LLVMFuzzerTestOneInput(), which hands bytes to the code that meets
// them in the product. Nothing of that code is copied here.
#pragma once

#include <sys/socket.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <span>
#include <vector>

#include "plugin/transport/socket.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

namespace scape::fuzz {

// Ends the process, which is a finding, where `holds` is false.
inline void require(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "fuzz: %s\n", what);
  std::abort();
}

// Numbers and bytes from the front of an input; zeros and nothing after its end.
class Input {
 public:
  Input(const uint8_t* data, size_t size) : left_(std::as_bytes(std::span(data, size))) {}

  template <typename T>
  T number() {
    T value{};
    const std::span<const std::byte> bytes = take(sizeof value);
    if (!bytes.empty()) std::memcpy(&value, bytes.data(), bytes.size());
    return value;
  }
  std::span<const std::byte> take(size_t most) {
    const std::span<const std::byte> taken = left_.first(std::min(most, left_.size()));
    left_ = left_.subspan(taken.size());
    return taken;
  }
  std::span<const std::byte> rest() { return take(left_.size()); }
  bool empty() const { return left_.empty(); }

 private:
  std::span<const std::byte> left_;
};

// A copy in memory of its own: what is read beyond its end is noticed.
inline std::vector<std::byte> copy_of(std::span<const std::byte> bytes) {
  return {bytes.begin(), bytes.end()};
}

// A listener on loopback, as ranks have one.
struct Door {
  plugin::Socket socket;
  plugin::Endpoint endpoint;

  Door() {
    plugin::Address loopback;
    loopback.bytes[0] = 127;
    loopback.bytes[3] = 1;
    endpoint.addresses = {loopback};
    require(plugin::listen_on(endpoint.addresses, &socket, &endpoint.port).ok(),
            "no listener on loopback");
  }
};

// Sends all of it, as far as the other side takes it.
inline void say(const plugin::Socket& socket, std::span<const std::byte> bytes) {
  static_cast<void>(
      plugin::send_all(socket, bytes.data(), bytes.size(), plugin::seconds_from_now(60)));
  // Thousands of connections a second: none may linger, or loopback runs out of ports.
  const linger none{1, 0};
  ::setsockopt(socket.fd(), SOL_SOCKET, SO_LINGER, &none, sizeof none);
}

// The same, and no more will come.
inline void say_all(const plugin::Socket& socket, std::span<const std::byte> bytes) {
  say(socket, bytes);
  ::shutdown(socket.fd(), SHUT_WR);
}

}  // namespace scape::fuzz
