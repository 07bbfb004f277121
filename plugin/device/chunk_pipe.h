// ChunkPipe: kernels over an array of page-locked host memory, through two chunks of device memory.
//
// While a kernel works on one chunk the other is filled or emptied: copies to the device have a
// stream of their own, copies from it another, so that both directions of the link are in use at
// once. Two chunks are enough, since a kernel takes a small part of the time of a copy. Everything
// is enqueued by the calling thread; nothing waits for the device, and after open() nothing is
// allocated. Arrays of several buffers take turns at the chunks, whatever streams they are on.
//
//   pipe.run(stream, residual, n, ChunkPipe::Use::kUpdate, last_use,
//            [&](float* chunk, size_t begin, size_t size) { return kernel(stream, chunk, ...); });
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>

#include "base/status.h"
#include "plugin/device/cuda_event.h"

namespace scape::plugin {

// One thread at a time.
class ChunkPipe {
 public:
  enum class Use {
    kRead,    // chunks are dropped
    kUpdate,  // and what kernels leave in them goes back to the array
  };

  // Begins of chunks are multiples of so many elements: kernels go over a mask in runs of these.
  static constexpr size_t kGrain = 2048;

  // chunk_bytes: at least one grain of floats; whole grains of it count.
  ChunkPipe(int device, size_t chunk_bytes);
  // Waits for what the device still has to do with the chunks.
  ~ChunkPipe();
  ChunkPipe(const ChunkPipe&) = delete;
  ChunkPipe& operator=(const ChunkPipe&) = delete;
  // MEMORY where there is none left for the chunks.
  Status open();

  // Calls kernel(chunk, begin, size) for values[begin .. begin + size), in order; it enqueues its
  // work on `stream` and gives a Status. `last_use` is behind the last work on the array, whatever
  // stream that was on, and is moved behind these. Ends at the first error.
  template <typename Kernel>
  Status run(cudaStream_t stream, float* values, size_t n, Use use, Event& last_use,
             Kernel&& kernel) {
    Status status = last_use.hold(in_);
    for (size_t begin = 0; status.ok() && begin < n; begin += chunk_elements_) {
      Chunk& chunk = chunks_[next_++ % chunks_.size()];
      const size_t size = std::min(chunk_elements_, n - begin);
      status = fill(chunk, values + begin, size, stream);
      if (status.ok()) status = kernel(chunk.memory, begin, size);
      if (!status.ok()) break;
      status =
          use == Use::kRead ? chunk.free.mark(stream) : empty(chunk, values + begin, size, stream);
    }
    // Also where an error came after some chunks.
    const Status marked = last_use.mark(use == Use::kRead ? stream : out_);
    return status.ok() ? marked : status;
  }

 private:
  struct Chunk {
    explicit Chunk(int device) : filled(device), used(device), free(device) {}
    float* memory = nullptr;
    Event filled;  // behind the copy to it
    Event used;    // behind the kernel, which the copy from it waits for
    Event free;    // behind all that reads it
  };

  // To the device, where the chunk is free; the stream goes on when it is there.
  Status fill(Chunk& chunk, const float* from, size_t size, cudaStream_t stream);
  // From the device, behind what the stream holds.
  Status empty(Chunk& chunk, float* to, size_t size, cudaStream_t stream);

  const int device_;
  const size_t chunk_elements_;
  cudaStream_t in_ = nullptr;
  cudaStream_t out_ = nullptr;
  std::array<Chunk, 2> chunks_;
  size_t next_ = 0;
};

}  // namespace scape::plugin
