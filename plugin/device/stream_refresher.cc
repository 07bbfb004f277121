#include "plugin/device/stream_refresher.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <string>
#include <thread>
#include <utility>

#include "base/settings.h"

namespace scape::plugin {
namespace {

// How often wait() asks the device.
constexpr std::chrono::microseconds kAskAgain{50};

}  // namespace

StreamRefresher::StreamRefresher(std::shared_ptr<CudaDevice> device,
                                 std::shared_ptr<Communicator> communicator)
    : device_(std::move(device)), communicator_(std::move(communicator)), owner_(::getpid()) {}

bool StreamRefresher::in_owner_process() const { return ::getpid() == owner_; }

// ---- the side channel ----

Status StreamRefresher::start_side_channel(const void*, size_t) {
  if (side_work_ || !failure_.ok()) return failure_;
  failure_ = communicator_->side_channel(&side_, &side_work_);
  return failure_;
}

bool StreamRefresher::side_is_there() {
  if (!failure_.ok() || side_ready_) return true;
  if (!side_work_ || !side_work_->done()) return false;
  side_ready_ = true;
  if (const Status status = side_work_->status(); !status.ok()) fail(status);
  return true;
}

bool StreamRefresher::side_channel_ready(Status* status) {
  if (!side_is_there()) return false;
  enqueue_ready();
  *status = failure_;
  return true;
}

// ---- jobs ----

StreamRefresher::Entry* StreamRefresher::find(const std::shared_ptr<SideJob>& job) {
  const auto found = std::find_if(entries_.begin(), entries_.end(),
                                  [&](const Entry& entry) { return entry.job == job; });
  return found != entries_.end() ? &*found : nullptr;
}

void StreamRefresher::drop(const std::shared_ptr<SideJob>& job) {
  Entry* const entry = find(job);
  if (entry == nullptr) return;
  if (entry->fence) fences_.push_back(std::move(entry->fence));
  entries_.erase(entries_.begin() + (entry - entries_.data()));
}

void StreamRefresher::submit(const std::shared_ptr<SideJob>& job) {
  drop(job);  // carried out, and never joined
  job->submitted();
  Entry entry;
  entry.job = job;
  if (!fences_.empty()) {
    entry.fence = std::move(fences_.back());
    fences_.pop_back();
  }
  entries_.push_back(std::move(entry));
}

void StreamRefresher::ready(const std::shared_ptr<SideJob>& job, Stream stream) {
  Entry* const entry = find(job);
  entry->ready = true;
  Status status = failure_;
  if (status.ok() && !entry->fence) status = device_->make_fence(&entry->fence);
  if (status.ok()) status = entry->fence->mark(stream);
  if (status.ok()) {
    enqueue_ready();
  } else {
    fail(status);
  }
}

void StreamRefresher::cancel(const std::shared_ptr<SideJob>& job, const Status& why) {
  Entry* const entry = find(job);
  if (entry == nullptr || entry->enqueued) return;
  job->end(why);
  drop(job);
}

void StreamRefresher::enqueue_ready() {
  if (!side_is_there()) return;
  for (size_t i = 0; i < entries_.size() && failure_.ok();) {
    Entry& entry = entries_[i];
    Status obstacle;
    if (!entry.ready || entry.enqueued || !entry.job->may_start(&obstacle)) {
      ++i;
      continue;
    }
    if (!obstacle.ok()) {
      const std::shared_ptr<SideJob> job = entry.job;
      job->end(obstacle);
      drop(job);
      continue;
    }
    if (const Status status = enqueue(&entry); !status.ok()) {
      fail(status);
      return;
    }
    ++i;
  }
}

Status StreamRefresher::enqueue(Entry* entry) {
  const Stream side = device_->side_stream();
  SCAPE_RETURN_IF_ERROR(entry->fence->hold(side));
  WorkPtr work;
  SCAPE_RETURN_IF_ERROR(entry->job->start(*side_, side, &work));
  SCAPE_RETURN_IF_ERROR(entry->job->finish(side));
  SCAPE_RETURN_IF_ERROR(entry->fence->mark(side));
  entry->enqueued = true;
  if (!entry->job->for_host()) {
    entry->job->conclude();
    entry->job->end(Status::Ok());
  }
  return Status::Ok();
}

bool StreamRefresher::conclude(Entry* entry) {
  if (entry->job->done()) return true;
  bool passed = false;
  if (const Status status = entry->fence->passed(&passed); !status.ok()) {
    fail(status);
    return true;
  }
  if (!passed) return false;
  // Where the side communicator failed, nothing came.
  if (const Status status = communicator_->async_error(); !status.ok()) {
    fail(status);
    return true;
  }
  entry->job->conclude();
  entry->job->end(Status::Ok());
  return true;
}

bool StreamRefresher::join(const std::shared_ptr<SideJob>& job, Stream stream) {
  enqueue_ready();
  Entry* const entry = find(job);
  if (entry == nullptr) return job->done();
  if (!job->done() && !(entry->enqueued && conclude(entry))) return false;
  if (job->status().ok()) {
    if (const Status status = entry->fence->hold(stream); !status.ok()) fail(status);
  }
  drop(job);
  return true;
}

Status StreamRefresher::wait(const std::shared_ptr<SideJob>& job) {
  const double seconds = settings().timeout_s;
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  for (;;) {
    // What it depends on first.
    for (Entry& entry : entries_) {
      if (entry.enqueued && !conclude(&entry)) break;
    }
    enqueue_ready();
    Entry* const entry = find(job);
    if (entry == nullptr || !failure_.ok()) return job->status();
    bool passed = false;
    if (entry->enqueued) SCAPE_RETURN_IF_ERROR(entry->fence->passed(&passed));
    if (passed && conclude(entry)) {
      drop(job);
      return job->status();
    }
    if (std::chrono::steady_clock::now() > end) {
      return error(SCAPE_ERR_TIMEOUT,
                   "%s: peers did not answer on the side channel within %g s; see whether a rank "
                   "died or is stopped, or raise SCAPE_TIMEOUT",
                   std::string(communicator_->name()).c_str(), seconds);
    }
    std::this_thread::sleep_for(kAskAgain);
  }
}

void StreamRefresher::fail(const Status& why) {
  communicator_->abort(why);  // and the side channel with it
  failure_ = why;
  // Those that are not ready yet end in ready().
  for (const Entry& entry : entries_) {
    if (entry.ready && !entry.job->done()) entry.job->end(why);
  }
}

}  // namespace scape::plugin
