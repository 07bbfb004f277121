#include "plugin/transport/rails.h"

#include <sys/epoll.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <deque>
#include <string_view>
#include <utility>
#include <vector>

#include "base/log.h"
#include "plugin/transport/peer_address.h"
#include "plugin/transport/socket.h"
#include "plugin/transport/wire.h"

namespace scape::plugin {
namespace {

constexpr size_t kPage = 4096;

// Spreads tags that differ in a few bits.
size_t spread(uint64_t tag, size_t count) {
  return static_cast<size_t>((tag * 0x9e3779b97f4a7c15U) >> 33) % count;
}

class RailsTransport final : public Transport {
 public:
  explicit RailsTransport(std::string_view module) : module_(module) {}
  ~RailsTransport() override {
    if (event_fd_ >= 0) ::close(event_fd_);
    rails_.clear();  // before the pieces that they may still have
  }

  Status init(const TransportModule& module, TransportOptions options,
              std::span<const std::string> devices) {
    for (const std::string& device : devices) {
      options.device = device;
      names_.push_back(device);
      rails_.emplace_back();
      SCAPE_RETURN_IF_ERROR(module.make(options, &rails_.back()));
    }
    return options.wakeup ? watch_all() : Status::Ok();
  }

  std::string_view name() const override { return module_; }

  Status address(std::vector<std::byte>* out) override {
    WireWriter writer;
    for (const auto& rail : rails_) {
      std::vector<std::byte> one;
      SCAPE_RETURN_IF_ERROR(rail->address(&one));
      writer.put_bytes(one);
    }
    *out = seal_address({provider(), "", writer.bytes()});
    return Status::Ok();
  }

  // The peer's n-th device is the other end of this rank's n-th; those that one side has more of
  // are left out.
  Status add_peer(const std::vector<std::byte>& address, const std::string& who,
                  int* peer) override {
    PeerAddress theirs;
    SCAPE_RETURN_IF_ERROR(unseal_address(address, who, &theirs));
    if (theirs.provider != provider()) {
      return error(SCAPE_ERR_MISMATCH,
                   "%s sends over %s and this rank over %s; let SCAPE_NET_IF name several devices "
                   "everywhere, or one",
                   who.c_str(), theirs.provider.c_str(), provider().c_str());
    }
    WireReader reader(theirs.bytes);
    Peer made;
    while (reader.ok() && reader.left() > 0 && made.numbers.size() < rails_.size()) {
      const std::vector<std::byte> one = reader.get_bytes();
      if (!reader.ok()) break;
      int number = -1;
      SCAPE_RETURN_IF_ERROR(rails_[made.numbers.size()]->add_peer(one, who, &number));
      made.numbers.push_back(number);
    }
    if (!reader.ok() || made.numbers.empty()) {
      return error(SCAPE_ERR_MISMATCH, "the addresses of %s are cut short", who.c_str());
    }
    *peer = static_cast<int>(peers_.size());
    peers_.push_back(std::move(made));
    return Status::Ok();
  }

  Status register_memory(void* data, size_t bytes, void** region) override {
    auto regions = std::make_unique<Regions>(rails_.size());
    for (size_t i = 0; i < rails_.size(); ++i) {
      if (Status status = rails_[i]->register_memory(data, bytes, &(*regions)[i]); !status.ok()) {
        deregister_memory(regions.release());
        return status;
      }
    }
    *region = regions.release();
    return Status::Ok();
  }
  void deregister_memory(void* region) override {
    const std::unique_ptr<Regions> regions(static_cast<Regions*>(region));
    for (size_t i = 0; regions != nullptr && i < rails_.size(); ++i) {
      if ((*regions)[i] != nullptr) rails_[i]->deregister_memory((*regions)[i]);
    }
  }

  void send(int peer, uint64_t tag, const void* data, size_t bytes, Operation* operation) override {
    start(peer, tag, true, static_cast<std::byte*>(const_cast<void*>(data)), bytes, operation);
  }
  void recv(int peer, uint64_t tag, void* data, size_t bytes, Operation* operation) override {
    start(peer, tag, false, static_cast<std::byte*>(data), bytes, operation);
  }

  Operation* progress(bool* moved) override {
    *moved = false;
    Operation* ended = nullptr;
    for (const auto& rail : rails_) {
      bool here = false;
      for (Operation* piece = rail->progress(&here); piece != nullptr;) {
        Operation* const next = piece->next;
        if (Operation* const whole = end_piece(piece); whole != nullptr) {
          whole->next = ended;
          ended = whole;
        }
        piece = next;
      }
      *moved |= here;
    }
    return ended;
  }

  void cancel(Operation* operation) override {
    if (operation->outcome != Outcome::kPending) return;
    auto* const message = static_cast<Message*>(operation->handle);
    for (size_t i = 0; i < message->count; ++i) {
      Operation& piece = message->pieces[i];
      if (piece.outcome == Outcome::kPending) rails_[piece.index]->cancel(&piece);
    }
  }

  void abandon() override {
    for (const auto& rail : rails_) rail->abandon();
  }

  void flush(int timeout_ms) override {
    const Deadline deadline = Clock::now() + std::chrono::milliseconds(timeout_ms);
    for (const auto& rail : rails_) rail->flush(milliseconds_until(deadline));
  }

  int event_fd() const override { return event_fd_; }
  bool arm() override {
    return std::all_of(rails_.begin(), rails_.end(), [](const auto& rail) { return rail->arm(); });
  }

  size_t room() const override {
    size_t room = SIZE_MAX;
    for (const auto& rail : rails_) room = std::min(room, rail->room());
    return room;
  }

  TransportCounters counters() const override {
    TransportCounters all;
    for (const auto& rail : rails_) all += rail->counters();
    return all;
  }

 private:
  using Regions = std::vector<void*>;
  struct Peer {
    std::vector<int> numbers;  // of the rails' own
  };
  // A message under way in pieces.
  struct Message {
    Operation* operation = nullptr;
    bool sends = false, broken = false;
    Outcome outcome = Outcome::kDone;  // in the end
    size_t bytes = 0, received = 0;
    size_t count = 0, left = 0;
    Operation pieces[kMaxTransportRails];
  };

  std::string provider() const { return "several devices of " + module_; }

  // One descriptor that is readable when one of the rails' is.
  Status watch_all() {
    for (const auto& rail : rails_) {
      if (rail->event_fd() < 0) return Status::Ok();
    }
    event_fd_ = ::epoll_create1(EPOLL_CLOEXEC);
    for (const auto& rail : rails_) {
      epoll_event event{};
      event.events = EPOLLIN;
      if (event_fd_ < 0 || ::epoll_ctl(event_fd_, EPOLL_CTL_ADD, rail->event_fd(), &event) != 0) {
        return error(SCAPE_ERR_SYSTEM, "%s: several devices cannot be watched: %s", module_.c_str(),
                     std::strerror(errno));
      }
    }
    return Status::Ok();
  }

  void start(int peer, uint64_t tag, bool sends, std::byte* data, size_t bytes,
             Operation* operation) {
    const std::vector<int>& numbers = peers_[static_cast<size_t>(peer)].numbers;
    if (free_.empty()) free_.push_back(&messages_.emplace_back());
    Message* const message = free_.back();
    free_.pop_back();
    message->operation = operation;
    message->sends = sends;
    message->broken = false;
    message->outcome = Outcome::kDone;
    message->bytes = bytes;
    message->received = 0;
    message->count = message->left = bytes <= kCutFrom ? 1 : numbers.size();
    operation->outcome = Outcome::kPending;
    operation->received = 0;
    operation->transport = this;
    operation->handle = message;
    const auto* const regions = static_cast<const Regions*>(operation->region);
    for (size_t i = 0; i < message->count; ++i) {
      // The first part goes where the whole would: were the two sides not to agree on the length,
      // they would meet there and see it.
      const size_t rail = (spread(tag, numbers.size()) + i) % numbers.size();
      const MessagePart part = message_part(bytes, i, message->count);
      Operation& piece = message->pieces[i];
      piece.owner = message;
      piece.index = static_cast<uint32_t>(rail);
      piece.region = regions != nullptr ? (*regions)[rail] : nullptr;
      if (sends) {
        rails_[rail]->send(numbers[rail], tag, data + part.begin, part.bytes, &piece);
      } else {
        rails_[rail]->recv(numbers[rail], tag, data + part.begin, part.bytes, &piece);
      }
    }
  }

  // The whole, where this was the last piece of it.
  Operation* end_piece(Operation* piece) {
    auto* const message = static_cast<Message*>(piece->owner);
    --message->left;
    const auto which = static_cast<size_t>(piece - message->pieces);
    const size_t expected = message_part(message->bytes, which, message->count).bytes;
    const bool in_order =
        piece->outcome == Outcome::kDone && (message->sends || piece->received == expected);
    if (!message->broken) message->received += piece->received;
    if (!in_order && !message->broken) {
      // What is wrong first stands for the message. Other parts of a receive may never come.
      message->broken = true;
      message->outcome = piece->outcome;
      message->received = piece->received;
      if (piece->outcome == Outcome::kFailed) {
        SCAPE_INFO("%s: a message over %s failed", module_.c_str(), names_[piece->index].c_str());
      }
      if (!message->sends) cancel(message->operation);
    }
    if (message->left > 0) return nullptr;
    Operation* const operation = message->operation;
    operation->outcome = message->outcome;
    operation->received = message->sends ? 0 : message->received;
    operation->handle = nullptr;
    free_.push_back(message);
    return operation;
  }

  const std::string module_;
  std::vector<std::string> names_;
  std::vector<std::unique_ptr<Transport>> rails_;
  std::vector<Peer> peers_;
  std::deque<Message> messages_;  // addresses stay
  std::vector<Message*> free_;
  int event_fd_ = -1;
};

}  // namespace

MessagePart message_part(size_t bytes, size_t i, size_t count) {
  const auto up_to = [&](size_t parts) {
    return parts == count ? bytes : bytes / kPage * parts / count * kPage;
  };
  return {up_to(i), up_to(i + 1) - up_to(i)};
}

Status make_rails(const TransportModule& module, const TransportOptions& options,
                  std::span<const std::string> devices, std::unique_ptr<Transport>* out) {
  auto transport = std::make_unique<RailsTransport>(module.name);
  SCAPE_RETURN_IF_ERROR(transport->init(
      module, options, devices.first(std::min(devices.size(), kMaxTransportRails))));
  *out = std::move(transport);
  return Status::Ok();
}

}  // namespace scape::plugin
