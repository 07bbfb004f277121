// Communicators of the stand-in: one of host mode each, and the order of its calls on streams.
#pragma once

// First: NCCL's declarations then name the same streams.
#include "simgpu.h"

#include <atomic>
#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "interposer/real_nccl.h"
#include "tests/simgpu/nccl/simnccl.h"

namespace simnccl {

using namespace scape::nccl;  // NOLINT: a room about NCCL's types

// A call that a stream will run.
struct Call {
  const char* function = nullptr;
  size_t bytes = 0;
  cudaStream_t stream = nullptr;
  std::function<ncclResult_t(const Functions& host, ncclComm_t comm)> run;
};

struct Comm {
  // Set when made.
  int device = 0;
  bool blocking = true;
  int rank = -1;
  int size = 0;
  const std::shared_ptr<simgpu::Order> order = simgpu::make_order();

  std::mutex mutex;  // guards what follows
  std::condition_variable changed;
  std::atomic<ncclComm_t> host = nullptr;  // null until it is made, and after the end
  int jobs = 0;                            // inits, splits, late launches that are under way
  bool aborted = false;
  bool revoked = false;
  bool finalized = false;
  ncclResult_t failure = ncclSuccess;  // of a call that ran, or of a job
  std::string message;
  std::set<int> ops;  // made at run time, of those alive
  std::map<uintptr_t, void*> windows;
  std::map<std::string, simnccl_counters> counters;

  // Keeps the first failure; none that an abort or a revocation brings about.
  void fail(ncclResult_t result, const std::string& why);
};
using CommPtr = std::shared_ptr<Comm>;

// A handle is the address of the communicator; one that is gone is recognised.
ncclComm_t publish(const CommPtr& comm);
CommPtr find(ncclComm_t handle);
// Also takes it out of the table.
CommPtr remove(ncclComm_t handle);

// Calls on it may be enqueued: it is made, and nothing of it failed or is under way.
ncclResult_t usable(const CommPtr& comm);

// The sentence of ncclGetLastError, of this thread.
ncclResult_t refuse(ncclResult_t result, const std::string& why);
const std::string& last_error();

// Runs the calls of one group on this communicator, in order, on the thread of a stream.
void run(const CommPtr& comm, const std::vector<Call>& calls);
// Enqueues that on the streams of the calls.
ncclResult_t enqueue(const CommPtr& comm, std::vector<Call> calls);

// Waits until what was enqueued has run; false when that takes too long.
bool drain(Comm& comm);

void count_call(Comm& comm, const Call& call);

}  // namespace simnccl
