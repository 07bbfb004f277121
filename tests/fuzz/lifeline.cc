// What two peers say on their connections to this rank. First how many calls this rank makes before
// it reads, then the length of what the first peer says (16 bits), its bytes, and the second's.
#include "plugin/transport/lifeline.h"
#include "plugin/host_communicator.h"
#include "tests/fuzz/input.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace scape;
  constexpr uint64_t kCookie = 1;
  static const auto* const door = new fuzz::Door;
  fuzz::Input input(data, size);
  const uint64_t calls = input.number<uint8_t>();
  const size_t length = input.number<uint16_t>();

  // Accepted by the system already, so that one thread can play all three.
  plugin::Socket listener(::dup(door->socket.fd()));
  plugin::Socket peers[2];
  for (int32_t rank = 1; rank <= 2; ++rank) {
    std::vector<std::byte> body(sizeof rank);
    std::memcpy(body.data(), &rank, sizeof rank);
    fuzz::require(plugin::introduce(door->endpoint, kCookie, body, plugin::seconds_from_now(60),
                                    &peers[rank - 1])
                      .ok(),
                  "loopback cannot be reached");
  }
  std::shared_ptr<plugin::Lifeline> lifeline;
  fuzz::require(plugin::Lifeline::connect(0, 3, kCookie, std::move(listener),
                                          door->endpoint.addresses, std::vector(3, door->endpoint),
                                          plugin::seconds_from_now(60), &lifeline)
                    .ok(),
                "no lifeline");
  lifeline->set_describe(&plugin::describe_call);
  plugin::Descriptor call;
  for (; call.call < calls; ++call.call) lifeline->started(0, call);
  fuzz::say_all(peers[0], input.take(length));
  fuzz::say_all(peers[1], input.rest());
  lifeline->poll(true);
  for (; call.call < calls + 3; ++call.call) lifeline->started(0, call);
  lifeline->poll(true);
  fuzz::require(lifeline->failed() == !lifeline->status().ok() &&
                    lifeline->failed() == (lifeline->status().code() != SCAPE_OK),
                "a failure without a reason");
  static_cast<void>(lifeline->departures());
  return 0;
}
