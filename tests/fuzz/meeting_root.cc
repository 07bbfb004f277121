// What connects to the root of a meeting: up to four visitors, each with the length of what it says
// (15 bits, and one for going away then) and the bytes.
#include "plugin/transport/bootstrap.h"
#include "tests/fuzz/input.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace scape;
  constexpr uint64_t kCookie = 0x65696b6f6f432121;
  static const auto* const door = new fuzz::Door;
  fuzz::Input input(data, size);
  std::vector<plugin::Socket> visitors;
  while (!input.empty() && visitors.size() < 4) {
    const auto length = input.number<uint16_t>();
    plugin::Socket& visitor = visitors.emplace_back();
    fuzz::require(plugin::connect_to(door->endpoint, plugin::seconds_from_now(60), &visitor).ok(),
                  "loopback cannot be reached");
    const std::span<const std::byte> bytes = input.take(length & 0x7fff);
    (length & 0x8000) != 0 ? fuzz::say_all(visitor, bytes) : fuzz::say(visitor, bytes);
  }
  // All have come, so the root has nobody to wait for. One round takes those who do not know the
  // cookie.
  plugin::serve_meeting(door->socket, door->endpoint.addresses, kCookie, 0, 0, -1);
  return 0;
}
