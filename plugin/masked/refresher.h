// Refresher: what one communicator's registered buffers share, as a masked buffer sees it.
//
//  - Turns. Ranks must start the works of a communicator in the same order, but a masked call can
//    start its exchange only when its mask is there, which is a local matter. So a call takes a
//    turn when it begins, and starts its works when the turns before it are over.
//  - The side channel, a second communicator for background traffic, made at the first call that
//    needs it.
//  - Side jobs: work on the side channel, carried out in the order of submission, which must be the
//    same on all ranks. Several may be under way at once.
//
// Who carries them out is the implementation's matter: a progress thread (thread_refresher.h), or
// the calling thread, which enqueues them on a side stream.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "base/status.h"
#include "plugin/communicator.h"
#include "plugin/stream.h"

namespace scape::plugin {

// One piece of background work. The members of the derived class belong to the submitter until
// ready() and after join(), to the refresher in between.
class SideJob {
 public:
  virtual ~SideJob() = default;

  // Carried out, or given up; on a stream: enqueued, unless it is for_host().
  bool done() const { return done_.load(std::memory_order_acquire); }
  // Valid once done().
  const Status& status() const { return status_; }

  // ---- for the refresher alone ----
  void submitted();
  void end(const Status& status);
  // Asked before start(): false while something that it depends on is not done, and an error when
  // that went wrong alike on all ranks, which ends the job without any traffic.
  virtual bool may_start(Status*) { return true; }
  // Local preparation, then the start of one collective on the side channel, ordered on `stream`.
  virtual Status start(Communicator& side, Stream stream, WorkPtr* work) = 0;
  // When that collective is done and went well, or, for what is ordered on `stream`, behind it.
  virtual Status finish(Stream stream) = 0;
  // Whether the host reads what came of it: the job is done() then when `stream` has passed what
  // finish() put there, and conclude() was called.
  virtual bool for_host() const { return false; }
  virtual void conclude() {}

 private:
  Status status_;
  std::atomic<bool> done_{true};
};

// Thread-safe.
class Refresher {
 public:
  virtual ~Refresher() = default;

  // False in a child made by fork(), which must not use it.
  virtual bool in_owner_process() const = 0;

  // False while the making of the side channel has the communicator to itself, so that no work may
  // be started on it; no turn is served then.
  virtual bool communicator_is_free() const = 0;
  // Turns are served in the order in which they were taken.
  virtual uint64_t take_turn() = 0;
  virtual bool is_turn(uint64_t turn) const = 0;
  virtual void end_turn(uint64_t turn) = 0;

  // Starts the making of the side channel on the communicator if that has not happened yet. Inside
  // a turn. What serves it is placed near the first caller's memory, `bytes` at `data`, which it
  // does not touch.
  virtual Status start_side_channel(const void* data, size_t bytes) = 0;
  // True when the side channel is there, or failed (then *status says why). Does not block, nor
  // drive the communicator.
  virtual bool side_channel_ready(Status* status) = 0;

  // Takes a place in the order for a job that is done() or new. It is carried out once ready() was
  // called, after what `stream` holds by then.
  virtual void submit(const std::shared_ptr<SideJob>& job) = 0;
  virtual void ready(const std::shared_ptr<SideJob>& job, Stream stream) = 0;
  // Gives up the place of a job that will not become ready.
  virtual void cancel(const std::shared_ptr<SideJob>& job, const Status& why) = 0;

  // True when the job is done() and whatever `stream` gets from now on comes after it. Never
  // blocks.
  virtual bool join(const std::shared_ptr<SideJob>& job, Stream stream) = 0;
  // Blocks until the job has been carried out, or SCAPE_TIMEOUT is over.
  virtual Status wait(const std::shared_ptr<SideJob>& job) = 0;
};

}  // namespace scape::plugin
