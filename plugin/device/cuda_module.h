// What libscape_cuda.so, the one part that is built over CUDA, offers to the library that opens it.
// Nothing in here throws.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "base/status.h"
#include "plugin/masked/engine.h"
#include "plugin/stream.h"

namespace scape::plugin {

// A mark in a stream, which other streams can be held behind and the host can ask for. May be
// marked again and again.
class Fence {
 public:
  virtual ~Fence() = default;
  // Behind what `stream` holds.
  virtual Status mark(Stream stream) = 0;
  // What `stream` gets from now on comes after the mark.
  virtual Status hold(Stream stream) = 0;
  // Whether the device has passed the mark.
  virtual Status passed(bool* out) = 0;
};

// One device. One thread at a time; fences and engines keep it alive.
class CudaDevice {
 public:
  virtual ~CudaDevice() = default;

  // Of low priority, and independent of the legacy stream: what runs in the background.
  virtual Stream side_stream() const = 0;
  virtual Status make_fence(std::unique_ptr<Fence>* out) = 0;
  virtual Status make_engine(std::shared_ptr<Engine>* out) = 0;
  // As in DeviceChannel.
  virtual Status is_capturing(Stream stream, bool* out) = 0;
  virtual Status reaches(const void* data, bool* out) = 0;
};

struct CudaModule {
  uint32_t abi;
  // residual_chunk: SCAPE_RESIDUAL_CHUNK. SYSTEM, with CUDA's reason, where the device cannot be
  // used.
  Status (*open_device)(int device, size_t residual_chunk, std::shared_ptr<CudaDevice>* out);
};

// The module's only symbol, a CudaModule of this ABI. Both sides come from one build.
inline constexpr char kCudaModuleSymbol[] = "scape_cuda_module";
inline constexpr uint32_t kCudaModuleAbi = 2;

// Opens libscape_cuda.so from beside this library, for good. SYSTEM where it is missing.
Status load_cuda_module(const CudaModule** out);

}  // namespace scape::plugin
