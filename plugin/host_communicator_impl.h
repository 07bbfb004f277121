// The one implementation of Communicator on host memory: its state, and what its parts give each
// other. In
//   host_communicator.cc  its life, progress, and the calls
//   host_making.cc        how communicators and side channels are made
//   host_sharing.cc       payloads in memory that ranks of one host share
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <memory_resource>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "plugin/collectives/executor.h"
#include "plugin/collectives/schedule.h"
#include "plugin/collectives/schedules.h"
#include "plugin/communicator.h"
#include "plugin/transport/lifeline.h"
#include "plugin/transport/shared_memory.h"
#include "plugin/transport/transport.h"

namespace scape::plugin {

// Numbered as descriptors name them.
enum Call : uint8_t {
  kAllReduce = 1,
  kReduceScatter,
  kReduceScatterV,
  kAllGather,
  kAllGatherV,
  kAllToAll,
  kBroadcast,
  kReduce,
  kGather,
  kScatter,
  kSharedAllReduce,
};

// A number made of two, alike on all ranks.
uint64_t mix(uint64_t a, uint64_t b);

// A work that is over, or that its owner ends.
template <typename Base>
class OwnedWork : public Base {
 public:
  bool done() const override { return done_.load(std::memory_order_acquire); }
  Status status() const override { return done() ? status_ : Status::Ok(); }
  void end(Status status) {
    status_ = std::move(status);
    done_.store(true, std::memory_order_release);
  }

 private:
  Status status_;
  std::atomic<bool> done_{false};
};

using SimpleWork = OwnedWork<Work>;

// Of each host's ranks an operand, and a result.
class HostSharedPayload final : public SharedPayload {
 public:
  // `me`: this rank's place among those of its host, layout.hosts[host].
  HostSharedPayload(std::unique_ptr<SharedMemory> memory, SharedLayout layout, size_t host,
                    size_t me, size_t capacity)
      : memory_(std::move(memory)),
        layout_(std::move(layout)),
        ranks_(layout_.hosts[host].size()),
        me_(me),
        capacity_(capacity) {}

  size_t capacity() const override { return capacity_; }
  void* operand() override { return memory_->data() + me_ * layout_.stride; }
  const void* result() const override { return memory_->data() + ranks_ * layout_.stride; }
  bool can_reduce(DataType type, ReduceOp op) const override {
    return shares_all_reduce(layout_.hosts.size(), type, op);
  }
  std::byte* memory() { return memory_->data(); }
  const SharedLayout& layout() const { return layout_; }

 private:
  const std::unique_ptr<SharedMemory> memory_;
  const SharedLayout layout_;
  const size_t ranks_, me_, capacity_;
};

struct Arguments {
  Call call = kAllReduce;
  const void* send = nullptr;
  void* recv = nullptr;
  size_t count = 0;
  DataType type = DataType::kFloat32;
  Reduction reduction;
  int root = -1;
  std::span<const size_t> counts = {};  // of a call that has_counts()
  HostSharedPayload* shared = nullptr;  // kSharedAllReduce
};

class HostCommunicator final : public Communicator {
 public:
  HostCommunicator(int rank, int size, uint64_t cookie, int channel,
                   std::unique_ptr<Transport> transport, std::shared_ptr<Lifeline> lifeline);
  ~HostCommunicator() override;

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  std::string_view name() const override { return name_; }

  Status all_reduce(const void* send, void* recv, size_t count, DataType type, Reduction reduction,
                    const CallTag& tag, WorkPtr* work) override {
    return start({kAllReduce, send, recv, count, type, reduction}, tag, work);
  }
  Status reduce_scatter(const void* send, void* recv, size_t recv_count, DataType type,
                        Reduction reduction, const CallTag& tag, WorkPtr* work) override {
    return start({kReduceScatter, send, recv, recv_count, type, reduction}, tag, work);
  }
  Status reduce_scatter_v(const void* send, void* recv, std::span<const size_t> counts,
                          DataType type, Reduction reduction, const CallTag& tag,
                          WorkPtr* work) override {
    return start_with_counts({kReduceScatterV, send, recv, 0, type, reduction, -1, counts}, tag,
                             work);
  }
  Status all_gather(const void* send, void* recv, size_t send_count, DataType type,
                    const CallTag& tag, WorkPtr* work) override {
    return start({kAllGather, send, recv, send_count, type, {}}, tag, work);
  }
  Status all_gather_v(const void* send, void* recv, std::span<const size_t> counts, DataType type,
                      const CallTag& tag, WorkPtr* work) override {
    return start_with_counts({kAllGatherV, send, recv, 0, type, {}, -1, counts}, tag, work);
  }
  Status all_to_all(const void* send, void* recv, size_t count, DataType type, const CallTag& tag,
                    WorkPtr* work) override {
    return start({kAllToAll, send, recv, count, type, {}}, tag, work);
  }
  Status broadcast(const void* send, void* recv, size_t count, DataType type, int root,
                   const CallTag& tag, WorkPtr* work) override {
    return start({kBroadcast, send, recv, count, type, {}, root}, tag, work);
  }
  Status reduce(const void* send, void* recv, size_t count, DataType type, Reduction reduction,
                int root, const CallTag& tag, WorkPtr* work) override {
    return start({kReduce, send, recv, count, type, reduction, root}, tag, work);
  }
  Status gather(const void* send, void* recv, size_t count, DataType type, int root,
                const CallTag& tag, WorkPtr* work) override {
    return start({kGather, send, recv, count, type, {}, root}, tag, work);
  }
  Status scatter(const void* send, void* recv, size_t count, DataType type, int root,
                 const CallTag& tag, WorkPtr* work) override {
    return start({kScatter, send, recv, count, type, {}, root}, tag, work);
  }
  Status share_payload(size_t bytes, std::shared_ptr<SharingWork>* work) override;
  Status all_reduce(SharedPayload& payload, size_t count, DataType type, Reduction reduction,
                    const CallTag& tag, WorkPtr* work) override;
  Status send(const void* data, size_t count, DataType type, int peer, WorkPtr* work) override {
    return point_to_point(true, const_cast<void*>(data), count, type, peer, work);
  }
  Status recv(void* data, size_t count, DataType type, int peer, WorkPtr* work) override {
    return point_to_point(false, data, count, type, peer, work);
  }

  Status register_memory(void* data, size_t bytes, void** region) override;
  void deregister_memory(void* region) override;

  bool progress() override;
  void wait_event(int timeout_ms) override;
  Status async_error() const override;
  void abort(const Status& why) override;
  Status side_channel(std::shared_ptr<Communicator>* side, WorkPtr* work) override;
  ByteCounters counters() const override;

  Lifeline* lifeline() const { return lifeline_.get(); }
  uint64_t cookie() const { return cookie_; }
  // Numbers the communicators made from this one, alike on all ranks.
  uint64_t next_offspring() { return offspring_.fetch_add(1); }

 private:
  struct Key {
    Call call;
    DataType type;
    ReduceOp op;
    bool in_place;
    int root;
    size_t count;
    size_t stride;  // of shared memory
    bool operator==(const Key&) const = default;
  };
  struct Cached {
    Key key;
    std::vector<size_t> counts;
    std::shared_ptr<const Schedule> schedule;
    uint64_t used = 0;
  };
  struct Watched {  // a collective that may have to be published
    std::shared_ptr<Run> run;
    Descriptor descriptor;
    bool published = false;
  };
  struct SelfMessage {
    std::byte* data;
    size_t bytes;
    std::shared_ptr<SimpleWork> work;
  };

  Status check(const Arguments& arguments) const;
  Status check_process(const char* what) const;
  bool in_forked_child() const { return fork_count() != forks_; }
  // What the lifeline knows: a failure elsewhere, or a rank that died.
  Status trouble_of_others() const;
  // After a time-out: the ranks that all wait for, as far as that can be told; empty where not.
  // Asks them, for a second at most.
  std::string who_keeps_the_others();
  Status refusal() const;  // of a call to a failed communicator; locked
  Status start(const Arguments& arguments, const CallTag& tag, WorkPtr* work);
  Status start_locked(const Arguments& arguments, const CallTag& tag, WorkPtr* work);
  Status start_with_counts(Arguments arguments, const CallTag& tag, WorkPtr* work);
  // An all-gather of this many bytes a rank.
  Status gather_bytes(const void* mine, void* all, size_t bytes, const char* name, WorkPtr* work);
  std::shared_ptr<const Schedule> schedule_for(const Arguments& arguments);
  std::shared_ptr<const Schedule> build(const Arguments& arguments, bool in_place) const;
  Status point_to_point(bool sending, void* data, size_t count, DataType type, int peer,
                        WorkPtr* work);
  Status self_message(bool sending, std::byte* data, size_t bytes, WorkPtr* work);
  bool progress_locked();
  void drop_watched();
  void watch();
  void meet_trouble();
  void fail_locked(const Status& why);

  const int rank_, size_;
  const uint64_t cookie_;
  const int channel_;  // 0; 1 for a side channel
  const pid_t process_;
  const uint64_t forks_;  // when it was made
  std::string name_;
  std::shared_ptr<Lifeline> lifeline_;  // null for a single rank

  mutable std::mutex mutex_;
  std::unique_ptr<Executor> executor_;
  uint64_t calls_ = 0;
  std::pmr::deque<Watched> watched_;
  std::vector<Cached> cache_;
  size_t cached_steps_ = 0;
  uint64_t cache_clock_ = 0;
  std::vector<uint64_t> sent_, received_;  // point to point messages, per peer
  std::deque<SelfMessage> self_sends_, self_receives_;
  std::vector<std::function<bool()>> followups_;  // run after progress until they return true
  uint32_t turns_ = 0;
  std::optional<std::chrono::steady_clock::time_point> trouble_met_;
  Status failure_;
  std::atomic<uint64_t> offspring_{0};
};

}  // namespace scape::plugin
