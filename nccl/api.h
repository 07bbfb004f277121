// The NCCL API from 2.18 to 2.32 in own declarations, so that building needs neither NCCL nor CUDA.
//
// Names are NCCL's, in namespace scape::nccl, so that a test can hold them against the real nccl.h
// in one translation unit (tests/unit/interposer/nccl_header_check.cc). Structures that NCCL
// versions by their leading size are declared in their newest form; nothing beyond a caller's size
// is ever read. Enumerations have the type that C compilers give them spelt out: callers may pass
// any value of it, which would otherwise be undefined before it could be refused.
#pragma once

#include <climits>
#include <cstddef>
#include <cstdint>

namespace scape::nccl {

// The version this header follows, and what ncclGetVersion answers where no real NCCL is in the
// process.
inline constexpr int kVersionCode = 23203;

inline constexpr unsigned kApiMagic = 0xcafebeef;
inline constexpr unsigned kSimInfoMagic = 0x74685283;
inline constexpr int kUndefInt = INT_MIN;
inline constexpr int kSplitNoColor = -1;
inline constexpr int kShrinkDefault = 0;
inline constexpr int kShrinkAbort = 1;

typedef struct ncclComm* ncclComm_t;
typedef struct ncclWindow_vidmem* ncclWindow_t;
typedef struct ncclParamHandle* ncclParamHandle_t;
typedef struct CUstream_st* cudaStream_t;
typedef struct CUevent_st* cudaEvent_t;

struct ncclUniqueId {
  char internal[128];
};

enum ncclResult_t : unsigned {
  ncclSuccess = 0,
  ncclUnhandledCudaError = 1,
  ncclSystemError = 2,
  ncclInternalError = 3,
  ncclInvalidArgument = 4,
  ncclInvalidUsage = 5,
  ncclRemoteError = 6,
  ncclInProgress = 7,
  ncclTimeout = 8,  // unknown to callers built with a header older than 2.32
  ncclNumResults = 9,
};

enum ncclRedOp_t : unsigned {
  ncclSum = 0,
  ncclProd = 1,
  ncclMax = 2,
  ncclMin = 3,
  ncclAvg = 4,
  ncclNumOps = 5,  // the first value of operations made at run time
  ncclMaxRedOp = INT_MAX,
};

enum ncclDataType_t : unsigned {
  ncclInt8 = 0,
  ncclUint8 = 1,
  ncclInt32 = 2,
  ncclUint32 = 3,
  ncclInt64 = 4,
  ncclUint64 = 5,
  ncclFloat16 = 6,
  ncclFloat32 = 7,
  ncclFloat64 = 8,
  ncclBfloat16 = 9,
  ncclFloat8e4m3 = 10,
  ncclFloat8e5m2 = 11,
  ncclNumTypes = 12,
};

enum ncclScalarResidence_t : unsigned { ncclScalarDevice = 0, ncclScalarHostImmediate = 1 };

enum ncclCommMemStat_t : unsigned {
  ncclStatGpuMemSuspend = 0,
  ncclStatGpuMemSuspended = 1,
  ncclStatGpuMemPersist = 2,
  ncclStatGpuMemTotal = 3,
};

struct ncclConfig_t {
  size_t size;
  unsigned int magic;
  unsigned int version;
  int blocking;        // since 2.14
  int cgaClusterSize;  // since 2.17
  int minCTAs;
  int maxCTAs;
  const char* netName;
  int splitShare;        // since 2.18
  int trafficClass;      // since 2.24
  const char* commName;  // since 2.26
  int collnetEnable;     // since 2.27
  int CTAPolicy;
  int shrinkShare;
  int nvlsCTAs;
  int nChannelsPerNetPeer;  // since 2.28
  int nvlinkCentricSched;
  int graphUsageMode;  // since 2.29
  int numRmaCtx;
  int maxP2pPeers;
  int graphStreamOrdering;  // since 2.31
  int launchOrderImplicit;
  int numRmaSig;
  int rmaEagerInit;
  int hostCftMode;
  int nvlsHostMode;
};

struct ncclConfigExt_t {
  ncclConfigExt_t* next;
  struct {
    int vendorId;
    int optionId;
  } key;
  union {
    int i;
    const char* s;
    void* raw;
  } val;
};

struct ncclCollConfig_t {
  size_t size;
  unsigned int magic;
  unsigned int version;
  ncclConfigExt_t* ext;
  int minCTAs;
  int maxCTAs;
  int nvlsCTAs;
  int cgaClusterSize;
  const char* algSelection;
  int forceAlgSelection;
  int CTAPolicy;
  uint64_t userProfilerTag;
  cudaEvent_t launchCompletionEvent;
};

struct ncclSimInfo_t {
  size_t size;
  unsigned int magic;
  unsigned int version;
  float estimatedTime;
};

struct ncclWaitSignalDesc_t {
  int opCnt;
  int peer;
  int sigIdx;
  int ctx;
};

struct ncclEncryptionConfig_t {
  size_t size;
  unsigned int magic;
  unsigned int version;
  int mode;
  const char* psk;
};

// Of the device API only what its host functions pass by value; all else there goes by pointer and
// is never looked into.
struct ncclTeam_t {
  int nRanks, rank, stride;
};
struct ncclMultimemHandle_t {
  void* mcBasePtr;
};

static_assert(sizeof(ncclUniqueId) == 128);
static_assert(sizeof(ncclConfig_t) == 120);
static_assert(offsetof(ncclConfig_t, blocking) == 16);
static_assert(offsetof(ncclConfig_t, netName) == 32);
static_assert(offsetof(ncclConfig_t, commName) == 48);
static_assert(sizeof(ncclConfigExt_t) == 24);
static_assert(sizeof(ncclCollConfig_t) == 72);
static_assert(sizeof(ncclSimInfo_t) == 24);
static_assert(sizeof(ncclWaitSignalDesc_t) == 16);
static_assert(sizeof(ncclEncryptionConfig_t) == 32);
static_assert(sizeof(ncclRedOp_t) == 4 && sizeof(ncclDataType_t) == 4 && sizeof(ncclResult_t) == 4);

}  // namespace scape::nccl
