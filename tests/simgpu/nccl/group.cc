#include "tests/simgpu/nccl/group.h"

#include <algorithm>
#include <thread>

#include "base/exit_guard.h"
#include "interposer/host_mode.h"
#include "interposer/process.h"
#include "tests/simgpu/nccl/settings.h"

namespace simnccl {
namespace {

struct Group {
  int depth = 0;
  ncclResult_t error = ncclSuccess;
  std::string why;
  std::vector<Job> jobs;
  std::vector<std::pair<CommPtr, std::vector<Call>>> calls;  // by communicator, in order
};
thread_local std::unique_ptr<Group> open_group;

void begin_job(Comm& comm) {
  const std::lock_guard lock(comm.mutex);
  ++comm.jobs;
}

void end_job(Comm& comm) {
  const std::lock_guard lock(comm.mutex);
  --comm.jobs;
  comm.changed.notify_all();
}

// Runs it, and makes its communicator fail where it does.
ncclResult_t run_job(const Job& job, std::string* why) {
  const ncclResult_t result = job.run(scape::interposer::host_functions());
  if (result != ncclSuccess) {
    *why = last_error().empty() ? scape::interposer::last_error() : last_error();
    job.comm->fail(result, *why);
  }
  return result;
}

// On a thread of its own, which nobody joins: an abort must not wait for it.
void run_later(Job job) {
  std::thread([job = std::move(job)] {
    std::this_thread::sleep_for(settings().in_progress);
    // It may be opening a network library, which exit() would take down meanwhile.
    const scape::ExitGuard guard;
    std::string why;
    (void)run_job(job, &why);
    end_job(*job.comm);
  }).detach();
}

ncclResult_t launch(const CommPtr& comm, std::vector<Call> calls) {
  if (comm->blocking || settings().launch.count() == 0) return enqueue(comm, std::move(calls));
  begin_job(*comm);
  std::thread([comm, calls = std::move(calls)] {
    std::this_thread::sleep_for(settings().launch);
    const ncclResult_t result = enqueue(comm, calls);
    if (result != ncclSuccess) comm->fail(result, last_error());
    end_job(*comm);
  }).detach();
  return ncclInProgress;
}

}  // namespace

void group_start() {
  if (open_group == nullptr) open_group = std::make_unique<Group>();
  ++open_group->depth;
}

ncclResult_t group_end(bool discard) {
  if (open_group == nullptr) {
    return refuse(ncclInvalidUsage, "no group is open in this thread; call ncclGroupStart first");
  }
  if (--open_group->depth > 0) return open_group->error;
  const std::unique_ptr<Group> group = std::move(open_group);
  if (discard) return ncclSuccess;
  if (group->error != ncclSuccess) {
    // Communicators of jobs that never begin would be waited for.
    for (const Job& job : group->jobs) job.comm->fail(group->error, group->why);
    return refuse(group->error, group->why);
  }
  ncclResult_t result = run_jobs(std::move(group->jobs));
  if (result != ncclSuccess && result != ncclInProgress) return result;
  for (auto& [comm, calls] : group->calls) {
    const ncclResult_t got = launch(comm, std::move(calls));
    if (got == ncclInProgress && result == ncclSuccess) result = got;
    if (got != ncclSuccess && got != ncclInProgress) return got;
  }
  return result;
}

ncclResult_t in_group(ncclResult_t result) {
  if (open_group != nullptr && result != ncclSuccess && result != ncclInProgress &&
      open_group->error == ncclSuccess) {
    open_group->error = result;
    open_group->why = last_error();
  }
  return result;
}

ncclResult_t submit(Job job) {
  if (open_group == nullptr) {
    std::vector<Job> alone;
    alone.push_back(std::move(job));
    return run_jobs(std::move(alone));
  }
  open_group->jobs.push_back(std::move(job));
  return ncclSuccess;
}

ncclResult_t submit(const CommPtr& comm, Call call) {
  count_call(*comm, call);
  if (open_group == nullptr) {
    std::vector<Call> alone;
    alone.push_back(std::move(call));
    return launch(comm, std::move(alone));
  }
  auto& all = open_group->calls;
  auto found =
      std::find_if(all.begin(), all.end(), [&](const auto& entry) { return entry.first == comm; });
  if (found == all.end()) found = all.insert(all.end(), {comm, {}});
  found->second.push_back(std::move(call));
  return ncclSuccess;
}

ncclResult_t run_jobs(std::vector<Job> jobs) {
  ncclResult_t result = ncclSuccess;
  std::vector<std::thread> threads;
  std::vector<ncclResult_t> results(jobs.size(), ncclSuccess);
  std::vector<std::string> reasons(jobs.size());
  for (const Job& job : jobs) begin_job(*job.comm);
  for (size_t i = 0; i < jobs.size(); ++i) {
    if (!jobs[i].comm->blocking) {
      run_later(jobs[i]);
      result = ncclInProgress;
      continue;
    }
    // Ranks that one thread owns wait for each other.
    threads.emplace_back([&, i] {
      results[i] = run_job(jobs[i], &reasons[i]);
      end_job(*jobs[i].comm);
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (size_t i = 0; i < jobs.size(); ++i) {
    if (results[i] != ncclSuccess) return refuse(results[i], reasons[i]);
  }
  return result;
}

}  // namespace simnccl
