// Streams and events.
#include <algorithm>

#include "runtime.h"

using namespace simgpu;  // NOLINT: all here is CUDA's C API

namespace {

cudaError_t create_stream(Runtime& rt, cudaStream_t* out, unsigned flags, int priority) {
  if (out == nullptr || flags > cudaStreamNonBlocking) return cudaErrorInvalidValue;
  StreamPtr made = make_stream(rt, current_device(), flags, std::clamp(priority, -5, 0));
  ++rt.counters.stream_creates;
  *out = made.get();
  rt.streams.emplace(made.get(), std::move(made));
  return cudaSuccess;
}

// A stream under capture has nothing that could be waited for.
cudaError_t refuse_capturing(const CUstream_st& stream) {
  if (stream.capture == nullptr) return cudaSuccess;
  invalidate(*stream.capture);
  return cudaErrorStreamCaptureUnsupported;
}

// The end of all that the stream holds; what the legacy stream holds includes the blocking streams.
cudaError_t end_of(Runtime& rt, const StreamPtr& stream, TokenPtr* out) {
  if (const cudaError_t error = refuse_capturing(*stream); error != cudaSuccess) return error;
  if (const cudaError_t error = check_legacy(rt, *stream); error != cudaSuccess) return error;
  *out = stream->legacy ? enqueue(rt, stream, Work{}) : stream->last;
  return cudaSuccess;
}

template <typename Use>
cudaError_t with_stream(const char* name, cudaStream_t handle, Use&& use) {
  return call(name, kAnyTime, [&](Runtime& rt, Lock&) -> cudaError_t {
    const StreamPtr stream = find_stream(rt, handle);
    return stream == nullptr ? cudaErrorInvalidResourceHandle : use(*stream);
  });
}

cudaError_t create_event(Runtime& rt, cudaEvent_t* out, unsigned flags) {
  if (out == nullptr || flags > 7) return cudaErrorInvalidValue;
  if ((flags & cudaEventInterprocess) != 0) return cudaErrorNotSupported;
  auto made = std::make_shared<CUevent_st>();
  made->device = current_device();
  made->flags = flags;
  ++rt.counters.event_creates;
  *out = made.get();
  rt.events.emplace(made.get(), std::move(made));
  return cudaSuccess;
}

cudaError_t record(Runtime& rt, cudaEvent_t handle, cudaStream_t stream_handle, unsigned flags) {
  const EventPtr event = find_event(rt, handle);
  const StreamPtr stream = find_stream(rt, stream_handle);
  if (event == nullptr || stream == nullptr || event->device != stream->device) {
    return cudaErrorInvalidResourceHandle;
  }
  if (flags > cudaEventRecordExternal) return cudaErrorInvalidValue;
  if (const cudaError_t error = check_legacy(rt, *stream); error != cudaSuccess) return error;
  if (stream->capture == nullptr) {
    if (flags == cudaEventRecordExternal) return cudaErrorIllegalState;
    event->capture = nullptr;
    event->token = enqueue(rt, stream, Work{});
    return cudaSuccess;
  }
  if (stream->capture->invalid) return cudaErrorStreamCaptureInvalidated;
  if (flags == cudaEventRecordExternal) {
    return submit(rt, stream, Work{cudaGraphNodeTypeEventRecord, nullptr, nullptr, event});
  }
  event->capture = stream->capture;
  event->nodes = stream->frontier;
  return cudaSuccess;
}

void follow(CUstream_st& stream, const std::vector<size_t>& nodes) {
  stream.frontier.insert(stream.frontier.end(), nodes.begin(), nodes.end());
  std::sort(stream.frontier.begin(), stream.frontier.end());
  stream.frontier.erase(std::unique(stream.frontier.begin(), stream.frontier.end()),
                        stream.frontier.end());
}

cudaError_t wait_event(Runtime& rt, cudaStream_t stream_handle, cudaEvent_t handle,
                       unsigned flags) {
  const EventPtr event = find_event(rt, handle);
  const StreamPtr stream = find_stream(rt, stream_handle);
  if (event == nullptr || stream == nullptr) return cudaErrorInvalidResourceHandle;
  if (flags > cudaEventWaitExternal) return cudaErrorInvalidValue;
  if (const cudaError_t error = check_legacy(rt, *stream); error != cudaSuccess) return error;
  if (stream->capture != nullptr && stream->capture->invalid) {
    return cudaErrorStreamCaptureInvalidated;
  }
  if (event->capture != nullptr) {
    Capture& capture = *event->capture;
    const bool active = capture.origin != nullptr;
    if (!active || flags == cudaEventWaitExternal) return cudaErrorCapturedEvent;
    if (capture.invalid) return cudaErrorStreamCaptureInvalidated;
    if (stream->legacy) {
      invalidate(capture);
      return cudaErrorStreamCaptureImplicit;
    }
    if (stream->capture != nullptr && stream->capture != event->capture) {
      invalidate(capture);
      invalidate(*stream->capture);
      return cudaErrorStreamCaptureMerge;
    }
    if (stream->capture == nullptr) {
      stream->capture = event->capture;
      stream->frontier.clear();
      capture.streams.push_back(stream);
    }
    follow(*stream, event->nodes);
    return cudaSuccess;
  }
  if (stream->capture == nullptr) {
    if (flags == cudaEventWaitExternal) return cudaErrorIllegalState;
    if (event->token != nullptr) enqueue(rt, stream, Work{}, {event->token});
    return cudaSuccess;
  }
  if (flags == cudaEventWaitExternal) {
    return submit(rt, stream, Work{cudaGraphNodeTypeWaitEvent, nullptr, nullptr, event});
  }
  if (event->token == nullptr) return cudaSuccess;
  invalidate(*stream->capture);
  return cudaErrorStreamCaptureIsolation;
}

// An event of a capture stands for nodes, not for a moment.
cudaError_t refuse_captured(const CUevent_st& event) {
  if (event.capture == nullptr) return cudaSuccess;
  if (event.capture->origin != nullptr) invalidate(*event.capture);
  return cudaErrorCapturedEvent;
}

}  // namespace

cudaError_t cudaStreamCreate(cudaStream_t* stream) {
  return call("cudaStreamCreate", kAnyTime,
              [&](Runtime& rt, Lock&) { return create_stream(rt, stream, cudaStreamDefault, 0); });
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  return call("cudaStreamCreateWithFlags", kAnyTime,
              [&](Runtime& rt, Lock&) { return create_stream(rt, stream, flags, 0); });
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int priority) {
  return call("cudaStreamCreateWithPriority", kAnyTime,
              [&](Runtime& rt, Lock&) { return create_stream(rt, stream, flags, priority); });
}

cudaError_t cudaStreamDestroy(cudaStream_t handle) {
  return call("cudaStreamDestroy", kAnyTime, [&](Runtime& rt, Lock&) -> cudaError_t {
    const auto found = rt.streams.find(handle);
    if (found == rt.streams.end()) return cudaErrorInvalidResourceHandle;
    const StreamPtr stream = found->second;
    if (stream->capture != nullptr) invalidate(*stream->capture);
    close_stream(*stream);
    rt.streams.erase(found);
    return cudaSuccess;
  });
}

cudaError_t cudaStreamQuery(cudaStream_t handle) {
  return call("cudaStreamQuery", kUnsafe, [&](Runtime& rt, Lock&) -> cudaError_t {
    const StreamPtr stream = find_stream(rt, handle);
    if (stream == nullptr) return cudaErrorInvalidResourceHandle;
    if (const cudaError_t error = refuse_capturing(*stream); error != cudaSuccess) return error;
    if (const cudaError_t error = check_legacy(rt, *stream); error != cudaSuccess) return error;
    bool idle = ready(stream->last);
    if (stream->legacy) {
      for (const auto& weak : rt.all_streams) {
        const StreamPtr other = weak.lock();
        if (other != nullptr && other->device == stream->device && other->blocking()) {
          idle &= ready(other->last);
        }
      }
    }
    return idle ? cudaSuccess : cudaErrorNotReady;
  });
}

cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
  return call("cudaStreamSynchronize", kUnsafe, [&](Runtime& rt, Lock& lock) -> cudaError_t {
    ++rt.counters.host_syncs;
    const StreamPtr stream = find_stream(rt, handle);
    if (stream == nullptr) return cudaErrorInvalidResourceHandle;
    TokenPtr end;
    if (const cudaError_t error = end_of(rt, stream, &end); error != cudaSuccess) return error;
    return wait_for(rt, lock, end, stream->device);
  });
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) {
  return call("cudaStreamWaitEvent", kAnyTime,
              [&](Runtime& rt, Lock&) { return wait_event(rt, stream, event, flags); });
}

cudaError_t cudaStreamGetDevice(cudaStream_t handle, int* device) {
  return with_stream("cudaStreamGetDevice", handle, [&](const CUstream_st& stream) {
    if (device == nullptr) return cudaErrorInvalidValue;
    *device = stream.device;
    return cudaSuccess;
  });
}

cudaError_t cudaStreamGetId(cudaStream_t handle, unsigned long long* id) {
  return with_stream("cudaStreamGetId", handle, [&](const CUstream_st& stream) {
    if (id == nullptr) return cudaErrorInvalidValue;
    *id = stream.id;
    return cudaSuccess;
  });
}

cudaError_t cudaStreamGetFlags(cudaStream_t handle, unsigned* flags) {
  return with_stream("cudaStreamGetFlags", handle, [&](const CUstream_st& stream) {
    if (flags == nullptr) return cudaErrorInvalidValue;
    *flags = stream.flags;
    return cudaSuccess;
  });
}

cudaError_t cudaStreamGetPriority(cudaStream_t handle, int* priority) {
  return with_stream("cudaStreamGetPriority", handle, [&](const CUstream_st& stream) {
    if (priority == nullptr) return cudaErrorInvalidValue;
    *priority = stream.priority;
    return cudaSuccess;
  });
}

cudaError_t cudaLaunchHostFunc(cudaStream_t handle, cudaHostFn_t function, void* data) {
  return call("cudaLaunchHostFunc", kAnyTime, [&](Runtime& rt, Lock&) -> cudaError_t {
    if (function == nullptr) return cudaErrorInvalidValue;
    const StreamPtr stream = find_stream(rt, handle);
    if (stream == nullptr) return cudaErrorInvalidResourceHandle;
    ++rt.counters.host_functions;
    return submit(rt, stream,
                  Work{cudaGraphNodeTypeHost, [=] { function(data); }, nullptr, nullptr});
  });
}

cudaError_t cudaEventCreate(cudaEvent_t* event) {
  return call("cudaEventCreate", kAnyTime,
              [&](Runtime& rt, Lock&) { return create_event(rt, event, cudaEventDefault); });
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
  return call("cudaEventCreateWithFlags", kAnyTime,
              [&](Runtime& rt, Lock&) { return create_event(rt, event, flags); });
}

cudaError_t cudaEventDestroy(cudaEvent_t event) {
  return call("cudaEventDestroy", kAnyTime, [&](Runtime& rt, Lock&) {
    return rt.events.erase(event) == 1 ? cudaSuccess : cudaErrorInvalidResourceHandle;
  });
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  return call("cudaEventRecord", kAnyTime, [&](Runtime& rt, Lock&) {
    return record(rt, event, stream, cudaEventRecordDefault);
  });
}

cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags) {
  return call("cudaEventRecordWithFlags", kAnyTime,
              [&](Runtime& rt, Lock&) { return record(rt, event, stream, flags); });
}

cudaError_t cudaEventQuery(cudaEvent_t handle) {
  return call("cudaEventQuery", kUnsafe, [&](Runtime& rt, Lock&) -> cudaError_t {
    const EventPtr event = find_event(rt, handle);
    if (event == nullptr) return cudaErrorInvalidResourceHandle;
    if (const cudaError_t error = refuse_captured(*event); error != cudaSuccess) return error;
    if (!ready(event->token)) return cudaErrorNotReady;
    return rt.devices[static_cast<size_t>(event->device)].broken;
  });
}

cudaError_t cudaEventSynchronize(cudaEvent_t handle) {
  return call("cudaEventSynchronize", kUnsafe, [&](Runtime& rt, Lock& lock) -> cudaError_t {
    ++rt.counters.host_syncs;
    const EventPtr event = find_event(rt, handle);
    if (event == nullptr) return cudaErrorInvalidResourceHandle;
    if (const cudaError_t error = refuse_captured(*event); error != cudaSuccess) return error;
    return wait_for(rt, lock, event->token, event->device);
  });
}

cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t from, cudaEvent_t to) {
  return call("cudaEventElapsedTime", kAnyTime, [&](Runtime& rt, Lock&) -> cudaError_t {
    if (milliseconds == nullptr) return cudaErrorInvalidValue;
    const EventPtr first = find_event(rt, from);
    const EventPtr second = find_event(rt, to);
    for (const EventPtr& event : {first, second}) {
      if (event == nullptr || event->token == nullptr || event->capture != nullptr ||
          (event->flags & cudaEventDisableTiming) != 0) {
        return cudaErrorInvalidResourceHandle;
      }
    }
    if (!first->token->done || !second->token->done) return cudaErrorNotReady;
    *milliseconds =
        std::chrono::duration<float, std::milli>(second->token->when - first->token->when).count();
    return cudaSuccess;
  });
}
