// The exported symbols of the NCCL API: ncclX and pncclX alike, each one jump through the table of
// the mode in force.
#include "interposer/mode.h"
#include "scape/scape.h"

// Inside the namespace only for the sake of the types: C linkage makes the names global.
namespace scape::nccl {

using interposer::functions;

extern "C" {

#define SCAPE_NCCL_COMMON(type, name, params, args)
#define SCAPE_NCCL_FUNCTION(type, name, params, args)                                           \
  SCAPE_API type nccl##name params { return functions(__builtin_return_address(0)).name args; } \
  SCAPE_API type pnccl##name params { return functions(__builtin_return_address(0)).name args; }
#include "nccl/function_list.h"

SCAPE_API ncclResult_t ncclGetVersion(int* version) {
  return interposer::get_version(version, __builtin_return_address(0));
}
SCAPE_API ncclResult_t pncclGetVersion(int* version) {
  return interposer::get_version(version, __builtin_return_address(0));
}
SCAPE_API const char* ncclGetErrorString(ncclResult_t result) {
  return interposer::get_error_string(result);
}
SCAPE_API const char* pncclGetErrorString(ncclResult_t result) {
  return interposer::get_error_string(result);
}
SCAPE_API const char* ncclGetLastError(ncclComm_t comm) { return interposer::get_last_error(comm); }
SCAPE_API const char* pncclGetLastError(ncclComm_t comm) {
  return interposer::get_last_error(comm);
}

}  // extern "C"

}  // namespace scape::nccl
