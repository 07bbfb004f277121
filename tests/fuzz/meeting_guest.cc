// What a rank hears from whatever listens where the root, or rank 0, is said to be.
#include <poll.h>

#include <thread>

#include "plugin/transport/bootstrap.h"
#include "tests/fuzz/input.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace scape;
  static const auto* const door = new fuzz::Door;
  fuzz::Input input(data, size);
  plugin::Attendance mine;
  const auto first = input.number<uint8_t>();
  mine.size = 1 + first % 8;
  const bool at_rank_0 = (first & 0x80) != 0;
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
  const Status status = plugin::attend_meeting(door->endpoint, 1, at_rank_0, mine, 5, &members);
  listening.join();
  fuzz::require(status.ok() ? members.size() == static_cast<size_t>(mine.size)
                            : status.code() != SCAPE_OK && !status.message().empty(),
                "neither the ranks nor an error");
  return 0;
}
