// Links no NCCL. Calls whatever has its names in the process; or, given a library, lets that one
// call.
#include <dlfcn.h>

#include <cstdio>

#include "nccl/api.h"

using namespace scape::nccl;

template <typename Function>
Function* find(const char* name) {
  return reinterpret_cast<Function*>(dlsym(RTLD_DEFAULT, name));
}

int main(int argc, char** argv) {
  if (argc > 1) {
    void* library = dlopen(argv[1], RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) {
      std::fprintf(stderr, "%s\n", dlerror());
      return 2;
    }
    reinterpret_cast<void (*)()>(dlsym(library, "call_nccl"))();
    return 0;
  }
  auto* get_id = find<ncclResult_t(ncclUniqueId*)>("ncclGetUniqueId");
  auto* get_version = find<ncclResult_t(int*)>("ncclGetVersion");
  auto* last_error = find<const char*(ncclComm_t)>("ncclGetLastError");
  if (get_id == nullptr || get_version == nullptr || last_error == nullptr) return 3;
  ncclUniqueId id;
  int version = 0;
  const ncclResult_t result = get_id(&id);
  get_version(&version);
  std::printf("%d %d %s\n", result, version, result == ncclSuccess ? "" : last_error(nullptr));
  return 0;
}
