// Executor: runs schedules over a transport, many at once, without blocking.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <memory_resource>
#include <mutex>
#include <string>
#include <vector>

#include "plugin/collectives/schedule.h"
#include "plugin/communicator.h"
#include "plugin/transport/transport.h"

namespace scape::plugin {

// How the messages of one call are tagged. All fields must fit or are cut: kRankBits of the sender,
// and for collectives 16 bits of the message's number and 33 bits of `key`, which both sides derive
// from the call's number and description: ranks that call different things never take each other's
// messages. Point to point messages are numbered per pair of ranks instead.
struct TagSpace {
  bool point_to_point = false;
  uint64_t key = 0;  // collectives: the call; point to point: the number of the first message

  static constexpr int kRankBits = 14;
  uint64_t tag(int sender, uint32_t message) const;
};

// Memory that runs give back when they end, so that calls which repeat themselves allocate nothing.
// Any thread may drop the last reference to a run.
class RunPool final : public std::pmr::memory_resource {
 private:
  void* do_allocate(size_t bytes, size_t alignment) override;
  void do_deallocate(void* block, size_t bytes, size_t alignment) override;
  bool do_is_equal(const memory_resource& other) const noexcept override { return this == &other; }

  std::mutex mutex_;
  std::pmr::unsynchronized_pool_resource blocks_{
      {.max_blocks_per_chunk = 16, .largest_required_pool_block = size_t{1} << 20}};
};

// The caller's two spaces, what the transport's register_memory() said of them, and the memory that
// ranks of the host share. Null: nothing.
struct Buffers {
  const void* send = nullptr;
  void* recv = nullptr;
  void* send_region = nullptr;
  void* recv_region = nullptr;
  void* shared = nullptr;
};

// One schedule under way. done() and status() may be read by any thread, all else is the
// executor's.
class Run final : public Work {
 public:
  Run(std::shared_ptr<RunPool> pool, std::shared_ptr<const Schedule> schedule,
      const Buffers& buffers, Reduction reduction, TagSpace tags, const char* name);
  ~Run() override;

  bool done() const override { return done_.load(std::memory_order_acquire); }
  Status status() const override { return done() ? status_ : Status::Ok(); }

  const char* name() const { return name_; }
  std::chrono::steady_clock::time_point started() const { return started_; }

 private:
  friend class Executor;
  bool waits_for(int peer) const;
  std::string waits() const;

  void* region_of(Space space) const {
    return space == Space::kSend ? send_region_ : space == Space::kRecv ? recv_region_ : nullptr;
  }

  const std::shared_ptr<RunPool> pool_;
  const std::shared_ptr<const Schedule> schedule_;
  Memory memory_;
  void* const send_region_;
  void* const recv_region_;
  const Reduction reduction_;
  const TagSpace tags_;
  const char* const name_;
  const std::chrono::steady_clock::time_point started_;
  std::pmr::vector<uint32_t> remaining_;    // predecessors left, per step
  std::pmr::vector<Operation> operations_;  // per step
  std::pmr::vector<uint32_t> ready_;
  size_t next_ready_ = 0;
  size_t left_;        // steps
  size_t flying_ = 0;  // operations that the transport holds
  void* scratch_ = nullptr;
  size_t scratch_bytes_ = 0;
  size_t place_ = 0;  // in Executor::active_
  Status status_;
  std::atomic<bool> done_{false};
};

// Calls are serialised by the owner.
class Executor {
 public:
  // Runs of more than one rank need a transport.
  explicit Executor(std::unique_ptr<Transport> transport);
  ~Executor();

  Transport* transport() const { return transport_.get(); }
  RunPool* pool() const { return pool_.get(); }

  // `name` is of the call, for messages, and lives as long as the program.
  std::shared_ptr<Run> make_run(std::shared_ptr<const Schedule> schedule, const Buffers& buffers,
                                const Reduction& reduction, TagSpace tags, const char* name) const;

  // Posts what can be posted at once; the run may be over when it returns.
  void start(const std::shared_ptr<Run>& run);

  // Takes what has arrived as far as it goes. True when something moved.
  bool progress();

  // Ends every run with `why` and takes back what the transport has not touched yet. Nothing is
  // written to the callers' buffers afterwards.
  void fail(const Status& why);

  // What went wrong while running, for the owner to act on with fail(); ok otherwise.
  const Status& trouble() const { return trouble_; }

  bool idle() const { return active_.empty(); }
  // True when a run needs a message from, or to, this rank.
  bool waits_for(int peer) const;
  // What the runs wait for, for messages: "AllReduce waits for rank 2"; of the first few.
  std::string waits() const;

 private:
  void run_ready(Run* run);
  void complete(Run* run, uint32_t step);
  void settle(Run* run);  // after run_ready(): over?
  void handle(Operation* operation);
  void* take_scratch(size_t* bytes);
  void give_scratch(void* block, size_t bytes);

  const std::shared_ptr<RunPool> pool_ = std::make_shared<RunPool>();
  // Before the transport: its end may still touch operations.
  std::vector<std::shared_ptr<Run>> active_;
  std::vector<std::shared_ptr<Run>>
      abandoned_;  // failed, with operations that the transport still holds
  struct Block {
    void* memory;
    size_t bytes;
  };
  std::vector<Block> blocks_;
  Status trouble_;
  std::unique_ptr<Transport> transport_;
};

}  // namespace scape::plugin
