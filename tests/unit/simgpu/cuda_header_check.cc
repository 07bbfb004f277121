// Holds the simulated device's declarations against the real cuda_runtime_api.h. There is nothing
// to run: that it compiles is the test. cuda_header_check.sh writes the list of names that it
// includes.
#include <cuda_runtime_api.h>

#include <cstddef>
#include <type_traits>

#undef SIMGPU_API
#define SIMGPU_API
namespace sim {
#include "tests/simgpu/include/cuda_runtime_api.h"
}  // namespace sim

namespace {

// ---- functions: as many parameters, each of the same size and kind ----

template <typename A, typename B>
constexpr bool alike() {
  return sizeof(A) == sizeof(B) && alignof(A) == alignof(B) &&
         std::is_pointer_v<A> == std::is_pointer_v<B> && std::is_enum_v<A> == std::is_enum_v<B>;
}
template <typename R, typename... A, typename S, typename... B>
constexpr bool same(R (*)(A...), S (*)(B...)) {
  if constexpr (sizeof...(A) != sizeof...(B)) {
    return false;
  } else {
    return alike<R, S>() && (alike<A, B>() && ...);
  }
}
static_assert(!same(&::cudaMalloc, &sim::cudaFree));

#define SAME_FUNCTION(name) static_assert(same(&::name, &sim::name), #name);
#define SAME_VALUE(name) \
  static_assert(static_cast<int>(::name) == static_cast<int>(sim::name), #name);
#include "names.inc"

// ---- structures ----

#define SAME_FIELD(type, field)                                          \
  static_assert(offsetof(::type, field) == offsetof(sim::type, field) && \
                    std::is_pointer_v<decltype(::type::field)> ==        \
                        std::is_pointer_v<decltype(sim::type::field)> && \
                    sizeof(::type::field) == sizeof(sim::type::field),   \
                #type "." #field)
static_assert(sizeof(::cudaPointerAttributes) == sizeof(sim::cudaPointerAttributes));
SAME_FIELD(cudaPointerAttributes, type);
SAME_FIELD(cudaPointerAttributes, device);
SAME_FIELD(cudaPointerAttributes, devicePointer);
SAME_FIELD(cudaPointerAttributes, hostPointer);
static_assert(sizeof(::cudaLaunchConfig_t) == sizeof(sim::cudaLaunchConfig_t));
SAME_FIELD(cudaLaunchConfig_t, gridDim);
SAME_FIELD(cudaLaunchConfig_t, blockDim);
SAME_FIELD(cudaLaunchConfig_t, dynamicSmemBytes);
SAME_FIELD(cudaLaunchConfig_t, stream);
SAME_FIELD(cudaLaunchConfig_t, attrs);
SAME_FIELD(cudaLaunchConfig_t, numAttrs);
static_assert(sizeof(::cudaLaunchAttribute) == sizeof(sim::cudaLaunchAttribute));
SAME_FIELD(cudaLaunchAttribute, id);
SAME_FIELD(cudaLaunchAttribute, val);
SAME_FIELD(cudaLaunchAttribute, val.cooperative);
SAME_FIELD(cudaLaunchAttribute, val.clusterDim.z);
SAME_FIELD(cudaLaunchAttribute, val.programmaticStreamSerializationAllowed);
SAME_FIELD(cudaLaunchAttribute, val.priority);

// The simulator has some of the fields, at places of its own.
#define SAME_TYPE(field)                                                                       \
  static_assert(                                                                               \
      std::is_same_v<decltype(::cudaDeviceProp::field), decltype(sim::cudaDeviceProp::field)>, \
      #field);
SAME_TYPE(name)
SAME_TYPE(totalGlobalMem)
SAME_TYPE(sharedMemPerBlock)
SAME_TYPE(regsPerBlock)
SAME_TYPE(warpSize)
SAME_TYPE(maxThreadsPerBlock)
SAME_TYPE(maxThreadsDim)
SAME_TYPE(maxGridSize)
SAME_TYPE(totalConstMem)
SAME_TYPE(major)
SAME_TYPE(minor)
SAME_TYPE(multiProcessorCount)
SAME_TYPE(integrated)
SAME_TYPE(canMapHostMemory)
SAME_TYPE(concurrentKernels)
SAME_TYPE(pciBusID)
SAME_TYPE(pciDeviceID)
SAME_TYPE(pciDomainID)
SAME_TYPE(asyncEngineCount)
SAME_TYPE(unifiedAddressing)
SAME_TYPE(l2CacheSize)
SAME_TYPE(maxThreadsPerMultiProcessor)
SAME_TYPE(streamPrioritiesSupported)
SAME_TYPE(sharedMemPerMultiprocessor)
SAME_TYPE(cooperativeLaunch)
SAME_TYPE(sharedMemPerBlockOptin)
SAME_TYPE(hostRegisterSupported)
SAME_TYPE(memoryPoolsSupported)

}  // namespace
