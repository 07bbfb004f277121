#include "plugin/device/cuda_event.h"

namespace scape::plugin {

Status check_cuda(cudaError_t result, const char* what) {
  if (result == cudaSuccess) return Status::Ok();
  (void)cudaGetLastError();  // the program's own checks are not to find it
  return error(result == cudaErrorMemoryAllocation ? SCAPE_ERR_MEMORY : SCAPE_ERR_INTERNAL,
               "CUDA: %s: %s", what, cudaGetErrorString(result));
}

UncapturedScope::UncapturedScope() { (void)cudaThreadExchangeStreamCaptureMode(&mode_); }

UncapturedScope::~UncapturedScope() { (void)cudaThreadExchangeStreamCaptureMode(&mode_); }

DeviceScope::DeviceScope(int device) : device_(device) {
  (void)cudaGetDevice(&before_);
  if (before_ != device_) (void)cudaSetDevice(device_);
}

DeviceScope::~DeviceScope() {
  if (before_ != device_ && before_ >= 0) (void)cudaSetDevice(before_);
}

Event::Event(int device) : device_(device) {
  const DeviceScope scope(device_);
  if (cudaEventCreateWithFlags(&event_, cudaEventDisableTiming) != cudaSuccess) event_ = nullptr;
}

Event::~Event() {
  if (event_ != nullptr) (void)cudaEventDestroy(event_);
}

Status Event::mark(cudaStream_t stream) {
  const DeviceScope scope(device_);
  return check_cuda(cudaEventRecord(event_, stream), "marking a stream");
}

Status Event::hold(cudaStream_t stream) {
  const DeviceScope scope(device_);
  return check_cuda(cudaStreamWaitEvent(stream, event_, 0), "holding a stream behind another");
}

Status Event::passed(bool* out) {
  // Not with the device as the thread's: going back to another would make a context there.
  const UncapturedScope scope;
  const cudaError_t result = cudaEventQuery(event_);
  *out = result == cudaSuccess;
  if (result == cudaErrorNotReady) {
    (void)cudaGetLastError();
    return Status::Ok();
  }
  return check_cuda(result, "asking for an event");
}

Status Event::wait() {
  const DeviceScope scope(device_);
  return check_cuda(cudaEventSynchronize(event_), "waiting for an event");
}

}  // namespace scape::plugin
