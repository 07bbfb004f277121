// The simulated devices: streams as queues of works with a thread each, events, captures.
//
// One mutex guards all of it; works run without it. Everything lives until the process ends,
// because threads may be in it then.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "device_memory.h"
#include "simgpu.h"

namespace simgpu {

using Clock = std::chrono::steady_clock;
using Lock = std::unique_lock<std::mutex>;
using StreamPtr = std::shared_ptr<CUstream_st>;
using EventPtr = std::shared_ptr<CUevent_st>;

// The end of a work, once it is enqueued.
struct Token {
  bool done = false;
  Clock::time_point when;
  std::vector<StreamPtr> waiters;
};
using TokenPtr = std::shared_ptr<Token>;

class Order {
 public:
  TokenPtr last;
};

// Something that a stream runs.
struct Work {
  cudaGraphNodeType type = cudaGraphNodeTypeEmpty;
  std::function<void()> body;  // may be empty
  std::shared_ptr<Order> order;
  // Of external nodes in a graph: the event that a launch records, or waits for.
  EventPtr event;
};

struct Op {
  Work work;
  std::vector<TokenPtr> waits;
  TokenPtr done;
};

// A capture under way: the graph so far, and which streams take part.
struct Capture {
  unsigned long long id = 0;
  cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal;
  std::thread::id thread;
  CUstream_st* origin = nullptr;
  bool invalid = false;
  std::unique_ptr<CUgraph_st> graph;
  std::vector<StreamPtr> streams;
  std::map<Order*, size_t> last_of;  // the last node of each order
};
using CapturePtr = std::shared_ptr<Capture>;

}  // namespace simgpu

// CUDA's opaque types.

struct CUstream_st : std::enable_shared_from_this<CUstream_st> {
  int device = 0;
  unsigned flags = 0;
  int priority = 0;
  unsigned long long id = 0;
  bool legacy = false;

  std::deque<simgpu::Op> queue;
  simgpu::TokenPtr last;  // of what was enqueued last; null at first
  bool has_thread = false;
  bool closing = false;
  uint64_t started = 0;  // works so far
  std::condition_variable wake;

  simgpu::CapturePtr capture;
  std::vector<size_t> frontier;  // nodes that the next captured work follows

  bool blocking() const { return !legacy && (flags & cudaStreamNonBlocking) == 0; }
};

struct CUevent_st {
  int device = 0;
  unsigned flags = 0;
  simgpu::TokenPtr token;  // of the last record; null before
  // Of a record in a capture, in token's stead.
  simgpu::CapturePtr capture;
  std::vector<size_t> nodes;
};

struct CUgraphNode_st {
  simgpu::Work work;
  std::vector<size_t> follows;  // earlier nodes
  unsigned long long lane = 0;  // the stream that it was captured on
  int device = 0;
};

struct CUgraph_st {
  std::vector<std::unique_ptr<CUgraphNode_st>> nodes;
};

struct CUgraphExec_st {
  CUgraph_st graph;
  std::map<unsigned long long, simgpu::StreamPtr> lanes;
  simgpu::TokenPtr last;  // of the last launch
};

namespace simgpu {

struct Device {
  StreamPtr legacy;
  cudaError_t broken = cudaSuccess;  // a sticky error
  size_t used = 0;
  size_t used_high = 0;
};

struct Runtime {
  std::mutex mutex;
  std::condition_variable changed;  // a work ended
  int host_waiters = 0;
  std::vector<Device> devices;
  std::unordered_map<CUstream_st*, StreamPtr> streams;  // those with a handle
  std::vector<std::weak_ptr<CUstream_st>> all_streams;  // also of graphs and threads
  std::unordered_map<CUevent_st*, EventPtr> events;
  std::unordered_map<CUgraph_st*, std::unique_ptr<CUgraph_st>> graphs;
  std::unordered_map<CUgraphExec_st*, std::unique_ptr<CUgraphExec_st>> execs;
  std::vector<CapturePtr> captures;
  unsigned long long next_stream = 1, next_capture = 1;
  std::map<std::string, uint64_t, std::less<>> calls;
  std::unordered_map<const void*, size_t> shared_memory_of;  // kernels' cudaFuncSetAttribute
  simgpu_counters counters{};
  DeviceMemory memory;
  int running = 0;        // works that are in their bodies
  bool stopping = false;  // the process ends
};
Runtime& runtime();

// ---- calls of the API ----

enum Needs : unsigned {
  kAnyTime = 0,
  kUnsafe = 1,     // forbidden while a capture that the calling thread must heed is under way
  kNoContext = 2,  // goes on when the device is broken
};

// Counts the call and fails it where the process is a forked child, a setting says so, or the
// current device is broken; else runs `body` with the runtime's mutex held. Remembers the error.
cudaError_t call(const char* name, unsigned needs,
                 const std::function<cudaError_t(Runtime&, Lock&)>& body);
int current_device();
void set_current_device(int device);
// The mode of this thread, for cudaThreadExchangeStreamCaptureMode.
cudaStreamCaptureMode& capture_mode_of_thread();

// ---- all below with the runtime's mutex held ----

// The error that SIMGPU_FAIL has for the call that was counted last; success where it has none.
cudaError_t injected(const Runtime& rt, const char* function);

// The stream of a handle, special ones included; null where there is none.
StreamPtr find_stream(Runtime& rt, cudaStream_t handle);
EventPtr find_event(Runtime& rt, cudaEvent_t handle);
StreamPtr make_stream(Runtime& rt, int device, unsigned flags, int priority);
// No more comes; the thread ends when the queue is empty.
void close_stream(CUstream_st& stream);

// Enqueues, or adds a node where the stream is capturing.
cudaError_t submit(Runtime& rt, const StreamPtr& stream, Work work,
                   std::vector<TokenPtr> waits = {});
// Enqueues outside captures.
TokenPtr enqueue(Runtime& rt, const StreamPtr& stream, Work work, std::vector<TokenPtr> waits = {});
// Blocks the calling host thread. What the wait showed: the device's sticky error.
cudaError_t wait_for(Runtime& rt, Lock& lock, const TokenPtr& token, int device);
cudaError_t wait_for_device(Runtime& rt, Lock& lock, int device);
bool ready(const TokenPtr& token);

// The legacy stream may not be used while a blocking stream of its device is captured.
cudaError_t check_legacy(Runtime& rt, const CUstream_st& stream);
// Ends with the captures that forbid unsafe calls of this thread, each made invalid.
cudaError_t check_unsafe(Runtime& rt);
void invalidate(Capture& capture);
bool any_capture(Runtime& rt, int device);

}  // namespace simgpu
