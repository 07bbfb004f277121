// The loops that net_perf times, over any carrier.
//
// They are those of NCCL's proxy threads: every pass offers each connection at most one message and
// asks after the oldest one under way, and nothing waits. Where nothing has moved for long, the
// core is given up between passes, as NCCL does too.
#pragma once

#include <functional>
#include <vector>

#include "perf/net/carrier.h"

namespace scape::perf {

// How the messages lie and go.
struct Course {
  Areas areas;
  int connections = 1;  // in use, of the areas'
  int window = 1;       // requests under way on a connection
  int group = 1;        // receives in a request, with tags 0 .. group - 1
  int slots = 1;        // places in an area that a connection's messages take in turns
  size_t stride = 0;    // between them

  std::byte* slot(std::byte* area, int connection, long message) const {
    return area + static_cast<size_t>(connection) * areas.bytes +
           static_cast<size_t>(message % slots) * stride;
  }
};

// Called with a message before it is sent, or after it has come, where the loop is not timed.
using Visit =
    std::function<void(bool sends, int connection, long message, std::byte* data, size_t bytes)>;

// Told of every pass: gives the core up in those that come after a while in which nothing moved.
class Idle {
 public:
  void pass(bool moved) {
    if (moved) {
      passes_ = 0;
    } else if (++passes_ % 16 == 0) {
      wait();
    }
  }

 private:
  void wait();

  unsigned passes_ = 0;
  uint64_t since_ns_ = 0;
};

// One direction of `messages` messages, a multiple of the group, on each connection.
class Stream {
 public:
  Stream(Carrier* carrier, const Course* course, bool sends, size_t bytes, long messages,
         const Visit* visit = nullptr);

  // Posts what the window has room for.
  Status fill();
  // Until all is over.
  Status run();
  // Messages whose size was another.
  uint64_t wrong_sizes() const { return wrong_sizes_; }

 private:
  struct Lane {
    long begun = 0, ended = 0;  // requests
    std::vector<Request> requests;
  };
  // *moved: there was room, and it has begun.
  Status begin_next(int connection, Lane* lane, bool* moved);
  // *moved is set if it is over, else left.
  Status end_oldest(int connection, Lane* lane, bool* moved);

  Carrier& carrier_;
  const Course& course_;
  const bool sends_;
  const size_t bytes_;
  const int step_;       // messages in a request
  const long requests_;  // of each connection
  const long window_;
  const Visit* const visit_;
  uint64_t wrong_sizes_ = 0;
  std::vector<Lane> lanes_;
};

// `count` round trips of one message, with the connections in turns. The first of the two ranks
// gets the time of each, in nanoseconds.
Status ping_pong(Carrier* carrier, const Course& course, bool first, size_t bytes, long count,
                 std::vector<double>* times_ns, uint64_t* wrong_sizes);

}  // namespace scape::perf
