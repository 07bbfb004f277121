#include "plugin/net/handshake.h"

#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <mutex>
#include <utility>

#include "base/settings.h"
#include "plugin/net/stripes.h"
#include "plugin/transport/bootstrap.h"
#include "plugin/transport/wire.h"

namespace scape::net {
namespace {

using plugin::Clock;
using plugin::WireReader;
using plugin::WireWriter;

constexpr uint32_t kMagic = 0x53434e33;  // with any change to what is said
constexpr uint32_t kLongestFrame = 64 << 10;

std::string here() {
  char name[128] = "";
  ::gethostname(name, sizeof name - 1);
  return format("process %d on %s", static_cast<int>(::getpid()), name);
}

Status gone(const char* what) {
  return error(SCAPE_ERR_REMOTE, "the peer closed the connection %s", what);
}

void put_rails(const std::vector<RailAddress>& rails, WireWriter* writer) {
  writer->put(static_cast<uint8_t>(rails.size()));
  for (const RailAddress& rail : rails) {
    writer->put(rail.speed_mbps);
    writer->put_bytes(rail.address);
  }
}

// False where it is no list of rails.
bool get_rails(WireReader* reader, std::vector<RailAddress>* rails) {
  rails->clear();
  const size_t count = reader->get<uint8_t>();
  if (count < 1 || count > kMaxRails) return false;
  for (size_t i = 0; i < count && reader->ok(); ++i) {
    RailAddress rail;
    rail.speed_mbps = reader->get<uint32_t>();
    rail.address = reader->get_bytes();
    rails->push_back(std::move(rail));
  }
  return reader->ok();
}

Status mismatch(const std::string& who, const std::string& theirs, const std::string& mine) {
  return error(SCAPE_ERR_MISMATCH,
               "%s uses %s and this process %s; set SCAPE_NET to the same everywhere", who.c_str(),
               theirs.c_str(), mine.c_str());
}

}  // namespace

Status Invitation::write(void* handle) const {
  WireWriter writer;
  writer.put(kMagic);
  writer.put(cookie);
  writer.put_text(library);
  writer.put_endpoint(endpoint);
  if (writer.bytes().size() > kBytes) {
    return error(SCAPE_ERR_INTERNAL, "a handle of %zu bytes does not fit into %zu",
                 writer.bytes().size(), kBytes);
  }
  std::memset(handle, 0, NET_HANDLE_BYTES);
  std::memcpy(handle, writer.bytes().data(), writer.bytes().size());
  return Status::Ok();
}

Status Invitation::read(const void* handle, Invitation* out) {
  WireReader reader(std::span(static_cast<const std::byte*>(handle), kBytes));
  const auto magic = reader.get<uint32_t>();
  out->cookie = reader.get<uint64_t>();
  out->library = reader.get_text();
  out->endpoint = reader.get_endpoint();
  if (magic == kMagic && reader.ok() && !out->endpoint.addresses.empty()) return Status::Ok();
  return error(SCAPE_ERR_ARGUMENT,
               "the handle to connect to is not one of this plugin's (it begins 0x%08x); use the "
               "same NCCL_NET_PLUGIN, and one build of scape, everywhere",
               magic);
}

Status open_door(const std::string& library, plugin::Socket* socket, Invitation* out) {
  SCAPE_RETURN_IF_ERROR(plugin::choose_addresses(settings().socket_ifname, settings().socket_family,
                                                 &out->endpoint.addresses));
  SCAPE_RETURN_IF_ERROR(plugin::listen_on(out->endpoint.addresses, socket, &out->endpoint.port));
  out->library = library;
  return plugin::random_cookie(&out->cookie);
}

void Frames::put(const std::vector<std::byte>& message) {
  WireWriter writer;
  writer.put_bytes(message);
  out_ = writer.bytes();
  sent_ = 0;
}

Status Frames::push(bool* done) {
  while (sent_ < out_.size()) {
    const ssize_t sent =
        ::send(socket_.fd(), out_.data() + sent_, out_.size() - sent_, MSG_NOSIGNAL);
    if (sent > 0) {
      sent_ += static_cast<size_t>(sent);
    } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
      break;
    } else if (errno != EINTR) {
      return gone("while it was made");
    }
  }
  *done = sent_ == out_.size();
  return Status::Ok();
}

Status Frames::pull(bool* done, std::vector<std::byte>* message) {
  *done = false;
  for (;;) {
    uint32_t length = 0;
    if (in_.size() >= sizeof length) {
      std::memcpy(&length, in_.data(), sizeof length);
      if (length > kLongestFrame)
        return error(SCAPE_ERR_REMOTE, "the peer speaks another language");
    }
    const size_t wanted = sizeof length + length;
    if (in_.size() == wanted && in_.size() > sizeof length) {
      message->assign(in_.begin() + sizeof length, in_.end());
      in_.clear();
      *done = true;
      return Status::Ok();
    }
    // Not a byte more than the message has: what comes after it is the connection's.
    const size_t had = in_.size();
    in_.resize(had < sizeof length ? sizeof length : wanted);
    const ssize_t got = ::recv(socket_.fd(), in_.data() + had, in_.size() - had, 0);
    in_.resize(had + (got > 0 ? static_cast<size_t>(got) : 0));
    if (got > 0 || (got < 0 && errno == EINTR)) continue;
    if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return Status::Ok();
    return gone("while it was made");
  }
}

Dial::Dial(std::shared_ptr<Worker> worker, Invitation invitation, double timeout_s)
    : worker_(std::move(worker)),
      invitation_(std::move(invitation)),
      addresses_(plugin::seen_from_here(invitation_.endpoint.addresses)),
      deadline_(plugin::seconds_from_now(timeout_s)) {}

Dial::~Dial() {
  if (worker_ != nullptr) worker_->give_place_back();
}

std::string Dial::peer() const { return "the process at " + invitation_.endpoint.text(); }

// Goes on to the next address there is.
Status Dial::connect_next(const std::string& reason) {
  if (!reason.empty()) {
    reasons_ +=
        (reasons_.empty() ? "" : "; ") + addresses_[next_address_ - 1].text() + ": " + reason;
  }
  while (next_address_ < addresses_.size()) {
    if (next_address_ > 0) worker_->counters().retries[Retry::kAddress].add();
    const plugin::Address& address = addresses_[next_address_++];
    const int failure = plugin::begin_connection(address, invitation_.endpoint.port, &connecting_);
    if (failure == 0) {
      // Each gets its share of the time, so that one that swallows packets does not starve the
      // rest.
      address_deadline_ =
          Clock::now() +
          (deadline_ - Clock::now()) / static_cast<long>(addresses_.size() - next_address_ + 1);
      stage_ = Stage::kConnecting;
      return Status::Ok();
    }
    reasons_ += (reasons_.empty() ? "" : "; ") + address.text() + ": " + std::strerror(failure);
  }
  return error(SCAPE_ERR_REMOTE,
               "cannot reach %s (%s); see that its process lives, and that "
               "NCCL_SOCKET_IFNAME names an interface which all hosts reach",
               peer().c_str(), reasons_.c_str());
}

Status Dial::step(std::unique_ptr<Connection>* out) {
  out->reset();
  if (stage_ == Stage::kConnect) SCAPE_RETURN_IF_ERROR(connect_next(""));
  if (stage_ == Stage::kConnecting) {
    int state = plugin::connection_state(connecting_);
    if (state == EINPROGRESS) {
      if (Clock::now() < address_deadline_) return Status::Ok();
      state = ETIMEDOUT;
    }
    if (state != 0) {
      connecting_ = plugin::Socket();
      return connect_next(std::strerror(state));
    }
    frames_ = Frames(std::move(connecting_));
    WireWriter hello;
    hello.put(kMagic);
    hello.put(invitation_.cookie);
    hello.put_text(worker_->library());
    hello.put_text(here());
    put_rails(worker_->addresses(), &hello);
    frames_.put(hello.bytes());
    stage_ = Stage::kHello;
  }
  bool done = false;
  if (stage_ == Stage::kHello) {
    SCAPE_RETURN_IF_ERROR(frames_.push(&done));
    if (done) stage_ = Stage::kAnswer;
  }
  std::vector<std::byte> answer;
  done = false;
  if (stage_ == Stage::kAnswer) SCAPE_RETURN_IF_ERROR(frames_.pull(&done, &answer));
  if (!done) {
    if (Clock::now() < deadline_) return Status::Ok();
    return error(SCAPE_ERR_TIMEOUT,
                 "%s did not accept the connection in time; raise "
                 "SCAPE_BOOTSTRAP_TIMEOUT if it needs longer",
                 peer().c_str());
  }
  WireReader reader(answer);
  const bool accepted = reader.get<uint8_t>() != 0;
  const std::string who = reader.get_text();
  const auto number = reader.get<uint32_t>();
  std::vector<RailAddress> rails;
  if (!get_rails(&reader, &rails))
    return error(SCAPE_ERR_REMOTE, "%s speaks another language", peer().c_str());
  if (!accepted) {
    return error(SCAPE_ERR_MISMATCH, "%s refuses the connection: %s", peer().c_str(), who.c_str());
  }
  std::vector<Channel> channels;
  {
    std::lock_guard<std::mutex> lock(worker_->mutex());
    SCAPE_RETURN_IF_ERROR(worker_->channels_to(rails, who, number, &channels));
  }
  *out = std::make_unique<Connection>(std::move(worker_), std::move(frames_.socket()), true,
                                      std::move(channels), number, who);
  return Status::Ok();
}

Greeting::Greeting(plugin::Socket socket, double timeout_s)
    : frames_(std::move(socket)), deadline_(plugin::seconds_from_now(timeout_s)) {}

Greeting::~Greeting() {
  if (worker_ != nullptr) worker_->give_place_back();
}

Status Greeting::hear(const Invitation& invitation, bool* done) {
  std::vector<std::byte> hello;
  SCAPE_RETURN_IF_ERROR(frames_.pull(done, &hello));
  if (!*done) {
    if (Clock::now() < deadline_) return Status::Ok();
    return error(SCAPE_ERR_TIMEOUT, "who connected said nothing");
  }
  WireReader reader(hello);
  const auto magic = reader.get<uint32_t>();
  const auto cookie = reader.get<uint64_t>();
  library_ = reader.get_text();
  who_ = reader.get_text();
  const bool whole = get_rails(&reader, &rails_);
  if (magic == kMagic && cookie == invitation.cookie && whole) return Status::Ok();
  return error(SCAPE_ERR_REMOTE, "who connected was not invited");
}

Status Greeting::answer(const Invitation& invitation) {
  {
    std::lock_guard<std::mutex> lock(worker_->mutex());
    number_ = worker_->next_connection();
    refusal_ = library_ == invitation.library
                   ? worker_->channels_to(rails_, who_, number_, &channels_)
                   : mismatch(who_, library_, invitation.library);
  }
  WireWriter answer;
  answer.put(static_cast<uint8_t>(refusal_.ok()));
  answer.put_text(refusal_.ok() ? here() : refusal_.message());
  answer.put(number_);
  put_rails(worker_->addresses(), &answer);
  frames_.put(answer.bytes());
  return Status::Ok();
}

Status Greeting::finish(std::unique_ptr<Connection>* out, bool* stranger) {
  bool done = false;
  SCAPE_RETURN_IF_ERROR(frames_.push(&done));
  if (!done) {
    if (Clock::now() < deadline_) return Status::Ok();
    return error(SCAPE_ERR_TIMEOUT, "who connected takes no answer");
  }
  *stranger = false;
  if (!refusal_.ok()) return refusal_;
  *out = std::make_unique<Connection>(std::move(worker_), std::move(frames_.socket()), false,
                                      std::move(channels_), number_, who_);
  return Status::Ok();
}

}  // namespace scape::net
