// How ranks find each other: everyone connects to one listening socket (the root), says who it is
// and how it can be reached, and gets the list of all once it is complete.
//
// Strangers on the port (wrong cookie, rubbish, or silence) are dropped and hold nobody up. What
// the ranks must agree on is compared, and a difference reported to every rank that came.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/status.h"
#include "plugin/transport/socket.h"

namespace scape::plugin {

// What a unique id says.
struct Invitation {
  static constexpr uint16_t kVersion = 2;
  static constexpr uint8_t kHostMode = 1;

  uint16_t version = kVersion;
  uint8_t mode = kHostMode;
  uint64_t cookie = 0;  // strangers do not know it
  Endpoint root;

  std::array<std::byte, 128> encode() const;
  // False when the bytes are no id of ours.
  static bool decode(const std::array<std::byte, 128>& bytes, Invitation* out);
};

// 64 bits from the system's random source.
Status random_cookie(uint64_t* out);

// The most ranks that a communicator can have.
inline constexpr int kMaxRanks = 1 << 14;

// What one rank brings to the meeting.
struct Attendance {
  int rank = 0;
  int size = 1;
  std::string transport;
  std::string purpose;  // "create", "split", ...: alike on all ranks
  Endpoint listener;
  std::vector<std::byte> blob;  // the transport's address
};

struct Member {
  Endpoint listener;
  std::vector<std::byte> blob;
};

// A connection that knew the cookie.
struct Guest {
  Socket socket;
  std::vector<std::byte> body;
};

// Accepts connections at a listener and hands on those that say a well-formed hello with the cookie
// within seconds; the others are dropped. Never blocks on any of them.
class Doorman {
 public:
  Doorman(const Socket& listener, std::vector<Address> addresses, uint64_t cookie);

  // Waits until a guest is there, one of the sockets in `watched` is readable, or the deadline.
  // Fills *guests with those who came.
  void wait(Deadline deadline, const std::vector<int>& watched, std::vector<Guest>* guests);

 private:
  struct Visitor {
    Socket socket;
    std::vector<std::byte> bytes;
    Deadline until;
  };
  bool listen_to(Visitor* visitor, std::vector<Guest>* guests);

  const Socket& listener_;
  const std::vector<Address> addresses_;
  const uint64_t cookie_;
  std::vector<Visitor> visitors_;
};

// A doorman's first word to a visitor who knew the cookie.
inline constexpr uint64_t kNod = 0x3131444f4e414353;  // "SCANOD11"

// The visitor's side: connects and says hello. `refused` tells that nothing listens there.
Status introduce(const Endpoint& to, uint64_t cookie, const std::vector<std::byte>& body,
                 Deadline deadline, Socket* out, bool* refused = nullptr);
// Then waits for the doorman's nod; an error where the other side goes, or is no doorman.
Status await_nod(const Socket& socket, Deadline deadline);

// Serves one meeting at the listener: returns when all ranks have the list, or have been told why
// there will be none. first_wait_s bounds the wait for the first rank, rest_wait_s that for the
// others. `stop`, a descriptor or -1, ends it when readable.
void serve_meeting(const Socket& listener, const std::vector<Address>& addresses, uint64_t cookie,
                   double first_wait_s, double rest_wait_s, int stop);

// The same, and attends it too, for a rank 0 that is the root itself. *members is in rank order.
Status hold_meeting(const Socket& listener, const std::vector<Address>& addresses, uint64_t cookie,
                    const Attendance& mine, double timeout_s, std::vector<Member>* members);

// Attends a meeting. `at_rank_0`: that rank holds it, and may come late. *members is in rank order.
Status attend_meeting(const Endpoint& root, uint64_t cookie, bool at_rank_0, const Attendance& mine,
                      double timeout_s, std::vector<Member>* members);

// Opens a root in this process: a listener, and a thread that serves one meeting and ends.
Status open_root(double timeout_s, Invitation* out);

// Waits briefly until the root with this cookie, where it is in this process, is gone; with
// `cancel`, ends it first.
void leave_root(uint64_t cookie, bool cancel);

}  // namespace scape::plugin
