// Operations that ncclRedOpCreatePreMulSum made.
#pragma once

#include "nccl/api.h"
#include "plugin/communicator.h"

namespace scape::interposer {

// A sum with a factor.
struct PremulSum {
  plugin::DataType type;
  plugin::Reduction reduction;   // of an immediate scalar
  const void* scalar = nullptr;  // of a device-resident one: read when the collective is launched
};

// Reads the scalar, which the host can reach.
void read_scalar(const void* scalar, plugin::DataType type, plugin::Reduction* out);

}  // namespace scape::interposer
