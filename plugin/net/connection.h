// A connection: one direction of messages between two processes, once it is made. Its requests are
// of a fixed number, in place; nothing is allocated for a message, but for the first of a tag where
// there are several rails.
//
// Over several rails (a device that was made of several) large messages are cut and the others take
// the rails in turns: see stripes.h.
//
// A TCP connection stands beside it for as long as it lives. It tells of the peer's end: a process
// that dies closes it without the goodbye that an orderly close sends before.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/status.h"
#include "plugin/net/abi/common.h"
#include "plugin/net/stripes.h"
#include "plugin/net/worker.h"
#include "plugin/transport/socket.h"
#include "plugin/transport/transport.h"

namespace scape::net {

class Connection;

// A message of a transport's.
struct Piece {
  plugin::Operation operation;
  int rail = -1;      // that has it; -1: nobody has
  bool leads = true;  // a whole message or a head, not a part
  size_t bytes = 0;   // of a part
};

// What NCCL holds of an operation under way.
struct Request {
  Connection* connection = nullptr;
  Piece* pieces = nullptr;  // as many for each receive as there are rails
  size_t sizes[NET_MAX_RECEIVES] = {};
  // Of receives: where they go.
  std::byte* data[NET_MAX_RECEIVES] = {};
  size_t room[NET_MAX_RECEIVES] = {};
  const Registration* memory[NET_MAX_RECEIVES] = {};
  std::byte head[kHeadBytes] = {};  // of a send
  int count = 0;
  int pending = 0;                 // pieces that have not ended
  std::atomic<bool> ended{false};  // all have
};

class Connection {
 public:
  // `sends`: the direction. `number`: the connection's, given by the receiver. `who`: the peer in
  // messages.
  Connection(std::shared_ptr<Worker> worker, plugin::Socket control, bool sends,
             std::vector<Channel> channels, uint32_t number, std::string who);
  ~Connection();

  // Each may be called by any thread. The request is null where none is free now: try again.
  Status send(void* data, size_t bytes, int tag, Registration* memory, Request** request);
  Status receive(int n, void* const* data, const size_t* bytes, const int* tags,
                 Registration* const* memories, Request** request);
  // *done, and then the sizes: the request is over, and its slot may be taken again.
  static Status test(Request* request, bool* done, int* sizes);

  Status register_memory(void* data, size_t bytes, Registration** out);
  Status deregister_memory(Registration* registration);

  bool sends() const { return sends_; }

  // Ends it, orderly where nothing has failed. What a sender gave away has left afterwards (within
  // bounds). Takes the connection.
  static void close(std::unique_ptr<Connection> connection);

  // For the worker, which holds its mutex: a message of a transport ended; how many have not.
  static void ended(plugin::Operation* operation);
  int messages() const { return messages_; }

 private:
  enum class End { kNone, kOrderly, kLost };

  Direction::Kind direction() const { return sends_ ? Direction::kSend : Direction::kReceive; }
  Request* take_request(int count);
  // The channel of the next message of this tag.
  size_t next_channel(int tag);
  // Whose turn it is among the tags of a channel: whole messages and heads by NCCL's tag, parts by
  // their message's number.
  uint64_t tag_of(size_t channel, bool leads, uint32_t name) const;
  void start(Request* request, size_t slot, size_t channel, bool leads, uint32_t name,
             std::byte* data, size_t bytes, const Registration* memory);
  // What has come to a receive: a message, a head or a part.
  Status take(Request* request, size_t slot);
  Status take_head(Request* request, size_t item);
  Status too_long() const;
  // The first failure is logged, and all calls from then on return it. Requests under way end.
  Status fail(Status why);
  void cancel_receives();
  // Looks, now and then, whether the peer is there.
  void watch();
  Status check();

  std::shared_ptr<Worker> worker_;
  plugin::Socket control_;
  const bool sends_;
  const std::vector<Channel> channels_;  // one a rail
  const uint32_t number_;
  const std::string who_;
  std::vector<uint32_t> weights_;  // of the channels
  Turns turns_{};
  std::unordered_map<int, uint32_t> messages_of_tag_;
  uint32_t striped_ = 0;            // messages
  std::atomic<uint32_t> taken_{0};  // a bit a request
  int messages_ = 0;
  uint64_t last_look_ns_ = 0;
  End end_ = End::kNone;
  uint64_t end_ns_ = 0;
  std::atomic<bool> failed_{false};
  Status failure_;
  std::vector<Piece> pieces_;
  Request requests_[NET_MAX_REQUESTS];
};

}  // namespace scape::net
