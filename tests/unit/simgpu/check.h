// What the tests of the simulated device share.
#pragma once

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <thread>
#include <vector>

#include "cuda_runtime.h"

namespace simgpu::test {

#define OK(call) ASSERT_EQ((call), cudaSuccess) << cudaGetErrorString(cudaPeekAtLastError())

// Keeps a stream busy until it is opened: a host function that waits.
class Gate {
 public:
  explicit Gate(cudaStream_t stream) {
    EXPECT_EQ(cudaLaunchHostFunc(
                  stream,
                  [](void* self) {
                    const auto* gate = static_cast<Gate*>(self);
                    while (!gate->open_.load()) {
                      std::this_thread::sleep_for(std::chrono::microseconds(100));
                    }
                  },
                  this),
              cudaSuccess);
  }
  ~Gate() { open(); }
  Gate(const Gate&) = delete;
  Gate& operator=(const Gate&) = delete;
  void open() { open_.store(true); }

 private:
  std::atomic<bool> open_{false};
};

// Ints on a device, all of one value.
inline int* device_ints(size_t count, int byte = 0) {
  void* out = nullptr;
  EXPECT_EQ(cudaMalloc(&out, count * sizeof(int)), cudaSuccess);
  EXPECT_EQ(cudaMemset(out, byte, count * sizeof(int)), cudaSuccess);
  // The host does not wait for a memset, nor do non-blocking streams.
  EXPECT_EQ(cudaStreamSynchronize(nullptr), cudaSuccess);
  return static_cast<int*>(out);
}

inline std::vector<int> read_ints(const int* from, size_t count) {
  std::vector<int> out(count);
  EXPECT_EQ(cudaMemcpy(out.data(), from, count * sizeof(int), cudaMemcpyDeviceToHost), cudaSuccess);
  return out;
}

inline simgpu_counters counters() {
  simgpu_counters out;
  simgpu_get_counters(&out);
  return out;
}

}  // namespace simgpu::test
