// Refresher: what one communicator's registered buffers share.
//
//  - Turns. Ranks must start the works of a communicator in the same order, but a masked call can
//  start its
//    exchange only when its mask is there, which is a local matter. So a call takes a turn when it
//    begins, and starts its works when the turns before it are over.
//  - The side channel, a second communicator for background traffic, and the progress thread that
//  serves
//    it. Both are made at the first call that needs them.
//  - Side jobs: work on the side channel, done by the progress thread in the order of submission,
//  which must
//    be the same on all ranks. Several may be under way at once.
//
// Thread-safe. The destructor stops and joins the thread and waits for no peer. After fork() the
// child must not use it, nor destroy it: make_refresher()'s pointer sees to that.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>

#include "base/status.h"
#include "plugin/communicator.h"

namespace scape::plugin {

// One piece of background work. Submitted once; the members of the derived class belong to the
// submitter until ready() and after done(), to the progress thread in between.
class SideJob {
 public:
  virtual ~SideJob() = default;

  bool done() const { return done_.load(std::memory_order_acquire); }
  // Valid once done().
  const Status& status() const { return status_; }

 protected:
  // Called on the progress thread: local preparation, then the start of one collective on the side
  // channel.
  virtual Status start(Communicator& side, WorkPtr* work) = 0;
  // Called on the progress thread when that collective is done and went well.
  virtual Status finish() = 0;
  // Called before start(): false while something that it depends on is not done, and an error when
  // that went wrong alike on all ranks, which ends the job without any traffic.
  virtual bool may_start(Status*) { return true; }

 private:
  friend class Refresher;
  bool ready_ = false;  // guarded by the Refresher's mutex
  Status status_;
  std::atomic<bool> done_{true};
};

class Refresher {
 public:
  explicit Refresher(std::shared_ptr<Communicator> communicator);
  ~Refresher();
  Refresher(const Refresher&) = delete;
  Refresher& operator=(const Refresher&) = delete;

  // False in a child made by fork().
  bool in_owner_process() const;

  // Turns are served in the order in which they were taken.
  uint64_t take_turn();
  bool is_turn(uint64_t turn) const;
  void end_turn(uint64_t turn);

  // Starts the making of the side channel on the communicator if that has not happened yet. Inside
  // a turn. The thread is placed near the first caller's memory, `bytes` at `data`, which it does
  // not touch.
  Status start_side_channel(const void* data, size_t bytes);
  // True when the side channel is there, or failed (then *status says why). The first such call
  // starts the thread. Does not block, nor drive the communicator.
  bool side_channel_ready(Status* status);

  // Takes a place in the order for a job that is done() or new. It is carried out once ready() was
  // called.
  void submit(const std::shared_ptr<SideJob>& job);
  void ready(const std::shared_ptr<SideJob>& job);
  // Gives up the place of a job that will not become ready.
  void cancel(const std::shared_ptr<SideJob>& job, const Status& why);

  // Blocks until the job is done, or SCAPE_TIMEOUT is over.
  Status wait(const SideJob& job);

 private:
  struct Running {
    std::shared_ptr<SideJob> job;
    WorkPtr work;
  };

  void run();
  // Until it is to stop, or the side channel has failed.
  void serve();
  // The next job in order that can be started now; jobs that ended without traffic are taken out on
  // the way.
  std::shared_ptr<SideJob> take_startable();
  // Ends the oldest job under way when its collective is done; false when it is not.
  bool complete_oldest(Status* status);
  void end(const std::shared_ptr<SideJob>& job, const Status& status);
  // Ends every job, now and from now on, and tells the other ranks.
  void fail(const Status& why);

  const std::shared_ptr<Communicator> communicator_;
  const pid_t owner_;

  std::atomic<uint64_t> next_turn_{0};
  std::atomic<uint64_t> turn_{0};

  mutable std::mutex mutex_;
  std::condition_variable wake_;      // of the progress thread
  std::condition_variable finished_;  // of wait()
  std::deque<std::shared_ptr<SideJob>> queue_;
  // Used by the thread alone. Outlives side_, which may hold pointers into the jobs when it was
  // aborted.
  std::deque<Running> running_;
  std::shared_ptr<Communicator> side_;
  WorkPtr side_work_;
  const void* callers_data_ = nullptr;
  size_t callers_bytes_ = 0;
  Status failure_;  // of the side channel; ends every job from then on
  bool stop_ = false;
  std::thread thread_;
};

}  // namespace scape::plugin
