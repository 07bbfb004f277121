// Host mode or device mode, settled once, at the first call that needs one.
#pragma once

#include <atomic>

#include "base/status.h"
#include "interposer/real_nccl.h"

namespace scape::interposer {

enum class Mode : int { kUnsettled = 0, kHost = 1, kDevice = 2, kFailed = 3 };
const char* name_of(Mode mode);

// The functions of the mode in force; null while none is.
extern constinit std::atomic<const nccl::Functions*> functions_in_force;

// Settles the mode and returns its functions; `caller` is an address in the calling object, where a
// real NCCL may be found. Where settling fails (a bad setting, device mode without a real NCCL) the
// functions of the answer refuse with that reason.
const nccl::Functions& settle_mode(const void* caller);

inline const nccl::Functions& functions(const void* caller) {
  const nccl::Functions* table = functions_in_force.load(std::memory_order_acquire);
  return table != nullptr ? *table : settle_mode(caller);
}

Mode mode();

// The real NCCL behind device mode; its path is empty in other modes.
const RealNccl& real_nccl();

// Functions that refuse: what no mode has, what only a GPU can do, and everything where settling
// failed.
const nccl::Functions& refusing_functions();

// Answers to the calls that need no mode.
nccl::ncclResult_t get_version(int* version, const void* caller);
const char* get_error_string(nccl::ncclResult_t result);
const char* get_last_error(nccl::ncclComm_t comm);

}  // namespace scape::interposer
