// A stand-in for the real NCCL, to pass calls through to: every function counts its calls and
// succeeds, whatever its arguments. It is one rank alone on host memory, so a collective is a copy.
#include "tests/support/stub_nccl.h"

#include <atomic>
#include <cstring>
#include <string>

#include "nccl/api.h"

#define STUB_EXPORT __attribute__((visibility("default")))

namespace scape::nccl {
namespace {

enum Function {
#define SCAPE_NCCL_FUNCTION(type, name, params, args) k##name,
#include "nccl/function_list.h"
  kFunctions
};
constinit std::atomic<uint64_t> calls[kFunctions];

constexpr const char* kNames[] = {
#define SCAPE_NCCL_FUNCTION(type, name, params, args) "nccl" #name,
#include "nccl/function_list.h"
};

size_t size_of(ncclDataType_t type) {
  constexpr size_t kSizes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
  return kSizes[type];
}

ncclComm_t the_comm() {
  static char anchor;
  return reinterpret_cast<ncclComm_t>(&anchor);
}

// Success, null or zero, as the caller's type has it.
struct Nothing {
  template <typename T>
  operator T() const {
    return T{};
  }
};

// What a function does besides being counted: nothing, where it has no specialisation.
template <Function function>
struct Answer {
  template <typename... Args>
  static Nothing call(Args...) {
    return {};
  }
};
template <>
struct Answer<kGetVersion> {
  static ncclResult_t call(int* version) {
    if (version != nullptr) *version = kStubVersion;
    return ncclSuccess;
  }
};
template <>
struct Answer<kGetErrorString> {
  static const char* call(ncclResult_t) { return "the stub's"; }
};
template <>
struct Answer<kGetLastError> {
  static const char* call(ncclComm_t) { return "the stub's last error"; }
};
template <>
struct Answer<kGetUniqueId> {
  static ncclResult_t call(ncclUniqueId* id) {
    if (id != nullptr) std::memset(id, 0x5b, sizeof *id);
    return ncclSuccess;
  }
};
template <>
struct Answer<kCommInitRank> {
  static ncclResult_t call(ncclComm_t* comm, int, ncclUniqueId, int) {
    if (comm != nullptr) *comm = the_comm();
    return ncclSuccess;
  }
};
template <>
struct Answer<kCommCount> {
  static ncclResult_t call(ncclComm_t, int* count) {
    if (count != nullptr) *count = 1;
    return ncclSuccess;
  }
};
template <>
struct Answer<kAllReduce> {
  static ncclResult_t call(const void* send, void* recv, size_t count, ncclDataType_t type,
                           ncclRedOp_t, ncclComm_t, cudaStream_t) {
    if (send != recv) std::memcpy(recv, send, count * size_of(type));
    return ncclSuccess;
  }
};

}  // namespace

extern "C" {

#define SCAPE_NCCL_FUNCTION(type, name, params, args)       \
  STUB_EXPORT type nccl##name params {                      \
    calls[k##name].fetch_add(1, std::memory_order_relaxed); \
    return static_cast<type>(Answer<k##name>::call args);   \
  }                                                         \
  STUB_EXPORT type pnccl##name params {                     \
    calls[k##name].fetch_add(1, std::memory_order_relaxed); \
    return static_cast<type>(Answer<k##name>::call args);   \
  }
#include "nccl/function_list.h"

STUB_EXPORT uint64_t stub_nccl_calls(const char* function) {
  for (int i = 0; i < kFunctions; ++i) {
    if (std::string(function) == kNames[i]) return calls[i].load(std::memory_order_relaxed);
  }
  return 0;
}

}  // extern "C"

}  // namespace scape::nccl
