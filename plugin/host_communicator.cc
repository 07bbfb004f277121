#include "plugin/host_communicator.h"

#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <deque>
#include <functional>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "base/log.h"
#include "base/settings.h"
#include "plugin/collectives/executor.h"
#include "plugin/collectives/reduce.h"
#include "plugin/collectives/schedules.h"
#include "plugin/transport/bootstrap.h"
#include "plugin/transport/lifeline.h"
#include "plugin/transport/transport.h"

namespace scape::plugin {
namespace {

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
};

const char* name_of(Call call) {
  switch (call) {
    case kAllReduce:
      return "AllReduce";
    case kReduceScatter:
      return "ReduceScatter";
    case kReduceScatterV:
      return "ReduceScatterV";
    case kAllGather:
      return "AllGather";
    case kAllGatherV:
      return "AllGatherV";
    case kAllToAll:
      return "AlltoAll";
    case kBroadcast:
      return "Broadcast";
    case kReduce:
      return "Reduce";
    case kGather:
      return "Gather";
    case kScatter:
      return "Scatter";
  }
  return "?";
}

bool has_op(Call call) {
  return call == kAllReduce || call == kReduceScatter || call == kReduceScatterV || call == kReduce;
}
bool has_counts(Call call) { return call == kAllGatherV || call == kReduceScatterV; }
bool has_root(Call call) {
  return call == kBroadcast || call == kReduce || call == kGather || call == kScatter;
}

std::string describe(const Descriptor& descriptor) {
  const Call call = static_cast<Call>(descriptor.operation);
  std::string text =
      format("%s(count %llu, %s", name_of(call), static_cast<unsigned long long>(descriptor.count),
             name_of(static_cast<DataType>(descriptor.type)));
  if (has_op(call)) text += format(", %s", name_of(static_cast<ReduceOp>(descriptor.op)));
  if (has_root(call)) text += format(", root %d", descriptor.root);
  if (descriptor.registered != 0) {
    text += format(", registered as \"%.*s\"", static_cast<int>(sizeof descriptor.name),
                   descriptor.name);
  }
  if (has_counts(call))
    text +=
        format(", counts #%06llx", static_cast<unsigned long long>(descriptor.extra & 0xffffff));
  return text + ")";
}

// A call that has not ended for this long tells the neighbours what it is.
constexpr auto kStall = std::chrono::milliseconds(100);
// Where a transport cannot wake anybody, its owner looks at it this often.
constexpr int kLookAgainMs = 1;
constexpr auto kTimeToHearOfACause = std::chrono::seconds(2);
constexpr int kFlushMs = 2000;
constexpr size_t kMaxRanks = size_t{1} << TagSpace::kRankBits;
constexpr size_t kMaxMessage = size_t{512} << 20;
constexpr size_t kAddressSlot = size_t{16} << 10;

uint64_t mix(uint64_t a, uint64_t b) {
  Descriptor words;
  words.call = a;
  words.count = b;
  return words.digest();
}

// A work that is over, or that its owner ends.
class SimpleWork final : public Work {
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

struct Arguments {
  Call call = kAllReduce;
  const void* send = nullptr;
  void* recv = nullptr;
  size_t count = 0;
  DataType type = DataType::kFloat32;
  Reduction reduction;
  int root = -1;
  std::span<const size_t> counts = {};  // of a call that has_counts()
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
  Status refusal() const;  // of a call to a failed communicator; locked
  Status start(const Arguments& arguments, const CallTag& tag, WorkPtr* work);
  Status start_with_counts(Arguments arguments, const CallTag& tag, WorkPtr* work);
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

// ---- counters of the process ----

struct Registry {
  std::mutex mutex;
  std::set<const HostCommunicator*> alive;
  ByteCounters gone;

  static Registry& instance() {
    static Registry* const registry = new Registry;  // never destroyed: used until the last moment
    return *registry;
  }
};

void add(ByteCounters* sum, const ByteCounters& more) {
  sum->sent_bytes += more.sent_bytes;
  sum->received_bytes += more.received_bytes;
  sum->sent_messages += more.sent_messages;
  sum->received_messages += more.received_messages;
}

// ---- life ----

HostCommunicator::HostCommunicator(int rank, int size, uint64_t cookie, int channel,
                                   std::unique_ptr<Transport> transport,
                                   std::shared_ptr<Lifeline> lifeline)
    : rank_(rank),
      size_(size),
      cookie_(cookie),
      channel_(channel),
      process_(::getpid()),
      forks_(fork_count()),
      name_(format("comm 0x%06llx%s", static_cast<unsigned long long>(mix(cookie, 1) & 0xffffff),
                   channel == 0 ? "" : " side")),
      lifeline_(std::move(lifeline)),
      executor_(std::make_unique<Executor>(std::move(transport))),
      watched_(executor_->pool()),
      sent_(static_cast<size_t>(size)),
      received_(static_cast<size_t>(size)) {
  if (lifeline_ != nullptr) lifeline_->set_describe(&describe);
  Registry& registry = Registry::instance();
  std::lock_guard<std::mutex> lock(registry.mutex);
  registry.alive.insert(this);
}

HostCommunicator::~HostCommunicator() {
  if (in_forked_child()) {
    // A forked child: transport and connections are the parent's. Their memory stays as it is.
    executor_.release();
    new std::shared_ptr<Lifeline>(std::move(lifeline_));
    return;
  }
  {
    Registry& registry = Registry::instance();
    std::lock_guard<std::mutex> lock(registry.mutex);
    registry.alive.erase(this);
    add(&registry.gone, counters());
  }
  std::lock_guard<std::mutex> lock(mutex_);
  if (failure_.ok() && !executor_->idle()) {
    executor_->fail(error(SCAPE_ERR_USAGE, "%s was destroyed with calls under way", name_.c_str()));
  }
  // What was sent last must leave before the transport goes.
  if (failure_.ok() && executor_->transport() != nullptr) executor_->transport()->flush(kFlushMs);
}

Status HostCommunicator::check_process(const char* what) const {
  if (!in_forked_child()) return Status::Ok();
  return error(SCAPE_ERR_USAGE,
               "%s: %s in a child forked by process %d, which owns the communicator; create one of "
               "the child's own",
               name_.c_str(), what, static_cast<int>(process_));
}

Status HostCommunicator::refusal() const {
  if (failure_.ok()) return failure_;
  return error(failure_.code(), "%s has failed before: %s", name_.c_str(),
               failure_.message().c_str());
}

void HostCommunicator::fail_locked(const Status& why) {
  if (!failure_.ok()) return;
  failure_ = why;
  executor_->fail(why);
  watched_.clear();
  for (auto* queue : {&self_sends_, &self_receives_}) {
    for (const SelfMessage& message : *queue) message.work->end(why);
    queue->clear();
  }
  if (lifeline_ != nullptr) lifeline_->fail(why);
}

void HostCommunicator::abort(const Status& why) {
  if (!check_process("abort").ok()) return;
  std::lock_guard<std::mutex> lock(mutex_);
  if (why.code() == SCAPE_ERR_TIMEOUT && !executor_->idle()) {
    return fail_locked(error(why.code(), "%s; on rank %d, %s", why.message().c_str(), rank_,
                             executor_->waits().c_str()));
  }
  fail_locked(why);
}

Status HostCommunicator::async_error() const {
  SCAPE_RETURN_IF_ERROR(check_process("async error"));
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!failure_.ok()) return failure_;
  }
  if (lifeline_ == nullptr) return Status::Ok();
  lifeline_->poll();
  if (lifeline_->failed()) return lifeline_->status();
  for (const Lifeline::Departure& departure : lifeline_->departures()) {
    if (!departure.orderly) {
      return error(SCAPE_ERR_REMOTE, "%s: rank %d has ended or died; abort the communicator",
                   name_.c_str(), departure.rank);
    }
  }
  return Status::Ok();
}

ByteCounters HostCommunicator::counters() const {
  // Without the lock: process_counters() comes here with the registry's, which making a side
  // channel takes inside this one.
  ByteCounters counters;
  if (executor_->transport() == nullptr) return counters;
  const TransportCounters moved = executor_->transport()->counters();
  counters.sent_bytes = moved.sent_bytes;
  counters.received_bytes = moved.received_bytes;
  counters.sent_messages = moved.sent_messages;
  counters.received_messages = moved.received_messages;
  return counters;
}

// ---- progress ----

bool HostCommunicator::progress() {
  if (in_forked_child()) return false;
  std::unique_lock<std::mutex> lock(mutex_, std::try_to_lock);
  return lock.owns_lock() && progress_locked();
}

bool HostCommunicator::progress_locked() {
  const bool moved = failure_.ok() && executor_->progress();
  meet_trouble();
  std::erase_if(followups_, [](const std::function<bool()>& followup) { return followup(); });
  if (++turns_ % (moved ? 1024 : 64) == 0) watch();
  return moved;
}

// The transport may notice a dead peer, or one that gave up because of it, before the lifeline
// tells which rank is the cause: a message that could not be moved waits a moment for that.
void HostCommunicator::meet_trouble() {
  if (executor_->trouble().ok() || !failure_.ok()) return;
  const auto now = std::chrono::steady_clock::now();
  if (!trouble_met_) trouble_met_ = now;
  const bool may_have_a_cause =
      lifeline_ != nullptr && executor_->trouble().code() == SCAPE_ERR_REMOTE;
  if (may_have_a_cause) watch();
  if (failure_.ok() && (!may_have_a_cause || now - *trouble_met_ > kTimeToHearOfACause)) {
    fail_locked(executor_->trouble());
  }
}

// Those that are over, oldest first.
void HostCommunicator::drop_watched() {
  while (!watched_.empty() && watched_.front().run->done()) watched_.pop_front();
}

// What need not be looked at every turn.
void HostCommunicator::watch() {
  if (lifeline_ == nullptr) return;
  lifeline_->poll();
  if (!failure_.ok()) return;
  if (lifeline_->failed()) return fail_locked(lifeline_->status());
  for (const Lifeline::Departure& departure : lifeline_->departures()) {
    if (!executor_->waits_for(departure.rank)) continue;
    return fail_locked(
        error(SCAPE_ERR_REMOTE, "%s: rank %d %s in the middle of a call; abort the communicator",
              name_.c_str(), departure.rank,
              departure.orderly ? "destroyed its communicator" : "has ended or died"));
  }
  drop_watched();
  if (watched_.empty() || watched_.front().published) return;
  Watched& oldest = watched_.front();
  if (std::chrono::steady_clock::now() - oldest.run->started() < kStall) return;
  oldest.published = true;
  lifeline_->publish(channel_, oldest.descriptor);
}

void HostCommunicator::wait_event(int timeout_ms) {
  if (in_forked_child()) return;
  std::vector<pollfd> entries;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    Transport* const transport = executor_->transport();
    if (channel_ == 0) return;
    if (transport != nullptr) {
      watch();
      if (progress_locked() || !failure_.ok()) return;
      if (transport->event_fd() < 0) {
        timeout_ms = std::min(timeout_ms, kLookAgainMs);
      } else {
        // Arming fails while something waits to be taken.
        if (!transport->arm()) return;
        entries.push_back({transport->event_fd(), POLLIN, 0});
      }
      lifeline_->append_poll_entries(&entries);
      // A call that stalls has to be published in time.
      if (!watched_.empty() && !watched_.front().published) {
        timeout_ms = std::min(timeout_ms, static_cast<int>(kStall.count()));
      }
    }
  }
  ::poll(entries.data(), static_cast<nfds_t>(entries.size()), timeout_ms);
}

// ---- collectives ----

Status HostCommunicator::check(const Arguments& arguments) const {
  const char* const call = name_of(arguments.call);
  const int type = static_cast<int>(arguments.type), op = static_cast<int>(arguments.reduction.op);
  if (type < 0 || type >= kDataTypes) {
    return error(SCAPE_ERR_ARGUMENT, "%s: %s: data type %d is not in 0 .. %d", name_.c_str(), call,
                 type, kDataTypes - 1);
  }
  if (op < 0 || op > static_cast<int>(ReduceOp::kPremulSum)) {
    return error(SCAPE_ERR_ARGUMENT, "%s: %s: reduction %d is not in 0 .. %d", name_.c_str(), call,
                 op, static_cast<int>(ReduceOp::kPremulSum));
  }
  if (has_root(arguments.call) && (arguments.root < 0 || arguments.root >= size_)) {
    return error(SCAPE_ERR_ARGUMENT, "%s: %s: root %d is not in 0 .. %d", name_.c_str(), call,
                 arguments.root, size_ - 1);
  }
  if (arguments.count == 0) return Status::Ok();
  const size_t element = size_of(arguments.type), ranks = static_cast<size_t>(size_);
  if (arguments.count > (SIZE_MAX / 4) / element / ranks) {
    return error(SCAPE_ERR_ARGUMENT, "%s: %s: count %zu is more than memory can hold",
                 name_.c_str(), call, arguments.count);
  }
  const size_t bytes = arguments.count * element;
  size_t send_bytes = bytes, recv_bytes = bytes;
  size_t in_place_recv = 0;  // where recv begins inside send, when in place
  size_t in_place_send = 0;  // where send begins inside recv
  const size_t own = static_cast<size_t>(rank_) * bytes;
  size_t counted_before = 0;  // this rank's part
  for (size_t q = 0; q < arguments.counts.size() && q < static_cast<size_t>(rank_); ++q)
    counted_before += arguments.counts[q] * element;
  const bool is_root = arguments.root == rank_;
  switch (arguments.call) {
    case kAllReduce:
      break;
    case kReduceScatter:
      send_bytes = bytes * ranks;
      in_place_recv = own;
      break;
    case kReduceScatterV:
      recv_bytes = arguments.counts[static_cast<size_t>(rank_)] * element;
      in_place_recv = counted_before;
      break;
    case kAllGather:
      recv_bytes = bytes * ranks;
      in_place_send = own;
      break;
    case kAllGatherV:
      send_bytes = arguments.counts[static_cast<size_t>(rank_)] * element;
      in_place_send = counted_before;
      break;
    case kAllToAll:
      send_bytes = recv_bytes = bytes * ranks;
      break;
    case kBroadcast:
      if (!is_root) send_bytes = 0;
      break;
    case kReduce:
      if (!is_root) recv_bytes = 0;
      break;
    case kGather:
      recv_bytes = is_root ? bytes * ranks : 0;
      in_place_send = own;
      break;
    case kScatter:
      send_bytes = is_root ? bytes * ranks : 0;
      in_place_recv = own;
      break;
  }
  if ((send_bytes > 0 && arguments.send == nullptr) ||
      (recv_bytes > 0 && arguments.recv == nullptr)) {
    return error(
        SCAPE_ERR_ARGUMENT, "%s: %s: the %s buffer is null but count is %zu", name_.c_str(), call,
        send_bytes > 0 && arguments.send == nullptr ? "sending" : "receiving", arguments.count);
  }
  const auto send = reinterpret_cast<uintptr_t>(arguments.send),
             recv = reinterpret_cast<uintptr_t>(arguments.recv);
  const bool overlap = send < recv + recv_bytes && recv < send + send_bytes;
  if (overlap && send + in_place_recv != recv + in_place_send) {
    return error(SCAPE_ERR_ARGUMENT,
                 "%s: %s: the buffers at %p and %p overlap; use the same memory as NCCL's in-place "
                 "rule says, or separate "
                 "memory",
                 name_.c_str(), call, arguments.send, arguments.recv);
  }
  return Status::Ok();
}

std::shared_ptr<const Schedule> HostCommunicator::build(const Arguments& arguments,
                                                        bool in_place) const {
  Shape shape{rank_, size_, arguments.count, arguments.type, arguments.reduction.op, in_place};
  switch (arguments.call) {
    case kAllReduce:
      return all_reduce_schedule(shape);
    case kReduceScatter:
      shape.count *= static_cast<size_t>(size_);
      return reduce_scatter_schedule(
          shape, std::vector<size_t>(static_cast<size_t>(size_), arguments.count));
    case kReduceScatterV:
      return reduce_scatter_schedule(shape, arguments.counts);
    case kAllGather:
      return all_gather_schedule(shape,
                                 std::vector<size_t>(static_cast<size_t>(size_), arguments.count));
    case kAllGatherV:
      return all_gather_schedule(shape, arguments.counts);
    case kAllToAll:
      return all_to_all_schedule(shape);
    case kBroadcast:
      return broadcast_schedule(shape, arguments.root);
    case kReduce:
      return reduce_schedule(shape, arguments.root);
    case kGather:
      return gather_schedule(shape, arguments.root);
    case kScatter:
      return scatter_schedule(shape, arguments.root);
  }
  return nullptr;
}

// Trainers repeat themselves: the last schedules are kept.
std::shared_ptr<const Schedule> HostCommunicator::schedule_for(const Arguments& arguments) {
  constexpr size_t kEntries = 128;
  constexpr size_t kMaxSteps = 16384, kMaxStepsInAll = 32 * kMaxSteps;
  const bool in_place = arguments.call == kAllToAll && arguments.send == arguments.recv;
  const Key key{arguments.call, arguments.type, arguments.reduction.op,
                in_place,       arguments.root, arguments.count};
  for (Cached& entry : cache_) {
    if (!(entry.key == key) || !std::ranges::equal(entry.counts, arguments.counts)) continue;
    entry.used = ++cache_clock_;
    return entry.schedule;
  }
  std::shared_ptr<const Schedule> schedule = build(arguments, in_place);
  const size_t steps = schedule->steps.size();
  if (steps > kMaxSteps) return schedule;
  while (cache_.size() == kEntries || cached_steps_ + steps > kMaxStepsInAll) {
    const auto oldest = std::ranges::min_element(cache_, {}, &Cached::used);
    cached_steps_ -= oldest->schedule->steps.size();
    *oldest = std::move(cache_.back());
    cache_.pop_back();
  }
  cached_steps_ += steps;
  cache_.push_back(
      {key, {arguments.counts.begin(), arguments.counts.end()}, schedule, ++cache_clock_});
  return schedule;
}

Status HostCommunicator::start_with_counts(Arguments arguments, const CallTag& tag, WorkPtr* work) {
  if (arguments.counts.size() != static_cast<size_t>(size_)) {
    return error(SCAPE_ERR_ARGUMENT, "%s: %s: %zu counts for %d ranks; give one per rank",
                 name_.c_str(), name_of(arguments.call), arguments.counts.size(), size_);
  }
  for (const size_t count : arguments.counts) arguments.count += count;
  return start(arguments, tag, work);
}

Status HostCommunicator::start(const Arguments& arguments, const CallTag& tag, WorkPtr* work) {
  SCAPE_RETURN_IF_ERROR(check_process(name_of(arguments.call)));
  SCAPE_RETURN_IF_ERROR(check(arguments));
  std::lock_guard<std::mutex> lock(mutex_);
  if (lifeline_ != nullptr && lifeline_->failed()) fail_locked(lifeline_->status());
  SCAPE_RETURN_IF_ERROR(refusal());
  Descriptor descriptor;
  descriptor.call = calls_++;
  descriptor.count = arguments.count;
  for (const size_t count : arguments.counts) descriptor.extra = mix(descriptor.extra, count);
  descriptor.root = arguments.root;
  descriptor.operation = arguments.call;
  descriptor.type = static_cast<uint8_t>(arguments.type);
  descriptor.op = static_cast<uint8_t>(arguments.reduction.op);
  descriptor.registered = tag.registered ? 1 : 0;
  tag.name.copy(descriptor.name, sizeof descriptor.name - 1);
  if (lifeline_ != nullptr) lifeline_->started(channel_, descriptor);
  if (arguments.count == 0) {
    // Over at once; whoever calls something else here has to hear of it.
    if (lifeline_ != nullptr) lifeline_->publish(channel_, descriptor);
    auto over = std::make_shared<SimpleWork>();
    over->end(Status::Ok());
    *work = std::move(over);
    return Status::Ok();
  }
  const TagSpace tags{false, (descriptor.call & 0x1ff) << 24 | (descriptor.digest() & 0xffffff)};
  auto run = executor_->make_run(schedule_for(arguments),
                                 {arguments.send, arguments.recv, tag.send_region, tag.recv_region},
                                 arguments.reduction, tags, name_of(arguments.call));
  *work = run;
  executor_->start(run);
  meet_trouble();
  drop_watched();
  if (lifeline_ != nullptr && !run->done()) watched_.push_back({run, descriptor});
  return Status::Ok();
}

// ---- point to point ----

Status HostCommunicator::point_to_point(bool sending, void* data, size_t count, DataType type,
                                        int peer, WorkPtr* work) {
  const char* const call = sending ? "Send" : "Recv";
  SCAPE_RETURN_IF_ERROR(check_process(call));
  if (peer < 0 || peer >= size_) {
    return error(SCAPE_ERR_ARGUMENT, "%s: %s: peer %d is not in 0 .. %d", name_.c_str(), call, peer,
                 size_ - 1);
  }
  const int type_number = static_cast<int>(type);
  if (type_number < 0 || type_number >= kDataTypes) {
    return error(SCAPE_ERR_ARGUMENT, "%s: %s: data type %d is not in 0 .. %d", name_.c_str(), call,
                 type_number, kDataTypes - 1);
  }
  if (count > 0 && data == nullptr) {
    return error(SCAPE_ERR_ARGUMENT, "%s: %s: the buffer is null but count is %zu", name_.c_str(),
                 call, count);
  }
  if (count > SIZE_MAX / 4 / size_of(type)) {
    return error(SCAPE_ERR_ARGUMENT, "%s: %s: count %zu is more than memory can hold",
                 name_.c_str(), call, count);
  }
  const size_t bytes = count * size_of(type);
  std::lock_guard<std::mutex> lock(mutex_);
  if (lifeline_ != nullptr && lifeline_->failed()) fail_locked(lifeline_->status());
  SCAPE_RETURN_IF_ERROR(refusal());
  if (bytes == 0) {
    auto over = std::make_shared<SimpleWork>();
    over->end(Status::Ok());
    *work = std::move(over);
    return Status::Ok();
  }
  if (peer == rank_) return self_message(sending, static_cast<std::byte*>(data), bytes, work);
  uint64_t& number = (sending ? sent_ : received_)[static_cast<size_t>(peer)];
  const TagSpace tags{true, number};
  ScheduleBuilder builder(rank_, size_, type);
  for (size_t at = 0; at < bytes; at += kMaxMessage, ++number) {
    const size_t length = std::min(kMaxMessage, bytes - at);
    sending ? builder.send(peer, {Space::kSend, at}, length)
            : builder.recv(peer, {Space::kRecv, at}, length);
  }
  auto run = executor_->make_run(builder.finish(), {data, data}, Reduction{}, tags, call);
  *work = run;
  executor_->start(run);
  meet_trouble();
  return Status::Ok();
}

Status HostCommunicator::self_message(bool sending, std::byte* data, size_t bytes, WorkPtr* work) {
  auto mine = std::make_shared<SimpleWork>();
  *work = mine;
  std::deque<SelfMessage>& others = sending ? self_receives_ : self_sends_;
  if (others.empty()) {
    (sending ? self_sends_ : self_receives_).push_back({data, bytes, std::move(mine)});
    return Status::Ok();
  }
  const SelfMessage other = std::move(others.front());
  others.pop_front();
  Status status;
  if (other.bytes != bytes) {
    status =
        error(SCAPE_ERR_MISMATCH,
              "%s: rank %d sends itself %zu bytes and receives %zu; give both one count",
              name_.c_str(), rank_, sending ? bytes : other.bytes, sending ? other.bytes : bytes);
  } else if (other.data != data) {
    std::memmove(sending ? other.data : data, sending ? data : other.data, bytes);
  }
  other.work->end(status);
  mine->end(status);
  return Status::Ok();
}

// ---- memory ----

Status HostCommunicator::register_memory(void* data, size_t bytes, void** region) {
  *region = nullptr;
  SCAPE_RETURN_IF_ERROR(check_process("registration of memory"));
  std::lock_guard<std::mutex> lock(mutex_);
  Transport* const transport = executor_->transport();
  return transport != nullptr ? transport->register_memory(data, bytes, region) : Status::Ok();
}

void HostCommunicator::deregister_memory(void* region) {
  if (in_forked_child()) return;
  std::lock_guard<std::mutex> lock(mutex_);
  if (executor_->transport() != nullptr) executor_->transport()->deregister_memory(region);
}

// ---- making communicators ----

Status HostCommunicator::side_channel(std::shared_ptr<Communicator>* side, WorkPtr* work) {
  if (channel_ != 0) return error(SCAPE_ERR_USAGE, "%s is a side channel itself", name_.c_str());
  const uint64_t cookie = mix(cookie_, next_offspring() + 1);
  auto made = std::make_shared<SimpleWork>();
  *work = made;
  if (size_ == 1) {
    *side = std::make_shared<HostCommunicator>(0, 1, cookie, 1, nullptr, nullptr);
    made->end(Status::Ok());
    return Status::Ok();
  }
  SCAPE_RETURN_IF_ERROR(check_process("side channel"));
  // Exchanges the addresses over this communicator, each in a slot of one size.
  struct Exchange {
    std::unique_ptr<Transport> transport;
    std::vector<std::byte> mine, all;
    WorkPtr gathering;
  };
  auto exchange = std::make_shared<Exchange>();
  TransportOptions options;
  options.wakeup = true;
  options.ranks = size_;
  SCAPE_RETURN_IF_ERROR(make_transport(options, &exchange->transport));
  std::vector<std::byte> address;
  SCAPE_RETURN_IF_ERROR(exchange->transport->address(&address));
  if (address.size() > kAddressSlot - sizeof(uint32_t)) {
    return error(SCAPE_ERR_SYSTEM,
                 "%s: a transport address of %zu bytes is longer than %zu; choose fewer devices "
                 "(UCX_NET_DEVICES)",
                 name_.c_str(), address.size(), kAddressSlot - sizeof(uint32_t));
  }
  const uint32_t length = static_cast<uint32_t>(address.size());
  exchange->mine.resize(kAddressSlot);
  std::memcpy(exchange->mine.data(), &length, sizeof length);
  std::memcpy(exchange->mine.data() + sizeof length, address.data(), length);
  exchange->all.resize(kAddressSlot * static_cast<size_t>(size_));
  SCAPE_RETURN_IF_ERROR(all_gather(exchange->mine.data(), exchange->all.data(), kAddressSlot,
                                   DataType::kUint8, {false, "side channel"},
                                   &exchange->gathering));
  std::lock_guard<std::mutex> lock(mutex_);
  followups_.push_back([this, exchange, made, side, cookie] {
    if (!exchange->gathering->done()) return false;
    if (Status status = exchange->gathering->status(); !status.ok()) {
      made->end(std::move(status));
      return true;
    }
    std::vector<std::vector<std::byte>> addresses;
    for (size_t q = 0; q < static_cast<size_t>(size_); ++q) {
      const std::byte* const slot = exchange->all.data() + q * kAddressSlot;
      uint32_t bytes;
      std::memcpy(&bytes, slot, sizeof bytes);
      addresses.emplace_back(
          slot + sizeof bytes,
          slot + sizeof bytes + std::min<size_t>(bytes, kAddressSlot - sizeof bytes));
    }
    Status status = exchange->transport->connect(addresses);
    if (status.ok()) {
      *side = std::make_shared<HostCommunicator>(rank_, size_, cookie, 1,
                                                 std::move(exchange->transport), lifeline_);
    }
    made->end(std::move(status));
    return true;
  });
  return Status::Ok();
}

// A meeting of all ranks, and what this one brings to it.
struct Meeting {
  Endpoint root;
  uint64_t cookie = 0;
  bool at_rank_0 = false;             // rank 0 holds it, else who made the unique id
  const Socket* root_door = nullptr;  // on a rank 0 that holds it: where it listens
  int rank = 0, size = 1;
  std::string purpose, transport_name;
  std::unique_ptr<Transport> transport;
  Socket listener;  // of this rank, for its lifeline
  Endpoint endpoint;
};

// Meets the other ranks and builds the communicator.
Status establish(Meeting* meeting, std::shared_ptr<Communicator>* out) {
  const double timeout = settings().bootstrap_timeout_s;
  Attendance mine;
  mine.rank = meeting->rank;
  mine.size = meeting->size;
  mine.transport = std::move(meeting->transport_name);
  mine.purpose = std::move(meeting->purpose);
  mine.listener = meeting->endpoint;
  SCAPE_RETURN_IF_ERROR(meeting->transport->address(&mine.blob));
  std::vector<Member> members;
  if (meeting->root_door != nullptr) {
    SCAPE_RETURN_IF_ERROR(hold_meeting(*meeting->root_door, meeting->root.addresses,
                                       meeting->cookie, mine, timeout, &members));
  } else {
    SCAPE_RETURN_IF_ERROR(attend_meeting(meeting->root, meeting->cookie, meeting->at_rank_0, mine,
                                         timeout, &members));
  }
  std::vector<std::vector<std::byte>> addresses;
  std::vector<Endpoint> endpoints;
  for (Member& member : members) {
    addresses.push_back(std::move(member.blob));
    endpoints.push_back(std::move(member.listener));
  }
  SCAPE_RETURN_IF_ERROR(meeting->transport->connect(addresses));
  std::shared_ptr<Lifeline> lifeline;
  SCAPE_RETURN_IF_ERROR(Lifeline::connect(
      meeting->rank, meeting->size, mix(meeting->cookie, 0), std::move(meeting->listener),
      meeting->endpoint.addresses, std::move(endpoints), seconds_from_now(timeout), &lifeline));
  *out = std::make_shared<HostCommunicator>(meeting->rank, meeting->size, meeting->cookie, 0,
                                            std::move(meeting->transport), std::move(lifeline));
  return Status::Ok();
}

// What host mode brings: the chosen transport, and a new listener.
Status prepare(Meeting* meeting) {
  TransportOptions options;
  options.ranks = meeting->size;
  SCAPE_RETURN_IF_ERROR(make_transport(options, &meeting->transport));
  meeting->transport_name = chosen_transport();
  SCAPE_RETURN_IF_ERROR(choose_addresses(settings().socket_ifname, settings().socket_family,
                                         &meeting->endpoint.addresses));
  return listen_on(meeting->endpoint.addresses, &meeting->listener, &meeting->endpoint.port);
}

Status check_rank(int rank, int size) {
  if (size >= 1 && static_cast<size_t>(size) <= kMaxRanks && rank >= 0 && rank < size)
    return Status::Ok();
  return error(SCAPE_ERR_ARGUMENT,
               "rank %d of %d is not possible: ranks are 0 .. size - 1, sizes 1 .. %zu", rank, size,
               kMaxRanks);
}

HostCommunicator* as_host(Communicator& communicator) {
  return dynamic_cast<HostCommunicator*>(&communicator);
}

// Meets some of the parent's ranks (`members`, in their new order) at the first one's listener.
Status meet_again(HostCommunicator& parent, const std::vector<int>& members, uint64_t cookie,
                  const std::string& purpose, std::shared_ptr<Communicator>* out) {
  const auto me = std::find(members.begin(), members.end(), parent.rank());
  const int rank = static_cast<int>(me - members.begin()), size = static_cast<int>(members.size());
  if (size == 1) {
    *out = std::make_shared<HostCommunicator>(0, 1, cookie, 0, nullptr, nullptr);
    return Status::Ok();
  }
  const Lifeline& lifeline = *parent.lifeline();
  Meeting meeting;
  meeting.root = lifeline.members()[static_cast<size_t>(members.front())];
  meeting.cookie = cookie;
  meeting.at_rank_0 = true;
  if (rank == 0) meeting.root_door = &lifeline.listener();
  meeting.rank = rank;
  meeting.size = size;
  meeting.purpose = purpose;
  SCAPE_RETURN_IF_ERROR(prepare(&meeting));
  return establish(&meeting, out);
}

}  // namespace

Status make_unique_id(UniqueId* id) {
  SCAPE_RETURN_IF_ERROR(settings_status());
  Invitation invitation;
  SCAPE_RETURN_IF_ERROR(open_root(settings().bootstrap_timeout_s, &invitation));
  id->bytes = invitation.encode();
  return Status::Ok();
}

bool is_host_unique_id(const UniqueId& id) {
  Invitation invitation;
  return Invitation::decode(id.bytes, &invitation);
}

void drop_unique_id(const UniqueId& id) {
  Invitation invitation;
  if (Invitation::decode(id.bytes, &invitation)) leave_root(invitation.cookie, true);
}

Status create_communicator(const UniqueId& id, int rank, int size,
                           std::shared_ptr<Communicator>* out) {
  SCAPE_RETURN_IF_ERROR(settings_status());
  SCAPE_RETURN_IF_ERROR(check_rank(rank, size));
  Invitation invitation;
  if (!Invitation::decode(id.bytes, &invitation)) {
    return error(SCAPE_ERR_ARGUMENT,
                 "rank %d: the unique id is not one of scape's host mode; make it with "
                 "ncclGetUniqueId in a process with the same SCAPE_MODE",
                 rank);
  }
  if (invitation.version != Invitation::kVersion || invitation.mode != Invitation::kHostMode) {
    return error(SCAPE_ERR_MISMATCH,
                 "rank %d: the unique id is of version %u, mode %u; this library has version %u, "
                 "mode %u (host); use one "
                 "build and one SCAPE_MODE everywhere",
                 rank, invitation.version, invitation.mode, Invitation::kVersion,
                 Invitation::kHostMode);
  }
  if (size == 1) {
    leave_root(invitation.cookie, true);
    *out = std::make_shared<HostCommunicator>(0, 1, invitation.cookie, 0, nullptr, nullptr);
    return Status::Ok();
  }
  Meeting meeting;
  meeting.root = invitation.root;
  meeting.cookie = invitation.cookie;
  meeting.rank = rank;
  meeting.size = size;
  meeting.purpose = "create";
  Status status = prepare(&meeting);
  if (status.ok()) status = establish(&meeting, out);
  leave_root(invitation.cookie, false);
  return status;
}

Status join_communicator(Joining joining, std::shared_ptr<Communicator>* out) {
  SCAPE_RETURN_IF_ERROR(check_rank(joining.rank, joining.size));
  if (joining.size == 1) {
    *out = std::make_shared<HostCommunicator>(0, 1, joining.cookie, 0, nullptr, nullptr);
    return Status::Ok();
  }
  Meeting meeting;
  meeting.root = std::move(joining.root);
  meeting.cookie = joining.cookie;
  meeting.at_rank_0 = true;
  meeting.rank = joining.rank;
  meeting.size = joining.size;
  meeting.purpose = "join";
  meeting.transport_name = std::move(joining.transport_name);
  meeting.transport = std::move(joining.transport);
  meeting.listener = std::move(joining.listener);
  meeting.endpoint = std::move(joining.endpoint);
  if (joining.rank == 0) meeting.root_door = &meeting.listener;
  return establish(&meeting, out);
}

Status split_communicator(Communicator& parent, int color, int key,
                          std::shared_ptr<Communicator>* out) {
  HostCommunicator* const host = as_host(parent);
  if (host == nullptr)
    return error(SCAPE_ERR_ARGUMENT, "split: the parent is not a host communicator");
  struct Choice {
    int32_t color, key;
  };
  const Choice mine{color, key};
  std::vector<Choice> all(static_cast<size_t>(host->size()));
  WorkPtr work;
  SCAPE_RETURN_IF_ERROR(
      host->all_gather(&mine, all.data(), sizeof mine, DataType::kUint8, {false, "split"}, &work));
  SCAPE_RETURN_IF_ERROR(wait(*host, *work));
  const uint64_t offspring = host->next_offspring() + 1;
  out->reset();
  if (color < 0) return Status::Ok();
  std::vector<int> members;
  for (int r = 0; r < host->size(); ++r) {
    if (all[static_cast<size_t>(r)].color == color) members.push_back(r);
  }
  std::stable_sort(members.begin(), members.end(), [&](int a, int b) {
    return all[static_cast<size_t>(a)].key < all[static_cast<size_t>(b)].key;
  });
  const uint64_t cookie = mix(mix(host->cookie(), offspring), static_cast<uint64_t>(color));
  return meet_again(*host, members, cookie, "split", out);
}

Status shrink_communicator(Communicator& parent, std::span<const int> excluded,
                           std::shared_ptr<Communicator>* out) {
  HostCommunicator* const host = as_host(parent);
  if (host == nullptr)
    return error(SCAPE_ERR_ARGUMENT, "shrink: the parent is not a host communicator");
  const std::set<int> out_of_it(excluded.begin(), excluded.end());
  std::string purpose = "shrink without";
  for (const int rank : out_of_it) {
    if (rank < 0 || rank >= host->size() || rank == host->rank()) {
      return error(SCAPE_ERR_ARGUMENT, "shrink: rank %d cannot be excluded on rank %d of %d", rank,
                   host->rank(), host->size());
    }
    purpose += format(" %d", rank);
  }
  std::vector<int> members;
  for (int r = 0; r < host->size(); ++r) {
    if (out_of_it.count(r) == 0) members.push_back(r);
  }
  const uint64_t cookie = mix(mix(host->cookie(), host->next_offspring() + 1), uint64_t{1} << 40);
  return meet_again(*host, members, cookie, purpose, out);
}

Status grow_communicator(Communicator* parent, const UniqueId* id, int rank, int size,
                         std::shared_ptr<Communicator>* out) {
  if (parent == nullptr) {
    if (id == nullptr) return error(SCAPE_ERR_ARGUMENT, "grow: a new rank needs the unique id");
    return create_communicator(*id, rank, size, out);
  }
  if (size <= parent->size()) {
    return error(SCAPE_ERR_ARGUMENT, "grow: %d ranks is not more than the %d there are", size,
                 parent->size());
  }
  // The root's id to all: slots of a flag and the id.
  struct Slot {
    uint8_t present = 0;
    UniqueId id;
  };
  Slot mine;
  if (id != nullptr) mine = {1, *id};
  std::vector<Slot> all(static_cast<size_t>(parent->size()));
  WorkPtr work;
  SCAPE_RETURN_IF_ERROR(
      parent->all_gather(&mine, all.data(), sizeof mine, DataType::kUint8, {false, "grow"}, &work));
  SCAPE_RETURN_IF_ERROR(wait(*parent, *work));
  const auto present = [](const Slot& slot) { return slot.present != 0; };
  if (std::count_if(all.begin(), all.end(), present) != 1) {
    return error(
        SCAPE_ERR_USAGE,
        "grow: %td ranks of the parent gave a unique id; the one that made it must, and no "
        "other",
        std::count_if(all.begin(), all.end(), present));
  }
  const auto root = std::find_if(all.begin(), all.end(), present);
  return create_communicator(root->id, parent->rank(), size, out);
}

ByteCounters process_counters() {
  Registry& registry = Registry::instance();
  std::lock_guard<std::mutex> lock(registry.mutex);
  ByteCounters sum = registry.gone;
  for (const HostCommunicator* communicator : registry.alive) add(&sum, communicator->counters());
  return sum;
}

}  // namespace scape::plugin
