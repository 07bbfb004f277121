#include "interposer/real_nccl.h"

#include <dlfcn.h>

#include "base/settings.h"
#include "interposer/process.h"

namespace scape::interposer {

using namespace nccl;  // the rows of nccl/function_list.h name NCCL's types

namespace {

constexpr const char* kLibrary = "libnccl.so.2";

const char* dl_error() {
  const char* text = ::dlerror();
  return text != nullptr ? text : "no reason given";
}

// True when the address lies in a copy of this library: this one, or another file of it.
bool is_scape(const void* address) {
  const LoadedObject object = object_of(address);
  if (object.base == own_object().base) return true;
  void* handle = ::dlopen(object.path.c_str(), RTLD_LAZY | RTLD_NOLOAD);
  if (handle == nullptr) return false;
  const void* version = ::dlsym(handle, "scape_version");
  ::dlclose(handle);
  return version != nullptr && object_of(version).base == object.base;
}

void* symbol(void* handle, const char* name) {
  const std::string with_p = std::string("p") + name;
  for (const char* candidate : {with_p.c_str(), name}) {
    void* found = ::dlsym(handle, candidate);
    if (found != nullptr && !is_scape(found)) return found;
  }
  return nullptr;
}

bool take(void* handle, RealNccl* out) {
  if (handle == nullptr) return false;
  const void* found = symbol(handle, "ncclGetVersion");
  if (found == nullptr) {
    if (handle != RTLD_NEXT) ::dlclose(handle);
    return false;
  }
  out->handle = handle;
  out->path = object_of(found).path;
  return true;
}

}  // namespace

Status find_real_nccl(const void* caller, Search search, RealNccl* out) {
  const std::string& named = settings().nccl_lib;
  if (!named.empty()) {
    void* handle = ::dlopen(named.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (handle == nullptr) {
      return error(SCAPE_ERR_NOT_FOUND,
                   "SCAPE_NCCL_LIB=\"%s\" cannot be opened: %s; correct or unset it", named.c_str(),
                   dl_error());
    }
    if (take(handle, out)) return {};
    return error(SCAPE_ERR_NOT_FOUND,
                 "SCAPE_NCCL_LIB=\"%s\" is not a real NCCL; correct or unset it", named.c_str());
  }
  if (take(RTLD_NEXT, out)) return {};
  if (take(::dlopen(kLibrary, RTLD_LAZY | RTLD_NOLOAD), out)) return {};
  const LoadedObject object = object_of(caller);
  if (!object.path.empty() && take(::dlopen(object.path.c_str(), RTLD_LAZY | RTLD_NOLOAD), out))
    return {};
  if (search == Search::kAnywhere && take(::dlopen(kLibrary, RTLD_NOW | RTLD_LOCAL), out))
    return {};
  return error(SCAPE_ERR_NOT_FOUND,
               "no real NCCL found: neither after this library, nor as %s in the process, nor "
               "beside %s%s; set "
               "SCAPE_NCCL_LIB to its path",
               kLibrary, object.path.empty() ? "the caller" : object.path.c_str(),
               search == Search::kAnywhere ? ", nor on the loader's path" : "");
}

void load_functions(const RealNccl& real, Functions* table) {
#define SCAPE_NCCL_FUNCTION(type, name, params, args)                      \
  if (void* found = symbol(real.handle, "nccl" #name); found != nullptr) { \
    table->name = reinterpret_cast<decltype(table->name)>(found);          \
  }
#include "nccl/function_list.h"
}

int version_of(const RealNccl& real) {
  using GetVersion = ncclResult_t (*)(int*);
  int version = 0;
  const auto get = reinterpret_cast<GetVersion>(symbol(real.handle, "ncclGetVersion"));
  if (get == nullptr || get(&version) != ncclSuccess) return 0;
  return version;
}

}  // namespace scape::interposer
