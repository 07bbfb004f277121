// What the cases on simulated devices share.
#pragma once

// First: NCCL's declarations then name the same streams.
#include "cuda_runtime_api.h"

#include <chrono>
#include <cstdio>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

#include "tests/functional/cases/case.h"
#include "tests/simgpu/nccl/simnccl.h"
#include "tests/support/slowdown.h"

namespace scape::cases {

#define CUDA(call) (::scape::cases::check_cuda(__FILE__, __LINE__, #call, (call)))
inline void check_cuda(const char* file, int line, const char* what, cudaError_t error) {
  if (error != cudaSuccess) failed(file, line, what, cudaGetErrorString(error));
}

inline cudaStream_t make_stream() {
  cudaStream_t stream = nullptr;
  CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  return stream;
}

// Floats on the current device.
class DeviceFloats {
 public:
  explicit DeviceFloats(const std::vector<float>& values) : count_(values.size()) {
    CUDA(cudaMalloc(reinterpret_cast<void**>(&data_), count_ * sizeof(float)));
    write(values);
  }
  DeviceFloats(size_t count, float value) : DeviceFloats(std::vector<float>(count, value)) {}
  DeviceFloats(const DeviceFloats&) = delete;
  DeviceFloats& operator=(const DeviceFloats&) = delete;
  ~DeviceFloats() { (void)cudaFree(data_); }

  float* get() const { return data_; }
  size_t count() const { return count_; }
  void write(const std::vector<float>& values) {
    CUDA(cudaMemcpy(data_, values.data(), values.size() * sizeof(float), cudaMemcpyHostToDevice));
  }
  // Reads behind what the stream holds.
  std::vector<float> read(cudaStream_t stream) const {
    CUDA(cudaStreamSynchronize(stream));
    std::vector<float> values(count_);
    CUDA(cudaMemcpy(values.data(), data_, count_ * sizeof(float), cudaMemcpyDeviceToHost));
    return values;
  }
  void expect(cudaStream_t stream, float value) const {
    for (const float got : read(stream)) {
      CHECK_SAYING(got == value, std::to_string(got) + " instead of " + std::to_string(value));
    }
  }

 private:
  float* data_ = nullptr;
  size_t count_;
};

inline ncclResult_t state_of(ncclComm_t comm) {
  ncclResult_t state = ncclInternalError;
  NCCL(ncclCommGetAsyncError(comm, &state));
  return state;
}

// As NCCL's initializer, and not blocking.
inline ncclConfig_t non_blocking() {
  ncclConfig_t config;
  // What nobody set is undefined.
  for (int* field = &config.blocking; field != reinterpret_cast<int*>(&config + 1); ++field) {
    *field = kUndefInt;
  }
  config.size = sizeof config;
  config.magic = kApiMagic;
  config.version = kVersionCode;
  config.netName = nullptr;
  config.commName = nullptr;
  config.blocking = 0;
  return config;
}

// How often it was in progress before it was not.
inline int wait_until_ready(ncclComm_t comm) {
  const auto start = std::chrono::steady_clock::now();
  for (int polls = 0;; ++polls) {
    const ncclResult_t state = state_of(comm);
    if (state == ncclSuccess) return polls;
    CHECK(state == ncclInProgress);
    CHECK(since(start) < 60 * test::kSlowdown);
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

// An id from rank 0 to another, through the case's folder.
inline void hand_over(const Rank& self, const ncclUniqueId& id) {
  const std::string path = self.folder + "/grow";
  std::ofstream(path + ".part", std::ios::binary).write(id.internal, sizeof id.internal);
  CHECK(std::rename((path + ".part").c_str(), path.c_str()) == 0);
}

inline ncclUniqueId handed_over(const Rank& self) {
  const auto start = std::chrono::steady_clock::now();
  ncclUniqueId id{};
  for (;;) {
    std::ifstream file(self.folder + "/grow", std::ios::binary);
    if (file.read(id.internal, sizeof id.internal)) return id;
    CHECK(since(start) < 30 * test::kSlowdown);
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
}

inline simnccl_counters counters_of(const char* function, ncclComm_t comm) {
  simnccl_counters counters;
  simnccl_get_counters(function, comm, &counters);
  return counters;
}

}  // namespace scape::cases
