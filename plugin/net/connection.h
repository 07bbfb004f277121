// A connection: one direction of messages between two processes, once it is made. Its requests are
// of a fixed number, in place; nothing is allocated for a message.
//
// A TCP connection stands beside it for as long as it lives. It tells of the peer's end: a process
// that dies closes it without the goodbye that an orderly close sends before.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>

#include "base/status.h"
#include "plugin/net/abi/common.h"
#include "plugin/net/worker.h"
#include "plugin/transport/socket.h"
#include "plugin/transport/transport.h"

namespace scape::net {

class Connection;

// What NCCL holds of an operation under way.
struct Request {
  Connection* connection = nullptr;
  plugin::Operation operations[NET_MAX_RECEIVES];
  size_t sizes[NET_MAX_RECEIVES] = {};
  int count = 0;
  int pending = 0;                 // messages that have not ended
  std::atomic<bool> ended{false};  // all have
};

class Connection {
 public:
  // `sends`: the direction. `number`: the connection's, given by the receiver. `who`: the peer in
  // messages.
  Connection(std::shared_ptr<Worker> worker, plugin::Socket control, bool sends, int peer,
             uint32_t number, std::string who);
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

  // For the worker, which holds its mutex: a message ended; how many have not.
  static void ended(plugin::Operation* operation);
  int messages() const { return messages_; }

 private:
  enum class End { kNone, kOrderly, kLost };

  Direction::Kind direction() const { return sends_ ? Direction::kSend : Direction::kReceive; }
  Request* take_request(int count);
  void begin(Request* request, int index, void* memory);
  // The first failure is logged, and all calls from then on return it. Requests under way end.
  Status fail(Status why);
  void cancel_receives();
  // Looks, now and then, whether the peer is there.
  void watch();
  Status check();

  std::shared_ptr<Worker> worker_;
  plugin::Socket control_;
  const bool sends_;
  const int peer_;
  const uint64_t tag_base_;
  const std::string who_;
  std::atomic<uint32_t> taken_{0};  // a bit a request
  int messages_ = 0;
  uint64_t last_look_ns_ = 0;
  End end_ = End::kNone;
  uint64_t end_ns_ = 0;
  std::atomic<bool> failed_{false};
  Status failure_;
  Request requests_[NET_MAX_REQUESTS];
};

}  // namespace scape::net
