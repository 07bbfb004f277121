#include "plugin/net/connection.h"

#include <sys/socket.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <climits>
#include <cstring>
#include <mutex>
#include <utility>

#include "base/clock.h"
#include "plugin/net/nccl_log.h"

namespace scape::net {
namespace {

constexpr uint64_t kMillisecond = 1000 * 1000;
constexpr uint64_t kBetweenLooks = 1 * kMillisecond;
// What a peer had sent before it ended may still be on its way: so long it has.
constexpr uint64_t kGraceAfterLoss = 1000 * kMillisecond;
constexpr uint64_t kGraceAfterGoodbye = 4000 * kMillisecond;
constexpr char kGoodbye = 'G';

static_assert(NET_MAX_REQUESTS == 32, "as many bits are in taken_");

}  // namespace

Connection::Connection(std::shared_ptr<Worker> worker, plugin::Socket control, bool sends,
                       std::vector<Channel> channels, uint32_t number, std::string who)
    : worker_(std::move(worker)),
      control_(std::move(control)),
      sends_(sends),
      channels_(std::move(channels)),
      number_(number),
      who_(std::move(who)),
      pieces_(NET_MAX_REQUESTS * NET_MAX_RECEIVES * channels_.size()) {
  for (const Channel& channel : channels_) weights_.push_back(channel.weight);
  turns_ = turns_of(weights_);
  for (size_t i = 0; i < NET_MAX_REQUESTS; ++i) {
    requests_[i].connection = this;
    requests_[i].pieces = &pieces_[i * NET_MAX_RECEIVES * channels_.size()];
  }
  worker_->counters().connections_opened[direction()].add();
  worker_->counters().connections[direction()].add();
}

Connection::~Connection() = default;

Request* Connection::take_request(int count) {
  const uint32_t taken = taken_.load(std::memory_order_acquire);
  if (taken == UINT32_MAX) {
    worker_->counters().retries[sends_ ? Retry::kSend : Retry::kReceive].add();
    return nullptr;
  }
  const int slot = std::countr_one(taken);  // only requests that end change bits meanwhile
  taken_.fetch_or(uint32_t{1} << slot, std::memory_order_acq_rel);
  Request& request = requests_[slot];
  request.count = count;
  request.pending = 0;
  request.ended.store(false, std::memory_order_relaxed);
  return &request;
}

size_t Connection::next_channel(int tag) {
  if (channels_.size() == 1) return 0;
  // Connections begin with different ones.
  return turns_[(number_ + messages_of_tag_[tag]++) % turns_.size()];
}

uint64_t Connection::tag_of(size_t channel, bool leads, uint32_t name) const {
  static_assert(kMaxRails <= 8, "as many are told apart here");
  const uint64_t kind = (leads ? 0 : 8) + channel;
  return uint64_t{number_} << 36 | kind << 32 | name;
}

void Connection::start(Request* request, size_t slot, size_t channel, bool leads, uint32_t name,
                       std::byte* data, size_t bytes, const Registration* memory) {
  const Channel& to = channels_[channel];
  Piece& piece = request->pieces[slot];
  piece.rail = to.rail;
  piece.leads = leads;
  piece.bytes = bytes;
  plugin::Operation& operation = piece.operation;
  operation.owner = request;
  operation.index = static_cast<uint32_t>(slot);
  operation.region = memory != nullptr ? memory->regions[static_cast<size_t>(to.rail)] : nullptr;
  ++messages_;
  ++request->pending;
  plugin::Transport& transport = worker_->transport(to.rail);
  const uint64_t tag = tag_of(channel, leads, name);
  if (sends_) {
    transport.send(to.peer, tag, data, bytes, &operation);
  } else {
    transport.recv(to.peer, tag, data, bytes, &operation);
  }
}

Status Connection::send(void* data, size_t bytes, int tag, Registration* memory,
                        Request** request) {
  *request = nullptr;
  std::lock_guard<std::mutex> lock(worker_->mutex());
  SCAPE_RETURN_IF_ERROR(check());
  if (end_ != End::kNone) {
    return fail(error(SCAPE_ERR_REMOTE, "%s %s and takes no more messages", who_.c_str(),
                      end_ == End::kOrderly ? "has closed the connection" : "has ended"));
  }
  Request* const taken = take_request(1);
  if (taken == nullptr) return Status::Ok();
  *request = taken;
  taken->sizes[0] = bytes;
  auto* const from = static_cast<std::byte*>(data);
  const size_t channel = next_channel(tag);
  if (channels_.size() == 1 || !is_striped(bytes)) {
    start(taken, 0, channel, true, static_cast<uint32_t>(tag), from, bytes, memory);
    return Status::Ok();
  }
  StripeHead head;
  head.total = bytes;
  head.sequence = ++striped_;
  head.write(taken->head);
  start(taken, 0, channel, true, static_cast<uint32_t>(tag), taken->head, kHeadBytes, nullptr);
  size_t parts[kMaxRails];
  cut(bytes, weights_, parts);
  for (size_t i = 0, begin = 0; i < channels_.size(); begin += parts[i++]) {
    if (parts[i] > 0) {
      start(taken, 1 + i, i, false, head.sequence, from + begin, parts[i], memory);
    }
  }
  return Status::Ok();
}

Status Connection::receive(int n, void* const* data, const size_t* bytes, const int* tags,
                           Registration* const* memories, Request** request) {
  *request = nullptr;
  std::lock_guard<std::mutex> lock(worker_->mutex());
  SCAPE_RETURN_IF_ERROR(check());
  Request* const taken = take_request(n);
  if (taken == nullptr) return Status::Ok();
  *request = taken;
  for (int i = 0; i < n; ++i) {
    taken->data[i] = static_cast<std::byte*>(data[i]);
    taken->room[i] = bytes[i];
    taken->memory[i] = memories != nullptr ? memories[i] : nullptr;
    start(taken, static_cast<size_t>(i) * channels_.size(), next_channel(tags[i]), true,
          static_cast<uint32_t>(tags[i]), taken->data[i], bytes[i], taken->memory[i]);
  }
  return Status::Ok();
}

Status Connection::take(Request* request, size_t slot) {
  const Piece& piece = request->pieces[slot];
  const size_t item = slot / channels_.size();
  const size_t received = piece.operation.received;
  if (!piece.leads) {
    if (received == piece.bytes) return Status::Ok();
    return error(SCAPE_ERR_REMOTE, "%s sent %zu bytes as a part of %zu", who_.c_str(), received,
                 piece.bytes);
  }
  if (channels_.size() > 1 && received == kHeadBytes) return take_head(request, item);
  request->sizes[item] = received;
  return Status::Ok();
}

Status Connection::take_head(Request* request, size_t item) {
  StripeHead head;
  if (!head.read(request->data[item])) {
    return error(SCAPE_ERR_REMOTE, "%s sent what is no head of a message; use one build of scape",
                 who_.c_str());
  }
  if (head.total > request->room[item]) return too_long();
  request->sizes[item] = static_cast<size_t>(head.total);
  size_t parts[kMaxRails];
  cut(request->sizes[item], weights_, parts);
  for (size_t i = 0, begin = 0; i < channels_.size(); begin += parts[i++]) {
    if (parts[i] == 0) continue;
    start(request, item * channels_.size() + i, i, false, head.sequence,
          request->data[item] + begin, parts[i], request->memory[item]);
  }
  return Status::Ok();
}

Status Connection::too_long() const {
  return error(SCAPE_ERR_USAGE, "%s sent a message that is longer than the buffer posted for it",
               who_.c_str());
}

void Connection::ended(plugin::Operation* operation) {
  auto* const request = static_cast<Request*>(operation->owner);
  Connection& connection = *request->connection;
  const size_t slot = operation->index;
  const int rail = std::exchange(request->pieces[slot].rail, -1);
  --connection.messages_;
  --request->pending;
  if (!connection.failed_.load(std::memory_order_relaxed)) {
    Status status;
    if (operation->outcome == plugin::Outcome::kTruncated) {
      status = connection.too_long();
    } else if (operation->outcome != plugin::Outcome::kDone) {
      // Where the peer has ended, the TCP connection tells more about it.
      connection.last_look_ns_ = 0;
      connection.watch();
      const bool lost = connection.end_ == End::kLost;
      const std::string over =
          connection.channels_.size() > 1 ? " over " + connection.worker_->name_of(rail) : "";
      status = error(lost ? SCAPE_ERR_REMOTE : SCAPE_ERR_SYSTEM, "a message %s %s%s failed%s",
                     connection.sends_ ? "to" : "from", connection.who_.c_str(), over.c_str(),
                     lost ? ": that process has ended" : "");
    } else if (!connection.sends_) {
      status = connection.take(request, slot);
    }
    if (!status.ok()) static_cast<void>(connection.fail(std::move(status)));
  }
  // Last: whoever sees it takes the request's word for how it went.
  if (request->pending == 0) request->ended.store(true, std::memory_order_release);
}

Status Connection::test(Request* request, bool* done, int* sizes) {
  Connection& connection = *request->connection;
  *done = false;
  if (!request->ended.load(std::memory_order_acquire)) {
    std::lock_guard<std::mutex> lock(connection.worker_->mutex());
    connection.worker_->progress();
    if (!request->ended.load(std::memory_order_relaxed)) return connection.check();
  }
  if (connection.failed_.load(std::memory_order_acquire)) {
    std::lock_guard<std::mutex> lock(connection.worker_->mutex());
    return connection.failure_;
  }
  *done = true;
  if (sizes != nullptr) {
    for (int i = 0; i < request->count; ++i) {
      sizes[i] = static_cast<int>(std::min<size_t>(request->sizes[i], INT_MAX));
    }
  }
  const auto slot = static_cast<uint32_t>(request - connection.requests_);
  connection.taken_.fetch_and(~(uint32_t{1} << slot), std::memory_order_acq_rel);
  return Status::Ok();
}

Status Connection::register_memory(void* data, size_t bytes, Registration** out) {
  std::lock_guard<std::mutex> lock(worker_->mutex());
  return worker_->register_memory(data, bytes, out);
}

Status Connection::deregister_memory(Registration* registration) {
  std::lock_guard<std::mutex> lock(worker_->mutex());
  return worker_->deregister_memory(registration);
}

Status Connection::check() {
  if (!failed_.load(std::memory_order_relaxed)) watch();
  return failure_;
}

void Connection::watch() {
  const uint64_t now = coarse_now_ns();
  if (end_ == End::kNone) {
    if (now - last_look_ns_ < kBetweenLooks) return;
    last_look_ns_ = now;
    char word = 0;
    const ssize_t got = ::recv(control_.fd(), &word, 1, MSG_DONTWAIT);
    if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR)) return;
    end_ = got == 1 && word == kGoodbye ? End::kOrderly : End::kLost;
    end_ns_ = now;
    if (end_ == End::kLost) worker_->note_loss();
  }
  const bool lost = end_ == End::kLost;
  if (messages_ == 0 || now - end_ns_ < (lost ? kGraceAfterLoss : kGraceAfterGoodbye)) return;
  if (failed_.load(std::memory_order_relaxed)) return;
  static_cast<void>(
      fail(error(SCAPE_ERR_REMOTE, "%s %s with %d messages under way", who_.c_str(),
                 lost ? "has ended (its process died or was killed)" : "has closed the connection",
                 messages_)));
}

Status Connection::fail(Status why) {
  if (failed_.load(std::memory_order_relaxed)) return failure_;
  failure_ = std::move(why);
  failed_.store(true, std::memory_order_release);
  worker_->counters().errors[sends_ ? Error::kSend : Error::kReceive].add();
  NET_WARN("%s", failure_.message().c_str());
  cancel_receives();
  return failure_;
}

void Connection::cancel_receives() {
  if (sends_) return;
  for (Piece& piece : pieces_) {
    if (piece.rail >= 0) worker_->transport(piece.rail).cancel(&piece.operation);
  }
}

void Connection::close(std::unique_ptr<Connection> connection) {
  const std::shared_ptr<Worker> worker = connection->worker_;
  worker->counters().connections[connection->direction()].take();
  {
    std::lock_guard<std::mutex> lock(worker->mutex());
    worker->progress();
    Connection& closing = *connection;
    if (!closing.failed_.load(std::memory_order_relaxed)) {
      if (closing.sends_) worker->flush();
      // Not waited for: a peer that does not read it learns of the end all the same.
      [[maybe_unused]] const ssize_t sent =
          ::send(closing.control_.fd(), &kGoodbye, 1, MSG_NOSIGNAL | MSG_DONTWAIT);
    }
    closing.control_.close();
    if (closing.messages_ > 0) {
      closing.cancel_receives();
      closing.failed_.store(true, std::memory_order_relaxed);  // whatever comes is no news
      closing.worker_.reset();
      worker->keep(std::move(connection));
    }
    worker->give_place_back();
  }
}

}  // namespace scape::net
