#include "plugin/transport/bootstrap.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <cstring>
#include <map>
#include <mutex>
#include <thread>

#include "base/fault.h"
#include "base/log.h"
#include "base/settings.h"
#include "base/thread.h"
#include "plugin/transport/wire.h"

namespace scape::plugin {
namespace {

constexpr uint64_t kIdMagic = 0x3144494550414353;     // "SCAPEID1"
constexpr uint64_t kHelloMagic = 0x314f4c4c45484353;  // "SCHELLO1"
constexpr size_t kMaxBody = size_t{64} << 10;
constexpr size_t kMaxVisitors = 256;  // not yet introduced, at once
constexpr double kHelloSeconds = 5;   // to say hello in
constexpr double kReplySeconds = 10;  // to take the list in
constexpr double kLingerSeconds = 3;  // latecomers of a failed meeting are told why
constexpr size_t kHelloBytes = 24;    // magic, cookie, version and length
constexpr uint32_t kProtocol = 1;

uint32_t length_of(const std::vector<std::byte>& hello) {
  uint32_t length;
  std::memcpy(&length, hello.data() + 20, sizeof length);
  return length;
}

std::string list_ranks(const std::vector<int>& ranks) {
  std::string text = ranks.size() == 1 ? "rank" : "ranks";
  for (size_t i = 0; i < ranks.size(); ++i) {
    if (i == 16) return text + format(" and %zu more", ranks.size() - i);
    text += (i == 0 ? " " : ", ") + std::to_string(ranks[i]);
  }
  return text;
}

bool parse_attendance(const std::vector<std::byte>& body, Attendance* out) {
  WireReader reader(body);
  out->rank = reader.get<int32_t>();
  out->size = reader.get<int32_t>();
  out->transport = reader.get_text();
  out->purpose = reader.get_text();
  out->listener = reader.get_endpoint();
  out->blob = reader.get_bytes();
  return reader.ok();
}

std::vector<std::byte> encode_reply(const Status& status, const std::vector<std::byte>& list) {
  WireWriter inner;
  inner.put(static_cast<int32_t>(status.code()));
  inner.put_text(status.message());
  WireWriter writer;
  writer.put(static_cast<uint64_t>(inner.bytes().size() + list.size()));
  writer.append(inner.bytes().data(), inner.bytes().size());
  writer.append(list.data(), list.size());
  return writer.bytes();
}

// The other side has closed, or sends what it must not.
bool has_gone(const Socket& socket) {
  char byte;
  const ssize_t got = ::recv(socket.fd(), &byte, 1, MSG_PEEK);
  return got >= 0 || (errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR);
}

// Compares a rank with the first that came; ok when they agree.
Status compare(const Attendance& first, const Attendance& other) {
  if (first.size < 1 || first.size > kMaxRanks) {
    return error(SCAPE_ERR_ARGUMENT, "rank %d gives %d ranks; a communicator has 1 to %d",
                 first.rank, first.size, kMaxRanks);
  }
  if (other.size != first.size) {
    return error(SCAPE_ERR_MISMATCH,
                 "rank %d gives %d ranks, rank %d gives %d; start all with one number", first.rank,
                 first.size, other.rank, other.size);
  }
  if (other.transport != first.transport) {
    return error(SCAPE_ERR_MISMATCH,
                 "rank %d uses transport %s, rank %d uses %s; set SCAPE_TRANSPORT alike",
                 first.rank, first.transport.c_str(), other.rank, other.transport.c_str());
  }
  if (other.purpose != first.purpose) {
    return error(
        SCAPE_ERR_MISMATCH,
        "rank %d calls %s, rank %d calls %s on one communicator; let all make the same call",
        first.rank, first.purpose.c_str(), other.rank, other.purpose.c_str());
  }
  if (other.rank < 0 || other.rank >= first.size) {
    return error(SCAPE_ERR_ARGUMENT, "rank %d is not in 0 .. %d", other.rank, first.size - 1);
  }
  return Status::Ok();
}

// The roots of this process, by cookie.
struct Roots {
  std::mutex mutex;
  std::condition_variable changed;
  struct Root {
    int stop;       // an eventfd that ends it
    pid_t process;  // whose thread serves it: a forked child inherits the entry, not the thread
    std::thread thread;
    bool awaited = false;  // somebody will join the thread
    bool finished = false;
  };
  std::map<uint64_t, Root> open;

  static Roots& instance() {
    static Roots* const roots = new Roots;  // never destroyed: its threads may outlast main()
    return *roots;
  }
};

}  // namespace

std::array<std::byte, 128> Invitation::encode() const {
  WireWriter writer;
  writer.put(kIdMagic);
  writer.put(version);
  writer.put(mode);
  writer.put(cookie);
  writer.put_endpoint(root);
  std::array<std::byte, 128> bytes{};
  static_assert(8 + 2 + 1 + 8 + 3 + kMaxAddresses * 21 <= 128);
  std::memcpy(bytes.data(), writer.bytes().data(), writer.bytes().size());
  return bytes;
}

bool Invitation::decode(const std::array<std::byte, 128>& bytes, Invitation* out) {
  WireReader reader(bytes);
  if (reader.get<uint64_t>() != kIdMagic) return false;
  out->version = reader.get<uint16_t>();
  out->mode = reader.get<uint8_t>();
  out->cookie = reader.get<uint64_t>();
  out->root = reader.get_endpoint();
  return reader.ok() && !out->root.addresses.empty();
}

Status random_cookie(uint64_t* out) {
  if (::getrandom(out, sizeof *out, 0) == static_cast<ssize_t>(sizeof *out)) return Status::Ok();
  return error(SCAPE_ERR_SYSTEM, "bootstrap: no random numbers from the system: %s",
               std::strerror(errno));
}

Doorman::Doorman(const Socket& listener, std::vector<Address> addresses, uint64_t cookie)
    : listener_(listener), addresses_(std::move(addresses)), cookie_(cookie) {}

// Reads what has come. True while the visitor may stay.
bool Doorman::listen_to(Visitor* visitor, std::vector<Guest>* guests) {
  for (;;) {
    const size_t have = visitor->bytes.size();
    const size_t want = have < kHelloBytes ? kHelloBytes : kHelloBytes + length_of(visitor->bytes);
    if (have == want && have > kHelloBytes) {
      Guest guest;
      guest.body.assign(visitor->bytes.begin() + kHelloBytes, visitor->bytes.end());
      // The nod tells the visitor that it is at the right door.
      const Status sent = send_all(visitor->socket, &kNod, sizeof kNod, Clock::now());
      guest.socket = std::move(visitor->socket);
      if (sent.ok()) guests->push_back(std::move(guest));
      return false;
    }
    visitor->bytes.resize(want);
    const ssize_t got = ::recv(visitor->socket.fd(), visitor->bytes.data() + have, want - have, 0);
    visitor->bytes.resize(have + static_cast<size_t>(std::max<ssize_t>(got, 0)));
    if (got == 0) return false;
    if (got < 0) return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR;
    if (have < kHelloBytes && visitor->bytes.size() == kHelloBytes) {
      WireReader reader(visitor->bytes);
      const bool known = reader.get<uint64_t>() == kHelloMagic && reader.get<uint64_t>() == cookie_;
      const uint32_t protocol = reader.get<uint32_t>();
      const uint32_t length = reader.get<uint32_t>();
      if (!known || protocol != kProtocol || length == 0 || length > kMaxBody) {
        SCAPE_DEBUG("bootstrap: dropped a connection that does not know the cookie");
        return false;
      }
    }
  }
}

void Doorman::wait(Deadline deadline, const std::vector<int>& watched, std::vector<Guest>* guests) {
  for (;;) {
    std::vector<pollfd> entries;
    entries.push_back({listener_.fd(), POLLIN, 0});
    for (const int fd : watched) entries.push_back({fd, POLLIN, 0});
    Deadline next = deadline;
    for (const Visitor& visitor : visitors_) {
      entries.push_back({visitor.socket.fd(), POLLIN, 0});
      next = std::min(next, visitor.until);
    }
    const int ready =
        ::poll(entries.data(), static_cast<nfds_t>(entries.size()), milliseconds_until(next));
    const auto now = Clock::now();
    bool news = false;
    if (ready > 0) {
      for (size_t i = 0; i < watched.size(); ++i) news = news || entries[1 + i].revents != 0;
      Socket socket;
      while (accept_connection(listener_, addresses_, &socket)) {
        // Too many that say nothing: the longest silent one goes.
        if (visitors_.size() >= kMaxVisitors) visitors_.erase(visitors_.begin());
        visitors_.push_back(
            {std::move(socket),
             {},
             now + std::chrono::milliseconds(static_cast<int>(kHelloSeconds * 1000))});
      }
    }
    std::vector<Visitor> staying;
    for (Visitor& visitor : visitors_) {
      if (listen_to(&visitor, guests) && now < visitor.until) staying.push_back(std::move(visitor));
    }
    visitors_ = std::move(staying);
    if (news || !guests->empty() || now >= deadline) return;
  }
}

Status introduce(const Endpoint& to, uint64_t cookie, const std::vector<std::byte>& body,
                 Deadline deadline, Socket* out, bool* refused) {
  Socket socket;
  SCAPE_RETURN_IF_ERROR(connect_to(to, deadline, &socket, refused));
  WireWriter hello;
  hello.put(kHelloMagic);
  hello.put(cookie);
  hello.put(kProtocol);
  hello.put_bytes(body);
  SCAPE_RETURN_IF_ERROR(send_all(socket, hello.bytes().data(), hello.bytes().size(), deadline));
  *out = std::move(socket);
  return Status::Ok();
}

Status await_nod(const Socket& socket, Deadline deadline) {
  uint64_t nod = 0;
  SCAPE_RETURN_IF_ERROR(recv_all(socket, &nod, sizeof nod, deadline));
  if (nod == kNod) return Status::Ok();
  return error(SCAPE_ERR_REMOTE, "bootstrap: what answers is not scape");
}

namespace {

struct Rank {
  Socket socket;  // none where it is the caller
  Attendance attendance;
};

// Until all ranks have the list, or the reason why there will be none, which is returned.
// `present`: those who are there at the start, and at the end all in rank order. Nobody may come at
// all, which is no failure.
Status gather(const Socket& listener, const std::vector<Address>& addresses, uint64_t cookie,
              double first_wait_s, double rest_wait_s, int stop, std::vector<Rank>* all) {
  Doorman doorman(listener, addresses, cookie);
  std::vector<Rank>& present = *all;
  Status failure;
  Deadline deadline = seconds_from_now(first_wait_s);
  const auto tell = [](const Socket& socket, const std::vector<std::byte>& reply) {
    if (!socket.valid()) return;
    if (const Status status =
            send_all(socket, reply.data(), reply.size(), seconds_from_now(kReplySeconds));
        !status.ok()) {
      SCAPE_DEBUG("bootstrap: a rank did not take the reply: %s", status.message().c_str());
    }
  };
  while (failure.ok()) {
    if (!present.empty() && present.size() == static_cast<size_t>(present.front().attendance.size))
      break;
    std::vector<int> watched;
    for (const Rank& rank : present) {
      if (rank.socket.valid()) watched.push_back(rank.socket.fd());
    }
    if (stop >= 0) watched.push_back(stop);
    std::vector<Guest> guests;
    doorman.wait(deadline, watched, &guests);
    if (stop >= 0) {
      pollfd entry{stop, POLLIN, 0};
      if (::poll(&entry, 1, 0) > 0) return Status::Ok();
    }
    for (const Rank& rank : present) {
      if (rank.socket.valid() && has_gone(rank.socket)) {
        failure = error(SCAPE_ERR_REMOTE,
                        "rank %d went away during the creation; look at its own message",
                        rank.attendance.rank);
      }
    }
    for (Guest& guest : guests) {
      Rank rank{std::move(guest.socket), {}};
      if (!parse_attendance(guest.body, &rank.attendance)) continue;
      if (present.empty()) deadline = seconds_from_now(rest_wait_s);
      const Attendance& first = present.empty() ? rank.attendance : present.front().attendance;
      if (failure.ok()) failure = compare(first, rank.attendance);
      for (const Rank& other : present) {
        if (failure.ok() && other.attendance.rank == rank.attendance.rank) {
          failure =
              error(SCAPE_ERR_USAGE, "rank %d came twice; give every process a rank of its own",
                    rank.attendance.rank);
        }
      }
      present.push_back(std::move(rank));
    }
    if (failure.ok() && guests.empty() && Clock::now() >= deadline) {
      if (present.empty()) return Status::Ok();  // nobody to tell
      std::vector<int> missing;
      for (int r = 0; r < present.front().attendance.size; ++r) {
        if (std::none_of(present.begin(), present.end(),
                         [r](const Rank& rank) { return rank.attendance.rank == r; })) {
          missing.push_back(r);
        }
      }
      failure = error(
          SCAPE_ERR_TIMEOUT,
          "%s of %d did not come within %g s (SCAPE_BOOTSTRAP_TIMEOUT); see whether they started",
          list_ranks(missing).c_str(), present.front().attendance.size, rest_wait_s);
    }
  }
  if (!failure.ok()) {
    const std::vector<std::byte> reply = encode_reply(failure, {});
    for (const Rank& rank : present) tell(rank.socket, reply);
    // Those still on their way hear the reason too, instead of finding a closed door.
    const Deadline end = std::min(seconds_from_now(kLingerSeconds), seconds_from_now(rest_wait_s));
    std::vector<int> watched;
    if (stop >= 0) watched.push_back(stop);
    while (Clock::now() < end &&
           present.size() < static_cast<size_t>(present.front().attendance.size)) {
      std::vector<Guest> guests;
      doorman.wait(end, watched, &guests);
      if (guests.empty()) break;
      for (Guest& guest : guests) {
        tell(guest.socket, reply);
        present.push_back({std::move(guest.socket), {}});
      }
    }
    return failure;
  }
  std::sort(present.begin(), present.end(),
            [](const Rank& a, const Rank& b) { return a.attendance.rank < b.attendance.rank; });
  WireWriter list;
  for (const Rank& rank : present) {
    list.put_endpoint(rank.attendance.listener);
    list.put_bytes(rank.attendance.blob);
  }
  const std::vector<std::byte> reply = encode_reply(Status::Ok(), list.bytes());
  for (const Rank& rank : present) tell(rank.socket, reply);
  return Status::Ok();
}

}  // namespace

void serve_meeting(const Socket& listener, const std::vector<Address>& addresses, uint64_t cookie,
                   double first_wait_s, double rest_wait_s, int stop) {
  std::vector<Rank> present;
  if (const Status status =
          gather(listener, addresses, cookie, first_wait_s, rest_wait_s, stop, &present);
      !status.ok()) {
    SCAPE_DEBUG("bootstrap: no meeting: %s", status.message().c_str());
  }
}

Status hold_meeting(const Socket& listener, const std::vector<Address>& addresses, uint64_t cookie,
                    const Attendance& mine, double timeout_s, std::vector<Member>* members) {
  fault_point(Fault::kMeeting);
  std::vector<Rank> present;
  present.push_back({Socket(), mine});
  if (const Status status = gather(listener, addresses, cookie, timeout_s, timeout_s, -1, &present);
      !status.ok()) {
    return error(status.code(), "bootstrap: %s", status.message().c_str());
  }
  members->clear();
  for (Rank& rank : present) {
    members->push_back({std::move(rank.attendance.listener), std::move(rank.attendance.blob)});
  }
  return Status::Ok();
}

Status attend_meeting(const Endpoint& root, uint64_t cookie, bool at_rank_0, const Attendance& mine,
                      double timeout_s, std::vector<Member>* members) {
  WireWriter body;
  body.put(static_cast<int32_t>(mine.rank));
  body.put(static_cast<int32_t>(mine.size));
  body.put_text(mine.transport);
  body.put_text(mine.purpose);
  body.put_endpoint(mine.listener);
  body.put_bytes(mine.blob);
  const Deadline deadline = seconds_from_now(timeout_s);
  Socket socket;
  bool refused = false;
  if (const Status status = introduce(root, cookie, body.bytes(), deadline, &socket, &refused);
      !status.ok()) {
    if (!refused) return status;
    if (at_rank_0) {
      return error(
          SCAPE_ERR_REMOTE,
          "bootstrap: rank 0 does not listen at %s any more: it has given up or ended; see "
          "its own message",
          root.text().c_str());
    }
    return error(SCAPE_ERR_SYSTEM,
                 "bootstrap: nothing listens at %s: the unique id was used before, or the process "
                 "that made it has "
                 "ended; make a new id for each communicator",
                 root.text().c_str());
  }
  // A rank nods when it comes to the meeting itself.
  Status status =
      await_nod(socket, at_rank_0 ? deadline : std::min(deadline, seconds_from_now(kHelloSeconds)));
  if (at_rank_0 && !status.ok()) {
    return error(SCAPE_ERR_REMOTE,
                 "bootstrap: rank 0, which listens at %s, did not come within %g s "
                 "(SCAPE_BOOTSTRAP_TIMEOUT) or has ended; see its own message",
                 root.text().c_str(), timeout_s);
  }
  if (!status.ok()) {
    return error(SCAPE_ERR_SYSTEM,
                 "bootstrap: what listens at %s does not answer to this unique id: it was used "
                 "before, or the process that made it has ended; make a new id for each "
                 "communicator",
                 root.text().c_str());
  }
  fault_point(Fault::kMeeting);
  uint64_t length = 0;
  // The root names who is missing when the time is over: give it the chance.
  const Deadline patient = deadline + std::chrono::seconds(5);
  status = recv_all(socket, &length, sizeof length, patient);
  const uint64_t most = (uint64_t{kMaxBody} + 256) * static_cast<uint64_t>(mine.size) + 4096;
  if (!status.ok() || length > most) {
    return error(
        SCAPE_ERR_REMOTE,
        "bootstrap: the root at %s ended before all ranks had come (%s); see the process that "
        "made the unique id",
        root.text().c_str(), status.ok() ? "its reply is damaged" : status.message().c_str());
  }
  // It grows with what comes: a stranger's word on its length takes no memory.
  std::vector<std::byte> reply;
  while (reply.size() < length) {
    const size_t have = reply.size();
    reply.resize(std::min<size_t>(length, have + kMaxBody));
    SCAPE_RETURN_IF_ERROR(recv_all(socket, reply.data() + have, reply.size() - have, patient));
  }
  WireReader reader(reply);
  const auto code = reader.get<int32_t>();
  const std::string message = reader.get_text();
  if (code != SCAPE_OK) {
    return told_error(code, "bootstrap: " + message +
                                (code == SCAPE_ERR_TIMEOUT ? "; all meet at " + root.text() : ""));
  }
  members->clear();
  for (int r = 0; r < mine.size; ++r) {
    Member member;
    member.listener = reader.get_endpoint();
    member.blob = reader.get_bytes();
    members->push_back(std::move(member));
  }
  if (!reader.ok())
    return error(SCAPE_ERR_SYSTEM, "bootstrap: the root's list of ranks is damaged");
  return Status::Ok();
}

Status open_root(double timeout_s, Invitation* out) {
  std::vector<Address> addresses;
  SCAPE_RETURN_IF_ERROR(
      choose_addresses(settings().socket_ifname, settings().socket_family, &addresses));
  SCAPE_RETURN_IF_ERROR(random_cookie(&out->cookie));
  auto listener = std::make_shared<Socket>();
  SCAPE_RETURN_IF_ERROR(listen_on(addresses, listener.get(), &out->root.port));
  out->root.addresses = addresses;
  auto stop = std::make_shared<Socket>(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!stop->valid())
    return error(SCAPE_ERR_SYSTEM, "bootstrap: eventfd failed: %s", std::strerror(errno));
  const uint64_t cookie = out->cookie;
  Roots& roots = Roots::instance();
  std::lock_guard<std::mutex> lock(roots.mutex);
  Roots::Root& root = roots.open[cookie];
  root.stop = stop->fd();
  root.process = ::getpid();
  const Status status = start_thread(
      "the root of a unique id", &root.thread, [listener, stop, addresses, cookie, timeout_s] {
        // Ids are often made long before the ranks use them.
        serve_meeting(*listener, addresses, cookie, 10 * timeout_s, timeout_s, stop->fd());
        listener->close();
        Roots& all_roots = Roots::instance();
        std::lock_guard<std::mutex> ending(all_roots.mutex);
        stop->close();
        Roots::Root& self = all_roots.open[cookie];
        self.finished = true;
        if (self.awaited) {
          all_roots.changed.notify_all();
        } else {
          self.thread.detach();
          all_roots.open.erase(cookie);
        }
      });
  if (!status.ok()) roots.open.erase(cookie);
  return status;
}

void leave_root(uint64_t cookie, bool cancel) {
  Roots& roots = Roots::instance();
  std::unique_lock<std::mutex> lock(roots.mutex);
  const auto found = roots.open.find(cookie);
  if (found == roots.open.end() || found->second.process != ::getpid()) return;
  Roots::Root& root = found->second;
  // One of several ranks of this process is enough.
  if (root.awaited) return;
  root.awaited = true;
  if (cancel && !root.finished) {
    const uint64_t one = 1;
    if (::write(root.stop, &one, sizeof one) < 0)
      SCAPE_DEBUG("bootstrap: the root takes no signal");
  }
  roots.changed.wait_for(lock, std::chrono::seconds(1), [&] { return root.finished; });
  if (!root.finished) {
    root.awaited = false;
    return;
  }
  std::thread thread = std::move(root.thread);
  roots.open.erase(found);
  lock.unlock();
  thread.join();
}

}  // namespace scape::plugin
