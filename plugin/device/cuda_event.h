// Events of a device, and what calls of CUDA need around them.
#pragma once

#include <cuda_runtime_api.h>

#include "base/status.h"

namespace scape::plugin {

// Ok, or INTERNAL (MEMORY where that is what lacks) with CUDA's reason.
Status check_cuda(cudaError_t result, const char* what);

// What this thread does meanwhile is no part of the capture of somebody's stream.
class UncapturedScope {
 public:
  UncapturedScope();
  ~UncapturedScope();
  UncapturedScope(const UncapturedScope&) = delete;
  UncapturedScope& operator=(const UncapturedScope&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

// The same, with a device as the thread's.
class DeviceScope {
 public:
  explicit DeviceScope(int device);
  ~DeviceScope();
  DeviceScope(const DeviceScope&) = delete;
  DeviceScope& operator=(const DeviceScope&) = delete;

 private:
  const UncapturedScope uncaptured_;
  int before_ = -1;
  const int device_;
};

// An event of one device. Only valid() ones may be used.
class Event {
 public:
  explicit Event(int device);
  ~Event();
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;

  bool valid() const { return event_ != nullptr; }
  Status mark(cudaStream_t stream);
  Status hold(cudaStream_t stream);
  // From any thread.
  Status passed(bool* out);
  // Waits for it.
  Status wait();

 private:
  const int device_;
  cudaEvent_t event_ = nullptr;
};

}  // namespace scape::plugin
