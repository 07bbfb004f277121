// Lifeline: what the ranks of a communicator tell each other besides data, over TCP connections
// that live as long as the communicator and need no help from the transport.
//
// Each rank is connected with the ranks at distance 1, 2, 4, ... . Over these links travel
//   - the end of a rank: a killed process closes its connections;
//   - failures: the first one is passed on to everyone, with its sentence;
//   - descriptions of calls that do not get on: neighbours compare them, so that ranks which call
//   different
//     things hear what each of them called. A call that gets on sends none: its messages carry a
//     digest of the description in their tags, and ranks that differ never take each other's
//     messages;
//   - the roll, once a call has timed out: who answers, and how many calls each has started.
//
// Shared by a communicator and its side channel. Thread-safe; after connect() nothing blocks but
// call_roll().
#pragma once

#include <poll.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "base/status.h"
#include "plugin/transport/bootstrap.h"
#include "plugin/transport/socket.h"

namespace scape::plugin {

// What a collective call is: the same 64 bytes on all ranks.
struct Descriptor {
  uint64_t call = 0;  // number of the call on its channel
  uint64_t count = 0;
  uint64_t extra = 0;  // digest of whatever else must agree (counts per rank)
  int32_t root = -1;
  uint8_t operation = 0;
  uint8_t type = 0;
  uint8_t op = 0;
  uint8_t registered = 0;
  char name[24] = {};                         // cut, zero-terminated
  float learning_rate = 0, weight_decay = 0;  // of a registered buffer's last optimizer step

  bool operator==(const Descriptor& other) const;
  uint64_t digest() const;
};
static_assert(sizeof(Descriptor) == 64);

class Lifeline {
 public:
  // Makes the links: to lower ranks by connecting, from higher ones by accepting at `listener`.
  static Status connect(int rank, int size, uint64_t cookie, Socket listener,
                        std::vector<Address> addresses, std::vector<Endpoint> members,
                        Deadline deadline, std::shared_ptr<Lifeline>* out);
  // Says goodbye: peers then know that this rank left in order.
  ~Lifeline();

  // How a descriptor reads, for messages.
  using Describe = std::string (*)(const Descriptor&);
  void set_describe(Describe describe);

  // Where this rank listens, and everyone: for meetings after a failure.
  const Socket& listener() const { return listener_; }
  const std::vector<Endpoint>& members() const { return members_; }
  uint64_t cookie() const { return cookie_; }

  // Takes what has arrived. At most every millisecond does it look; `always` overrides.
  void poll(bool always = false);

  bool failed() const { return failed_.load(std::memory_order_acquire); }
  Status status() const;

  // Records the first failure and tells everyone. Later ones are ignored.
  void fail(const Status& why);

  // A rank whose end was noticed some time ago (long enough for its last messages to have been
  // taken), and how; -1: none. `orderly`: it said goodbye.
  struct Departure {
    int rank = -1;
    bool orderly = false;
  };
  std::vector<Departure> departures() const;

  // Who keeps the others, as far as it can be told: ranks that did not answer within a second
  // (stopped, in none of this library's calls, or cut off), and ranks that have started fewer calls
  // of the channel than this one. Every rank answers whose poll() is called.
  struct Roll {
    std::vector<int> silent, behind;
  };
  Roll call_roll(int channel);

  // Every call of a channel, in order, before its first message.
  void started(int channel, const Descriptor& descriptor);
  // Tells the neighbours what this rank is calling; once per call.
  void publish(int channel, const Descriptor& descriptor);

  // The descriptors that poll() reads, for sleeping until something arrives.
  void append_poll_entries(std::vector<pollfd>* entries) const;

 private:
  struct Link {
    int rank = -1;
    Socket socket;
    std::vector<std::byte> in;
    std::vector<std::byte> out;  // what the socket did not take yet
    bool said_goodbye = false;
    bool nodded = true;  // of a lower rank: has accepted
  };
  struct Channel {
    uint64_t calls = 0;  // so far
    std::array<Descriptor, 256> history{};
    // Of calls that this rank has not made yet, by call and rank.
    std::map<std::pair<uint64_t, int>, Descriptor> early;
  };
  // What a rank said when the roll was called.
  struct Presence {
    int32_t number = 0;  // its answers are numbered from 1
    Clock::time_point when;
    std::array<uint64_t, 2> calls{};  // by channel
  };
  struct Gone {
    Clock::time_point when;
    bool orderly = false;
  };

  Lifeline() = default;
  Status add_links(Deadline deadline);
  Status dial(const std::set<int>& peers, Deadline deadline);
  void accept_guests(Doorman* doorman, Deadline until, std::set<int>* awaited);
  Status await_links(Doorman* doorman, std::set<int>* awaited, Deadline deadline);
  void read_link(Link* link);
  void handle_frame(Link* link, uint8_t kind, uint8_t channel, int32_t rank, int32_t code,
                    std::span<const std::byte> body);
  void send_frame(Link* link, uint8_t kind, uint8_t channel, int32_t rank, int32_t code,
                  std::span<const std::byte> body);
  void send_to_all(uint8_t kind, uint8_t channel, int32_t rank, int32_t code,
                   std::span<const std::byte> body, const Link* except = nullptr);
  void flush_link(Link* link);
  void note_departure(int rank, bool orderly, const Link* from);
  void record_failure(const Status& why, const Link* from);
  void answer_roll(const Link* from);
  void note_presence(int rank, int32_t number, std::span<const std::byte> body, const Link* from);
  void compare(const Descriptor& mine, int peer, const Descriptor& theirs);

  int rank_ = 0, size_ = 1;
  uint64_t cookie_ = 0;
  Socket listener_;
  std::vector<Address> addresses_;
  std::vector<Endpoint> members_;

  mutable std::mutex mutex_;
  std::vector<Link> links_;
  std::array<Channel, 2> channels_;
  std::map<int, Gone> gone_;
  Clock::time_point roll_called_;
  int32_t answers_ = 0;
  std::map<int, Presence> present_;
  Describe describe_ = nullptr;
  Status failure_;
  std::atomic<bool> failed_{false};
  std::atomic<int64_t> last_poll_ns_{0};
};

}  // namespace scape::plugin
