#include "interposer/launch.h"

#include <sched.h>

#include <chrono>
#include <cstdlib>
#include <map>
#include <new>
#include <thread>

#include "base/exit_guard.h"
#include "base/settings.h"
#include "interposer/process.h"
#include "interposer/saved_state.h"

namespace scape::interposer {
namespace {

using Clock = std::chrono::steady_clock;
using plugin::CallTag;
using plugin::Communicator;
using plugin::WorkPtr;

Status start_dense(const Call& call, WorkPtr* work) {
  Communicator& comm = call.comm->communicator();
  plugin::Reduction reduction = call.reduction;
  if (call.scalar != nullptr) read_scalar(call.scalar, call.type, &reduction);
  const CallTag tag{call.route.registered, call.route.name};
  switch (call.kind) {
    case Call::Kind::kAllReduce:
      return comm.all_reduce(call.send, call.recv, call.count, call.type, reduction, tag, work);
    case Call::Kind::kReduceScatter:
      return comm.reduce_scatter(call.send, call.recv, call.count, call.type, reduction, tag, work);
    case Call::Kind::kAllGather:
      return comm.all_gather(call.send, call.recv, call.count, call.type, tag, work);
    case Call::Kind::kAllToAll:
      return comm.all_to_all(call.send, call.recv, call.count, call.type, tag, work);
    case Call::Kind::kBroadcast:
      return comm.broadcast(call.send, call.recv, call.count, call.type, call.peer, tag, work);
    case Call::Kind::kReduce:
      return comm.reduce(call.send, call.recv, call.count, call.type, reduction, call.peer, tag,
                         work);
    case Call::Kind::kGather:
      return comm.gather(call.send, call.recv, call.count, call.type, call.peer, tag, work);
    case Call::Kind::kScatter:
      return comm.scatter(call.send, call.recv, call.count, call.type, call.peer, tag, work);
    case Call::Kind::kSend:
      return comm.send(call.send, call.count, call.type, call.peer, work);
    case Call::Kind::kRecv:
      return comm.recv(call.recv, call.count, call.type, call.peer, work);
  }
  return error(SCAPE_ERR_INTERNAL, "call of unknown kind %d", static_cast<int>(call.kind));
}

// The calls of one communicator, in order.
class Lane {
 public:
  explicit Lane(std::shared_ptr<HostComm> comm) : comm_(std::move(comm)) {}

  void add(Call* call) { calls_.push_back(call); }
  const Status& status() const { return first_error_; }
  int rank() const { return comm_->rank(); }

  // Moves on without blocking; true when something changed.
  bool step() {
    bool moved = comm_->communicator().progress();
    if (masked_) moved |= poll_masked();
    while (!masked_ && next_ < calls_.size() && start()) moved = true;
    while (waiting_ < works_.size() && works_[waiting_]->done()) {
      keep(works_[waiting_]->status());
      works_[waiting_++].reset();
      moved = true;
    }
    return moved;
  }

  bool over() const { return !masked_ && next_ == calls_.size() && waiting_ == works_.size(); }

  void fail(const Status& why) {
    // The communicator adds whom its calls wait for.
    comm_->communicator().abort(why);
    const Status known = comm_->communicator().async_error();
    keep(known.ok() ? why : known);
  }

 private:
  // Starts the next call; false when it has to wait.
  bool start() {
    Call& call = *calls_[next_];
    if (call.route.buffer != nullptr) return start_masked(call);
    ++next_;
    WorkPtr work;
    const Status status = start_dense(call, &work);
    keep(status);
    if (status.ok()) works_.push_back(std::move(work));
    return true;
  }

  bool start_masked(Call& call) {
    Buffer& buffer = *call.route.buffer;
    // Another thread may be in a call or a step of this buffer; it may need this thread's progress.
    std::unique_lock busy(buffer.busy, std::try_to_lock);
    if (!busy.owns_lock()) return false;
    ++next_;
    if (buffer.dropped) {
      keep(error(SCAPE_ERR_USAGE,
                 "registration \"%s\" was dropped while a call of it was pending; unregister, or "
                 "destroy the communicator, after ncclGroupEnd",
                 call.route.name.c_str()));
      return true;
    }
    if (Status status = claim_saved_state(buffer); !status.ok()) {
      // The others have begun this call, or will: they hear of it at once instead of waiting.
      fail(status);
      return true;
    }
    plugin::Reduction reduction = call.reduction;
    if (call.scalar != nullptr) read_scalar(call.scalar, call.type, &reduction);
    const Status status = buffer.masked->begin_all_reduce(call.send, call.recv, reduction);
    keep(status);
    if (status.ok()) {
      masked_ = &buffer;
      busy_ = std::move(busy);
      poll_masked();
    }
    return true;
  }

  bool poll_masked() {
    if (!masked_->masked->poll()) return false;
    keep(masked_->masked->status());
    masked_ = nullptr;
    busy_.unlock();
    return true;
  }

  void keep(const Status& status) {
    if (first_error_.ok()) first_error_ = status;
  }

  std::shared_ptr<HostComm> comm_;
  std::vector<Call*> calls_;
  size_t next_ = 0;
  std::vector<WorkPtr> works_;
  size_t waiting_ = 0;  // works before it are done
  Buffer* masked_ = nullptr;
  std::unique_lock<std::mutex> busy_;
  Status first_error_;
};

// Drives all lanes together until all are over.
void run(std::vector<Lane>& lanes) {
  ExitGuard guard;
  const auto limit = std::chrono::duration<double>(settings().timeout_s);
  auto last_move = Clock::now();
  bool timed_out = false;
  for (unsigned idle = 0;;) {
    bool over = true;
    bool moved = false;
    for (Lane& lane : lanes) {
      moved |= lane.step();
      over &= lane.over();
    }
    if (over) break;
    guard.stop_if_exiting();
    if (moved) {
      if (idle > 256) last_move = Clock::now();
      idle = 0;
      continue;
    }
    // A short spin keeps latency low where each rank has a core; beyond that others get the core.
    if (++idle < 64) continue;
    ::sched_yield();
    if (idle % 256 != 0) continue;
    const auto now = Clock::now();
    if (idle == 256) last_move = now;
    if (now - last_move < limit || timed_out) continue;
    timed_out = true;
    for (Lane& lane : lanes) {
      if (!lane.over()) {
        lane.fail(error(SCAPE_ERR_TIMEOUT,
                        "no peer moved for %g s (SCAPE_TIMEOUT); see whether the ranks that are "
                        "waited for are stopped or late, or raise SCAPE_TIMEOUT",
                        settings().timeout_s));
      }
    }
  }
}

constinit thread_local Group* open_group = nullptr;

}  // namespace

Status launch(std::vector<Call>& calls) {
  std::vector<Lane> lanes;
  std::map<uint64_t, size_t> lane_of;
  for (Call& call : calls) {
    const auto [entry, fresh] = lane_of.try_emplace(call.comm->id(), lanes.size());
    if (fresh) lanes.emplace_back(call.comm);
    lanes[entry->second].add(&call);
  }

  try {
    run(lanes);
  } catch (const std::bad_alloc&) {
    // What was started must not go on into the callers' buffers, nor the other ranks wait for it.
    for (Lane& lane : lanes) {
      lane.fail(error(SCAPE_ERR_MEMORY, "rank %d ran out of memory in a call", lane.rank()));
    }
    run(lanes);  // all of it fails now, and so comes to its end
  }
  for (const Lane& lane : lanes) SCAPE_RETURN_IF_ERROR(lane.status());
  return {};
}

Group* current_group() { return open_group; }

Status group_start() {
  if (open_group == nullptr) open_group = new Group;
  ++open_group->depth;
  return {};
}

Status group_end(bool discard) {
  if (open_group == nullptr) {
    return error(SCAPE_ERR_USAGE, "no group is open in this thread; call ncclGroupStart first");
  }
  if (--open_group->depth > 0) return open_group->first_error;
  const std::unique_ptr<Group> group(std::exchange(open_group, nullptr));
  SCAPE_RETURN_IF_ERROR(group->first_error);
  if (discard) return {};
  // Sends to oneself without a receive would wait for ever.
  std::map<uint64_t, int> to_self;
  for (const Call& call : group->calls) {
    if (call.kind == Call::Kind::kSend && call.peer == call.comm->rank())
      ++to_self[call.comm->id()];
    if (call.kind == Call::Kind::kRecv && call.peer == call.comm->rank())
      --to_self[call.comm->id()];
  }
  for (const auto& [comm, surplus] : to_self) {
    if (surplus != 0) {
      return error(SCAPE_ERR_USAGE, "the group has %d %s to its own rank without a counterpart",
                   std::abs(surplus), surplus > 0 ? "sends" : "receives");
    }
  }
  SCAPE_RETURN_IF_ERROR(run_together(group->jobs));
  return launch(group->calls);
}

Status submit(Call call) {
  if (open_group != nullptr) {
    open_group->calls.push_back(std::move(call));
    return {};
  }
  std::vector<Call> alone;
  alone.push_back(std::move(call));
  return launch(alone);
}

Status submit_job(std::function<Status()> job) {
  if (open_group != nullptr) {
    open_group->jobs.push_back(std::move(job));
    return {};
  }
  return job();
}

Status run_together(const std::vector<std::function<Status()>>& jobs) {
  if (jobs.size() == 1) return jobs.front()();
  std::vector<Status> results(jobs.size());
  std::vector<std::thread> threads;
  const auto run = [&](size_t i) {
    try {
      results[i] = jobs[i]();
    } catch (const std::exception& exception) {
      results[i] = error(SCAPE_ERR_INTERNAL, "%s", exception.what());
    }
  };
  std::exception_ptr refused;
  try {
    for (size_t i = 0; i < jobs.size(); ++i) threads.emplace_back(run, i);
  } catch (...) {
    refused = std::current_exception();  // no more threads: those that run still have to be joined
  }
  for (std::thread& thread : threads) thread.join();
  if (refused != nullptr) std::rethrow_exception(refused);
  for (const Status& result : results) SCAPE_RETURN_IF_ERROR(result);
  return {};
}

}  // namespace scape::interposer
