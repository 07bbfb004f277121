// Groups of the stand-in: calls and jobs are gathered, and begin at the outermost end.
#pragma once

#include "tests/simgpu/nccl/comm.h"

namespace simnccl {

// The making of communicators, or their end: collective between ranks, and blocking.
struct Job {
  CommPtr comm;  // that it is about
  std::function<ncclResult_t(const Functions& host)> run;
};

void group_start();
// Begins what was gathered; where `discard` says so, drops it.
ncclResult_t group_end(bool discard);
// An error in a group fails all of it.
ncclResult_t in_group(ncclResult_t result);

// Begins it now, or with the group of this thread. Blocking communicators' jobs are over when this
// returns; of others ncclInProgress comes back, and the rest is on a thread of its own.
ncclResult_t submit(Job job);
ncclResult_t submit(const CommPtr& comm, Call call);
ncclResult_t run_jobs(std::vector<Job> jobs);

}  // namespace simnccl
