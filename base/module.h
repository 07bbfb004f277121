// Modules: parts that link a library which may be absent, in shared libraries of their own, beside
// the one that uses them.
#pragma once

#include <string>

#include "base/status.h"

namespace scape {

// Opens libscape_<name>.so from beside the library (or program) that contains this code, for good:
// such libraries do not survive unloading. SYSTEM, with the loader's reasons, where it cannot be.
Status open_module(const std::string& name, void** handle);

}  // namespace scape
