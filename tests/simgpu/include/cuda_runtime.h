// The C++ part of the simulated CUDA runtime: kernel launches.
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
