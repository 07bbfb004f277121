// Captures and graphs, and work of other libraries on streams.
#include <algorithm>

#include "runtime.h"

using namespace simgpu;  // NOLINT: most here is CUDA's C API

namespace {

// Ends it for the streams that take part.
void finish(Runtime& rt, const CapturePtr& capture) {
  for (const StreamPtr& stream : capture->streams) {
    stream->capture = nullptr;
    stream->frontier.clear();
  }
  capture->streams.clear();
  capture->origin = nullptr;
  std::erase(rt.captures, capture);
}

// Whether all nodes lead to what the origin stream would follow.
bool joined(const Capture& capture) {
  const auto& nodes = capture.graph->nodes;
  std::vector<bool> reached(nodes.size());
  for (const size_t node : capture.origin->frontier) reached[node] = true;
  for (size_t i = nodes.size(); i-- > 0;) {
    if (!reached[i]) return false;
    for (const size_t before : nodes[i]->follows) reached[before] = true;
  }
  return true;
}

CUgraph_st copy_of(const CUgraph_st& graph) {
  CUgraph_st copy;
  for (const auto& node : graph.nodes)
    copy.nodes.push_back(std::make_unique<CUgraphNode_st>(*node));
  return copy;
}

// Nodes of a graph that nothing follows.
std::vector<size_t> ends_of(const CUgraph_st& graph) {
  std::vector<bool> followed(graph.nodes.size());
  for (const auto& node : graph.nodes) {
    for (const size_t before : node->follows) followed[before] = true;
  }
  std::vector<size_t> ends;
  for (size_t i = 0; i < followed.size(); ++i) {
    if (!followed[i]) ends.push_back(i);
  }
  return ends;
}

// A launch on a capturing stream: its nodes become nodes of that graph.
cudaError_t launch_captured(CUgraphExec_st& exec, CUstream_st& stream) {
  if (stream.capture->invalid) return cudaErrorStreamCaptureInvalidated;
  auto& nodes = stream.capture->graph->nodes;
  const size_t base = nodes.size();
  for (const auto& original : exec.graph.nodes) {
    auto node = std::make_unique<CUgraphNode_st>(*original);
    for (size_t& before : node->follows) before += base;
    if (node->follows.empty()) node->follows = stream.frontier;
    nodes.push_back(std::move(node));
  }
  std::vector<size_t> ends = ends_of(exec.graph);
  if (ends.empty()) return cudaSuccess;
  for (size_t& end : ends) end += base;
  stream.frontier = std::move(ends);
  return cudaSuccess;
}

// Branches of the graph run on streams of their own, side by side, as on a device.
void launch_now(Runtime& rt, CUgraphExec_st& exec, const StreamPtr& stream) {
  const TokenPtr head = enqueue(rt, stream, Work{}, {exec.last});
  std::vector<TokenPtr> tokens;
  for (const auto& node : exec.graph.nodes) {
    StreamPtr& lane = exec.lanes[node->lane];
    if (lane == nullptr) lane = make_stream(rt, node->device, cudaStreamNonBlocking, 0);
    std::vector<TokenPtr> waits{head};
    for (const size_t before : node->follows) waits.push_back(tokens[before]);
    const EventPtr& event = node->work.event;
    if (node->work.type == cudaGraphNodeTypeWaitEvent) waits.push_back(event->token);
    tokens.push_back(enqueue(rt, lane, node->work, std::move(waits)));
    if (node->work.type == cudaGraphNodeTypeEventRecord) {
      event->capture = nullptr;
      event->token = tokens.back();
    }
  }
  exec.last = enqueue(rt, stream, Work{}, std::move(tokens));
}

}  // namespace

cudaError_t cudaStreamBeginCapture(cudaStream_t handle, cudaStreamCaptureMode mode) {
  return call("cudaStreamBeginCapture", kAnyTime, [&](Runtime& rt, Lock&) -> cudaError_t {
    const StreamPtr stream = find_stream(rt, handle);
    if (stream == nullptr) return cudaErrorInvalidResourceHandle;
    if (mode < cudaStreamCaptureModeGlobal || mode > cudaStreamCaptureModeRelaxed) {
      return cudaErrorInvalidValue;
    }
    if (stream->legacy) return cudaErrorStreamCaptureUnsupported;
    if (stream->capture != nullptr) return cudaErrorIllegalState;
    auto capture = std::make_shared<Capture>();
    capture->id = rt.next_capture++;
    capture->mode = mode;
    capture->thread = std::this_thread::get_id();
    capture->origin = stream.get();
    capture->graph = std::make_unique<CUgraph_st>();
    capture->streams.push_back(stream);
    stream->capture = capture;
    stream->frontier.clear();
    rt.captures.push_back(std::move(capture));
    return cudaSuccess;
  });
}

cudaError_t cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t* out) {
  return call("cudaStreamEndCapture", kAnyTime, [&](Runtime& rt, Lock&) -> cudaError_t {
    const StreamPtr stream = find_stream(rt, handle);
    if (stream == nullptr) return cudaErrorInvalidResourceHandle;
    if (out == nullptr) return cudaErrorInvalidValue;
    *out = nullptr;
    const CapturePtr capture = stream->capture;
    if (capture == nullptr) return cudaErrorIllegalState;
    if (capture->origin != stream.get()) {
      invalidate(*capture);
      return cudaErrorStreamCaptureUnmatched;
    }
    if (capture->mode != cudaStreamCaptureModeRelaxed &&
        capture->thread != std::this_thread::get_id()) {
      return cudaErrorStreamCaptureWrongThread;
    }
    const bool whole = joined(*capture);
    finish(rt, capture);
    if (capture->invalid) return cudaErrorStreamCaptureInvalidated;
    if (!whole) return cudaErrorStreamCaptureUnjoined;
    *out = capture->graph.get();
    rt.graphs.emplace(capture->graph.get(), std::move(capture->graph));
    return cudaSuccess;
  });
}

cudaError_t cudaStreamIsCapturing(cudaStream_t handle, cudaStreamCaptureStatus* status) {
  return call("cudaStreamIsCapturing", kAnyTime, [&](Runtime& rt, Lock&) -> cudaError_t {
    if (status == nullptr) return cudaErrorInvalidValue;
    const StreamPtr stream = find_stream(rt, handle);
    if (stream == nullptr) return cudaErrorInvalidResourceHandle;
    if (const cudaError_t error = check_legacy(rt, *stream); error != cudaSuccess) return error;
    *status = stream->capture == nullptr ? cudaStreamCaptureStatusNone
              : stream->capture->invalid ? cudaStreamCaptureStatusInvalidated
                                         : cudaStreamCaptureStatusActive;
    return cudaSuccess;
  });
}

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  return call("cudaThreadExchangeStreamCaptureMode", kNoContext, [&](Runtime&, Lock&) {
    if (mode == nullptr || *mode < cudaStreamCaptureModeGlobal ||
        *mode > cudaStreamCaptureModeRelaxed) {
      return cudaErrorInvalidValue;
    }
    std::swap(*mode, capture_mode_of_thread());
    return cudaSuccess;
  });
}

cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t* nodes, size_t* count) {
  return call("cudaGraphGetNodes", kAnyTime, [&](Runtime& rt, Lock&) -> cudaError_t {
    const auto found = rt.graphs.find(graph);
    if (found == rt.graphs.end() || count == nullptr) return cudaErrorInvalidValue;
    const auto& all = found->second->nodes;
    if (nodes == nullptr) {
      *count = all.size();
      return cudaSuccess;
    }
    for (size_t i = 0; i < *count; ++i) nodes[i] = i < all.size() ? all[i].get() : nullptr;
    *count = std::min(*count, all.size());
    return cudaSuccess;
  });
}

cudaError_t cudaGraphNodeGetType(cudaGraphNode_t node, cudaGraphNodeType* type) {
  return call("cudaGraphNodeGetType", kAnyTime, [&](Runtime&, Lock&) {
    if (node == nullptr || type == nullptr) return cudaErrorInvalidValue;
    *type = node->work.type;
    return cudaSuccess;
  });
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t* out, cudaGraph_t graph,
                                 unsigned long long flags) {
  return call("cudaGraphInstantiate", kAnyTime, [&](Runtime& rt, Lock&) -> cudaError_t {
    const auto found = rt.graphs.find(graph);
    if (out == nullptr || found == rt.graphs.end() || flags > 15) return cudaErrorInvalidValue;
    auto exec = std::make_unique<CUgraphExec_st>();
    exec->graph = copy_of(*found->second);
    *out = exec.get();
    rt.execs.emplace(exec.get(), std::move(exec));
    return cudaSuccess;
  });
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t handle, cudaStream_t stream_handle) {
  return call("cudaGraphLaunch", kAnyTime, [&](Runtime& rt, Lock&) -> cudaError_t {
    const auto found = rt.execs.find(handle);
    if (found == rt.execs.end()) return cudaErrorInvalidValue;
    const StreamPtr stream = find_stream(rt, stream_handle);
    if (stream == nullptr) return cudaErrorInvalidResourceHandle;
    if (const cudaError_t error = check_legacy(rt, *stream); error != cudaSuccess) return error;
    ++rt.counters.graph_launches;
    if (stream->capture != nullptr) return launch_captured(*found->second, *stream);
    launch_now(rt, *found->second, stream);
    return cudaSuccess;
  });
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t handle) {
  return call("cudaGraphExecDestroy", kAnyTime, [&](Runtime& rt, Lock&) -> cudaError_t {
    const auto found = rt.execs.find(handle);
    if (found == rt.execs.end()) return cudaErrorInvalidValue;
    for (const auto& [id, lane] : found->second->lanes) close_stream(*lane);
    rt.execs.erase(found);
    return cudaSuccess;
  });
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  return call("cudaGraphDestroy", kAnyTime, [&](Runtime& rt, Lock&) {
    return rt.graphs.erase(graph) == 1 ? cudaSuccess : cudaErrorInvalidValue;
  });
}

cudaError_t simgpu::enqueue(std::span<const cudaStream_t> handles, std::function<void()> body,
                            const std::shared_ptr<Order>& order) {
  return call("simgpu::enqueue", kAnyTime, [&](Runtime& rt, Lock&) -> cudaError_t {
    if (handles.empty()) return cudaErrorInvalidValue;
    std::vector<StreamPtr> streams;
    for (const cudaStream_t handle : handles) {
      streams.push_back(find_stream(rt, handle));
      if (streams.back() == nullptr) return cudaErrorInvalidResourceHandle;
      if (streams.back()->device != streams.front()->device) return cudaErrorInvalidValue;
      const cudaError_t error = check_legacy(rt, *streams.back());
      if (error != cudaSuccess) return error;
    }
    const StreamPtr& first = streams.front();
    const CapturePtr capture = first->capture;
    for (const StreamPtr& stream : streams) {
      if (stream->capture == capture) continue;
      if (capture != nullptr) invalidate(*capture);
      if (stream->capture != nullptr) invalidate(*stream->capture);
      return cudaErrorStreamCaptureIsolation;
    }
    std::vector<TokenPtr> waits;
    for (const StreamPtr& stream : streams) {
      if (stream == first) continue;
      if (capture == nullptr) {
        waits.push_back(stream->last);
      } else {
        first->frontier.insert(first->frontier.end(), stream->frontier.begin(),
                               stream->frontier.end());
      }
    }
    const cudaError_t error =
        submit(rt, first, Work{cudaGraphNodeTypeKernel, std::move(body), order, nullptr},
               std::move(waits));
    if (error != cudaSuccess) return error;
    for (const StreamPtr& stream : streams) {
      if (stream == first) continue;
      if (capture == nullptr) {
        enqueue(rt, stream, Work{}, {first->last});
      } else {
        stream->frontier = first->frontier;
      }
    }
    return cudaSuccess;
  });
}
