// The C++ part of the simulated CUDA runtime: kernel launches, and functions that take typed
// pointers.
#pragma once

#include <tuple>
#include <utility>

#include "cuda_runtime_api.h"
#include "simgpu.h"
#include "simt.h"

// A kernel is an ordinary function here; its arguments are copied at the launch, as CUDA does. A
// grid that goes wrong says so on stderr and breaks the device.
template <typename... Params, typename... Args>
inline cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Params...),
                                      Args&&... args) {
  const auto* address = reinterpret_cast<const void*>(kernel);
  if (config == nullptr) return simgpu::launch(nullptr, address, nullptr);
  const auto dim = [](const dim3& from) { return simgpu::Dim{from.x, from.y, from.z}; };
  const simgpu::Launch launch{address, dim(config->gridDim), dim(config->blockDim),
                              config->dynamicSmemBytes};
  std::tuple<Params...> parameters(std::forward<Args>(args)...);
  return simgpu::launch(config, address, [kernel, launch, parameters = std::move(parameters)] {
    return simgpu::run_grid(launch, [&] { std::apply(kernel, parameters); });
  });
}

template <typename T>
inline cudaError_t cudaMalloc(T** out, size_t size) {
  return cudaMalloc(reinterpret_cast<void**>(out), size);
}
template <typename T>
inline cudaError_t cudaMallocAsync(T** out, size_t size, cudaStream_t stream) {
  return cudaMallocAsync(reinterpret_cast<void**>(out), size, stream);
}
template <typename T>
inline cudaError_t cudaMallocHost(T** out, size_t size, unsigned int flags = 0) {
  return cudaHostAlloc(reinterpret_cast<void**>(out), size, flags);
}
template <typename T>
inline cudaError_t cudaHostAlloc(T** out, size_t size, unsigned int flags) {
  return cudaHostAlloc(reinterpret_cast<void**>(out), size, flags);
}
template <typename T>
inline cudaError_t cudaHostGetDevicePointer(T** out, void* address, unsigned int flags) {
  return cudaHostGetDevicePointer(reinterpret_cast<void**>(out), address, flags);
}
template <typename... Params>
inline cudaError_t cudaFuncSetAttribute(void (*kernel)(Params...), cudaFuncAttribute attribute,
                                        int value) {
  return cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), attribute, value);
}
template <typename... Params>
inline cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks,
                                                                 void (*kernel)(Params...),
                                                                 int block_size,
                                                                 size_t dynamic_smem) {
  return cudaOccupancyMaxActiveBlocksPerMultiprocessor(
      blocks, reinterpret_cast<const void*>(kernel), block_size, dynamic_smem);
}
inline cudaError_t cudaEventCreate(cudaEvent_t* event, unsigned int flags) {
  return cudaEventCreateWithFlags(event, flags);
}
