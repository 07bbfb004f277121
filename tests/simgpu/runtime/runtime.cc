#include "runtime.h"

#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <new>

#include "settings.h"

namespace simgpu {
namespace {

std::atomic<bool> started{false};
std::atomic<bool> forked{false};  // a child of a process that had used the devices

thread_local int device_here = 0;
thread_local cudaError_t last_error_here = cudaSuccess;
thread_local bool in_host_function = false;
thread_local cudaStreamCaptureMode mode_here = cudaStreamCaptureModeGlobal;

Runtime* make_runtime() {
  auto* made = new Runtime;
  if (!settings().mistake.empty()) {
    std::fprintf(stderr, "simgpu: %s\n", settings().mistake.c_str());
    return made;
  }
  made->memory.start(settings().guard_host_access);
  made->devices.resize(static_cast<size_t>(settings().devices));
  for (int i = 0; i < settings().devices; ++i) {
    StreamPtr legacy = make_stream(*made, i, cudaStreamDefault, 0);
    legacy->legacy = true;
    made->devices[static_cast<size_t>(i)].legacy = legacy;
  }
  ::pthread_atfork(nullptr, nullptr, [] { forked.store(true); });
  started.store(true);
  return made;
}

uint64_t mixed(uint64_t value) {
  value += 0x9e3779b97f4a7c15u;
  value = (value ^ value >> 30) * 0xbf58476d1ce4e5b9u;
  value = (value ^ value >> 27) * 0x94d049bb133111ebu;
  return value ^ value >> 31;
}

// How long the reorder mode holds a work back: half of them not at all, a few very long, the same
// in each run of a seed.
std::chrono::microseconds hold_of(const CUstream_st& stream) {
  if (!settings().reorder) return {};
  const uint64_t draw = mixed(mixed(mixed(settings().seed) + stream.id) + stream.started);
  const uint64_t longest = settings().delay_us;
  switch (draw % 8) {
    case 0:
    case 1:
      return std::chrono::microseconds(longest);
    case 2:
    case 3:
      return std::chrono::microseconds((draw >> 8) % (longest / 8 + 1));
    default:
      return {};
  }
}

// Waits on the stream's own thread; false when the process ends.
bool wait_on_stream(Runtime& rt, Lock& lock, CUstream_st& stream, const TokenPtr& token) {
  if (token->done) return true;
  token->waiters.push_back(stream.shared_from_this());
  stream.wake.wait(lock, [&] { return token->done || rt.stopping; });
  return token->done;
}

void run_stream(const StreamPtr& stream) {
  Runtime& rt = runtime();
  Lock lock(rt.mutex);
  device_here = stream->device;
  for (;;) {
    stream->wake.wait(lock,
                      [&] { return rt.stopping || !stream->queue.empty() || stream->closing; });
    if (rt.stopping || stream->queue.empty()) return;
    Op op = std::move(stream->queue.front());
    stream->queue.pop_front();
    for (const TokenPtr& token : op.waits) {
      if (!wait_on_stream(rt, lock, *stream, token)) return;
    }
    op.waits.clear();
    if (op.work.body) {
      if (const auto hold = hold_of(*stream); hold.count() > 0) {
        lock.unlock();
        std::this_thread::sleep_for(hold);
        lock.lock();
        if (rt.stopping) return;
      }
      ++stream->started;
      Device& device = rt.devices[static_cast<size_t>(stream->device)];
      if (op.work.type == cudaGraphNodeTypeKernel && device.broken == cudaSuccess) {
        ++rt.calls["kernel"];
        device.broken = injected(rt, "kernel");
      }
      // A broken device runs nothing more; what waits for it goes on.
      if (device.broken == cudaSuccess) {
        const bool host = op.work.type == cudaGraphNodeTypeHost;
        ++rt.running;
        if (!host) rt.memory.access_begins();
        in_host_function = host;
        lock.unlock();
        op.work.body();
        lock.lock();
        in_host_function = false;
        if (!host) rt.memory.access_ends();
        --rt.running;
      }
      op.work.body = nullptr;
    }
    op.done->done = true;
    op.done->when = Clock::now();
    for (const StreamPtr& waiter : op.done->waiters) waiter->wake.notify_all();
    op.done->waiters.clear();
    if (rt.host_waiters > 0) rt.changed.notify_all();
  }
}

// At the end of the process: no work begins any more, those that run get a moment to end, and what
// was never freed is told.
__attribute__((destructor)) void end_of_process() {
  if (!started.load() || forked.load()) return;
  Runtime& rt = runtime();
  Lock lock(rt.mutex);
  rt.stopping = true;
  for (const auto& weak : rt.all_streams) {
    if (const StreamPtr stream = weak.lock(); stream != nullptr) stream->wake.notify_all();
  }
  for (int i = 0; i < 100 && rt.running > 0; ++i) {
    lock.unlock();
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
    lock.lock();
  }
  if (settings().leaks == Leaks::kIgnore) return;
  size_t leaks = 0;
  const auto tell = [&](const std::string& what) {
    ++leaks;
    std::fprintf(stderr, "simgpu: never freed: %s\n", what.c_str());
  };
  for (const auto& [begin, allocation] : rt.memory.all()) {
    if (allocation.live && !allocation.registered) tell(describe(allocation));
  }
  for (const auto& [handle, stream] : rt.streams) tell("stream " + std::to_string(stream->id));
  if (!rt.events.empty()) tell(std::to_string(rt.events.size()) + " events");
  if (!rt.graphs.empty()) tell(std::to_string(rt.graphs.size()) + " graphs");
  if (!rt.execs.empty()) tell(std::to_string(rt.execs.size()) + " executable graphs");
  if (leaks > 0 && settings().leaks == Leaks::kFail) ::_exit(99);
}

// The per-thread default streams of one thread, one a device.
struct ThreadStreams {
  std::map<int, StreamPtr> streams;
  ~ThreadStreams() {
    if (forked.load()) return;
    const Lock lock(runtime().mutex);
    for (const auto& [device, stream] : streams) close_stream(*stream);
  }
};
thread_local ThreadStreams thread_streams;

}  // namespace

Runtime& runtime() {
  static Runtime* const instance = make_runtime();
  return *instance;
}

cudaError_t injected(const Runtime& rt, const char* function) {
  const auto& failures = settings().failures;
  if (failures.empty()) return cudaSuccess;
  const auto count = rt.calls.find(function);
  const uint64_t calls = count != rt.calls.end() ? count->second : 0;
  for (const Failure& failure : failures) {
    if (failure.function != function) continue;
    if (calls == failure.nth || (failure.later_too && calls > failure.nth)) return failure.error;
  }
  return cudaSuccess;
}

cudaError_t call(const char* name, unsigned needs,
                 const std::function<cudaError_t(Runtime&, Lock&)>& body) {
  const auto run = [&]() -> cudaError_t {
    if (forked.load(std::memory_order_relaxed)) return cudaErrorInitializationError;
    if (in_host_function) return cudaErrorNotPermitted;
    Runtime& rt = runtime();
    if (!settings().mistake.empty()) return cudaErrorInitializationError;
    Lock lock(rt.mutex);
    ++rt.calls[name];
    if (const cudaError_t error = injected(rt, name); error != cudaSuccess) return error;
    if (rt.devices.empty()) return cudaErrorNoDevice;
    if ((needs & kNoContext) == 0) {
      const Device& device = rt.devices[static_cast<size_t>(device_here)];
      if (device.broken != cudaSuccess) return device.broken;
    }
    if ((needs & kUnsafe) != 0) {
      if (const cudaError_t error = check_unsafe(rt); error != cudaSuccess) return error;
    }
    try {
      return body(rt, lock);
    } catch (const std::bad_alloc&) {
      return cudaErrorMemoryAllocation;
    }
  };
  const cudaError_t error = run();
  if (error != cudaSuccess) last_error_here = error;
  return error;
}

int current_device() { return device_here; }
void set_current_device(int device) { device_here = device; }
cudaStreamCaptureMode& capture_mode_of_thread() { return mode_here; }

StreamPtr find_stream(Runtime& rt, cudaStream_t handle) {
  if (handle == nullptr || handle == cudaStreamLegacy) {
    return rt.devices[static_cast<size_t>(device_here)].legacy;
  }
  if (handle == cudaStreamPerThread) {
    StreamPtr& mine = thread_streams.streams[device_here];
    if (mine == nullptr) mine = make_stream(rt, device_here, cudaStreamDefault, 0);
    return mine;
  }
  const auto found = rt.streams.find(handle);
  return found != rt.streams.end() ? found->second : nullptr;
}

EventPtr find_event(Runtime& rt, cudaEvent_t handle) {
  const auto found = rt.events.find(handle);
  return found != rt.events.end() ? found->second : nullptr;
}

StreamPtr make_stream(Runtime& rt, int device, unsigned flags, int priority) {
  auto made = std::make_shared<CUstream_st>();
  made->device = device;
  made->flags = flags;
  made->priority = priority;
  made->id = rt.next_stream++;
  std::erase_if(rt.all_streams, [](const auto& weak) { return weak.expired(); });
  rt.all_streams.push_back(made);
  return made;
}

void close_stream(CUstream_st& stream) {
  stream.closing = true;
  stream.wake.notify_all();
}

bool ready(const TokenPtr& token) { return token == nullptr || token->done; }

TokenPtr enqueue(Runtime& rt, const StreamPtr& stream, Work work, std::vector<TokenPtr> waits) {
  Op op{std::move(work), std::move(waits), std::make_shared<Token>()};
  if (stream->legacy) {
    for (const auto& weak : rt.all_streams) {
      const StreamPtr other = weak.lock();
      if (other != nullptr && other->device == stream->device && other->blocking()) {
        op.waits.push_back(other->last);
      }
    }
  } else if (stream->blocking()) {
    op.waits.push_back(rt.devices[static_cast<size_t>(stream->device)].legacy->last);
  }
  if (op.work.order != nullptr) {
    op.waits.push_back(op.work.order->last);
    op.work.order->last = op.done;
  }
  std::erase_if(op.waits, ready);
  TokenPtr done = op.done;
  stream->last = done;
  stream->queue.push_back(std::move(op));
  if (!stream->has_thread) {
    stream->has_thread = true;
    std::thread(run_stream, stream).detach();
  }
  stream->wake.notify_all();
  return done;
}

cudaError_t submit(Runtime& rt, const StreamPtr& stream, Work work, std::vector<TokenPtr> waits) {
  if (const cudaError_t error = check_legacy(rt, *stream); error != cudaSuccess) return error;
  if (stream->capture == nullptr) {
    enqueue(rt, stream, std::move(work), std::move(waits));
    return cudaSuccess;
  }
  Capture& capture = *stream->capture;
  if (capture.invalid) return cudaErrorStreamCaptureInvalidated;
  auto node = std::make_unique<CUgraphNode_st>();
  node->follows = stream->frontier;
  if (work.order != nullptr) {
    const auto [last, fresh] =
        capture.last_of.try_emplace(work.order.get(), capture.graph->nodes.size());
    if (!fresh) {
      node->follows.push_back(last->second);
      last->second = capture.graph->nodes.size();
    }
  }
  node->work = std::move(work);
  node->lane = stream->id;
  node->device = stream->device;
  stream->frontier = {capture.graph->nodes.size()};
  capture.graph->nodes.push_back(std::move(node));
  return cudaSuccess;
}

cudaError_t wait_for(Runtime& rt, Lock& lock, const TokenPtr& token, int device) {
  if (!ready(token)) {
    ++rt.host_waiters;
    rt.changed.wait(lock, [&] { return token->done; });
    --rt.host_waiters;
  }
  return rt.devices[static_cast<size_t>(device)].broken;
}

cudaError_t wait_for_device(Runtime& rt, Lock& lock, int device) {
  std::vector<TokenPtr> tokens;
  for (const auto& weak : rt.all_streams) {
    const StreamPtr stream = weak.lock();
    if (stream != nullptr && stream->device == device) tokens.push_back(stream->last);
  }
  for (const TokenPtr& token : tokens) (void)wait_for(rt, lock, token, device);
  return rt.devices[static_cast<size_t>(device)].broken;
}

void invalidate(Capture& capture) { capture.invalid = true; }

bool any_capture(Runtime& rt, int device) {
  return std::any_of(rt.captures.begin(), rt.captures.end(),
                     [&](const CapturePtr& one) { return one->origin->device == device; });
}

cudaError_t check_legacy(Runtime& rt, const CUstream_st& stream) {
  if (!stream.legacy) return cudaSuccess;
  cudaError_t error = cudaSuccess;
  for (const CapturePtr& capture : rt.captures) {
    for (const StreamPtr& other : capture->streams) {
      if (other->device != stream.device || !other->blocking()) continue;
      invalidate(*capture);
      error = cudaErrorStreamCaptureImplicit;
    }
  }
  return error;
}

cudaError_t check_unsafe(Runtime& rt) {
  if (mode_here == cudaStreamCaptureModeRelaxed) return cudaSuccess;
  cudaError_t error = cudaSuccess;
  for (const CapturePtr& capture : rt.captures) {
    if (capture->mode == cudaStreamCaptureModeRelaxed) continue;
    const bool own = capture->thread == std::this_thread::get_id();
    const bool heeded =
        mode_here == cudaStreamCaptureModeGlobal && capture->mode == cudaStreamCaptureModeGlobal;
    if (!own && !heeded) continue;
    invalidate(*capture);
    error = cudaErrorStreamCaptureUnsupported;
  }
  return error;
}

}  // namespace simgpu

using namespace simgpu;  // NOLINT: what follows is CUDA's and the simulator's C API

cudaError_t cudaGetLastError() {
  const cudaError_t error = cudaPeekAtLastError();
  last_error_here = cudaSuccess;
  return error;
}

cudaError_t cudaPeekAtLastError() {
  if (forked.load(std::memory_order_relaxed)) return cudaErrorInitializationError;
  if (started.load() && !in_host_function) {
    Runtime& rt = runtime();
    const Lock lock(rt.mutex);
    if (!rt.devices.empty()) {
      const cudaError_t broken = rt.devices[static_cast<size_t>(device_here)].broken;
      if (broken != cudaSuccess) return broken;
    }
  }
  return last_error_here;
}

void simgpu_get_counters(simgpu_counters* counters) {
  const Lock lock(runtime().mutex);
  *counters = runtime().counters;
}

uint64_t simgpu_calls(const char* function) {
  Runtime& rt = runtime();
  const Lock lock(rt.mutex);
  const auto found = rt.calls.find(function);
  return found != rt.calls.end() ? found->second : 0;
}

void simgpu_break_device(int device, cudaError_t error) {
  Runtime& rt = runtime();
  const Lock lock(rt.mutex);
  if (device >= 0 && static_cast<size_t>(device) < rt.devices.size()) {
    rt.devices[static_cast<size_t>(device)].broken = error;
  }
}

int simgpu_host_access_guard() { return static_cast<int>(runtime().memory.guard()); }

namespace simgpu {

std::shared_ptr<Order> make_order() { return std::make_shared<Order>(); }

bool wait(Order& order, double seconds) {
  Runtime& rt = runtime();
  Lock lock(rt.mutex);
  const TokenPtr token = order.last;
  if (ready(token)) return true;
  ++rt.host_waiters;
  const bool done = rt.changed.wait_for(lock, std::chrono::duration<double>(seconds),
                                        [&] { return token->done; });
  --rt.host_waiters;
  return done;
}

}  // namespace simgpu
