// Transport: tagged messages between the ranks of one communicator. The seam to UCX and libfabric,
// which live in modules of their own, so that nothing links a network library.
//
// A transport has one owner at a time: calls are serialised by the caller. It never blocks, never
// throws, and knows nothing of collectives.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"

namespace scape::plugin {

enum class Outcome : uint8_t {
  kPending,    // under way
  kDone,       // sent, or received; `received` says how much
  kTruncated,  // the message was longer than the buffer; nothing was written beyond it
  kCancelled,
  kFailed,
};

// One message under way. Its owner keeps it, and the bytes it refers to, in place until it has come
// back from progress(), or the transport is destroyed.
struct Operation {
  Outcome outcome = Outcome::kPending;
  size_t received = 0;
  void* owner = nullptr;                 // the caller's
  void* region = nullptr;                // the caller's: what register_memory() said of the bytes
  uint32_t index = 0;                    // the caller's
  class Transport* transport = nullptr;  // the transport's
  void* handle = nullptr;                // the transport's
  Operation* next = nullptr;             // links completed operations
};

struct TransportCounters {
  uint64_t sent_bytes = 0;
  uint64_t received_bytes = 0;
  uint64_t sent_messages = 0;
  uint64_t received_messages = 0;
  // The library had no room for them at first.
  uint64_t posted_again = 0;

  TransportCounters& operator+=(const TransportCounters& more) {
    sent_bytes += more.sent_bytes;
    received_bytes += more.received_bytes;
    sent_messages += more.sent_messages;
    received_messages += more.received_messages;
    posted_again += more.posted_again;
    return *this;
  }
};

class Transport {
 public:
  virtual ~Transport() = default;

  virtual std::string_view name() const = 0;

  // What peers need to reach this transport; opaque, the same until it is destroyed.
  virtual Status address(std::vector<std::byte>* out) = 0;

  // Takes every rank's address, in rank order, this rank's included. Once, before the first
  // message.
  virtual Status connect(std::span<const std::vector<std::byte>> addresses) {
    for (size_t rank = 0; rank < addresses.size(); ++rank) {
      int peer = -1;
      SCAPE_RETURN_IF_ERROR(add_peer(addresses[rank], format("rank %zu", rank), &peer));
    }
    return Status::Ok();
  }

  // Takes the address of one more peer, at any time, instead of connect(). `who` is its name in
  // messages; the peer's number comes out.
  virtual Status add_peer(const std::vector<std::byte>& address, const std::string& who,
                          int* peer) = 0;

  // Makes memory known to the device for as long as the region is not given back: nothing has to be
  // pinned for the messages whose operations name it. Null where nothing needs to be.
  virtual Status register_memory(void* data, size_t bytes, void** region) = 0;
  virtual void deregister_memory(void* region) = 0;

  // Starts a message to `peer`, of bytes < 2^30 unless the device says more. A tag names the
  // message: messages of one tag from one peer arrive in order, and the receiver must be able to
  // tell the peer from the tag.
  virtual void send(int peer, uint64_t tag, const void* data, size_t bytes,
                    Operation* operation) = 0;

  // Takes the next message of exactly this tag.
  virtual void recv(int peer, uint64_t tag, void* data, size_t bytes, Operation* operation) = 0;

  // Moves what can be moved now. Returns the operations that ended since the last call, linked by
  // `next`; *moved says whether anything went on at all.
  virtual Operation* progress(bool* moved) = 0;

  // Asks for an operation to end early; it still comes back from progress().
  virtual void cancel(Operation* operation) = 0;

  // Says that the communicator has failed: messages may be left that nobody takes.
  virtual void abandon() = 0;

  // Waits up to timeout_ms, driving the transport, until all that was sent has left. For an orderly
  // end only.
  virtual void flush(int timeout_ms) = 0;

  // A descriptor that becomes readable when progress() has something to do, or -1 when this
  // transport was not made to wake its owner, or cannot. arm() must succeed before each poll;
  // false: progress first.
  virtual int event_fd() const = 0;
  virtual bool arm() = 0;

  // How many messages can be under way in each direction. More may be started, and wait for their
  // turn behind those; what they wait for must not wait for them.
  virtual size_t room() const = 0;

  virtual TransportCounters counters() const = 0;  // any thread may ask, at any time
};

struct TransportOptions {
  bool wakeup = false;      // event_fd() works where it can, at the cost of some latency
  int ranks = 0;            // how many peers to expect
  std::string device = {};  // name of one of the module's devices(); the module's choice when empty
  // Every send is under way until it has left, however small, so that flush() waits for all.
  bool tracks_all = false;
};

// A network device that a module can make a transport on.
struct TransportDevice {
  std::string name;      // what TransportOptions::device takes, the system's name for it
  std::string protocol;  // the module's word for how it is driven
  bool network = true;   // false: the host's memory, which reaches no other host
  bool fabric = false;   // hardware that this module's library is made for, not just TCP
  size_t largest_message = SIZE_MAX;
};

// What a module exports as `scape_transport_module`. The number changes with any type above.
inline constexpr uint32_t kTransportAbi = 3;
struct TransportModule {
  uint32_t abi;
  const char* name;
  // Makes a transport; null and an error otherwise.
  Status (*make)(const TransportOptions& options, std::unique_ptr<Transport>* out);
  // The devices that the user's settings leave, best first; never none when ok.
  Status (*devices)(std::vector<TransportDevice>* out);
};
inline constexpr char kTransportModuleSymbol[] = "scape_transport_module";

// The module libscape_<name>.so, loaded from beside this code at the first call and kept for good
// (network libraries do not survive unloading). Thread-safe.
Status load_transport_module(std::string_view name, const TransportModule** out);

// A transport of the kind that SCAPE_TRANSPORT chose.
Status make_transport(const TransportOptions& options, std::unique_ptr<Transport>* out);

// The kinds there are, whether or not their libraries are.
std::span<const std::string_view> transport_names();

// The name of the chosen kind.
std::string_view chosen_transport();
// Whether it was chosen by its name.
bool transport_is_named();

}  // namespace scape::plugin
