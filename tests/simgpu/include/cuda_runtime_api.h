// The simulated device's CUDA runtime: the subset of CUDA 13's that Scape uses, in own
// declarations.
//
// Names, types and values are CUDA's (tests/unit/simgpu/cuda_header_check.sh holds them against the
// real header where there is one); what a function does is CUDA's too, as far as
// tests/simgpu/README.md says. Include this header in the place of CUDA's and link libsimcudart.so.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "vector_types.h"

#ifndef SIMGPU_API
#if defined(__cplusplus)
#define SIMGPU_API extern "C" __attribute__((visibility("default")))
#else
#define SIMGPU_API extern __attribute__((visibility("default")))
#endif
#endif

#define CUDART_VERSION 13000

enum cudaError {
  cudaSuccess = 0,
  cudaErrorInvalidValue = 1,
  cudaErrorMemoryAllocation = 2,
  cudaErrorInitializationError = 3,
  cudaErrorCudartUnloading = 4,
  cudaErrorInvalidConfiguration = 9,
  cudaErrorInvalidSymbol = 13,
  cudaErrorInvalidDevicePointer = 17,
  cudaErrorInvalidMemcpyDirection = 21,
  cudaErrorNotYetImplemented = 31,
  cudaErrorStubLibrary = 34,
  cudaErrorInsufficientDriver = 35,
  cudaErrorCallRequiresNewerDriver = 36,
  cudaErrorDevicesUnavailable = 46,
  cudaErrorIncompatibleDriverContext = 49,
  cudaErrorMissingConfiguration = 52,
  cudaErrorInvalidDeviceFunction = 98,
  cudaErrorNoDevice = 100,
  cudaErrorInvalidDevice = 101,
  cudaErrorStartupFailure = 127,
  cudaErrorInvalidKernelImage = 200,
  cudaErrorDeviceUninitialized = 201,
  cudaErrorNoKernelImageForDevice = 209,
  cudaErrorECCUncorrectable = 214,
  cudaErrorUnsupportedLimit = 215,
  cudaErrorDeviceAlreadyInUse = 216,
  cudaErrorPeerAccessUnsupported = 217,
  cudaErrorInvalidPtx = 218,
  cudaErrorUnsupportedPtxVersion = 222,
  cudaErrorOperatingSystem = 304,
  cudaErrorInvalidResourceHandle = 400,
  cudaErrorIllegalState = 401,
  cudaErrorSymbolNotFound = 500,
  cudaErrorNotReady = 600,
  cudaErrorIllegalAddress = 700,
  cudaErrorLaunchOutOfResources = 701,
  cudaErrorLaunchTimeout = 702,
  cudaErrorPeerAccessAlreadyEnabled = 704,
  cudaErrorPeerAccessNotEnabled = 705,
  cudaErrorSetOnActiveProcess = 708,
  cudaErrorContextIsDestroyed = 709,
  cudaErrorAssert = 710,
  cudaErrorHostMemoryAlreadyRegistered = 712,
  cudaErrorHostMemoryNotRegistered = 713,
  cudaErrorHardwareStackError = 714,
  cudaErrorIllegalInstruction = 715,
  cudaErrorMisalignedAddress = 716,
  cudaErrorInvalidAddressSpace = 717,
  cudaErrorInvalidPc = 718,
  cudaErrorLaunchFailure = 719,
  cudaErrorCooperativeLaunchTooLarge = 720,
  cudaErrorNotPermitted = 800,
  cudaErrorNotSupported = 801,
  cudaErrorSystemNotReady = 802,
  cudaErrorSystemDriverMismatch = 803,
  cudaErrorStreamCaptureUnsupported = 900,
  cudaErrorStreamCaptureInvalidated = 901,
  cudaErrorStreamCaptureMerge = 902,
  cudaErrorStreamCaptureUnmatched = 903,
  cudaErrorStreamCaptureUnjoined = 904,
  cudaErrorStreamCaptureIsolation = 905,
  cudaErrorStreamCaptureImplicit = 906,
  cudaErrorCapturedEvent = 907,
  cudaErrorStreamCaptureWrongThread = 908,
  cudaErrorTimeout = 909,
  cudaErrorGraphExecUpdateFailure = 910,
  cudaErrorExternalDevice = 911,
  cudaErrorInvalidClusterSize = 912,
  cudaErrorUnknown = 999,
};
typedef enum cudaError cudaError_t;

typedef struct CUstream_st* cudaStream_t;
typedef struct CUevent_st* cudaEvent_t;
typedef struct CUgraph_st* cudaGraph_t;
typedef struct CUgraphNode_st* cudaGraphNode_t;
typedef struct CUgraphExec_st* cudaGraphExec_t;
typedef struct CUmemPoolHandle_st* cudaMemPool_t;
typedef void (*cudaHostFn_t)(void* userData);

#define cudaStreamLegacy ((cudaStream_t)0x1)
#define cudaStreamPerThread ((cudaStream_t)0x2)
#define cudaStreamDefault 0x00
#define cudaStreamNonBlocking 0x01
#define cudaEventDefault 0x00
#define cudaEventBlockingSync 0x01
#define cudaEventDisableTiming 0x02
#define cudaEventInterprocess 0x04
#define cudaEventRecordDefault 0x00
#define cudaEventRecordExternal 0x01
#define cudaEventWaitDefault 0x00
#define cudaEventWaitExternal 0x01
#define cudaHostAllocDefault 0x00
#define cudaHostAllocPortable 0x01
#define cudaHostAllocMapped 0x02
#define cudaHostAllocWriteCombined 0x04
#define cudaHostRegisterDefault 0x00
#define cudaHostRegisterPortable 0x01
#define cudaHostRegisterMapped 0x02
#define cudaHostRegisterIoMemory 0x04
#define cudaHostRegisterReadOnly 0x08
#define cudaCpuDeviceId ((int)-1)
#define cudaInvalidDeviceId ((int)-2)

enum cudaMemcpyKind {
  cudaMemcpyHostToHost = 0,
  cudaMemcpyHostToDevice = 1,
  cudaMemcpyDeviceToHost = 2,
  cudaMemcpyDeviceToDevice = 3,
  cudaMemcpyDefault = 4,
};

enum cudaMemoryType {
  cudaMemoryTypeUnregistered = 0,
  cudaMemoryTypeHost = 1,
  cudaMemoryTypeDevice = 2,
  cudaMemoryTypeManaged = 3,
};

enum cudaStreamCaptureStatus {
  cudaStreamCaptureStatusNone = 0,
  cudaStreamCaptureStatusActive = 1,
  cudaStreamCaptureStatusInvalidated = 2,
};

enum cudaStreamCaptureMode {
  cudaStreamCaptureModeGlobal = 0,
  cudaStreamCaptureModeThreadLocal = 1,
  cudaStreamCaptureModeRelaxed = 2,
};

enum cudaFuncAttribute {
  cudaFuncAttributeMaxDynamicSharedMemorySize = 8,
  cudaFuncAttributePreferredSharedMemoryCarveout = 9,
};

enum cudaDeviceAttr {
  cudaDevAttrMaxThreadsPerBlock = 1,
  cudaDevAttrMaxBlockDimX = 2,
  cudaDevAttrMaxBlockDimY = 3,
  cudaDevAttrMaxBlockDimZ = 4,
  cudaDevAttrMaxGridDimX = 5,
  cudaDevAttrMaxGridDimY = 6,
  cudaDevAttrMaxGridDimZ = 7,
  cudaDevAttrMaxSharedMemoryPerBlock = 8,
  cudaDevAttrTotalConstantMemory = 9,
  cudaDevAttrWarpSize = 10,
  cudaDevAttrMaxRegistersPerBlock = 12,
  cudaDevAttrMultiProcessorCount = 16,
  cudaDevAttrIntegrated = 18,
  cudaDevAttrCanMapHostMemory = 19,
  cudaDevAttrComputeMode = 20,
  cudaDevAttrConcurrentKernels = 31,
  cudaDevAttrPciBusId = 33,
  cudaDevAttrPciDeviceId = 34,
  cudaDevAttrL2CacheSize = 38,
  cudaDevAttrMaxThreadsPerMultiProcessor = 39,
  cudaDevAttrAsyncEngineCount = 40,
  cudaDevAttrUnifiedAddressing = 41,
  cudaDevAttrPciDomainId = 50,
  cudaDevAttrComputeCapabilityMajor = 75,
  cudaDevAttrComputeCapabilityMinor = 76,
  cudaDevAttrStreamPrioritiesSupported = 78,
  cudaDevAttrMaxSharedMemoryPerMultiprocessor = 81,
  cudaDevAttrMaxRegistersPerMultiprocessor = 82,
  cudaDevAttrManagedMemory = 83,
  cudaDevAttrPageableMemoryAccess = 88,
  cudaDevAttrConcurrentManagedAccess = 89,
  cudaDevAttrCanUseHostPointerForRegisteredMem = 91,
  cudaDevAttrCooperativeLaunch = 95,
  cudaDevAttrMaxSharedMemoryPerBlockOptin = 97,
  cudaDevAttrHostRegisterSupported = 99,
  cudaDevAttrMaxBlocksPerMultiprocessor = 106,
  cudaDevAttrMemoryPoolsSupported = 115,
  cudaDevAttrGPUDirectRDMASupported = 116,
  cudaDevAttrClusterLaunch = 120,
};

enum cudaMemPoolAttr {
  cudaMemPoolReuseFollowEventDependencies = 0x1,
  cudaMemPoolReuseAllowOpportunistic = 0x2,
  cudaMemPoolReuseAllowInternalDependencies = 0x3,
  cudaMemPoolAttrReleaseThreshold = 0x4,
  cudaMemPoolAttrReservedMemCurrent = 0x5,
  cudaMemPoolAttrReservedMemHigh = 0x6,
  cudaMemPoolAttrUsedMemCurrent = 0x7,
  cudaMemPoolAttrUsedMemHigh = 0x8,
};

enum cudaGraphNodeType {
  cudaGraphNodeTypeKernel = 0x00,
  cudaGraphNodeTypeMemcpy = 0x01,
  cudaGraphNodeTypeMemset = 0x02,
  cudaGraphNodeTypeHost = 0x03,
  cudaGraphNodeTypeGraph = 0x04,
  cudaGraphNodeTypeEmpty = 0x05,
  cudaGraphNodeTypeWaitEvent = 0x06,
  cudaGraphNodeTypeEventRecord = 0x07,
};

enum cudaDriverEntryPointQueryResult {
  cudaDriverEntryPointSuccess = 0,
  cudaDriverEntryPointSymbolNotFound = 1,
  cudaDriverEntryPointVersionNotSufficent = 2,
};

enum cudaGetDriverEntryPointFlags {
  cudaEnableDefault = 0x0,
  cudaEnableLegacyStream = 0x1,
  cudaEnablePerThreadDefaultStream = 0x2,
};

typedef enum cudaLaunchAttributeID {
  cudaLaunchAttributeIgnore = 0,
  cudaLaunchAttributeCooperative = 2,
  cudaLaunchAttributeClusterDimension = 4,
  cudaLaunchAttributeProgrammaticStreamSerialization = 6,
  cudaLaunchAttributePriority = 8,
} cudaLaunchAttributeID;

typedef union cudaLaunchAttributeValue {
  char pad[64];
  int cooperative;
  struct {
    unsigned int x, y, z;
  } clusterDim;
  int programmaticStreamSerializationAllowed;
  int priority;
} cudaLaunchAttributeValue;

typedef struct cudaLaunchAttribute_st {
  cudaLaunchAttributeID id;
  char pad[8 - sizeof(cudaLaunchAttributeID)];
  cudaLaunchAttributeValue val;
} cudaLaunchAttribute;

typedef struct cudaLaunchConfig_st {
  dim3 gridDim;
  dim3 blockDim;
  size_t dynamicSmemBytes;
  cudaStream_t stream;
  cudaLaunchAttribute* attrs;
  unsigned int numAttrs;
} cudaLaunchConfig_t;

struct cudaPointerAttributes {
  enum cudaMemoryType type;
  int device;
  void* devicePointer;
  void* hostPointer;
  long reserved[8];
};

// CUDA's fields that the simulator fills, not at CUDA's offsets.
struct cudaDeviceProp {
  char name[256];
  size_t totalGlobalMem;
  size_t sharedMemPerBlock;
  int regsPerBlock;
  int warpSize;
  int maxThreadsPerBlock;
  int maxThreadsDim[3];
  int maxGridSize[3];
  size_t totalConstMem;
  int major;
  int minor;
  int multiProcessorCount;
  int integrated;
  int canMapHostMemory;
  int concurrentKernels;
  int pciBusID;
  int pciDeviceID;
  int pciDomainID;
  int asyncEngineCount;
  int unifiedAddressing;
  int l2CacheSize;
  int maxThreadsPerMultiProcessor;
  int streamPrioritiesSupported;
  size_t sharedMemPerMultiprocessor;
  int cooperativeLaunch;
  size_t sharedMemPerBlockOptin;
  int hostRegisterSupported;
  int memoryPoolsSupported;
};

// ---- errors, versions ----
SIMGPU_API cudaError_t cudaGetLastError(void);
SIMGPU_API cudaError_t cudaPeekAtLastError(void);
SIMGPU_API const char* cudaGetErrorName(cudaError_t error);
SIMGPU_API const char* cudaGetErrorString(cudaError_t error);
SIMGPU_API cudaError_t cudaDriverGetVersion(int* driverVersion);
SIMGPU_API cudaError_t cudaRuntimeGetVersion(int* runtimeVersion);
SIMGPU_API cudaError_t cudaGetDriverEntryPointByVersion(
    const char* symbol, void** funcPtr, unsigned int cudaVersion, unsigned long long flags,
    enum cudaDriverEntryPointQueryResult* driverStatus);

// ---- devices ----
SIMGPU_API cudaError_t cudaGetDeviceCount(int* count);
SIMGPU_API cudaError_t cudaGetDevice(int* device);
SIMGPU_API cudaError_t cudaSetDevice(int device);
SIMGPU_API cudaError_t cudaDeviceGetAttribute(int* value, enum cudaDeviceAttr attr, int device);
SIMGPU_API cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp* prop, int device);
SIMGPU_API cudaError_t cudaDeviceGetPCIBusId(char* pciBusId, int len, int device);
SIMGPU_API cudaError_t cudaMemGetInfo(size_t* free, size_t* total);
SIMGPU_API cudaError_t cudaDeviceSynchronize(void);
SIMGPU_API cudaError_t cudaDeviceGetStreamPriorityRange(int* leastPriority, int* greatestPriority);

// ---- memory ----
SIMGPU_API cudaError_t cudaMalloc(void** devPtr, size_t size);
SIMGPU_API cudaError_t cudaFree(void* devPtr);
SIMGPU_API cudaError_t cudaMallocAsync(void** devPtr, size_t size, cudaStream_t hStream);
SIMGPU_API cudaError_t cudaFreeAsync(void* devPtr, cudaStream_t hStream);
SIMGPU_API cudaError_t cudaMallocHost(void** ptr, size_t size);
SIMGPU_API cudaError_t cudaHostAlloc(void** pHost, size_t size, unsigned int flags);
SIMGPU_API cudaError_t cudaFreeHost(void* ptr);
SIMGPU_API cudaError_t cudaHostRegister(void* ptr, size_t size, unsigned int flags);
SIMGPU_API cudaError_t cudaHostUnregister(void* ptr);
SIMGPU_API cudaError_t cudaHostGetDevicePointer(void** pDevice, void* pHost, unsigned int flags);
SIMGPU_API cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes* attributes,
                                                const void* ptr);
SIMGPU_API cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t* memPool, int device);
SIMGPU_API cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t memPool, enum cudaMemPoolAttr attr,
                                               void* value);
SIMGPU_API cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t memPool, enum cudaMemPoolAttr attr,
                                               void* value);
SIMGPU_API cudaError_t cudaMemcpy(void* dst, const void* src, size_t count,
                                  enum cudaMemcpyKind kind);
SIMGPU_API cudaError_t cudaMemset(void* devPtr, int value, size_t count);
#if defined(__cplusplus)
#define SIMGPU_DEFAULT(value) = value
#else
#define SIMGPU_DEFAULT(value)
#endif
SIMGPU_API cudaError_t cudaMemcpyAsync(void* dst, const void* src, size_t count,
                                       enum cudaMemcpyKind kind,
                                       cudaStream_t stream SIMGPU_DEFAULT(0));
SIMGPU_API cudaError_t cudaMemsetAsync(void* devPtr, int value, size_t count,
                                       cudaStream_t stream SIMGPU_DEFAULT(0));

// ---- streams ----
SIMGPU_API cudaError_t cudaStreamCreate(cudaStream_t* pStream);
SIMGPU_API cudaError_t cudaStreamCreateWithFlags(cudaStream_t* pStream, unsigned int flags);
SIMGPU_API cudaError_t cudaStreamCreateWithPriority(cudaStream_t* pStream, unsigned int flags,
                                                    int priority);
SIMGPU_API cudaError_t cudaStreamDestroy(cudaStream_t stream);
SIMGPU_API cudaError_t cudaStreamQuery(cudaStream_t stream);
SIMGPU_API cudaError_t cudaStreamSynchronize(cudaStream_t stream);
SIMGPU_API cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event,
                                           unsigned int flags SIMGPU_DEFAULT(0));
SIMGPU_API cudaError_t cudaStreamGetDevice(cudaStream_t hStream, int* device);
SIMGPU_API cudaError_t cudaStreamGetId(cudaStream_t hStream, unsigned long long* streamId);
SIMGPU_API cudaError_t cudaStreamGetFlags(cudaStream_t hStream, unsigned int* flags);
SIMGPU_API cudaError_t cudaStreamGetPriority(cudaStream_t hStream, int* priority);
SIMGPU_API cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t fn, void* userData);
SIMGPU_API cudaError_t cudaFuncSetAttribute(const void* func, enum cudaFuncAttribute attr,
                                            int value);

// ---- events ----
SIMGPU_API cudaError_t cudaEventCreate(cudaEvent_t* event);
SIMGPU_API cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned int flags);
SIMGPU_API cudaError_t cudaEventDestroy(cudaEvent_t event);
SIMGPU_API cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream SIMGPU_DEFAULT(0));
SIMGPU_API cudaError_t cudaEventRecordWithFlags(cudaEvent_t event,
                                                cudaStream_t stream SIMGPU_DEFAULT(0),
                                                unsigned int flags SIMGPU_DEFAULT(0));
SIMGPU_API cudaError_t cudaEventQuery(cudaEvent_t event);
SIMGPU_API cudaError_t cudaEventSynchronize(cudaEvent_t event);
SIMGPU_API cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t start, cudaEvent_t end);

// ---- capture and graphs ----
SIMGPU_API cudaError_t cudaStreamBeginCapture(cudaStream_t stream, enum cudaStreamCaptureMode mode);
SIMGPU_API cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* pGraph);
SIMGPU_API cudaError_t cudaStreamIsCapturing(cudaStream_t stream,
                                             enum cudaStreamCaptureStatus* pCaptureStatus);
SIMGPU_API cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode* mode);
SIMGPU_API cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t* nodes,
                                         size_t* numNodes);
SIMGPU_API cudaError_t cudaGraphNodeGetType(cudaGraphNode_t node, enum cudaGraphNodeType* pType);
SIMGPU_API cudaError_t cudaGraphInstantiate(cudaGraphExec_t* pGraphExec, cudaGraph_t graph,
                                            unsigned long long flags SIMGPU_DEFAULT(0));
SIMGPU_API cudaError_t cudaGraphLaunch(cudaGraphExec_t graphExec, cudaStream_t stream);
SIMGPU_API cudaError_t cudaGraphExecDestroy(cudaGraphExec_t graphExec);
SIMGPU_API cudaError_t cudaGraphDestroy(cudaGraph_t graph);
