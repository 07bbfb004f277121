#include "perf/net/loops.h"

#include <sched.h>

#include "base/clock.h"

namespace scape::perf {

namespace {
// More than most messages on their way need.
constexpr uint64_t kPatienceNs = 1000 * 1000;
}  // namespace

void Idle::wait() {
  const uint64_t now = now_ns();
  if (passes_ == 16) since_ns_ = now;
  if (now - since_ns_ >= kPatienceNs) ::sched_yield();
}

Stream::Stream(Carrier* carrier, const Course* course, bool sends, size_t bytes, long messages,
               const Visit* visit)
    : carrier_(*carrier),
      course_(*course),
      sends_(sends),
      bytes_(bytes),
      step_(sends ? 1 : course->group),
      requests_(messages / step_),
      window_(sends ? course->window * course->group : course->window),
      visit_(visit),
      lanes_(static_cast<size_t>(course->connections)) {
  for (Lane& lane : lanes_) lane.requests.resize(static_cast<size_t>(window_));
}

Status Stream::begin_next(int connection, Lane* lane, bool* moved) {
  *moved = false;
  if (lane->begun == requests_ || lane->begun - lane->ended == window_) return Status::Ok();
  Request* const request = &lane->requests[static_cast<size_t>(lane->begun % window_)];
  const long first = lane->begun * step_;
  Answer answer = Answer::kNotNow;
  if (sends_) {
    std::byte* const data = course_.slot(course_.areas.send, connection, first);
    if (visit_ != nullptr) (*visit_)(true, connection, first, data, bytes_);
    answer =
        carrier_.send(connection, data, bytes_, static_cast<int>(first % course_.group), request);
  } else {
    void* data[kMaxGroup];
    size_t sizes[kMaxGroup];
    int tags[kMaxGroup];
    for (int i = 0; i < step_; ++i) {
      data[i] = course_.slot(course_.areas.receive, connection, first + i);
      sizes[i] = bytes_;
      tags[i] = i;
    }
    answer = carrier_.receive(connection, step_, data, sizes, tags, request);
  }
  if (answer == Answer::kFailed) return carrier_.failure();
  *moved = answer == Answer::kDone;
  lane->begun += *moved;
  return Status::Ok();
}

Status Stream::end_oldest(int connection, Lane* lane, bool* moved) {
  if (lane->ended == lane->begun) return Status::Ok();
  Request* const request = &lane->requests[static_cast<size_t>(lane->ended % window_)];
  const Answer answer = carrier_.test(request);
  if (answer == Answer::kFailed) return carrier_.failure();
  if (answer == Answer::kNotNow) return Status::Ok();
  *moved = true;
  const long first = lane->ended++ * step_;
  if (sends_) return Status::Ok();
  for (int i = 0; i < step_; ++i) {
    wrong_sizes_ += request->sizes[i] != bytes_;
    if (visit_ != nullptr) {
      (*visit_)(false, connection, first + i,
                course_.slot(course_.areas.receive, connection, first + i), bytes_);
    }
  }
  return Status::Ok();
}

Status Stream::fill() {
  bool begun = true;
  while (begun) {
    begun = false;
    for (size_t i = 0; i < lanes_.size(); ++i) {
      bool one = false;
      SCAPE_RETURN_IF_ERROR(begin_next(static_cast<int>(i), &lanes_[i], &one));
      begun |= one;
    }
  }
  return Status::Ok();
}

Status Stream::run() {
  Idle idle;
  for (size_t open = lanes_.size(); open > 0;) {
    open = 0;
    bool any = false;
    for (size_t i = 0; i < lanes_.size(); ++i) {
      Lane& lane = lanes_[i];
      if (lane.ended == requests_) continue;
      bool moved = false;
      SCAPE_RETURN_IF_ERROR(begin_next(static_cast<int>(i), &lane, &moved));
      SCAPE_RETURN_IF_ERROR(end_oldest(static_cast<int>(i), &lane, &moved));
      any |= moved;
      open += lane.ended < requests_;
    }
    idle.pass(any);
  }
  return Status::Ok();
}

namespace {

// One message at a time, as ping_pong() needs them.
class Single {
 public:
  Single(Carrier* carrier, const Course* course, size_t bytes)
      : carrier_(*carrier), course_(*course), bytes_(bytes) {}

  Status send(long message, Request* request) {
    const int connection = connection_of(message);
    Answer answer = Answer::kNotNow;
    while (answer == Answer::kNotNow) {
      answer = carrier_.send(connection, course_.slot(course_.areas.send, connection, 0), bytes_, 0,
                             request);
    }
    return answer == Answer::kFailed ? carrier_.failure() : Status::Ok();
  }

  Status receive(long message, Request* request) {
    const int connection = connection_of(message);
    void* data[] = {course_.slot(course_.areas.receive, connection, 0)};
    int tags[] = {0};
    Answer answer = Answer::kNotNow;
    while (answer == Answer::kNotNow) {
      answer = carrier_.receive(connection, 1, data, &bytes_, tags, request);
    }
    return answer == Answer::kFailed ? carrier_.failure() : Status::Ok();
  }

  Status wait(Request* request) {
    Idle idle;
    Answer answer = carrier_.test(request);
    for (; answer == Answer::kNotNow; answer = carrier_.test(request)) idle.pass(false);
    return answer == Answer::kFailed ? carrier_.failure() : Status::Ok();
  }

 private:
  int connection_of(long message) const { return static_cast<int>(message % course_.connections); }

  Carrier& carrier_;
  const Course& course_;
  const size_t bytes_;
};

}  // namespace

// Receives stand ready before the message that they are for can come, posted when a message has
// just left and there is nothing else to do.
Status ping_pong(Carrier* carrier, const Course& course, bool first, size_t bytes, long count,
                 std::vector<double>* times_ns, uint64_t* wrong_sizes) {
  Single single(carrier, &course, bytes);
  Request sent, received[2];
  times_ns->clear();
  if (first) times_ns->reserve(static_cast<size_t>(count));
  const long ahead = first ? 1 : 2;
  for (long i = 0; i < std::min(ahead, count); ++i) {
    SCAPE_RETURN_IF_ERROR(single.receive(i, &received[i]));
  }
  uint64_t before = now_ns();
  for (long i = 0; i < count; ++i) {
    Request* const mine = &received[i % 2];
    if (!first) {
      SCAPE_RETURN_IF_ERROR(single.wait(mine));
      *wrong_sizes += mine->sizes[0] != bytes;
    }
    SCAPE_RETURN_IF_ERROR(single.send(i, &sent));
    if (i + ahead < count) {
      SCAPE_RETURN_IF_ERROR(single.receive(i + ahead, &received[(i + ahead) % 2]));
    }
    SCAPE_RETURN_IF_ERROR(single.wait(&sent));
    if (!first) continue;
    SCAPE_RETURN_IF_ERROR(single.wait(mine));
    *wrong_sizes += mine->sizes[0] != bytes;
    const uint64_t now = now_ns();
    times_ns->push_back(static_cast<double>(now - before));
    before = now;
  }
  return Status::Ok();
}

}  // namespace scape::perf
