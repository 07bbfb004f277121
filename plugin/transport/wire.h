// Bytes on the bootstrap's sockets: little-endian fixed-width fields, strings and blobs with their
// length before them. A reader that runs past the end says so once, at the end.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "base/status.h"
#include "plugin/transport/socket.h"

namespace scape::plugin {

class WireWriter {
 public:
  template <typename T>
  void put(T value) {
    static_assert(std::is_integral_v<T>);
    append(&value, sizeof value);
  }
  void put_bytes(std::span<const std::byte> data) {
    put(static_cast<uint32_t>(data.size()));
    append(data.data(), data.size());
  }
  void put_text(const std::string& text) { put_bytes(std::as_bytes(std::span(text))); }
  void put_endpoint(const Endpoint& endpoint) {
    put(endpoint.port);
    put(static_cast<uint8_t>(endpoint.addresses.size()));
    for (const Address& address : endpoint.addresses) {
      put(static_cast<uint8_t>(address.v6));
      append(address.bytes, address.v6 ? 16 : 4);
      if (address.v6) put(address.scope);
    }
  }
  // As they are, without a length.
  void append(const void* data, size_t length) {
    for (size_t i = 0; i < length; ++i) bytes_.push_back(static_cast<const std::byte*>(data)[i]);
  }
  const std::vector<std::byte>& bytes() const { return bytes_; }

 private:
  std::vector<std::byte> bytes_;
};

class WireReader {
 public:
  explicit WireReader(std::span<const std::byte> bytes) : bytes_(bytes) {}

  template <typename T>
  T get() {
    T value{};
    take(&value, sizeof value);
    return value;
  }
  std::vector<std::byte> get_bytes() {
    const size_t length = get<uint32_t>();
    if (length > bytes_.size()) {
      ok_ = false;
      return {};
    }
    std::vector<std::byte> data(bytes_.begin(),
                                bytes_.begin() + static_cast<std::ptrdiff_t>(length));
    bytes_ = bytes_.subspan(length);
    return data;
  }
  std::string get_text() {
    const std::vector<std::byte> data = get_bytes();
    return std::string(reinterpret_cast<const char*>(data.data()), data.size());
  }
  Endpoint get_endpoint() {
    Endpoint endpoint;
    endpoint.port = get<uint16_t>();
    const size_t count = get<uint8_t>();
    if (count > kMaxAddresses) ok_ = false;
    for (size_t i = 0; i < count && ok_; ++i) {
      Address address;
      address.v6 = get<uint8_t>() != 0;
      take(address.bytes, address.v6 ? 16 : 4);
      if (address.v6) address.scope = get<uint32_t>();
      endpoint.addresses.push_back(address);
    }
    return endpoint;
  }
  bool ok() const { return ok_; }
  size_t left() const { return bytes_.size(); }

 private:
  void take(void* out, size_t length) {
    if (length > bytes_.size()) {
      ok_ = false;
      return;
    }
    std::memcpy(out, bytes_.data(), length);
    bytes_ = bytes_.subspan(length);
  }

  std::span<const std::byte> bytes_;
  bool ok_ = true;
};

// An error that another process tells of, in its words. A code that none of ours is counts as
// REMOTE.
inline Status told_error(int32_t code, std::string message) {
  const auto told = static_cast<scape_status>(code);
  const bool known = told > SCAPE_OK && told <= SCAPE_ERR_INTERNAL;
  return Status(known ? told : SCAPE_ERR_REMOTE, std::move(message));
}

}  // namespace scape::plugin
