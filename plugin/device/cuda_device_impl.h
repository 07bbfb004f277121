// One device as its engines share it: streams, events, and memory that nobody waits for.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <initializer_list>
#include <memory>
#include <unordered_map>
#include <vector>

#include "plugin/device/chunk_pipe.h"
#include "plugin/device/cuda_event.h"
#include "plugin/device/cuda_module.h"

namespace scape::plugin {

inline cudaStream_t cuda(Stream stream) { return static_cast<cudaStream_t>(stream.handle); }

class CudaDeviceImpl final : public CudaDevice,
                             public std::enable_shared_from_this<CudaDeviceImpl> {
 public:
  CudaDeviceImpl(int ordinal, size_t residual_chunk)
      : ordinal_(ordinal), residual_chunk_(residual_chunk) {}
  // Waits for what the device still has to do with its memory.
  ~CudaDeviceImpl() override;
  Status open();

  Stream side_stream() const override { return {side_}; }
  Status make_fence(std::unique_ptr<Fence>* out) override;
  Status make_engine(std::shared_ptr<Engine>* out) override;
  Status make_relay(size_t bytes, std::unique_ptr<Relay>* out) override;
  Status is_capturing(Stream stream, bool* out) override;
  Status reaches(const void* data, bool* out) override;

  int ordinal() const { return ordinal_; }
  // What `stream` gets from now on waits until *word, in page-locked memory, is not 0.
  Status wait_for_word(cudaStream_t stream, const uint32_t* word);
  // For copies that the host waits for, apart from everybody's streams.
  cudaStream_t access_stream() const { return access_; }

  // Device memory, or page-locked memory of the host. Null where there is none left. release(): no
  // work that is enqueued after `users` were marked, nor after now on the side stream, uses it; its
  // memory serves again when the device has got there. cudaFree() would wait for the device, and
  // with it for other ranks.
  void* allocate(size_t bytes, Home home);
  void release(void* memory, std::initializer_list<Event*> users);
  // The way to arrays whose home is the host, for all engines; made at the first of them.
  Status chunk_pipe(ChunkPipe** out);

 private:
  struct Block {
    void* memory;
    size_t bytes;
    Home home;
    std::unique_ptr<Event> free_after;  // null: now
  };
  struct Used {
    size_t bytes;
    Home home;
  };
  static void free(const Block& block);
  void* take_block(size_t bytes, Home home);
  void free_blocks();

  // The driver's cuStreamWaitValue32, which this module does not link.
  using WaitValue = int (*)(cudaStream_t stream, unsigned long long address, uint32_t value,
                            unsigned flags);

  const int ordinal_;
  const size_t residual_chunk_;
  WaitValue wait_value_ = nullptr;  // null where streams of this device cannot wait for memory
  cudaStream_t side_ = nullptr;
  cudaStream_t access_ = nullptr;
  cudaStream_t retire_ = nullptr;  // holds nothing but fences
  std::unordered_map<void*, Used> used_;
  std::vector<Block> retired_;
  std::vector<std::unique_ptr<Event>> events_;  // of retired blocks that serve again
  std::unique_ptr<ChunkPipe> chunk_pipe_;
};

}  // namespace scape::plugin
