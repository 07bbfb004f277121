// Finding the real NCCL, and filling the table of its functions.
#pragma once

#include <string>

#include "base/status.h"
#include "nccl/functions.h"

namespace scape::interposer {

// Whether a library that is not in the process yet may be brought in.
enum class Search { kInProcess, kAnywhere };

// Where the real NCCL was found: a handle for dlsym, and the file behind it.
struct RealNccl {
  void* handle = nullptr;
  std::string path;
};

// Looks in this order: SCAPE_NCCL_LIB; the objects after this library; a libnccl.so.2 in the
// process; the object that holds `caller` and what it needs; the loader's search path. This library
// itself, under whatever name, is never taken for it. NOT_FOUND says where it was looked for.
Status find_real_nccl(const void* caller, Search search, RealNccl* out);

// Fills the table with the library's pncclX (ncclX where it has no such name). What it lacks keeps
// the pointer that is there.
void load_functions(const RealNccl& real, nccl::Functions* table);

// The version of the real NCCL, or 0.
int version_of(const RealNccl& real);

}  // namespace scape::interposer
