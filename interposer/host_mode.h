// The NCCL API on host memory.
#pragma once

#include "interposer/real_nccl.h"

namespace scape::interposer {

const nccl::Functions& host_functions();

// This thread's last error, or what ended the communicator.
const char* host_last_error(nccl::ncclComm_t comm);

}  // namespace scape::interposer
