// What a connecting process hears from whatever listens where its handle says.
#include "plugin/net/handshake.h"
#include "tests/fuzz/net_worker.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace scape;
  static const auto* const door = new fuzz::Door;
  net::Invitation invitation;
  invitation.library = "ucx";
  invitation.endpoint = door->endpoint;
  net::Dial dial(fuzz::a_worker(), invitation, 5);
  std::unique_ptr<net::Connection> connection;
  plugin::Socket listener;
  Status status;
  while (status.ok() && connection == nullptr) {
    status = dial.step(&connection);
    if (!listener.valid() &&
        plugin::accept_connection(door->socket, door->endpoint.addresses, &listener)) {
      fuzz::say_all(listener, fuzz::Input(data, size).rest());
    }
  }
  fuzz::require(status.ok() == (connection != nullptr), "both a connection and an error");
  if (connection != nullptr) net::Connection::close(std::move(connection));
  return 0;
}
