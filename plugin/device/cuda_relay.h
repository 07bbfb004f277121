// A stream's way through the host, by the copy engine: page-locked memory, and a word in front of
// it that the stream waits for.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "plugin/device/cuda_device_impl.h"

namespace scape::plugin {

class CudaRelay final : public Relay {
 public:
  explicit CudaRelay(std::shared_ptr<CudaDeviceImpl> device);
  ~CudaRelay() override;
  Status open(size_t bytes);

  std::byte* data() override { return memory_ + kBefore; }
  size_t capacity() const override { return capacity_; }
  Status enqueue(Stream stream, const Transfer& transfer) override;
  Status arrived(bool* out) override { return arrived_.passed(out); }
  void release(bool good) override;
  Status over(bool* out) override { return over_.passed(out); }

 private:
  // The word has a cache line of its own.
  static constexpr size_t kBefore = 64;
  enum Word : uint32_t { kHostsTurn = 0, kGood, kBad };

  uint32_t* word() { return reinterpret_cast<uint32_t*>(memory_); }
  void write_word(Word value) { __atomic_store_n(word(), value, __ATOMIC_RELEASE); }
  Status enqueue_all(cudaStream_t stream, const Transfer& transfer);

  const std::shared_ptr<CudaDeviceImpl> device_;
  Event arrived_;
  Event over_;
  std::byte* memory_ = nullptr;
  size_t capacity_ = 0;
};

}  // namespace scape::plugin
