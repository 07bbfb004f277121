// What a rank hears from whatever listens where its unique id says the root is.
#include <poll.h>

#include <thread>

#include "plugin/transport/bootstrap.h"
#include "tests/fuzz/input.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace scape;
  static const auto* const door = new fuzz::Door;
  fuzz::Input input(data, size);
  plugin::Attendance mine;
  mine.size = 1 + input.number<uint8_t>() % 8;
  mine.transport = "ucx";
  mine.purpose = "create";
  plugin::Socket root;
  std::thread listening([&] {
    pollfd entry{door->socket.fd(), POLLIN, 0};
    ::poll(&entry, 1, 5000);
    if (plugin::accept_connection(door->socket, door->endpoint.addresses, &root)) {
      fuzz::say_all(root, input.rest());
    }
  });
  std::vector<plugin::Member> members;
  const Status status = plugin::attend_meeting(door->endpoint, 1, mine, 5, &members);
  listening.join();
  fuzz::require(status.ok() ? members.size() == static_cast<size_t>(mine.size)
                            : status.code() != SCAPE_OK && !status.message().empty(),
                "neither the ranks nor an error");
  return 0;
}
