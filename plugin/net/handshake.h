// How a connection comes about, without ever waiting.
//
// The listener's handle holds its TCP address. The sender's side (Dial) connects there and says
// hello with its rails; the receiver's side (Greeting) answers with its own and the
// connection's number. Both are steps that are taken whenever NCCL asks again.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/status.h"
#include "plugin/net/connection.h"
#include "plugin/net/worker.h"
#include "plugin/transport/socket.h"

namespace scape::net {

// What listen() writes for the peer. NCCL carries the bytes; the last eight of its buffer are not
// part of it.
struct Invitation {
  uint64_t cookie = 0;  // of the listener, against strangers
  std::string library;
  plugin::Endpoint endpoint;

  static constexpr size_t kBytes = NET_HANDLE_BYTES - sizeof(uint64_t);
  Status write(void* handle) const;
  static Status read(const void* handle, Invitation* out);
};

// Listens for whoever will be invited, at the addresses that the settings choose.
Status open_door(const std::string& library, plugin::Socket* socket, Invitation* out);

// Messages with their length before them, over a TCP connection that never blocks.
class Frames {
 public:
  Frames() = default;
  explicit Frames(plugin::Socket socket) : socket_(std::move(socket)) {}

  // The next message to send, after the last has left.
  void put(const std::vector<std::byte>& message);
  // What is left of it leaves; *done: all has. An error: the peer has gone.
  Status push(bool* done);
  // *done: a whole message is there.
  Status pull(bool* done, std::vector<std::byte>* message);

  plugin::Socket& socket() { return socket_; }

 private:
  plugin::Socket socket_;
  std::vector<std::byte> out_, in_;
  size_t sent_ = 0;
};

class Dial {
 public:
  // Connects to who invites, for a worker that has a place for the connection and loses it again
  // if none comes about.
  Dial(std::shared_ptr<Worker> worker, Invitation invitation, double timeout_s);
  ~Dial();

  // One step; the connection once there is one.
  Status step(std::unique_ptr<Connection>* out);

 private:
  enum class Stage { kConnect, kConnecting, kHello, kAnswer };
  Status connect_next(const std::string& reason);
  std::string peer() const;

  std::shared_ptr<Worker> worker_;
  const Invitation invitation_;
  const std::vector<plugin::Address> addresses_;
  const plugin::Deadline deadline_;
  plugin::Deadline address_deadline_;
  Stage stage_ = Stage::kConnect;
  size_t next_address_ = 0;
  std::string reasons_;
  plugin::Socket connecting_;
  Frames frames_;
};

class Greeting {
 public:
  Greeting(plugin::Socket socket, double timeout_s);
  ~Greeting();

  // One step. `worker_for_one` gives a worker with a place for the connection, when a valid hello
  // has come. *stranger: the failure is that of someone who was not invited, or has gone.
  template <typename Workers>
  Status step(const Invitation& invitation, Workers&& worker_for_one,
              std::unique_ptr<Connection>* out, bool* stranger) {
    bool done = false;
    *stranger = true;
    if (worker_ == nullptr) {
      SCAPE_RETURN_IF_ERROR(hear(invitation, &done));
      if (!done) return Status::Ok();
      *stranger = false;
      SCAPE_RETURN_IF_ERROR(worker_for_one(&worker_));
      SCAPE_RETURN_IF_ERROR(answer(invitation));
    }
    return finish(out, stranger);
  }

 private:
  Status hear(const Invitation& invitation, bool* done);
  Status answer(const Invitation& invitation);
  Status finish(std::unique_ptr<Connection>* out, bool* stranger);

  Frames frames_;
  const plugin::Deadline deadline_;
  std::shared_ptr<Worker> worker_;
  std::string library_, who_;
  std::vector<RailAddress> rails_;
  std::vector<Channel> channels_;
  uint32_t number_ = 0;
  Status refusal_;
};

}  // namespace scape::net
