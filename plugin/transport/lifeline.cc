#include "plugin/transport/lifeline.h"

#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <iterator>
#include <set>
#include <thread>
#include <utility>

#include "base/log.h"
#include "plugin/transport/wire.h"

namespace scape::plugin {
namespace {

enum FrameKind : uint8_t {
  kFailure = 1,
  kDescriptor = 2,
  kGoodbye = 3,
  kDeparture = 4,
  kRoll = 5,
  kPresent = 6
};

struct FrameHeader {
  uint8_t kind = 0;
  uint8_t channel = 0;
  uint16_t length = 0;
  int32_t rank = 0;
  int32_t code = 0;
};
constexpr size_t kMaxFrameBody = 2048;
// Messages that a rank sent before it ended may still be on their way through the transport.
constexpr auto kDepartureGrace = std::chrono::milliseconds(1000);
constexpr int64_t kPollEveryNs = 1'000'000;
// While links are made: how soon, and how often, a rank that does not come is looked for, and how
// long those that do not know of a failure yet are waited for.
constexpr auto kLookAfter = std::chrono::seconds(1);
constexpr auto kLinger = std::chrono::seconds(1);
// All ranks time out at about the same time: a roll that is called so soon after another is the
// same.
constexpr auto kSameRoll = std::chrono::milliseconds(200);
constexpr auto kRollTime = std::chrono::seconds(1);
constexpr size_t kMaxQueued = size_t{256} << 10;
// Taken from a peer at once; what is more waits for the next time.
constexpr size_t kMaxTaken = size_t{64} << 10;
// Descriptors kept of calls that this rank has not made yet, over all peers.
constexpr size_t kMaxEarly = size_t{64} << 10;

int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now().time_since_epoch())
      .count();
}

std::set<int> link_ranks(int rank, int size) {
  std::set<int> ranks;
  for (int distance = 1; distance < size; distance *= 2) {
    ranks.insert((rank + distance) % size);
    ranks.insert((rank - distance + size) % size);
  }
  ranks.erase(rank);
  return ranks;
}

}  // namespace

bool Descriptor::operator==(const Descriptor& other) const {
  return std::memcmp(this, &other, sizeof *this) == 0;
}

uint64_t Descriptor::digest() const {
  // Eight words through a multiply-and-fold mixer: cheap, and every bit counts.
  uint64_t words[8];
  std::memcpy(words, this, sizeof words);
  uint64_t hash = 0x9e3779b97f4a7c15;
  for (const uint64_t word : words) {
    const unsigned __int128 product =
        static_cast<unsigned __int128>(hash ^ word) * ((word << 1 | 1) ^ 0xd6e8feb86659fd93);
    hash = static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
    hash = (hash ^ (hash >> 29)) * 0xbf58476d1ce4e5b9;
  }
  return hash ^ (hash >> 32);
}

Status Lifeline::connect(int rank, int size, uint64_t cookie, Socket listener,
                         std::vector<Address> addresses, std::vector<Endpoint> members,
                         Deadline deadline, std::shared_ptr<Lifeline>* out) {
  std::shared_ptr<Lifeline> lifeline(new Lifeline);
  lifeline->rank_ = rank;
  lifeline->size_ = size;
  lifeline->cookie_ = cookie;
  lifeline->listener_ = std::move(listener);
  lifeline->addresses_ = std::move(addresses);
  lifeline->members_ = std::move(members);
  SCAPE_RETURN_IF_ERROR(lifeline->add_links(deadline));
  *out = std::move(lifeline);
  return Status::Ok();
}

Status Lifeline::add_links(Deadline deadline) {
  Doorman doorman(listener_, addresses_, cookie_);
  std::set<int> awaited;
  const std::set<int> peers = link_ranks(rank_, size_);
  std::copy(peers.upper_bound(rank_), peers.end(), std::inserter(awaited, awaited.end()));
  Status status = dial(peers, deadline);
  if (status.ok()) status = await_links(&doorman, &awaited, deadline);
  if (status.ok()) return status;
  // Those still on their way hear the reason too, instead of finding a closed door.
  std::lock_guard<std::mutex> lock(mutex_);
  const Deadline end = Clock::now() + kLinger;
  do {
    accept_guests(&doorman, end, &awaited);
  } while (!awaited.empty() && Clock::now() < end);
  record_failure(status, nullptr);
  return status;
}

// Connects to the lower ranks. It succeeds before the other side accepts, so nobody waits for
// anybody here.
Status Lifeline::dial(const std::set<int>& peers, Deadline deadline) {
  WireWriter body;
  body.put(static_cast<int32_t>(rank_));
  for (const int peer : peers) {
    if (peer > rank_) break;
    Link link;
    link.rank = peer;
    link.nodded = false;
    const Endpoint& endpoint = members_[static_cast<size_t>(peer)];
    if (const Status status = introduce(endpoint, cookie_, body.bytes(), deadline, &link.socket);
        !status.ok()) {
      return error(
          SCAPE_ERR_SYSTEM,
          "%s; rank %d listens there: open the way from this host, or choose the interface "
          "with NCCL_SOCKET_IFNAME",
          status.message().c_str(), peer);
    }
    links_.push_back(std::move(link));
  }
  return Status::Ok();
}

void Lifeline::accept_guests(Doorman* doorman, Deadline until, std::set<int>* awaited) {
  std::vector<int> watched;
  for (const Link& link : links_) {
    if (link.socket.valid()) watched.push_back(link.socket.fd());
  }
  std::vector<Guest> guests;
  doorman->wait(until, watched, &guests);
  for (Guest& guest : guests) {
    WireReader reader(guest.body);
    const int peer = reader.get<int32_t>();
    if (!reader.ok() || awaited->erase(peer) == 0) continue;
    Link link;
    link.rank = peer;
    link.socket = std::move(guest.socket);
    links_.push_back(std::move(link));
  }
}

// Until the higher ranks have connected and the lower ones have accepted.
Status Lifeline::await_links(Doorman* doorman, std::set<int>* awaited, Deadline deadline) {
  std::lock_guard<std::mutex> lock(mutex_);
  Deadline look = Clock::now() + kLookAfter;
  for (;;) {
    const auto silent =
        std::find_if(links_.begin(), links_.end(), [](const Link& link) { return !link.nodded; });
    if (awaited->empty() && silent == links_.end()) return Status::Ok();
    accept_guests(doorman, std::min(deadline, look), awaited);
    for (Link& link : links_) read_link(&link);
    if (failed()) return failure_;
    // Who went after its link was made is the first call's affair: the creation needs it no more.
    for (const auto& [rank, gone] : gone_) {
      const bool linked =
          awaited->count(rank) == 0 &&
          std::none_of(links_.begin(), links_.end(), [rank = rank](const Link& link) {
            return link.rank == rank && !link.nodded;
          });
      if (gone.orderly || linked) continue;
      return error(SCAPE_ERR_REMOTE,
                   "rank %d went away during the creation; look at its own message", rank);
    }
    if (Clock::now() >= deadline) {
      return error(SCAPE_ERR_TIMEOUT,
                   "bootstrap: rank %d did not connect in time (SCAPE_BOOTSTRAP_TIMEOUT); see its "
                   "own message",
                   awaited->empty() ? silent->rank : *awaited->begin());
    }
    if (Clock::now() < look) continue;
    look = Clock::now() + kLookAfter;
    // Who has not come may have died: nobody listens there then.
    for (const int peer : *awaited) {
      Socket socket;
      bool refused = false;
      const Endpoint& endpoint = members_[static_cast<size_t>(peer)];
      if (connect_to(endpoint, look, &socket, &refused).ok() || !refused) continue;
      return error(
          SCAPE_ERR_REMOTE,
          "rank %d ended during the creation (nothing listens at %s any more); look at its "
          "own message",
          peer, endpoint.text().c_str());
    }
  }
}

Lifeline::~Lifeline() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!failed()) send_to_all(kGoodbye, 0, rank_, 0, {});
}

void Lifeline::set_describe(Describe describe) {
  std::lock_guard<std::mutex> lock(mutex_);
  describe_ = describe;
}

Status Lifeline::status() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return failure_;
}

void Lifeline::poll(bool always) {
  const int64_t now = now_ns();
  if (!always) {
    if (now - last_poll_ns_.load(std::memory_order_relaxed) < kPollEveryNs) return;
    std::unique_lock<std::mutex> lock(mutex_, std::try_to_lock);
    if (!lock.owns_lock()) return;
    last_poll_ns_.store(now, std::memory_order_relaxed);
    for (Link& link : links_) read_link(&link);
    return;
  }
  std::lock_guard<std::mutex> lock(mutex_);
  last_poll_ns_.store(now, std::memory_order_relaxed);
  for (Link& link : links_) read_link(&link);
}

void Lifeline::read_link(Link* link) {
  flush_link(link);
  bool closed = false;
  while (link->socket.valid() && !closed && link->in.size() < kMaxTaken) {
    std::byte buffer[4096];
    const ssize_t got = ::recv(link->socket.fd(), buffer, sizeof buffer, 0);
    if (got > 0) {
      link->in.insert(link->in.end(), buffer, buffer + got);
    } else if (got == 0 || (errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR)) {
      closed = true;
    } else if (errno != EINTR) {
      break;
    }
  }
  size_t at = 0;
  if (!link->nodded && link->in.size() >= sizeof(uint64_t)) {
    at = sizeof(uint64_t);
    link->nodded = true;
    closed = closed || std::memcmp(link->in.data(), &kNod, sizeof kNod) != 0;
  }
  while (link->nodded && link->in.size() - at >= sizeof(FrameHeader)) {
    FrameHeader header;
    std::memcpy(&header, link->in.data() + at, sizeof header);
    if (header.length > kMaxFrameBody) {
      closed = true;
      break;
    }
    if (link->in.size() - at < sizeof header + header.length) break;
    handle_frame(link, header.kind, header.channel, header.rank, header.code,
                 std::span(link->in).subspan(at + sizeof header, header.length));
    at += sizeof header + header.length;
  }
  link->in.erase(link->in.begin(), link->in.begin() + static_cast<std::ptrdiff_t>(at));
  if (closed) {
    link->socket.close();
    note_departure(link->rank, link->said_goodbye, nullptr);
  }
}

void Lifeline::handle_frame(Link* link, uint8_t kind, uint8_t channel, int32_t rank, int32_t code,
                            std::span<const std::byte> body) {
  switch (kind) {
    case kFailure: {
      const std::string message(reinterpret_cast<const char*>(body.data()), body.size());
      record_failure(told_error(code, message), link);
      break;
    }
    case kDescriptor: {
      if (body.size() != sizeof(Descriptor) || channel >= channels_.size()) break;
      Descriptor theirs;
      std::memcpy(&theirs, body.data(), sizeof theirs);
      Channel& mine = channels_[channel];
      if (theirs.call >= mine.calls) {
        if (mine.early.size() < kMaxEarly) mine.early[{theirs.call, link->rank}] = theirs;
      } else if (mine.calls - theirs.call <= mine.history.size()) {
        compare(mine.history[theirs.call % mine.history.size()], link->rank, theirs);
      }
      break;
    }
    case kGoodbye:
      link->said_goodbye = true;
      note_departure(link->rank, true, nullptr);
      break;
    case kDeparture:
      if (rank >= 0 && rank < size_ && rank != rank_) note_departure(rank, code != 0, link);
      break;
    case kRoll:
      answer_roll(link);
      break;
    case kPresent:
      note_presence(rank, code, body, link);
      break;
    default:
      break;
  }
}

void Lifeline::flush_link(Link* link) {
  while (!link->out.empty() && link->socket.valid()) {
    const ssize_t sent =
        ::send(link->socket.fd(), link->out.data(), link->out.size(), MSG_NOSIGNAL);
    if (sent <= 0) {
      if (sent < 0 && errno == EINTR) continue;
      return;
    }
    link->out.erase(link->out.begin(), link->out.begin() + sent);
  }
}

void Lifeline::send_frame(Link* link, uint8_t kind, uint8_t channel, int32_t rank, int32_t code,
                          std::span<const std::byte> body) {
  // A peer that is stopped takes nothing: what it would have to be told is bounded.
  if (!link->socket.valid() || link->out.size() > kMaxQueued) return;
  const FrameHeader header{kind, channel, static_cast<uint16_t>(body.size()), rank, code};
  const auto* bytes = reinterpret_cast<const std::byte*>(&header);
  link->out.insert(link->out.end(), bytes, bytes + sizeof header);
  link->out.insert(link->out.end(), body.begin(), body.end());
  flush_link(link);
}

void Lifeline::send_to_all(uint8_t kind, uint8_t channel, int32_t rank, int32_t code,
                           std::span<const std::byte> body, const Link* except) {
  for (Link& link : links_) {
    if (&link != except) send_frame(&link, kind, channel, rank, code, body);
  }
}

void Lifeline::note_departure(int rank, bool orderly, const Link* from) {
  const auto [entry, fresh] = gone_.try_emplace(rank, Gone{Clock::now(), orderly});
  if (!fresh) return;
  SCAPE_DEBUG("rank %d has %s", rank, orderly ? "left" : "ended");
  send_to_all(kDeparture, 0, rank, orderly ? 1 : 0, {}, from);
}

void Lifeline::record_failure(const Status& why, const Link* from) {
  if (failed()) return;
  failure_ = why;
  failed_.store(true, std::memory_order_release);
  const std::string& message = why.message();
  const auto bytes =
      std::as_bytes(std::span(message)).first(std::min(message.size(), kMaxFrameBody));
  send_to_all(kFailure, 0, rank_, why.code(), bytes, from);
}

void Lifeline::fail(const Status& why) {
  std::lock_guard<std::mutex> lock(mutex_);
  record_failure(why, nullptr);
}

std::vector<Lifeline::Departure> Lifeline::departures() const {
  std::lock_guard<std::mutex> lock(mutex_);
  std::vector<Departure> departures;
  for (const auto& [rank, gone] : gone_) {
    if (Clock::now() - gone.when >= kDepartureGrace) departures.push_back({rank, gone.orderly});
  }
  return departures;
}

void Lifeline::answer_roll(const Link* from) {
  const Clock::time_point now = Clock::now();
  if (now - roll_called_ < kSameRoll) return;
  roll_called_ = now;
  send_to_all(kRoll, 0, rank_, 0, {}, from);
  const std::array<uint64_t, 2> calls{channels_[0].calls, channels_[1].calls};
  send_to_all(kPresent, 0, rank_, ++answers_, std::as_bytes(std::span(calls)));
}

void Lifeline::note_presence(int rank, int32_t number, std::span<const std::byte> body,
                             const Link* from) {
  if (rank < 0 || rank >= size_ || rank == rank_ || body.size() != sizeof(Presence::calls)) return;
  Presence& known = present_[rank];
  if (number <= known.number) return;  // it came another way, too
  known.number = number;
  known.when = Clock::now();
  std::memcpy(known.calls.data(), body.data(), body.size());
  send_to_all(kPresent, 0, rank, number, body, from);
}

Lifeline::Roll Lifeline::call_roll(int channel) {
  const Clock::time_point until = Clock::now() + kRollTime;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    answer_roll(nullptr);
  }
  for (;;) {
    poll(true);
    Roll roll;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      const auto at = static_cast<size_t>(channel);
      for (int rank = 0; rank < size_; ++rank) {
        if (rank == rank_) continue;
        const auto found = present_.find(rank);
        // An answer may overtake the call.
        if (found == present_.end() || found->second.when < roll_called_ - kSameRoll) {
          roll.silent.push_back(rank);
        } else if (found->second.calls[at] < channels_[at].calls) {
          roll.behind.push_back(rank);
        }
      }
    }
    if (roll.silent.empty() || failed() || Clock::now() >= until) return roll;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

void Lifeline::started(int channel, const Descriptor& descriptor) {
  std::lock_guard<std::mutex> lock(mutex_);
  Channel& mine = channels_[static_cast<size_t>(channel)];
  mine.history[descriptor.call % mine.history.size()] = descriptor;
  mine.calls = descriptor.call + 1;
  while (!mine.early.empty() && mine.early.begin()->first.first <= descriptor.call) {
    const auto [key, theirs] = *mine.early.begin();
    mine.early.erase(mine.early.begin());
    if (key.first == descriptor.call) compare(descriptor, key.second, theirs);
  }
}

void Lifeline::publish(int channel, const Descriptor& descriptor) {
  std::lock_guard<std::mutex> lock(mutex_);
  send_to_all(kDescriptor, static_cast<uint8_t>(channel), rank_, 0,
              std::as_bytes(std::span(&descriptor, 1)));
}

void Lifeline::compare(const Descriptor& mine, int peer, const Descriptor& theirs) {
  if (mine == theirs || describe_ == nullptr) return;
  const bool first = rank_ < peer;
  record_failure(error(SCAPE_ERR_MISMATCH,
                       "call %llu differs: rank %d calls %s, rank %d calls %s; let all ranks make "
                       "the same calls in one order",
                       static_cast<unsigned long long>(mine.call), first ? rank_ : peer,
                       describe_(first ? mine : theirs).c_str(), first ? peer : rank_,
                       describe_(first ? theirs : mine).c_str()),
                 nullptr);
}

void Lifeline::append_poll_entries(std::vector<pollfd>* entries) const {
  std::lock_guard<std::mutex> lock(mutex_);
  for (const Link& link : links_) {
    if (!link.socket.valid()) continue;
    entries->push_back(
        {link.socket.fd(), static_cast<short>(POLLIN | (link.out.empty() ? 0 : POLLOUT)), 0});
  }
}

}  // namespace scape::plugin
