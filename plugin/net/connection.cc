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

Connection::Connection(std::shared_ptr<Worker> worker, plugin::Socket control, bool sends, int peer,
                       uint32_t number, std::string who)
    : worker_(std::move(worker)),
      control_(std::move(control)),
      sends_(sends),
      peer_(peer),
      tag_base_(uint64_t{number} << 32),
      who_(std::move(who)) {
  for (Request& request : requests_) request.connection = this;
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
  request.count = request.pending = count;
  request.ended.store(false, std::memory_order_relaxed);
  return &request;
}

void Connection::begin(Request* request, int index, void* memory) {
  plugin::Operation& operation = request->operations[index];
  operation.owner = request;
  operation.index = static_cast<uint32_t>(index);
  const auto* registration = static_cast<const Registration*>(memory);
  operation.region = registration != nullptr ? registration->region : nullptr;
  ++messages_;
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
  *request = take_request(1);
  if (*request == nullptr) return Status::Ok();
  begin(*request, 0, memory);
  worker_->transport().send(peer_, tag_base_ | static_cast<uint32_t>(tag), data, bytes,
                            &(*request)->operations[0]);
  (*request)->sizes[0] = bytes;
  return Status::Ok();
}

Status Connection::receive(int n, void* const* data, const size_t* bytes, const int* tags,
                           Registration* const* memories, Request** request) {
  *request = nullptr;
  std::lock_guard<std::mutex> lock(worker_->mutex());
  SCAPE_RETURN_IF_ERROR(check());
  *request = take_request(n);
  if (*request == nullptr) return Status::Ok();
  for (int i = 0; i < n; ++i) {
    begin(*request, i, memories != nullptr ? memories[i] : nullptr);
    worker_->transport().recv(peer_, tag_base_ | static_cast<uint32_t>(tags[i]), data[i], bytes[i],
                              &(*request)->operations[i]);
  }
  return Status::Ok();
}

void Connection::ended(plugin::Operation* operation) {
  auto* const request = static_cast<Request*>(operation->owner);
  Connection& connection = *request->connection;
  --connection.messages_;
  if (--request->pending == 0) request->ended.store(true, std::memory_order_release);
  if (connection.failed_.load(std::memory_order_relaxed)) return;
  switch (operation->outcome) {
    case plugin::Outcome::kDone:
      if (!connection.sends_) request->sizes[operation->index] = operation->received;
      break;
    case plugin::Outcome::kTruncated:
      static_cast<void>(connection.fail(
          error(SCAPE_ERR_USAGE, "%s sent a message that is longer than the buffer posted for it",
                connection.who_.c_str())));
      break;
    default:
      // Where the peer has ended, the TCP connection tells more about it.
      connection.last_look_ns_ = 0;
      connection.watch();
      static_cast<void>(connection.fail(error(
          connection.end_ == End::kLost ? SCAPE_ERR_REMOTE : SCAPE_ERR_SYSTEM,
          "a message %s %s failed%s", connection.sends_ ? "to" : "from", connection.who_.c_str(),
          connection.end_ == End::kLost ? ": that process has ended" : "")));
      break;
  }
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
  for (Request& request : requests_) {
    for (int i = 0; request.pending > 0 && i < request.count; ++i) {
      worker_->transport().cancel(&request.operations[i]);
    }
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
