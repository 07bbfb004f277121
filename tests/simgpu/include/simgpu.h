// What the simulated device offers beyond CUDA's API: work of libraries on its streams, and what a
// test may ask it. Thread-safe.
#pragma once

#include <stdint.h>

#include "cuda_runtime_api.h"

// What the process has asked of all devices so far. A captured call counts when it is captured,
// and the work that a graph's launch brings counts as one launch.
struct simgpu_counters {
  uint64_t host_syncs;      // calls in which the host waited, or had to be ready to, for a device
  uint64_t allocations;     // of device memory and page-locked memory, of either kind
  uint64_t frees;           // of the same
  uint64_t stream_creates;  // streams made
  uint64_t event_creates;   // events made
  uint64_t kernels;         // launched
  uint64_t copies;
  uint64_t copied_bytes;
  uint64_t memsets;
  uint64_t host_functions;
  uint64_t graph_launches;
};
SIMGPU_API void simgpu_get_counters(struct simgpu_counters* counters);

// Calls so far of the function of this name ("cudaMalloc"); failed ones count too.
SIMGPU_API uint64_t simgpu_calls(const char* function);

// Ends the device as a fault of a kernel does: every later call on it returns `error`, until the
// process ends.
SIMGPU_API void simgpu_break_device(int device, cudaError_t error);

// How SIMGPU_HOST_ACCESS=fault is kept here: 0 it is not, 1 by memory protection keys, 2 by closing
// the memory while no stream works.
SIMGPU_API int simgpu_host_access_guard(void);

#if defined(__cplusplus)
#include <functional>
#include <memory>
#include <span>
#include <string>

namespace simgpu {

// A sequence of works that run one after another, in the order in which they were enqueued or their
// graphs launched, whatever streams they are on.
class Order;
__attribute__((visibility("default"))) std::shared_ptr<Order> make_order();
// Waits until all of it so far has run; false when `seconds` were over before.
__attribute__((visibility("default"))) bool wait(Order& order, double seconds);

// Enqueues `work`, which may touch device memory and may block, on all of the streams at once: it
// starts when what they hold has run, and what comes later on any of them starts when it is over.
// On capturing streams it becomes a node of the graph, run by each launch. Streams are of one
// device. Errors are CUDA's.
__attribute__((visibility("default"))) cudaError_t enqueue(
    std::span<const cudaStream_t> streams, std::function<void()> work,
    const std::shared_ptr<Order>& order = nullptr);

// What cudaLaunchKernelEx checks and enqueues. `grid` runs the whole grid and says what went wrong,
// which breaks the device; empty where all is well.
__attribute__((visibility("default"))) cudaError_t launch(const cudaLaunchConfig_t* config,
                                                          const void* kernel,
                                                          std::function<std::string()> grid);

// Whether all these bytes lie in one live allocation of that device, or of page-locked memory, so
// that work on the device may touch them. Not counted as a call.
__attribute__((visibility("default"))) bool reachable(const void* address, size_t bytes,
                                                      int device);

}  // namespace simgpu
#endif
