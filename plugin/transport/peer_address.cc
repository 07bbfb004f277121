#include "plugin/transport/peer_address.h"

#include <utility>

#include "base/crc.h"
#include "plugin/transport/wire.h"

namespace scape::plugin {
namespace {

constexpr uint32_t kMagic = 0x31414353;  // "SCA1", with any change to the form

}  // namespace

std::vector<std::byte> seal_address(const PeerAddress& address) {
  WireWriter writer;
  writer.put(kMagic);
  writer.put_text(address.provider);
  writer.put_text(address.host);
  writer.put_bytes(address.bytes);
  writer.put(crc32(0, writer.bytes().data(), writer.bytes().size()));
  return writer.bytes();
}

Status unseal_address(std::span<const std::byte> sealed, const std::string& who, PeerAddress* out) {
  WireReader reader(sealed);
  const auto magic = reader.get<uint32_t>();
  PeerAddress address;
  address.provider = reader.get_text();
  address.host = reader.get_text();
  address.bytes = reader.get_bytes();
  const size_t length = sealed.size() - reader.left();
  const auto crc = reader.get<uint32_t>();
  if (!reader.ok() || magic != kMagic || crc != crc32(0, sealed.data(), length) ||
      address.bytes.empty()) {
    return error(
        SCAPE_ERR_MISMATCH,
        "the address of %s (%zu bytes) is cut, damaged or of another form; use one build of "
        "scape everywhere",
        who.c_str(), sealed.size());
  }
  *out = std::move(address);
  return Status::Ok();
}

}  // namespace scape::plugin
