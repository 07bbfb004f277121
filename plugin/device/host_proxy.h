// The host's part of collectives of device memory: a thread that drives one communicator of host
// memory and its side channel for what streams send through the host.
//
// The calling thread enqueues a relay (cuda_module.h) and leaves the job here. The thread looks
// when what was sent has arrived, starts the collective on the relay's memory, and lets the stream
// go on. Jobs of a channel are started in the order of submission, which must be the same on all
// ranks. Nobody but the thread waits for the device or for a peer, and no host function is on any
// stream: one that waits holds up all others of the process, whatever streams they are on.
#pragma once

#include <sys/types.h>

#include <array>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "plugin/communicator.h"
#include "plugin/device/cuda_module.h"

namespace scape::plugin {

// One thread at a time, but for abort() and failure().
class HostProxy {
 public:
  enum Channel : size_t { kMain = 0, kSide };
  static constexpr size_t kChannels = 2;

  // An all-reduce, in place, or an all-gather of this rank's part.
  struct Job {
    bool gathers = false;
    size_t count = 0;  // elements of this rank
    DataType type = DataType::kFloat32;
    Reduction reduction = {};
    bool registered = false;
    std::string name = {};
    float learning_rate = 0, weight_decay = 0;
  };

  // Starts the thread. `side` is the side channel of `main`.
  static Status start(std::shared_ptr<CudaDevice> device, std::shared_ptr<Communicator> main,
                      std::shared_ptr<Communicator> side, std::shared_ptr<HostProxy>* out);
  // Goes on until the jobs are done, or nothing has moved for SCAPE_TIMEOUT; joins the thread.
  // After fork() the child must not come here: start()'s pointer sees to that.
  ~HostProxy();
  HostProxy(const HostProxy&) = delete;
  HostProxy& operator=(const HostProxy&) = delete;

  // Enqueues the way of `send` to the job and of its result to `recv` on the stream.
  Status submit(Channel channel, Stream stream, const void* send, void* recv, Job job);

  // What ended it. From then on every stream goes on at once, with poisoned results. That a rank
  // has left is no failure while nothing waits for it: programs end without destroying
  // communicators.
  Status failure() const;
  // Ends it, on all ranks.
  void abort(const Status& why);

  const Communicator& main() const { return *channels_[kMain].host; }

 private:
  struct Entry {
    Job job;
    std::unique_ptr<Relay> relay;
    WorkPtr work;  // null before it is started
  };
  struct Lane {
    std::shared_ptr<Communicator> host;
    std::deque<Entry> waiting;  // in order, for what streams send
    std::deque<Entry> running;
  };

  HostProxy(std::shared_ptr<CudaDevice> device, std::shared_ptr<Communicator> main,
            std::shared_ptr<Communicator> side);
  bool in_owner_process() const;
  Status of_this_rank(const Status& failure) const;
  Status take_relay(size_t bytes, std::unique_ptr<Relay>* out);

  // ---- the thread ----
  void run();
  void serve();
  // Waits for something to do; false when there is nothing and never will be.
  bool take_jobs();
  bool idle() const;
  Status advance(Lane& lane, bool* moved);
  Status start_job(Lane& lane, Entry& entry);
  // Lets all streams go on, with nothing to go on with.
  void give_up(const Status& why);

  const std::shared_ptr<CudaDevice> device_;
  const pid_t owner_;
  std::array<Lane, kChannels> channels_;  // what they hold is the thread's

  mutable std::mutex mutex_;  // guards what follows
  std::condition_variable wake_;
  std::array<std::vector<Entry>, kChannels> submitted_;
  // Those that no job has; some streams may still be on their way through.
  std::vector<std::unique_ptr<Relay>> relays_;
  Status failure_;
  bool stop_ = false;
  std::thread thread_;
};

}  // namespace scape::plugin
