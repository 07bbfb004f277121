// NCCL's functions as pointers: those of whatever library serves a call.
#pragma once

#include "nccl/api.h"

namespace scape::nccl {

// One pointer per function of the API.
struct Functions {
#define SCAPE_NCCL_FUNCTION(type, name, params, args) type(*name) params;
#include "nccl/function_list.h"
};

}  // namespace scape::nccl
