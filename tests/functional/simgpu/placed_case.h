// Cases that run in both modes: their buffers are on the host in host mode, on the device in device
// mode, and what comes out has to be the same, bit for bit.
#pragma once

#include "tests/functional/simgpu/sim_case.h"

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

namespace scape::cases {

inline bool on_device() {
  const char* mode = std::getenv("SCAPE_MODE");
  return mode != nullptr && std::string(mode) == "device";
}

// The stream of calls and steps; in host mode none.
inline cudaStream_t stream_here() { return on_device() ? make_stream() : nullptr; }

// An array where the mode's calls can reach it.
template <typename T>
class Placed {
 public:
  explicit Placed(size_t count) : host_(count) {
    if (!on_device()) return;
    CUDA(cudaMalloc(reinterpret_cast<void**>(&device_), count * sizeof(T)));
    put(host_, nullptr);
    CUDA(cudaDeviceSynchronize());
  }
  Placed(const Placed&) = delete;
  Placed& operator=(const Placed&) = delete;
  ~Placed() { (void)cudaFree(device_); }

  T* get() { return device_ != nullptr ? device_ : host_.data(); }
  size_t count() const { return host_.size(); }
  // In the order of the stream, as a training step writes its gradient.
  void put(const std::vector<T>& values, cudaStream_t stream) {
    CHECK(values.size() == count());
    if (device_ == nullptr) {
      host_ = values;
    } else {
      CUDA(cudaMemcpyAsync(device_, values.data(), count() * sizeof(T), cudaMemcpyHostToDevice,
                           stream));
    }
  }
  std::vector<T> read(cudaStream_t stream) const {
    std::vector<T> values = host_;
    if (device_ != nullptr) {
      CUDA(cudaMemcpyAsync(values.data(), device_, count() * sizeof(T), cudaMemcpyDeviceToHost,
                           stream));
      CUDA(cudaStreamSynchronize(stream));
    }
    return values;
  }

 private:
  std::vector<T> host_;
  T* device_ = nullptr;
};

// All that a rank has seen, step by step; the launcher compares the lines of the modes.
class Journal {
 public:
  void add(const void* data, size_t bytes) {
    const auto* at = static_cast<const unsigned char*>(data);
    for (size_t i = 0; i < bytes; ++i) digest_ = (digest_ ^ at[i]) * 0x100000001b3;
  }
  template <typename T>
  void add(const std::vector<T>& values) {
    add(values.data(), values.size() * sizeof(T));
  }
  // What the buffer's state is after its last call, and the counters that do not depend on speed.
  void add_state(const void* buffer, size_t count, bool moment = true);
  // A line for what has been added so far. Of one that begins with "all" every rank has the same.
  void line(const std::string& what);

 private:
  uint64_t digest_ = 0xcbf29ce484222325;
};

// Runs the ranks of `name` in host mode, then in device mode: as it comes, and with works held back
// at random. Demands the same journal each time.
void same_in_both_modes(const std::string& name, int ranks, const std::string& argument = "");

}  // namespace scape::cases
