// The refresher of host memory: a progress thread serves the side channel.
//
// The thread is started at the first side_channel_ready() that finds the channel made. The
// destructor stops and joins it and waits for no peer. After fork() the child must not destroy it:
// make_refresher()'s pointer sees to that.
#pragma once

#include <sys/types.h>

#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>

#include "plugin/masked/refresher.h"

namespace scape::plugin {

class ThreadRefresher final : public Refresher {
 public:
  explicit ThreadRefresher(std::shared_ptr<Communicator> communicator);
  ~ThreadRefresher() override;
  ThreadRefresher(const ThreadRefresher&) = delete;
  ThreadRefresher& operator=(const ThreadRefresher&) = delete;

  bool in_owner_process() const override;
  // The side channel is made by a work in the communicator's order.
  bool communicator_is_free() const override { return true; }
  uint64_t take_turn() override;
  bool is_turn(uint64_t turn) const override;
  void end_turn(uint64_t turn) override;
  Status start_side_channel(const void* data, size_t bytes) override;
  bool side_channel_ready(Status* status) override;
  void submit(const std::shared_ptr<SideJob>& job) override;
  void ready(const std::shared_ptr<SideJob>& job, Stream stream) override;
  void cancel(const std::shared_ptr<SideJob>& job, const Status& why) override;
  bool join(const std::shared_ptr<SideJob>& job, Stream stream) override;
  Status wait(const std::shared_ptr<SideJob>& job) override;

 private:
  struct Queued {
    std::shared_ptr<SideJob> job;
    bool ready = false;
  };
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
  std::deque<Queued>::iterator place_of(const std::shared_ptr<SideJob>& job);
  // Ends the oldest job under way when its collective is done; false when it is not.
  bool complete_oldest(Status* status);
  // Ends every job, now and from now on, and tells the other ranks.
  void fail(const Status& why);

  const std::shared_ptr<Communicator> communicator_;
  const pid_t owner_;

  std::atomic<uint64_t> next_turn_{0};
  std::atomic<uint64_t> turn_{0};

  mutable std::mutex mutex_;
  std::condition_variable wake_;      // of the progress thread
  std::condition_variable finished_;  // of wait()
  std::deque<Queued> queue_;
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
