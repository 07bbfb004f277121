// NCCL's functions as a program that includes nccl.h sees them, declared from the library's own
// table.
#pragma once

#include "interposer/nccl_api.h"

namespace scape::nccl {

// C linkage: the namespace is there for the types only.
extern "C" {
#define SCAPE_NCCL_FUNCTION(type, name, params, args) \
  type nccl##name params;                             \
  type pnccl##name params;
#include "interposer/nccl_functions.h"
}

}  // namespace scape::nccl
