#include "plugin/device/cuda_device_impl.h"

#include <algorithm>
#include <new>
#include <utility>

#include "plugin/device/cuda_engine.h"

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

// ---- events ----

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

namespace {

class FenceImpl final : public Fence {
 public:
  explicit FenceImpl(std::shared_ptr<CudaDeviceImpl> device)
      : device_(std::move(device)), event_(device_->ordinal()) {}
  bool valid() const { return event_.valid(); }
  Status mark(Stream stream) override { return event_.mark(cuda(stream)); }
  Status hold(Stream stream) override { return event_.hold(cuda(stream)); }
  Status passed(bool* out) override { return event_.passed(out); }

 private:
  const std::shared_ptr<CudaDeviceImpl> device_;
  Event event_;
};

}  // namespace

// ---- the device ----

Status CudaDeviceImpl::open() {
  const DeviceScope scope(ordinal_);
  int least = 0, greatest = 0;
  SCAPE_RETURN_IF_ERROR(
      check_cuda(cudaDeviceGetStreamPriorityRange(&least, &greatest), "asking for priorities"));
  SCAPE_RETURN_IF_ERROR(check_cuda(
      cudaStreamCreateWithPriority(&side_, cudaStreamNonBlocking, least), "making a stream"));
  for (cudaStream_t* stream : {&access_, &retire_}) {
    SCAPE_RETURN_IF_ERROR(
        check_cuda(cudaStreamCreateWithFlags(stream, cudaStreamNonBlocking), "making a stream"));
  }
  return Status::Ok();
}

CudaDeviceImpl::~CudaDeviceImpl() {
  const DeviceScope scope(ordinal_);
  for (const Block& block : retired_) (void)cudaFree(block.memory);
  for (const Block& block : staging_) (void)cudaFreeHost(block.memory);
  for (cudaStream_t stream : {side_, access_, retire_}) {
    if (stream != nullptr) (void)cudaStreamDestroy(stream);
  }
}

Status CudaDeviceImpl::make_fence(std::unique_ptr<Fence>* out) {
  try {
    auto fence = std::make_unique<FenceImpl>(shared_from_this());
    if (!fence->valid()) return error(SCAPE_ERR_INTERNAL, "CUDA: no event could be made");
    *out = std::move(fence);
    return Status::Ok();
  } catch (const std::bad_alloc&) {
    return error(SCAPE_ERR_MEMORY, "no memory for an event");
  }
}

Status CudaDeviceImpl::make_engine(std::shared_ptr<Engine>* out) {
  try {
    auto engine = std::make_shared<CudaEngine>(shared_from_this());
    SCAPE_RETURN_IF_ERROR(engine->open());
    *out = std::move(engine);
    return Status::Ok();
  } catch (const std::bad_alloc&) {
    return error(SCAPE_ERR_MEMORY, "no memory for the device side of a buffer");
  }
}

Status CudaDeviceImpl::is_capturing(Stream stream, bool* out) {
  const DeviceScope scope(ordinal_);
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  const cudaError_t result = cudaStreamIsCapturing(cuda(stream), &status);
  // The legacy stream, while another is captured that it would have to wait for.
  if (result == cudaErrorStreamCaptureImplicit) {
    (void)cudaGetLastError();
    *out = true;
    return Status::Ok();
  }
  *out = status != cudaStreamCaptureStatusNone;
  return check_cuda(result, "asking whether a stream is captured");
}

Status CudaDeviceImpl::reaches(const void* data, bool* out) {
  const DeviceScope scope(ordinal_);
  cudaPointerAttributes attributes{};
  SCAPE_RETURN_IF_ERROR(
      check_cuda(cudaPointerGetAttributes(&attributes, data), "asking for an address"));
  switch (attributes.type) {
    case cudaMemoryTypeDevice:
      *out = attributes.device == ordinal_;
      break;
    case cudaMemoryTypeHost:
    case cudaMemoryTypeManaged:
      *out = true;
      break;
    default:
      *out = false;
  }
  return Status::Ok();
}

// ---- memory ----

void* CudaDeviceImpl::take_block(size_t bytes) {
  auto best = retired_.end();
  for (auto it = retired_.begin(); it != retired_.end(); ++it) {
    const bool fits = it->bytes >= bytes && it->bytes - bytes <= bytes / 8;
    if (!fits || (best != retired_.end() && best->bytes <= it->bytes)) continue;
    if (it->free_after != nullptr) {
      bool passed = false;
      if (!it->free_after->passed(&passed).ok() || !passed) continue;
      events_.push_back(std::move(it->free_after));
    }
    best = it;
  }
  if (best == retired_.end()) return nullptr;
  void* const memory = best->memory;
  used_[memory] = best->bytes;
  retired_.erase(best);
  return memory;
}

// Waits for the device.
void CudaDeviceImpl::free_blocks() {
  for (Block& block : retired_) {
    (void)cudaFree(block.memory);
    if (block.free_after != nullptr) events_.push_back(std::move(block.free_after));
  }
  retired_.clear();
}

void* CudaDeviceImpl::allocate(size_t bytes) {
  const DeviceScope scope(ordinal_);
  try {
    if (void* memory = take_block(bytes); memory != nullptr) return memory;
    used_.reserve(used_.size() + 1);
    void* memory = nullptr;
    cudaError_t result = cudaMalloc(&memory, bytes);
    if (result == cudaErrorMemoryAllocation && !retired_.empty()) {
      (void)cudaGetLastError();
      free_blocks();
      result = cudaMalloc(&memory, bytes);
    }
    if (result != cudaSuccess) {
      (void)cudaGetLastError();
      return nullptr;
    }
    used_[memory] = bytes;
    return memory;
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}

void CudaDeviceImpl::release(void* memory, Event& owners) {
  const DeviceScope scope(ordinal_);
  const auto found = used_.find(memory);
  const size_t bytes = found->second;
  used_.erase(found);
  try {
    retired_.reserve(retired_.size() + 1);
    std::unique_ptr<Event> after;
    if (events_.empty()) {
      after = std::make_unique<Event>(ordinal_);
    } else {
      after = std::move(events_.back());
      events_.pop_back();
    }
    if (after->valid() && owners.hold(retire_).ok() && after->mark(side_).ok() &&
        after->hold(retire_).ok() && after->mark(retire_).ok()) {
      retired_.push_back({memory, bytes, std::move(after)});
      return;
    }
  } catch (const std::bad_alloc&) {
  }
  (void)cudaFree(memory);  // which waits
}

void* CudaDeviceImpl::allocate_staging(size_t bytes) {
  const DeviceScope scope(ordinal_);
  try {
    const auto found = std::find_if(staging_.begin(), staging_.end(),
                                    [&](const Block& block) { return block.bytes == bytes; });
    if (found != staging_.end()) {
      void* const memory = found->memory;
      staging_.erase(found);
      return memory;
    }
    void* memory = nullptr;
    if (cudaHostAlloc(&memory, bytes, cudaHostAllocDefault) == cudaSuccess) return memory;
    (void)cudaGetLastError();
  } catch (const std::bad_alloc&) {
  }
  return nullptr;
}

void CudaDeviceImpl::release_staging(void* memory, size_t bytes) {
  try {
    staging_.push_back({memory, bytes, nullptr});
  } catch (const std::bad_alloc&) {
    const DeviceScope scope(ordinal_);
    (void)cudaFreeHost(memory);
  }
}

}  // namespace scape::plugin
