#include "plugin/collectives/executor.h"

#include <algorithm>
#include <cstdlib>
#include <utility>

namespace scape::plugin {
namespace {

constexpr size_t kPage = 4096;
constexpr size_t kMaxBlocks = 8;
constexpr size_t kMaxBlockBytes = size_t{64} << 20;

// What std::allocate_shared has a run and its count of references from: keeps the pool for as long
// as there is one.
template <typename T>
struct PoolAllocator {
  using value_type = T;

  explicit PoolAllocator(std::shared_ptr<RunPool> from) : pool(std::move(from)) {}
  template <typename U>
  PoolAllocator(const PoolAllocator<U>& other) : pool(other.pool) {}

  T* allocate(size_t n) { return static_cast<T*>(pool->allocate(n * sizeof(T), alignof(T))); }
  void deallocate(T* block, size_t n) { pool->deallocate(block, n * sizeof(T), alignof(T)); }
  template <typename U>
  bool operator==(const PoolAllocator<U>& other) const {
    return pool == other.pool;
  }

  std::shared_ptr<RunPool> pool;
};

}  // namespace

void* RunPool::do_allocate(size_t bytes, size_t alignment) {
  std::lock_guard<std::mutex> lock(mutex_);
  return blocks_.allocate(bytes, alignment);
}

void RunPool::do_deallocate(void* block, size_t bytes, size_t alignment) {
  std::lock_guard<std::mutex> lock(mutex_);
  blocks_.deallocate(block, bytes, alignment);
}

uint64_t TagSpace::tag(int sender, uint32_t message) const {
  const uint64_t from = static_cast<uint64_t>(sender) << 49;
  if (point_to_point) {
    return (uint64_t{1} << 63) | from | ((key + message) & ((uint64_t{1} << 49) - 1));
  }
  return from | (uint64_t{message & 0xffff} << 33) | (key & ((uint64_t{1} << 33) - 1));
}

Run::Run(std::shared_ptr<RunPool> pool, std::shared_ptr<const Schedule> schedule,
         const Buffers& buffers, Reduction reduction, TagSpace tags, const char* name)
    : pool_(std::move(pool)),
      schedule_(std::move(schedule)),
      memory_{static_cast<const std::byte*>(buffers.send), static_cast<std::byte*>(buffers.recv),
              nullptr, static_cast<std::byte*>(buffers.shared)},
      send_region_(buffers.send_region),
      recv_region_(buffers.recv_region),
      reduction_(reduction),
      tags_(tags),
      name_(name),
      started_(std::chrono::steady_clock::now()),
      remaining_(schedule_->steps.size(), pool_.get()),
      operations_(schedule_->steps.size(), pool_.get()),
      ready_(schedule_->first.begin(), schedule_->first.end(), pool_.get()),
      left_(schedule_->steps.size()) {
  for (size_t i = 0; i < schedule_->steps.size(); ++i)
    remaining_[i] = schedule_->steps[i].predecessors;
}

Run::~Run() { std::free(scratch_); }

bool Run::waits_for(int peer) const {
  for (size_t i = 0; i < schedule_->steps.size(); ++i) {
    const Step& step = schedule_->steps[i];
    if (step.peer != peer) continue;
    const bool over = remaining_[i] == 0 && operations_[i].transport != nullptr &&
                      operations_[i].outcome == Outcome::kDone;
    if (!over) return true;
  }
  return false;
}

std::string Run::waits() const {
  std::string ranks;
  std::vector<bool> named(static_cast<size_t>(schedule_->size));
  for (size_t i = 0; i < schedule_->steps.size(); ++i) {
    const Step& step = schedule_->steps[i];
    if (remaining_[i] != 0 || operations_[i].outcome != Outcome::kPending) continue;
    if (operations_[i].transport == nullptr || step.peer < 0) continue;
    if (named[static_cast<size_t>(step.peer)]) continue;
    named[static_cast<size_t>(step.peer)] = true;
    ranks += (ranks.empty() ? "rank " : ", ") + std::to_string(step.peer);
  }
  return ranks.empty() ? name_ : std::string(name_) + " waits for " + ranks;
}

Executor::Executor(std::unique_ptr<Transport> transport) : transport_(std::move(transport)) {}

Executor::~Executor() {
  transport_.reset();
  for (const Block& block : blocks_) std::free(block.memory);
}

std::shared_ptr<Run> Executor::make_run(std::shared_ptr<const Schedule> schedule,
                                        const Buffers& buffers, const Reduction& reduction,
                                        TagSpace tags, const char* name) const {
  return std::allocate_shared<Run>(PoolAllocator<Run>(pool_), pool_, std::move(schedule), buffers,
                                   reduction, tags, name);
}

void* Executor::take_scratch(size_t* bytes) {
  size_t best = blocks_.size();
  for (size_t i = 0; i < blocks_.size(); ++i) {
    if (blocks_[i].bytes >= *bytes &&
        (best == blocks_.size() || blocks_[i].bytes < blocks_[best].bytes))
      best = i;
  }
  if (best < blocks_.size()) {
    const Block block = blocks_[best];
    blocks_.erase(blocks_.begin() + static_cast<std::ptrdiff_t>(best));
    *bytes = block.bytes;
    return block.memory;
  }
  *bytes = (*bytes + kPage - 1) / kPage * kPage;
  return std::aligned_alloc(kPage, *bytes);
}

void Executor::give_scratch(void* block, size_t bytes) {
  if (bytes > kMaxBlockBytes || blocks_.size() == kMaxBlocks) {
    std::free(block);
  } else {
    blocks_.push_back({block, bytes});
  }
}

void Executor::start(const std::shared_ptr<Run>& run) {
  if (run->schedule_->scratch_bytes > 0) {
    run->scratch_bytes_ = run->schedule_->scratch_bytes;
    run->scratch_ = take_scratch(&run->scratch_bytes_);
    if (run->scratch_ == nullptr) {
      run->status_ = error(SCAPE_ERR_MEMORY, "%s: %zu bytes of staging memory cannot be had",
                           run->name_, run->scratch_bytes_);
      trouble_ = run->status_;
      run->done_.store(true, std::memory_order_release);
      return;
    }
    run->memory_.scratch = static_cast<std::byte*>(run->scratch_);
  }
  run->place_ = active_.size();
  active_.push_back(run);
  run_ready(run.get());
  settle(run.get());
}

void Executor::run_ready(Run* run) {
  const Schedule& schedule = *run->schedule_;
  while (run->next_ready_ < run->ready_.size()) {
    const uint32_t id = run->ready_[run->next_ready_++];
    const Step& step = schedule.steps[id];
    if (step.kind != StepKind::kSend && step.kind != StepKind::kRecv) {
      run_local(schedule, step, run->memory_, run->reduction_);
      complete(run, id);
      continue;
    }
    Operation* const operation = &run->operations_[id];
    operation->owner = run;
    operation->index = id;
    ++run->flying_;
    if (step.kind == StepKind::kSend) {
      operation->region = run->region_of(step.from.space);
      transport_->send(step.peer, run->tags_.tag(schedule.rank, step.message),
                       run->memory_.read(step.from), step.amount, operation);
    } else {
      operation->region = run->region_of(step.to.space);
      transport_->recv(step.peer, run->tags_.tag(step.peer, step.message),
                       run->memory_.write(step.to), step.amount, operation);
    }
  }
  run->ready_.clear();
  run->next_ready_ = 0;
}

void Executor::complete(Run* run, uint32_t id) {
  const Step& step = run->schedule_->steps[id];
  --run->left_;
  for (uint32_t i = 0; i < step.successors; ++i) {
    const uint32_t next = run->schedule_->successors[step.first_successor + i];
    if (--run->remaining_[next] == 0) run->ready_.push_back(next);
  }
}

void Executor::settle(Run* run) {
  if (run->left_ != 0) return;
  if (run->scratch_ != nullptr)
    give_scratch(std::exchange(run->scratch_, nullptr), run->scratch_bytes_);
  const std::shared_ptr<Run> over = std::move(active_[run->place_]);
  if (over->place_ + 1 != active_.size()) {
    active_[over->place_] = std::move(active_.back());
    active_[over->place_]->place_ = over->place_;
  }
  active_.pop_back();
  over->done_.store(true, std::memory_order_release);
}

void Executor::handle(Operation* operation) {
  Run* const run = static_cast<Run*>(operation->owner);
  const Step& step = run->schedule_->steps[operation->index];
  --run->flying_;
  if (run->done()) return;  // failed before
  const bool received = step.kind == StepKind::kRecv;
  if (operation->outcome == Outcome::kDone && (!received || operation->received == step.amount)) {
    complete(run, operation->index);
    run_ready(run);
    settle(run);
    return;
  }
  if (!trouble_.ok()) return;
  if (operation->outcome == Outcome::kDone) {
    trouble_ = error(
        SCAPE_ERR_MISMATCH,
        "%s: rank %d expected %zu bytes from rank %d, which sent %zu; let both give one count",
        run->name_, run->schedule_->rank, step.amount, step.peer, operation->received);
  } else if (operation->outcome == Outcome::kTruncated) {
    trouble_ = error(
        SCAPE_ERR_MISMATCH,
        "%s: rank %d expected %zu bytes from rank %d, which sent more; let both give one count",
        run->name_, run->schedule_->rank, step.amount, step.peer);
  } else {
    trouble_ = error(SCAPE_ERR_REMOTE,
                     "%s: the transport could not %s rank %d; see whether it is alive and %s",
                     run->name_, received ? "receive from" : "send to", step.peer,
                     transport_->name() == "ucx"
                         ? "UCX reaches it: UCX_NET_DEVICES names the interfaces, TCP goes over "
                           "IPv4 only in version 1.13 (SCAPE_TRANSPORT=ofi takes IPv6), "
                           "and on one host it wants the same user (or UCX_TLS=^cma)"
                         : "reachable");
  }
}

bool Executor::progress() {
  if (transport_ == nullptr) return false;
  bool moved = false;
  bool any = false;
  // What a step starts may be over at once: go on until nothing is.
  for (Operation* operation = transport_->progress(&moved); operation != nullptr;
       operation = transport_->progress(&moved)) {
    any = true;
    while (operation != nullptr) {
      Operation* const next = operation->next;  // the run may go with the last of its operations
      handle(operation);
      operation = next;
    }
  }
  return any || moved;
}

void Executor::fail(const Status& why) {
  trouble_ = why;
  if (transport_ != nullptr) transport_->abandon();
  std::vector<std::shared_ptr<Run>> runs = std::move(active_);
  active_.clear();
  for (const auto& run : runs) {
    run->status_ = why;
    for (size_t i = 0; run->flying_ > 0 && i < run->schedule_->steps.size(); ++i) {
      Operation& operation = run->operations_[i];
      if (operation.transport != nullptr && operation.outcome == Outcome::kPending)
        transport_->cancel(&operation);
    }
    run->done_.store(true, std::memory_order_release);
  }
  // Cancelled receives come back at once. Sends that a peer never takes do not; they only read.
  if (transport_ != nullptr) progress();
  for (const auto& run : runs) {
    if (run->flying_ > 0) abandoned_.push_back(run);
  }
}

bool Executor::waits_for(int peer) const {
  return std::any_of(active_.begin(), active_.end(),
                     [peer](const auto& run) { return run->waits_for(peer); });
}

std::string Executor::waits() const {
  std::string text;
  for (size_t i = 0; i < active_.size() && i < 3; ++i)
    text += (i == 0 ? "" : ", ") + active_[i]->waits();
  return text;
}

}  // namespace scape::plugin
