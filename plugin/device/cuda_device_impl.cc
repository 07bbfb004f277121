#include "plugin/device/cuda_device_impl.h"

#include <algorithm>
#include <new>
#include <utility>

#include "kernels/cuda/cuda_ops.h"
#include "plugin/device/cuda_engine.h"
#include "plugin/device/cuda_relay.h"

namespace scape::plugin {
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
  // Of the version that every device has, where its system lets it.
  constexpr unsigned kSince = 12000;
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
  if (cudaGetDriverEntryPointByVersion("cuStreamWaitValue32", &found, kSince, cudaEnableDefault,
                                       &result) != cudaSuccess) {
    (void)cudaGetLastError();
  } else if (result == cudaDriverEntryPointSuccess) {
    wait_value_ = reinterpret_cast<WaitValue>(found);
  }
  return Status::Ok();
}

CudaDeviceImpl::~CudaDeviceImpl() {
  const DeviceScope scope(ordinal_);
  for (const Block& block : retired_) free(block);
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

Status CudaDeviceImpl::make_relay(size_t bytes, std::unique_ptr<Relay>* out) {
  try {
    auto relay = std::make_unique<CudaRelay>(shared_from_this());
    SCAPE_RETURN_IF_ERROR(relay->open(bytes));
    *out = std::move(relay);
    return Status::Ok();
  } catch (const std::bad_alloc&) {
    return error(SCAPE_ERR_MEMORY, "no memory for a way through the host");
  }
}

Status CudaDeviceImpl::wait_for_word(cudaStream_t stream, const uint32_t* word) {
  if (wait_value_ != nullptr) {
    constexpr unsigned kAtLeast = 0;  // CU_STREAM_WAIT_VALUE_GEQ
    const int result = wait_value_(stream, reinterpret_cast<uintptr_t>(word), 1, kAtLeast);
    // The driver's errors and the runtime's have the same numbers.
    if (result != cudaErrorNotSupported) {
      return check_cuda(static_cast<cudaError_t>(result), "making a stream wait for memory");
    }
    wait_value_ = nullptr;
  }
  return kernels::cuda::wait_for_word(stream, word);
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

void CudaDeviceImpl::free(const Block& block) {
  (void)(block.home == Home::kHost ? cudaFreeHost(block.memory) : cudaFree(block.memory));
}

void* CudaDeviceImpl::take_block(size_t bytes, Home home) {
  auto best = retired_.end();
  for (auto it = retired_.begin(); it != retired_.end(); ++it) {
    const bool fits = it->home == home && it->bytes >= bytes && it->bytes - bytes <= bytes / 8;
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
  used_[memory] = {best->bytes, home};
  retired_.erase(best);
  return memory;
}

// Waits for the device.
void CudaDeviceImpl::free_blocks() {
  for (Block& block : retired_) {
    free(block);
    if (block.free_after != nullptr) events_.push_back(std::move(block.free_after));
  }
  retired_.clear();
}

void* CudaDeviceImpl::allocate(size_t bytes, Home home) {
  const DeviceScope scope(ordinal_);
  try {
    if (void* memory = take_block(bytes, home); memory != nullptr) return memory;
    used_.reserve(used_.size() + 1);
    void* memory = nullptr;
    const auto make = [&] {
      return home == Home::kHost ? cudaHostAlloc(&memory, bytes, cudaHostAllocMapped)
                                 : cudaMalloc(&memory, bytes);
    };
    cudaError_t result = make();
    if (result == cudaErrorMemoryAllocation && !retired_.empty()) {
      (void)cudaGetLastError();
      free_blocks();
      result = make();
    }
    if (result != cudaSuccess) {
      (void)cudaGetLastError();
      return nullptr;
    }
    used_[memory] = {bytes, home};
    return memory;
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}

void CudaDeviceImpl::release(void* memory, std::initializer_list<Event*> users) {
  const DeviceScope scope(ordinal_);
  const auto found = used_.find(memory);
  Block block{memory, found->second.bytes, found->second.home, nullptr};
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
    const bool held = std::all_of(users.begin(), users.end(),
                                  [&](Event* user) { return user->hold(retire_).ok(); });
    if (held && after->valid() && after->mark(side_).ok() && after->hold(retire_).ok() &&
        after->mark(retire_).ok()) {
      block.free_after = std::move(after);
      retired_.push_back(std::move(block));
      return;
    }
  } catch (const std::bad_alloc&) {
  }
  free(block);  // which waits
}

Status CudaDeviceImpl::chunk_pipe(ChunkPipe** out) {
  if (chunk_pipe_ == nullptr) {
    auto made = std::make_unique<ChunkPipe>(ordinal_, residual_chunk_);
    SCAPE_RETURN_IF_ERROR(made->open());
    chunk_pipe_ = std::move(made);
  }
  *out = chunk_pipe_.get();
  return Status::Ok();
}

}  // namespace scape::plugin
