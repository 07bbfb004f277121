// One device as its engines share it: streams, events, and memory that nobody waits for.
#pragma once

#include <cuda_runtime_api.h>

#include <memory>
#include <unordered_map>
#include <vector>

#include "plugin/device/cuda_module.h"

namespace scape::plugin {

inline cudaStream_t cuda(Stream stream) { return static_cast<cudaStream_t>(stream.handle); }

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

class CudaDeviceImpl final : public CudaDevice,
                             public std::enable_shared_from_this<CudaDeviceImpl> {
 public:
  explicit CudaDeviceImpl(int ordinal) : ordinal_(ordinal) {}
  // Waits for what the device still has to do with its memory.
  ~CudaDeviceImpl() override;
  Status open();

  Stream side_stream() const override { return {side_}; }
  Status make_fence(std::unique_ptr<Fence>* out) override;
  Status make_engine(std::shared_ptr<Engine>* out) override;
  Status is_capturing(Stream stream, bool* out) override;
  Status reaches(const void* data, bool* out) override;

  int ordinal() const { return ordinal_; }
  // For copies that the host waits for, apart from everybody's streams.
  cudaStream_t access_stream() const { return access_; }

  // Device memory. Null where there is none left. release(): no work that is enqueued after
  // `owners` was marked, nor after now on the side stream, uses it; its memory serves again when
  // the device has got there. cudaFree() would wait for the device, and with it for other ranks.
  void* allocate(size_t bytes);
  void release(void* memory, Event& owners);
  // Page-locked memory, kept in the same way.
  void* allocate_staging(size_t bytes);
  void release_staging(void* memory, size_t bytes);

 private:
  struct Block {
    void* memory;
    size_t bytes;
    std::unique_ptr<Event> free_after;  // null: now
  };
  void* take_block(size_t bytes);
  void free_blocks();

  const int ordinal_;
  cudaStream_t side_ = nullptr;
  cudaStream_t access_ = nullptr;
  cudaStream_t retire_ = nullptr;  // holds nothing but fences
  std::unordered_map<void*, size_t> used_;
  std::vector<Block> retired_;
  std::vector<std::unique_ptr<Event>> events_;  // of retired blocks that serve again
  std::vector<Block> staging_;
};

}  // namespace scape::plugin
