#include "plugin/host_communicator.h"

#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <set>
#include <utility>

#include "base/fault.h"
#include "base/overlap.h"
#include "base/settings.h"
#include "base/thread.h"
#include "plugin/collectives/reduce.h"
#include "plugin/collectives/schedules.h"
#include "plugin/host_communicator_impl.h"

namespace scape::plugin {
namespace {

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
    case kSharedAllReduce:
      return "AllReduce (in shared memory)";
  }
  return "?";
}

bool has_op(Call call) {
  return call == kAllReduce || call == kReduceScatter || call == kReduceScatterV ||
         call == kReduce || call == kSharedAllReduce;
}
bool has_counts(Call call) { return call == kAllGatherV || call == kReduceScatterV; }
bool has_root(Call call) {
  return call == kBroadcast || call == kReduce || call == kGather || call == kScatter;
}

// A call that has not ended for this long tells the neighbours what it is.
constexpr auto kStall = std::chrono::milliseconds(100);
// Where a transport cannot wake anybody, its owner looks at it this often.
constexpr int kLookAgainMs = 1;
constexpr auto kTimeToHearOfACause = std::chrono::seconds(2);
constexpr int kFlushMs = 2000;
static_assert(kMaxRanks == 1 << TagSpace::kRankBits);
constexpr size_t kMaxMessage = size_t{512} << 20;

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
}  // namespace

uint64_t mix(uint64_t a, uint64_t b) {
  Descriptor words;
  words.call = a;
  words.count = b;
  return words.digest();
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
  if (lifeline_ != nullptr) lifeline_->set_describe(&describe_call);
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
  fault_point(Fault::kClosing);
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
  const bool timed_out = why.code() == SCAPE_ERR_TIMEOUT;
  const std::string culprits = timed_out ? who_keeps_the_others() : "";
  // A rank that gives up tells the others why it has to, where it knows.
  const Status cause = trouble_of_others();
  std::lock_guard<std::mutex> lock(mutex_);
  if (!cause.ok()) return fail_locked(cause);
  if (!culprits.empty()) {
    return fail_locked(error(why.code(), "%s; %s", why.message().c_str(), culprits.c_str()));
  }
  if (timed_out && !executor_->idle()) {
    return fail_locked(error(why.code(), "%s; on rank %d, %s", why.message().c_str(), rank_,
                             executor_->waits().c_str()));
  }
  fail_locked(why);
}

std::string HostCommunicator::who_keeps_the_others() {
  if (lifeline_ == nullptr || lifeline_->failed()) return {};
  int channel = channel_;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!failure_.ok()) return {};
    // A call that waits for its mask has nothing under way here.
    if (executor_->idle()) channel = 1;
  }
  const Lifeline::Roll roll = lifeline_->call_roll(channel);
  const auto list = [](const std::vector<int>& ranks) {
    constexpr size_t kShown = 8;
    std::string text = ranks.size() == 1 ? "rank " : "ranks ";
    for (size_t i = 0; i < std::min(ranks.size(), kShown); ++i) {
      text += (i == 0 ? "" : ", ") + std::to_string(ranks[i]);
    }
    if (ranks.size() > kShown) text += format(" and %zu more", ranks.size() - kShown);
    return text;
  };
  if (!roll.silent.empty()) {
    return list(roll.silent) +
           " gave no sign of life for a second (stopped, busy outside Scape's "
           "calls, or cut off)";
  }
  if (!roll.behind.empty()) return list(roll.behind) + " did not come to this call";
  return {};
}

Status HostCommunicator::async_error() const {
  SCAPE_RETURN_IF_ERROR(check_process("async error"));
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!failure_.ok()) return failure_;
  }
  return trouble_of_others();
}

Status HostCommunicator::trouble_of_others() const {
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
    case kSharedAllReduce:
      send_bytes = recv_bytes = 0;
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
  if (overlap(arguments.send, send_bytes, arguments.recv, recv_bytes) &&
      send + in_place_recv != recv + in_place_send) {
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
    case kSharedAllReduce:
      return shared_all_reduce_schedule(shape, arguments.shared->layout());
  }
  return nullptr;
}

// Trainers repeat themselves: the last schedules are kept.
std::shared_ptr<const Schedule> HostCommunicator::schedule_for(const Arguments& arguments) {
  constexpr size_t kEntries = 128;
  constexpr size_t kMaxSteps = 16384, kMaxStepsInAll = 32 * kMaxSteps;
  const bool in_place = arguments.call == kAllToAll && arguments.send == arguments.recv;
  const Key key{arguments.call,
                arguments.type,
                arguments.reduction.op,
                in_place,
                arguments.root,
                arguments.count,
                arguments.shared != nullptr ? arguments.shared->layout().stride : 0};
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
  return start_locked(arguments, tag, work);
}

Status HostCommunicator::start_locked(const Arguments& arguments, const CallTag& tag,
                                      WorkPtr* work) {
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
  descriptor.learning_rate = tag.learning_rate;
  descriptor.weight_decay = tag.weight_decay;
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
  const Buffers buffers{arguments.send, arguments.recv, tag.send_region, tag.recv_region,
                        arguments.shared != nullptr ? arguments.shared->memory() : nullptr};
  auto run = executor_->make_run(schedule_for(arguments), buffers, arguments.reduction, tags,
                                 name_of(arguments.call));
  *work = run;
  executor_->start(run);
  if (!tag.registered && channel_ == 0) fault_point(Fault::kDense);
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

// ---- for messages, and of the process ----

std::string describe_call(const Descriptor& descriptor) {
  const Call call = static_cast<Call>(descriptor.operation);
  std::string text =
      format("%s(count %llu, %s", name_of(call), static_cast<unsigned long long>(descriptor.count),
             name_of(static_cast<DataType>(descriptor.type)));
  if (has_op(call)) text += format(", %s", name_of(static_cast<ReduceOp>(descriptor.op)));
  if (has_root(call)) text += format(", root %d", descriptor.root);
  if (descriptor.registered != 0) {
    text += format(", registered as \"%.*s\"", static_cast<int>(sizeof descriptor.name),
                   descriptor.name);
  } else if (descriptor.name[0] != '\0') {
    text += format(", of \"%.*s\", whose sparsity is 0", static_cast<int>(sizeof descriptor.name),
                   descriptor.name);
  }
  if (descriptor.learning_rate != 0 || descriptor.weight_decay != 0) {
    text += format(", last step with lr %.9g, weight decay %.9g",
                   static_cast<double>(descriptor.learning_rate),
                   static_cast<double>(descriptor.weight_decay));
  }
  if (has_counts(call))
    text +=
        format(", counts #%06llx", static_cast<unsigned long long>(descriptor.extra & 0xffffff));
  return text + ")";
}

ByteCounters process_counters() {
  Registry& registry = Registry::instance();
  std::lock_guard<std::mutex> lock(registry.mutex);
  ByteCounters sum = registry.gone;
  for (const HostCommunicator* communicator : registry.alive) add(&sum, communicator->counters());
  return sum;
}

}  // namespace scape::plugin
