// A transport's address on its way to a peer.
//
// Network libraries believe every byte of an address, and take its length from what it says. So an
// address travels sealed, and one that was cut, damaged, or made by another library is refused
// before a library sees it.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <vector>

#include "base/status.h"

namespace scape::plugin {

struct PeerAddress {
  std::string provider;          // whose address it is: "ucx", or a provider of libfabric
  std::string host;              // where it is, for those that go other ways within a host
  std::vector<std::byte> bytes;  // the library's own; never empty
};

std::vector<std::byte> seal_address(const PeerAddress& address);

// MISMATCH, naming `who` sent it, when the bytes are no sealed address of this build.
Status unseal_address(std::span<const std::byte> sealed, const std::string& who, PeerAddress* out);

}  // namespace scape::plugin
