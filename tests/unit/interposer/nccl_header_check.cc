// Holds the declarations of nccl/api.h and nccl/function_list.h against a real nccl.h. There
// is nothing to run: that it compiles is the test (nccl_header_check.sh).
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <limits.h>
#include <stdint.h>

#include <cstddef>
#include <type_traits>

#include "nccl/api.h"

namespace around {

// What a function's name means where the real header, of this version, does not declare it.
struct NotDeclared {};
#define SCAPE_NCCL_FUNCTION(type, name, params, args) \
  inline constexpr NotDeclared nccl##name, pnccl##name;
#include "nccl/function_list.h"

namespace real {

#include <nccl.h>

static_assert(NCCL_VERSION_CODE >= 22809, "older headers lack most of what is compared");

// ---- functions: as many parameters, each of the same size and kind ----

template <typename A, typename B>
constexpr bool alike() {
  if constexpr (std::is_void_v<A> || std::is_void_v<B>) {
    return std::is_void_v<A> && std::is_void_v<B>;
  } else {
    return sizeof(A) == sizeof(B) && alignof(A) == alignof(B) &&
           std::is_pointer_v<A> == std::is_pointer_v<B> && std::is_class_v<A> == std::is_class_v<B>;
  }
}

template <typename R, typename... A, typename S, typename... B>
constexpr bool same(R (*)(A...), S (*)(B...)) {
  if constexpr (sizeof...(A) != sizeof...(B)) {
    return false;
  } else {
    return alike<R, S>() && (alike<A, B>() && ...);
  }
}
template <typename S, typename... B>
constexpr bool same(const NotDeclared*, S (*)(B...)) {
  return true;
}

}  // namespace real
}  // namespace around

namespace scape::nccl {
#define SCAPE_NCCL_FUNCTION(type, name, params, args) using name##_t = type(*) params;
#include "nccl/function_list.h"
}  // namespace scape::nccl

namespace around::real {

#define SCAPE_NCCL_FUNCTION(type, name, params, args)                                        \
  static_assert(same(static_cast<decltype(&nccl##name)>(nullptr), scape::nccl::name##_t{}),  \
                "nccl" #name);                                                               \
  static_assert(same(static_cast<decltype(&pnccl##name)>(nullptr), scape::nccl::name##_t{}), \
                "pnccl" #name);
#include "nccl/function_list.h"

// That the comparison sees anything at all.
static_assert(!std::is_same_v<decltype(&ncclAllReduce), const NotDeclared*>);
static_assert(!same(static_cast<decltype(&ncclAllReduce)>(nullptr), scape::nccl::Broadcast_t{}) ||
              !same(static_cast<decltype(&ncclCommCount)>(nullptr), scape::nccl::CommDestroy_t{}));

// ---- values ----

#define SAME_VALUE(name) static_assert(int{::around::real::name} == int{scape::nccl::name}, #name)
SAME_VALUE(ncclSuccess);
SAME_VALUE(ncclUnhandledCudaError);
SAME_VALUE(ncclSystemError);
SAME_VALUE(ncclInternalError);
SAME_VALUE(ncclInvalidArgument);
SAME_VALUE(ncclInvalidUsage);
SAME_VALUE(ncclRemoteError);
SAME_VALUE(ncclInProgress);
SAME_VALUE(ncclSum);
SAME_VALUE(ncclProd);
SAME_VALUE(ncclMax);
SAME_VALUE(ncclMin);
SAME_VALUE(ncclAvg);
SAME_VALUE(ncclNumOps);
SAME_VALUE(ncclMaxRedOp);
SAME_VALUE(ncclInt8);
SAME_VALUE(ncclUint8);
SAME_VALUE(ncclInt32);
SAME_VALUE(ncclUint32);
SAME_VALUE(ncclInt64);
SAME_VALUE(ncclUint64);
SAME_VALUE(ncclFloat16);
SAME_VALUE(ncclFloat32);
SAME_VALUE(ncclFloat64);
SAME_VALUE(ncclBfloat16);
SAME_VALUE(ncclFloat8e4m3);
SAME_VALUE(ncclFloat8e5m2);
SAME_VALUE(ncclNumTypes);
SAME_VALUE(ncclScalarDevice);
SAME_VALUE(ncclScalarHostImmediate);
static_assert(ncclConfig_t(NCCL_CONFIG_INITIALIZER).magic == scape::nccl::kApiMagic);
static_assert(NCCL_CONFIG_UNDEF_INT == scape::nccl::kUndefInt);
static_assert(NCCL_SPLIT_NOCOLOR == scape::nccl::kSplitNoColor);
static_assert(NCCL_SHRINK_DEFAULT == scape::nccl::kShrinkDefault);
static_assert(NCCL_SHRINK_ABORT == scape::nccl::kShrinkAbort);
static_assert(ncclSimInfo_t(NCCL_SIM_INFO_INITIALIZER).magic == scape::nccl::kSimInfoMagic);

// ---- structures ----

#define SAME_FIELD(type, field)                                                                \
  static_assert(offsetof(::around::real::type, field) == offsetof(scape::nccl::type, field) && \
                    sizeof(::around::real::type::field) == sizeof(scape::nccl::type::field),   \
                #type "." #field)
static_assert(sizeof(ncclUniqueId) == sizeof(scape::nccl::ncclUniqueId));
SAME_FIELD(ncclConfig_t, size);
SAME_FIELD(ncclConfig_t, magic);
SAME_FIELD(ncclConfig_t, version);
SAME_FIELD(ncclConfig_t, blocking);
SAME_FIELD(ncclConfig_t, cgaClusterSize);
SAME_FIELD(ncclConfig_t, minCTAs);
SAME_FIELD(ncclConfig_t, maxCTAs);
SAME_FIELD(ncclConfig_t, netName);
SAME_FIELD(ncclConfig_t, splitShare);
SAME_FIELD(ncclConfig_t, trafficClass);
SAME_FIELD(ncclConfig_t, commName);
SAME_FIELD(ncclConfig_t, collnetEnable);
SAME_FIELD(ncclConfig_t, CTAPolicy);
SAME_FIELD(ncclConfig_t, shrinkShare);
SAME_FIELD(ncclConfig_t, nvlsCTAs);
SAME_FIELD(ncclConfig_t, nChannelsPerNetPeer);
SAME_FIELD(ncclConfig_t, nvlinkCentricSched);
SAME_FIELD(ncclSimInfo_t, size);
SAME_FIELD(ncclSimInfo_t, version);
SAME_FIELD(ncclSimInfo_t, estimatedTime);

#if NCCL_VERSION_CODE >= 23200
SAME_VALUE(ncclTimeout);
SAME_VALUE(ncclNumResults);
SAME_VALUE(ncclStatGpuMemTotal);
static_assert(sizeof(ncclConfig_t) == sizeof(scape::nccl::ncclConfig_t));
SAME_FIELD(ncclConfig_t, graphUsageMode);
SAME_FIELD(ncclConfig_t, numRmaCtx);
SAME_FIELD(ncclConfig_t, maxP2pPeers);
SAME_FIELD(ncclConfig_t, graphStreamOrdering);
SAME_FIELD(ncclConfig_t, launchOrderImplicit);
SAME_FIELD(ncclConfig_t, numRmaSig);
SAME_FIELD(ncclConfig_t, rmaEagerInit);
SAME_FIELD(ncclConfig_t, hostCftMode);
SAME_FIELD(ncclConfig_t, nvlsHostMode);
static_assert(sizeof(ncclConfigExt_t) == sizeof(scape::nccl::ncclConfigExt_t));
SAME_FIELD(ncclConfigExt_t, next);
SAME_FIELD(ncclConfigExt_t, key);
SAME_FIELD(ncclConfigExt_t, val);
static_assert(sizeof(ncclCollConfig_t) == sizeof(scape::nccl::ncclCollConfig_t));
SAME_FIELD(ncclCollConfig_t, size);
SAME_FIELD(ncclCollConfig_t, magic);
SAME_FIELD(ncclCollConfig_t, version);
SAME_FIELD(ncclCollConfig_t, ext);
SAME_FIELD(ncclCollConfig_t, minCTAs);
SAME_FIELD(ncclCollConfig_t, maxCTAs);
SAME_FIELD(ncclCollConfig_t, nvlsCTAs);
SAME_FIELD(ncclCollConfig_t, cgaClusterSize);
SAME_FIELD(ncclCollConfig_t, algSelection);
SAME_FIELD(ncclCollConfig_t, forceAlgSelection);
SAME_FIELD(ncclCollConfig_t, CTAPolicy);
SAME_FIELD(ncclCollConfig_t, userProfilerTag);
SAME_FIELD(ncclCollConfig_t, launchCompletionEvent);
static_assert(sizeof(ncclWaitSignalDesc_t) == sizeof(scape::nccl::ncclWaitSignalDesc_t));
SAME_FIELD(ncclWaitSignalDesc_t, opCnt);
SAME_FIELD(ncclWaitSignalDesc_t, ctx);
static_assert(sizeof(ncclEncryptionConfig_t) == sizeof(scape::nccl::ncclEncryptionConfig_t));
SAME_FIELD(ncclEncryptionConfig_t, mode);
SAME_FIELD(ncclEncryptionConfig_t, psk);
#endif

}  // namespace around::real
