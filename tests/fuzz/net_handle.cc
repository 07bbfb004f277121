// The handle that listen() of the network plugin wrote in another process.
#include "plugin/net/handshake.h"
#include "tests/fuzz/input.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace scape;
  std::vector<std::byte> handle(NET_HANDLE_BYTES);
  std::memcpy(handle.data(), data, std::min(size, handle.size()));
  net::Invitation invitation;
  if (!net::Invitation::read(handle.data(), &invitation).ok()) return 0;
  std::vector<std::byte> written(NET_HANDLE_BYTES);
  net::Invitation again;
  fuzz::require(invitation.write(written.data()).ok() &&
                    net::Invitation::read(written.data(), &again).ok() &&
                    again.cookie == invitation.cookie && again.library == invitation.library &&
                    again.endpoint.text() == invitation.endpoint.text(),
                "what was read does not come back");
  return 0;
}
