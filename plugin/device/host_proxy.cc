#include "plugin/device/host_proxy.h"

#include <pthread.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <exception>
#include <iterator>
#include <utility>

#include "base/exit_guard.h"
#include "base/float_environment.h"
#include "base/log.h"
#include "base/settings.h"
#include "base/thread.h"
#include "plugin/placement/placement.h"

namespace scape::plugin {
namespace {

using Clock = std::chrono::steady_clock;

constexpr char kPurpose[] = "collectives of device memory";

// For so long only the core is offered to others between two looks; then the thread sleeps, for a
// small part of the time that it has waited.
constexpr std::chrono::microseconds kAwake{200};
constexpr Clock::duration kShortestSleep = std::chrono::microseconds(20);
constexpr Clock::duration kLongestSleep = std::chrono::microseconds(100);
constexpr int kWaitedPerSleep = 100;

// Where nothing moved. No event of a transport ends it: what arrives from a device makes none.
void rest(Clock::duration waited) {
  if (waited < kAwake) {
    ::sched_yield();
  } else {
    std::this_thread::sleep_for(
        std::clamp(waited / kWaitedPerSleep, kShortestSleep, kLongestSleep));
  }
}

}  // namespace

Status HostProxy::start(std::shared_ptr<CudaDevice> device, std::shared_ptr<Communicator> main,
                        std::shared_ptr<Communicator> side, std::shared_ptr<HostProxy>* out) {
  // In a forked child it is left alone: the thread stayed in the parent.
  std::shared_ptr<HostProxy> made(
      new HostProxy(std::move(device), std::move(main), std::move(side)), [](HostProxy* proxy) {
        if (proxy->in_owner_process()) delete proxy;
      });
  HostProxy* const proxy = made.get();
  SCAPE_RETURN_IF_ERROR(start_thread(kPurpose, &made->thread_, [proxy] { proxy->run(); }));
  *out = std::move(made);
  return Status::Ok();
}

HostProxy::HostProxy(std::shared_ptr<CudaDevice> device, std::shared_ptr<Communicator> main,
                     std::shared_ptr<Communicator> side)
    : device_(std::move(device)), owner_(::getpid()) {
  channels_[kMain].host = std::move(main);
  channels_[kSide].host = std::move(side);
}

HostProxy::~HostProxy() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  wake_.notify_all();
  if (thread_.joinable()) thread_.join();
  // Before the relays: a transport may have memory of theirs in its hands until its end.
  for (auto lane = channels_.rbegin(); lane != channels_.rend(); ++lane) lane->host.reset();
}

bool HostProxy::in_owner_process() const { return ::getpid() == owner_; }

// The other ranks read it, too.
Status HostProxy::of_this_rank(const Status& failure) const {
  if (failure.ok()) return failure;
  return error(failure.code(), "rank %d: %s", main().rank(), failure.message().c_str());
}

// ---- for the callers ----

Status HostProxy::take_relay(size_t bytes, std::unique_ptr<Relay>* out) {
  {
    const std::lock_guard lock(mutex_);
    auto best = relays_.end();
    for (auto it = relays_.begin(); it != relays_.end(); ++it) {
      const size_t capacity = (*it)->capacity();
      if (capacity < bytes || (best != relays_.end() && (*best)->capacity() <= capacity)) continue;
      bool over = false;
      SCAPE_RETURN_IF_ERROR(of_this_rank((*it)->over(&over)));
      if (over) best = it;
    }
    if (best != relays_.end()) {
      *out = std::move(*best);
      relays_.erase(best);
      return Status::Ok();
    }
  }
  return of_this_rank(device_->make_relay(bytes, out));
}

Status HostProxy::submit(Channel channel, Stream stream, const void* send, void* recv, Job job) {
  SCAPE_RETURN_IF_ERROR(failure());
  const Communicator& host = *channels_[channel].host;
  const size_t mine = job.count * size_of(job.type);
  const size_t all = job.gathers ? mine * static_cast<size_t>(host.size()) : mine;
  const size_t before = job.gathers ? mine * static_cast<size_t>(host.rank()) : 0;
  Entry entry;
  SCAPE_RETURN_IF_ERROR(take_relay(all, &entry.relay));
  const Status enqueued = of_this_rank(entry.relay->enqueue(
      stream,
      {.send = send, .send_bytes = mine, .send_offset = before, .recv = recv, .recv_bytes = all}));
  entry.job = std::move(job);
  const std::lock_guard lock(mutex_);
  if (!enqueued.ok() || !failure_.ok()) {
    entry.relay->release(false);
    relays_.push_back(std::move(entry.relay));
    return enqueued.ok() ? failure_ : enqueued;
  }
  submitted_[channel].push_back(std::move(entry));
  wake_.notify_one();
  return Status::Ok();
}

Status HostProxy::failure() const {
  const std::lock_guard lock(mutex_);
  return failure_;
}

void HostProxy::abort(const Status& why) {
  for (const Lane& lane : channels_) lane.host->abort(why);
  // It adds who is to blame, where it can tell.
  const Status known = main().async_error();
  {
    const std::lock_guard lock(mutex_);
    if (failure_.ok()) failure_ = known.ok() ? why : known;
  }
  wake_.notify_one();
}

// ---- the thread ----

void HostProxy::run() {
  const DefaultFloatEnvironment as_defined;  // the thread that started this one may have another
  ::pthread_setname_np(::pthread_self(), "scape-progress");
  try {
    place_this_thread(kPurpose, nullptr, 0, main().size());
    serve();
  } catch (const std::exception& problem) {  // no memory: nothing else is thrown in here
    give_up(error(SCAPE_ERR_MEMORY, "%s ended on %s: %s", kPurpose,
                  std::string(main().name()).c_str(), problem.what()));
  }
}

bool HostProxy::idle() const {
  return std::all_of(channels_.begin(), channels_.end(),
                     [](const Lane& lane) { return lane.waiting.empty() && lane.running.empty(); });
}

bool HostProxy::take_jobs() {
  std::unique_lock lock(mutex_);
  const auto nothing_new = [&] {
    return std::all_of(submitted_.begin(), submitted_.end(),
                       [](const std::vector<Entry>& entries) { return entries.empty(); });
  };
  if (idle()) wake_.wait(lock, [&] { return stop_ || !failure_.ok() || !nothing_new(); });
  if (idle() && stop_ && nothing_new()) return false;
  for (size_t i = 0; i < kChannels; ++i) {
    std::move(submitted_[i].begin(), submitted_[i].end(), std::back_inserter(channels_[i].waiting));
    submitted_[i].clear();
  }
  return true;
}

void HostProxy::serve() {
  Clock::time_point last_moved = Clock::now();
  bool was_idle = true;
  const std::chrono::duration<double> limit(settings().timeout_s);
  for (;;) {
    if (!take_jobs()) return;
    const ExitGuard guard;
    if (ExitGuard::exiting()) return;
    Status status = failure();
    bool moved = false;
    for (Lane& lane : channels_) {
      if (status.ok()) status = advance(lane, &moved);
    }
    const auto now = Clock::now();
    if (moved || was_idle) last_moved = now;
    was_idle = idle();
    if (status.ok() && now - last_moved > limit) {
      // A device that is busy is nobody's fault, but at the end nothing waits for ever.
      bool limited;
      {
        const std::lock_guard lock(mutex_);
        limited = stop_;
      }
      for (const Lane& lane : channels_) limited |= !lane.running.empty();
      if (limited) {
        status = error(SCAPE_ERR_TIMEOUT,
                       "%s: nothing arrived for %g s (SCAPE_TIMEOUT); look for what keeps the "
                       "other ranks",
                       std::string(main().name()).c_str(), limit.count());
      }
    }
    if (!status.ok()) {
      give_up(status);
      return;
    }
    if (!moved && !was_idle) rest(now - last_moved);
  }
}

Status HostProxy::start_job(Lane& lane, Entry& entry) {
  const Job& job = entry.job;
  const CallTag tag{.registered = job.registered,
                    .name = job.name,
                    .learning_rate = job.learning_rate,
                    .weight_decay = job.weight_decay};
  std::byte* const data = entry.relay->data();
  if (job.gathers) {
    const size_t before = job.count * size_of(job.type) * static_cast<size_t>(lane.host->rank());
    return lane.host->all_gather(data + before, data, job.count, job.type, tag, &entry.work);
  }
  return lane.host->all_reduce(data, data, job.count, job.type, job.reduction, tag, &entry.work);
}

Status HostProxy::advance(Lane& lane, bool* moved) {
  while (!lane.waiting.empty()) {
    bool arrived = false;
    SCAPE_RETURN_IF_ERROR(of_this_rank(lane.waiting.front().relay->arrived(&arrived)));
    if (!arrived) break;
    lane.running.push_back(std::move(lane.waiting.front()));
    lane.waiting.pop_front();
    *moved = true;
    SCAPE_RETURN_IF_ERROR(start_job(lane, lane.running.back()));
  }
  if (lane.running.empty()) return Status::Ok();
  *moved |= lane.host->progress();
  while (!lane.running.empty() && lane.running.front().work->done()) {
    SCAPE_RETURN_IF_ERROR(lane.running.front().work->status());
    std::unique_ptr<Relay> relay = std::move(lane.running.front().relay);
    lane.running.pop_front();
    *moved = true;
    relay->release(true);
    const std::lock_guard lock(mutex_);
    relays_.push_back(std::move(relay));
  }
  return Status::Ok();
}

void HostProxy::give_up(const Status& why) {
  const bool was_told = !failure().ok();
  abort(why);
  size_t lost = 0;
  {
    // submit() takes nothing any more.
    const std::lock_guard lock(mutex_);
    const auto release = [&](auto& entries) {
      for (Entry& entry : entries) entry.relay->release(false);
      lost += entries.size();
    };
    for (size_t i = 0; i < kChannels; ++i) {
      release(channels_[i].running);
      release(channels_[i].waiting);
      release(submitted_[i]);
    }
  }
  if (!was_told && lost > 0) {
    SCAPE_WARN("%zu collectives of device memory failed: %s", lost, failure().message().c_str());
  }
}

}  // namespace scape::plugin
