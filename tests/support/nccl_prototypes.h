// NCCL's functions as a program that includes nccl.h sees them, declared from the library's own
// table.
#pragma once

#include "nccl/api.h"

namespace scape::nccl {

// C linkage: the namespace is there for the types only.
extern "C" {
#define SCAPE_NCCL_FUNCTION(type, name, params, args) \
  type nccl##name params;                             \
  type pnccl##name params;
#include "nccl/function_list.h"
}

}  // namespace scape::nccl
