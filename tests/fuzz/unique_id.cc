// The 128 bytes of a unique id, which come from another process.
#include "plugin/host_communicator.h"
#include "plugin/transport/bootstrap.h"
#include "tests/fuzz/input.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace scape::plugin;
  UniqueId id{};
  std::memcpy(id.bytes.data(), data, std::min(size, id.bytes.size()));
  Invitation invitation;
  const bool read = Invitation::decode(id.bytes, &invitation);
  scape::fuzz::require(read == is_host_unique_id(id), "two answers to one id");
  // Of one rank: nobody is connected to.
  std::shared_ptr<Communicator> alone;
  const scape::Status status = create_communicator(id, 0, 1, &alone);
  scape::fuzz::require(status.ok() == (alone != nullptr), "no error, and no communicator");
  if (!read) return 0;
  scape::fuzz::require(!invitation.root.text().empty(), "no address");
  Invitation again;
  scape::fuzz::require(Invitation::decode(invitation.encode(), &again) &&
                           again.cookie == invitation.cookie &&
                           again.root.text() == invitation.root.text(),
                       "what was read does not come back");
  return 0;
}
