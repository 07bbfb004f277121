// The NCCL API handed on to the real NCCL.
#pragma once

#include "interposer/real_nccl.h"

namespace scape::interposer {

// The real functions; the few that are looked at on the way are wrapped. Called once.
const nccl::Functions& device_functions(const RealNccl& real);

// What the real NCCL says of its last error.
const char* device_last_error(nccl::ncclComm_t comm);

}  // namespace scape::interposer
