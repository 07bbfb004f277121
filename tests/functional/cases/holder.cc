// Links NCCL as a framework's library does, and is itself loaded late and locally.
#include <cstdio>

#include "tests/support/nccl_prototypes.h"

using namespace scape::nccl;

extern "C" __attribute__((visibility("default"))) void call_nccl() {
  ncclUniqueId id;
  int version = 0;
  const ncclResult_t result = ncclGetUniqueId(&id);
  ncclGetVersion(&version);
  std::printf("%d %d %s\n", result, version,
              result == ncclSuccess ? "" : ncclGetLastError(nullptr));
}
