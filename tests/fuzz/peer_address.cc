// A peer's address: as it is, and with its checksum made right, which mutations do not get past.
// Whatever is in it, the transports of this machine must take it or refuse it; a library sees none
// that is not of its own form.
#include "plugin/transport/peer_address.h"
#include "base/crc.h"
#include "plugin/transport/transport.h"
#include "tests/fuzz/input.h"

namespace {

using namespace scape::plugin;
using scape::fuzz::require;

void unseal(const std::vector<std::byte>& sealed) {
  PeerAddress address;
  const scape::Status status = unseal_address(sealed, "rank 1", &address);
  require(status.ok() ? !address.bytes.empty() : status.code() == SCAPE_ERR_MISMATCH,
          "neither an address nor a refusal");
  if (!status.ok()) return;
  PeerAddress again;
  require(unseal_address(seal_address(address), "rank 1", &again).ok() &&
              again.provider == address.provider && again.host == address.host &&
              again.bytes == address.bytes,
          "what was read does not come back");
}

// Anew now and then: it remembers every peer.
void add_to_libfabric(const std::vector<std::byte>& sealed) {
  static std::unique_ptr<Transport> transport;
  static int peers = 0;
  if (peers++ % 4096 == 0) {
    const TransportModule* module = nullptr;
    require(load_transport_module("ofi", &module).ok(), "no module");
    transport.reset();
    require(module->make({}, &transport).ok(), "no transport");
  }
  int peer = -1;
  const scape::Status status = transport->add_peer(sealed, "rank 1", &peer);
  require(status.ok() == (peer >= 0), "neither a peer nor an error");
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  std::vector<std::byte> sealed = scape::fuzz::copy_of(scape::fuzz::Input(data, size).rest());
  unseal(sealed);
  uint32_t crc;
  if (sealed.size() < sizeof crc) return 0;
  crc = scape::crc32(0, sealed.data(), sealed.size() - sizeof crc);
  std::memcpy(sealed.data() + sealed.size() - sizeof crc, &crc, sizeof crc);
  unseal(sealed);
  add_to_libfabric(sealed);
  return 0;
}
