// The C++ part of the simulated CUDA runtime: kernel launches.
#pragma once

#include <functional>
#include <tuple>
#include <utility>

#include "cuda_runtime_api.h"
#include "simgpu.h"

namespace simgpu {

// Runs `thread` once for each thread of the grid; simt.h has the rest of it.
void run_grid(dim3 grid, dim3 block, size_t dynamic_smem, const std::function<void()>& thread);

}  // namespace simgpu

// A kernel is an ordinary function here; its arguments are copied at the launch, as CUDA does.
template <typename... Params, typename... Args>
inline cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Params...),
                                      Args&&... args) {
  if (config == nullptr) return simgpu::launch(nullptr, nullptr, nullptr);
  std::tuple<Params...> parameters(std::forward<Args>(args)...);
  return simgpu::launch(config, reinterpret_cast<const void*>(kernel),
                        [kernel, parameters = std::move(parameters), grid = config->gridDim,
                         block = config->blockDim, dynamic_smem = config->dynamicSmemBytes] {
                          simgpu::run_grid(grid, block, dynamic_smem,
                                           [&] { std::apply(kernel, parameters); });
                        });
}
