#include "plugin/masked/thread_refresher.h"

#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <exception>
#include <string>
#include <utility>

#include "base/exit_guard.h"
#include "base/float_environment.h"
#include "base/settings.h"
#include "base/thread.h"
#include "plugin/masked/masked_buffer.h"
#include "plugin/placement/placement.h"

namespace scape::plugin {
namespace {

// How long the thread sleeps at most while a job is under way: a new job is no event of the
// transport, and must not wait long behind one whose peers are late.
constexpr int kEventTimeoutMs = 1;

// How long a stopping thread goes on with what is under way, so that peers that are about to get
// their last mask do get it.
constexpr std::chrono::milliseconds kFarewell{50};

}  // namespace

ThreadRefresher::ThreadRefresher(std::shared_ptr<Communicator> communicator)
    : communicator_(std::move(communicator)), owner_(::getpid()) {}

ThreadRefresher::~ThreadRefresher() {
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
  }
  wake_.notify_all();
  if (thread_.joinable()) thread_.join();
}

bool ThreadRefresher::in_owner_process() const { return ::getpid() == owner_; }

uint64_t ThreadRefresher::take_turn() { return next_turn_.fetch_add(1, std::memory_order_relaxed); }

bool ThreadRefresher::is_turn(uint64_t turn) const {
  return turn_.load(std::memory_order_acquire) == turn;
}

void ThreadRefresher::end_turn(uint64_t turn) { turn_.store(turn + 1, std::memory_order_release); }

Status ThreadRefresher::start_side_channel(const void* data, size_t bytes) {
  std::lock_guard lock(mutex_);
  if (side_work_ || !failure_.ok()) return failure_;
  callers_data_ = data;
  callers_bytes_ = bytes;
  failure_ = communicator_->side_channel(&side_, &side_work_);
  return failure_;
}

bool ThreadRefresher::side_channel_ready(Status* status) {
  std::lock_guard lock(mutex_);
  if (!thread_.joinable() && failure_.ok()) {
    if (!side_work_->done()) return false;
    failure_ = side_work_->status();
    if (failure_.ok()) {
      failure_ = start_thread("mask refreshes", &thread_, [this] { run(); });
    }
  }
  *status = failure_;
  return true;
}

std::deque<ThreadRefresher::Queued>::iterator ThreadRefresher::place_of(
    const std::shared_ptr<SideJob>& job) {
  return std::find_if(queue_.begin(), queue_.end(),
                      [&](const Queued& queued) { return queued.job == job; });
}

void ThreadRefresher::submit(const std::shared_ptr<SideJob>& job) {
  std::lock_guard lock(mutex_);
  job->submitted();
  queue_.push_back({job});
}

void ThreadRefresher::ready(const std::shared_ptr<SideJob>& job, Stream) {
  {
    std::lock_guard lock(mutex_);
    const auto place = place_of(job);
    place->ready = true;
    if (!failure_.ok()) {
      queue_.erase(place);
      job->end(failure_);
    }
  }
  wake_.notify_one();
}

void ThreadRefresher::cancel(const std::shared_ptr<SideJob>& job, const Status& why) {
  {
    std::lock_guard lock(mutex_);
    const auto place = place_of(job);
    if (place == queue_.end() || place->ready) return;
    queue_.erase(place);
    job->end(why);
  }
  wake_.notify_one();
}

bool ThreadRefresher::join(const std::shared_ptr<SideJob>& job, Stream) { return job->done(); }

Status ThreadRefresher::wait(const std::shared_ptr<SideJob>& job) {
  std::unique_lock lock(mutex_);
  const double seconds = settings().timeout_s;
  if (!finished_.wait_for(lock, std::chrono::duration<double>(seconds),
                          [&] { return job->done(); })) {
    return error(
        SCAPE_ERR_TIMEOUT,
        "%s: peers did not answer on the side channel within %g s; see whether a rank died "
        "or is stopped, or raise SCAPE_TIMEOUT",
        std::string(communicator_->name()).c_str(), seconds);
  }
  return job->status();
}

std::shared_ptr<SideJob> ThreadRefresher::take_startable() {
  while (!queue_.empty() && queue_.front().ready) {
    std::shared_ptr<SideJob> job = queue_.front().job;
    Status obstacle;
    if (!job->may_start(&obstacle)) return nullptr;
    queue_.pop_front();
    if (obstacle.ok()) return job;
    job->end(obstacle);
    finished_.notify_all();
  }
  return nullptr;
}

bool ThreadRefresher::complete_oldest(Status* status) {
  if (!running_.front().work->done()) return false;
  *status = running_.front().work->status();
  if (status->ok()) *status = running_.front().job->finish({});
  if (!status->ok()) return true;
  running_.front().job->conclude();
  const Running oldest = std::move(running_.front());
  running_.pop_front();
  {
    std::lock_guard lock(mutex_);
    oldest.job->end(Status::Ok());
  }
  finished_.notify_all();
  return true;
}

void ThreadRefresher::fail(const Status& why) {
  side_->abort(why);
  communicator_->abort(why);
  std::lock_guard lock(mutex_);
  failure_ = why;
  for (const Running& under_way : running_) under_way.job->end(why);
  // Those that are not ready yet end in ready().
  std::erase_if(queue_, [&](const Queued& queued) {
    if (queued.ready) queued.job->end(why);
    return queued.ready;
  });
  finished_.notify_all();
}

void ThreadRefresher::run() {
  const DefaultFloatEnvironment as_defined;  // the thread that started this one may have another
  ::pthread_setname_np(::pthread_self(), "scape-progress");
  try {
    place_this_thread("mask refreshes", callers_data_, callers_bytes_, communicator_->size());
    serve();
  } catch (const std::exception& failure) {  // no memory: nothing else is thrown in here
    fail(error(SCAPE_ERR_MEMORY, "the mask refresh of %s ended: %s",
               std::string(communicator_->name()).c_str(), failure.what()));
  }
}

void ThreadRefresher::serve() {
  std::chrono::steady_clock::time_point leave = std::chrono::steady_clock::time_point::max();
  for (;;) {
    std::shared_ptr<SideJob> next;
    {
      std::unique_lock lock(mutex_);
      if (running_.empty()) {
        wake_.wait(lock, [&] { return (next = take_startable()) != nullptr || stop_; });
      } else {
        next = take_startable();
      }
      if (stop_) {
        const auto now = std::chrono::steady_clock::now();
        leave = std::min(leave, now + kFarewell);
        if ((running_.empty() && !next) || now >= leave) return;
      }
    }
    const ExitGuard guard;
    if (ExitGuard::exiting()) return;
    Status status;
    if (next) {
      running_.push_back({next, nullptr});
      status = next->start(*side_, {}, &running_.back().work);
    } else if (const bool moved = side_->progress(); !complete_oldest(&status) && !moved) {
      side_->wait_event(kEventTimeoutMs);
    }
    if (!status.ok()) {
      fail(status);
      return;
    }
  }
}

std::shared_ptr<Refresher> make_refresher(std::shared_ptr<Communicator> communicator) {
  // In a forked child it is left alone: the thread stayed in the parent, the locks may be held by
  // it, and destroying a condition variable waits for those who wait on it.
  return {new ThreadRefresher(std::move(communicator)), [](Refresher* refresher) {
            if (refresher->in_owner_process()) delete refresher;
          }};
}

}  // namespace scape::plugin
