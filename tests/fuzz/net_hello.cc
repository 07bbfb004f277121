// What whoever connects to a listener of the network plugin says.
#include "plugin/net/handshake.h"
#include "tests/fuzz/net_worker.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace scape;
  net::Invitation invitation;
  invitation.cookie = 0x65696b6f6f432121;
  invitation.library = "ucx";
  int ends[2];
  fuzz::require(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, ends) == 0,
                "no socket pair");
  const plugin::Socket peer(ends[0]);
  net::Greeting greeting(plugin::Socket(ends[1]), 5);
  fuzz::say_all(peer, fuzz::Input(data, size).rest());
  const auto worker = [](std::shared_ptr<net::Worker>* out) {
    *out = fuzz::a_worker();
    return Status::Ok();
  };
  // All has been said: one step takes it.
  std::unique_ptr<net::Connection> connection;
  bool stranger = false;
  const Status status = greeting.step(invitation, worker, &connection, &stranger);
  fuzz::require(status.ok() == (connection != nullptr), "neither a connection nor an error");
  if (connection != nullptr) net::Connection::close(std::move(connection));
  return 0;
}
