// Devices, versions, the driver's entry points.
#include <algorithm>
#include <cstdio>
#include <cstring>

#include "runtime.h"
#include "settings.h"

using namespace simgpu;  // NOLINT: all here is CUDA's C API

namespace {

// One Hopper-like device.
constexpr int kWarp = 32;
constexpr int kProcessors = 8;
constexpr int kThreadsPerBlock = 1024;
constexpr int kThreadsPerProcessor = 2048;
constexpr int kBlocksPerProcessor = 32;
constexpr int kSharedPerBlock = 48 << 10;
constexpr int kSharedOptin = 227 << 10;
constexpr int kSharedPerProcessor = 228 << 10;
constexpr int kRegisters = 65536;

bool valid(const Runtime& rt, int device) {
  return device >= 0 && static_cast<size_t>(device) < rt.devices.size();
}

// The driver's functions that have no counterpart in the runtime's API. Their results are numbered
// as cudaError.
int write_value(cudaStream_t stream, unsigned long long address, uint32_t value, unsigned flags) {
  return call("cuStreamWriteValue32", kAnyTime, [&](Runtime& rt, Lock&) -> cudaError_t {
    if (!settings().memory_operations) return cudaErrorNotSupported;
    const StreamPtr found = find_stream(rt, stream);
    if (found == nullptr) return cudaErrorInvalidResourceHandle;
    if (address % sizeof value != 0 || flags > 1) return cudaErrorInvalidValue;
    auto* where = reinterpret_cast<uint32_t*>(address);
    Work work{cudaGraphNodeTypeMemset, [=] { __atomic_store_n(where, value, __ATOMIC_RELEASE); },
              nullptr, nullptr};
    return submit(rt, found, std::move(work));
  });
}

int wait_value(cudaStream_t stream, unsigned long long address, uint32_t value, unsigned flags) {
  return call("cuStreamWaitValue32", kAnyTime, [&](Runtime& rt, Lock&) -> cudaError_t {
    if (!settings().memory_operations) return cudaErrorNotSupported;
    const StreamPtr found = find_stream(rt, stream);
    if (found == nullptr) return cudaErrorInvalidResourceHandle;
    if (address % sizeof value != 0 || flags > 3) return cudaErrorInvalidValue;
    const auto* where = reinterpret_cast<const uint32_t*>(address);
    const auto met = [=] {
      const uint32_t now = __atomic_load_n(where, __ATOMIC_ACQUIRE);
      switch (flags) {
        case 0:
          return static_cast<int32_t>(now - value) >= 0;
        case 1:
          return now == value;
        case 2:
          return (now & value) != 0;
        default:
          return ~(now | value) != 0;
      }
    };
    const auto wait = [met, &rt, device = found->device] {
      while (!met()) {
        std::this_thread::sleep_for(std::chrono::microseconds(50));
        const Lock lock(rt.mutex);
        if (rt.stopping || rt.devices[static_cast<size_t>(device)].broken != cudaSuccess) return;
      }
    };
    return submit(rt, found, Work{cudaGraphNodeTypeMemset, wait, nullptr, nullptr});
  });
}

}  // namespace

cudaError_t cudaDriverGetVersion(int* version) {
  return call("cudaDriverGetVersion", kNoContext, [&](Runtime&, Lock&) {
    if (version == nullptr) return cudaErrorInvalidValue;
    *version = CUDART_VERSION;
    return cudaSuccess;
  });
}

cudaError_t cudaRuntimeGetVersion(int* version) {
  return call("cudaRuntimeGetVersion", kNoContext, [&](Runtime&, Lock&) {
    if (version == nullptr) return cudaErrorInvalidValue;
    *version = CUDART_VERSION;
    return cudaSuccess;
  });
}

cudaError_t cudaGetDriverEntryPointByVersion(const char* symbol, void** function, unsigned version,
                                             unsigned long long flags,
                                             cudaDriverEntryPointQueryResult* status) {
  return call("cudaGetDriverEntryPointByVersion", kAnyTime, [&](Runtime&, Lock&) {
    if (symbol == nullptr || function == nullptr || flags > cudaEnablePerThreadDefaultStream) {
      return cudaErrorInvalidValue;
    }
    *function = nullptr;
    if (std::strcmp(symbol, "cuStreamWriteValue32") == 0) {
      *function = reinterpret_cast<void*>(write_value);
    } else if (std::strcmp(symbol, "cuStreamWaitValue32") == 0) {
      *function = reinterpret_cast<void*>(wait_value);
    }
    cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
    if (*function != nullptr && version < 8000) {  // where the driver got them
      *function = nullptr;
      result = cudaDriverEntryPointVersionNotSufficent;
    } else if (*function != nullptr) {
      result = cudaDriverEntryPointSuccess;
    }
    if (status != nullptr) {
      *status = result;
      return cudaSuccess;
    }
    return result == cudaDriverEntryPointSuccess ? cudaSuccess : cudaErrorSymbolNotFound;
  });
}

cudaError_t cudaGetDeviceCount(int* count) {
  return call("cudaGetDeviceCount", kNoContext, [&](Runtime& rt, Lock&) {
    if (count == nullptr) return cudaErrorInvalidValue;
    *count = static_cast<int>(rt.devices.size());
    return cudaSuccess;
  });
}

cudaError_t cudaGetDevice(int* device) {
  return call("cudaGetDevice", kNoContext, [&](Runtime&, Lock&) {
    if (device == nullptr) return cudaErrorInvalidValue;
    *device = current_device();
    return cudaSuccess;
  });
}

cudaError_t cudaSetDevice(int device) {
  return call("cudaSetDevice", kNoContext, [&](Runtime& rt, Lock&) {
    if (!valid(rt, device)) return cudaErrorInvalidDevice;
    set_current_device(device);
    return cudaSuccess;
  });
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  return call("cudaDeviceGetAttribute", kNoContext, [&](Runtime& rt, Lock&) -> cudaError_t {
    if (value == nullptr) return cudaErrorInvalidValue;
    if (!valid(rt, device)) return cudaErrorInvalidDevice;
    switch (attribute) {
      case cudaDevAttrMaxThreadsPerBlock:
      case cudaDevAttrMaxBlockDimX:
      case cudaDevAttrMaxBlockDimY:
        *value = kThreadsPerBlock;
        break;
      case cudaDevAttrMaxBlockDimZ:
        *value = 64;
        break;
      case cudaDevAttrMaxGridDimX:
        *value = 0x7fffffff;
        break;
      case cudaDevAttrMaxGridDimY:
      case cudaDevAttrMaxGridDimZ:
        *value = 65535;
        break;
      case cudaDevAttrMaxSharedMemoryPerBlock:
        *value = kSharedPerBlock;
        break;
      case cudaDevAttrTotalConstantMemory:
      case cudaDevAttrMaxRegistersPerBlock:
      case cudaDevAttrMaxRegistersPerMultiprocessor:
        *value = kRegisters;
        break;
      case cudaDevAttrWarpSize:
        *value = kWarp;
        break;
      case cudaDevAttrMaxBlocksPerMultiprocessor:
        *value = kBlocksPerProcessor;
        break;
      case cudaDevAttrMultiProcessorCount:
        *value = kProcessors;
        break;
      case cudaDevAttrL2CacheSize:
        *value = 50 << 20;
        break;
      case cudaDevAttrMaxThreadsPerMultiProcessor:
        *value = kThreadsPerProcessor;
        break;
      case cudaDevAttrAsyncEngineCount:
        *value = 3;
        break;
      case cudaDevAttrPciBusId:
        *value = device + 1;
        break;
      case cudaDevAttrComputeCapabilityMajor:
        *value = 9;
        break;
      case cudaDevAttrMaxSharedMemoryPerMultiprocessor:
        *value = kSharedPerProcessor;
        break;
      case cudaDevAttrMaxSharedMemoryPerBlockOptin:
        *value = kSharedOptin;
        break;
      case cudaDevAttrCanMapHostMemory:
      case cudaDevAttrConcurrentKernels:
      case cudaDevAttrUnifiedAddressing:
      case cudaDevAttrStreamPrioritiesSupported:
      case cudaDevAttrCanUseHostPointerForRegisteredMem:
      case cudaDevAttrHostRegisterSupported:
      case cudaDevAttrMemoryPoolsSupported:
        *value = 1;
        break;
      case cudaDevAttrPciDeviceId:
      case cudaDevAttrPciDomainId:
      case cudaDevAttrComputeCapabilityMinor:
      case cudaDevAttrIntegrated:
      case cudaDevAttrComputeMode:
      case cudaDevAttrManagedMemory:
      case cudaDevAttrPageableMemoryAccess:
      case cudaDevAttrConcurrentManagedAccess:
      case cudaDevAttrCooperativeLaunch:
      case cudaDevAttrGPUDirectRDMASupported:
      case cudaDevAttrClusterLaunch:
        *value = 0;
        break;
      default:
        return cudaErrorInvalidValue;
    }
    return cudaSuccess;
  });
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  return call("cudaGetDeviceProperties", kNoContext, [&](Runtime& rt, Lock&) -> cudaError_t {
    if (properties == nullptr) return cudaErrorInvalidValue;
    if (!valid(rt, device)) return cudaErrorInvalidDevice;
    cudaDeviceProp out{};
    std::snprintf(out.name, sizeof out.name, "simulated device");
    out.totalGlobalMem = settings().memory;
    out.sharedMemPerBlock = kSharedPerBlock;
    out.regsPerBlock = kRegisters;
    out.warpSize = kWarp;
    out.maxThreadsPerBlock = kThreadsPerBlock;
    const int blocks[3] = {kThreadsPerBlock, kThreadsPerBlock, 64};
    const int grid[3] = {0x7fffffff, 65535, 65535};
    std::copy(std::begin(blocks), std::end(blocks), out.maxThreadsDim);
    std::copy(std::begin(grid), std::end(grid), out.maxGridSize);
    out.totalConstMem = kRegisters;
    out.major = 9;
    out.multiProcessorCount = kProcessors;
    out.canMapHostMemory = 1;
    out.concurrentKernels = 1;
    out.pciBusID = device + 1;
    out.asyncEngineCount = 3;
    out.unifiedAddressing = 1;
    out.l2CacheSize = 50 << 20;
    out.maxThreadsPerMultiProcessor = kThreadsPerProcessor;
    out.streamPrioritiesSupported = 1;
    out.sharedMemPerMultiprocessor = kSharedPerProcessor;
    out.sharedMemPerBlockOptin = kSharedOptin;
    out.hostRegisterSupported = 1;
    out.memoryPoolsSupported = 1;
    *properties = out;
    return cudaSuccess;
  });
}

cudaError_t cudaDeviceGetPCIBusId(char* id, int length, int device) {
  return call("cudaDeviceGetPCIBusId", kNoContext, [&](Runtime& rt, Lock&) -> cudaError_t {
    if (id == nullptr || length < 13) return cudaErrorInvalidValue;
    if (!valid(rt, device)) return cudaErrorInvalidDevice;
    std::snprintf(id, static_cast<size_t>(length), "0000:%02X:00.0", device + 1);
    return cudaSuccess;
  });
}

cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  return call("cudaDeviceGetStreamPriorityRange", kAnyTime, [&](Runtime&, Lock&) {
    if (least != nullptr) *least = 0;
    if (greatest != nullptr) *greatest = -5;
    return cudaSuccess;
  });
}

cudaError_t cudaDeviceSynchronize() {
  return call("cudaDeviceSynchronize", kUnsafe, [&](Runtime& rt, Lock& lock) -> cudaError_t {
    ++rt.counters.host_syncs;
    if (any_capture(rt, current_device())) {
      for (const CapturePtr& capture : rt.captures) {
        if (capture->origin->device == current_device()) invalidate(*capture);
      }
      return cudaErrorStreamCaptureUnsupported;
    }
    return wait_for_device(rt, lock, current_device());
  });
}

cudaError_t cudaFuncSetAttribute(const void* function, cudaFuncAttribute attribute, int value) {
  return call("cudaFuncSetAttribute", kAnyTime, [&](Runtime& rt, Lock&) -> cudaError_t {
    if (function == nullptr) return cudaErrorInvalidDeviceFunction;
    if (attribute == cudaFuncAttributePreferredSharedMemoryCarveout) return cudaSuccess;
    if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize) return cudaErrorInvalidValue;
    if (value < 0 || value > kSharedOptin) return cudaErrorInvalidValue;
    rt.shared_memory_of[function] = static_cast<size_t>(value);
    return cudaSuccess;
  });
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void* function,
                                                          int block_size, size_t dynamic_smem) {
  return call("cudaOccupancyMaxActiveBlocksPerMultiprocessor", kAnyTime,
              [&](Runtime&, Lock&) -> cudaError_t {
                if (blocks == nullptr || block_size < 1 || block_size > kThreadsPerBlock) {
                  return cudaErrorInvalidValue;
                }
                if (function == nullptr) return cudaErrorInvalidDeviceFunction;
                const size_t shared = std::max<size_t>(dynamic_smem, 1);
                const size_t fit = std::min<size_t>(
                    static_cast<size_t>(kThreadsPerProcessor / block_size),
                    std::min<size_t>(kBlocksPerProcessor, kSharedPerProcessor / shared));
                *blocks = static_cast<int>(fit);
                return cudaSuccess;
              });
}

cudaError_t simgpu::launch(const cudaLaunchConfig_t* config, const void* kernel,
                           std::function<std::string()> grid) {
  return call("cudaLaunchKernelEx", kAnyTime, [&](Runtime& rt, Lock&) -> cudaError_t {
    if (config == nullptr) return cudaErrorInvalidConfiguration;
    if (kernel == nullptr) return cudaErrorInvalidDeviceFunction;
    const StreamPtr stream = find_stream(rt, config->stream);
    if (stream == nullptr || stream->device != current_device()) {
      return cudaErrorInvalidResourceHandle;
    }
    const dim3& blocks = config->gridDim;
    const dim3& threads = config->blockDim;
    if (blocks.x == 0 || blocks.y == 0 || blocks.z == 0 || threads.x == 0 || threads.y == 0 ||
        threads.z == 0 || blocks.x > 0x7fffffffu || blocks.y > 65535 || blocks.z > 65535 ||
        threads.z > 64 || threads.x > kThreadsPerBlock || threads.y > kThreadsPerBlock ||
        uint64_t{threads.x} * threads.y * threads.z > kThreadsPerBlock) {
      return cudaErrorInvalidConfiguration;
    }
    const auto allowed = rt.shared_memory_of.find(kernel);
    const size_t most = allowed != rt.shared_memory_of.end()
                            ? std::max<size_t>(allowed->second, kSharedPerBlock)
                            : kSharedPerBlock;
    if (config->dynamicSmemBytes > most) return cudaErrorInvalidValue;
    ++rt.counters.kernels;
    const auto run = [&rt, grid = std::move(grid), device = stream->device] {
      const std::string wrong = grid();
      if (wrong.empty()) return;
      std::fprintf(stderr, "simgpu: %s\n", wrong.c_str());
      const Lock lock(rt.mutex);
      rt.devices[static_cast<size_t>(device)].broken = cudaErrorLaunchFailure;
    };
    return submit(rt, stream, Work{cudaGraphNodeTypeKernel, run, nullptr, nullptr});
  });
}
