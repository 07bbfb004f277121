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

// A stream's way through the host: what it sends there is copied to page-locked memory, the stream
// waits while the host has its turn, and goes on with what the host has left there. Used again and
// again, by one transfer at a time; the host's side of it from any thread.
class Relay {
 public:
  virtual ~Relay() = default;

  // The page-locked memory, the host's from arrived() to release().
  virtual std::byte* data() = 0;
  virtual size_t capacity() const = 0;

  struct Transfer {
    const void* send = nullptr;
    size_t send_bytes = 0;
    size_t send_offset = 0;  // where they go to in data()
    void* recv = nullptr;
    size_t recv_bytes = 0;  // from the beginning of data()
  };
  // Enqueues the transfer and returns. Where it fails the stream waits for nothing.
  virtual Status enqueue(Stream stream, const Transfer& transfer) = 0;
  // Whether what was sent is there.
  virtual Status arrived(bool* out) = 0;
  // Ends the host's turn, once. Not `good`: the receiving buffer gets 0xff in every byte, whatever
  // becomes of data() meanwhile.
  virtual void release(bool good) = 0;
  // Whether the stream has got past the transfer, so that the next one may be enqueued.
  virtual Status over(bool* out) = 0;
};

// One device. One thread at a time; fences, engines and relays keep it alive.
class CudaDevice {
 public:
  virtual ~CudaDevice() = default;

  // Of low priority, and independent of the legacy stream: what runs in the background.
  virtual Stream side_stream() const = 0;
  virtual Status make_fence(std::unique_ptr<Fence>* out) = 0;
  virtual Status make_engine(std::shared_ptr<Engine>* out) = 0;
  // MEMORY where there is no page-locked memory left. To be destroyed when it is over().
  virtual Status make_relay(size_t bytes, std::unique_ptr<Relay>* out) = 0;
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
