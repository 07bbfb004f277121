#include "base/module.h"

#include <dlfcn.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <vector>

#include "base/log.h"
#include "base/signal_handlers.h"

namespace scape {
namespace {

std::string directory_of(const std::string& path) {
  const size_t slash = path.rfind('/');
  return slash == std::string::npos ? "." : path.substr(0, slash);
}

// Without links; empty where there is nothing.
std::string resolved(const std::string& path) {
  char* const found = ::realpath(path.c_str(), nullptr);
  std::string text = found != nullptr ? found : "";
  ::free(found);
  return text;
}

// The file that is mapped at an address; empty where the kernel does not say.
std::string file_mapped_at(const void* address) {
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    unsigned long begin, end;
    int path_at = 0;
    const int read =
        std::sscanf(line.c_str(), "%lx-%lx %*s %*s %*s %*s %n", &begin, &end, &path_at);
    const auto at = reinterpret_cast<uintptr_t>(address);
    if (read == 2 && begin <= at && at < end) return line.substr(static_cast<size_t>(path_at));
  }
  return "";
}

// The directory of the library (or program) that contains this code, links resolved.
std::string own_directory() {
  Dl_info info{};
  static const char anchor = 0;
  if (dladdr(&anchor, &info) == 0 || info.dli_fname == nullptr) return ".";
  std::string path = info.dli_fname;
  if (path.find('/') == std::string::npos) {
    path = "/proc/self/exe";
  } else if (path.front() != '/') {
    // As LD_PRELOAD had it: the process may have changed its directory since.
    if (const std::string mapped = file_mapped_at(&anchor); !mapped.empty()) path = mapped;
  }
  const std::string real = resolved(path);
  return directory_of(real.empty() ? path : real);
}

}  // namespace

Status open_module(const std::string& name, void** handle) {
  const std::string file = "libscape_" + name + ".so";
  const std::string here = own_directory();
  // Beside the library; for a program in bin/, in the lib/ next to it.
  std::vector<std::string> directories = {here};
  const std::string lib = resolved(here + "/../lib");
  if (!lib.empty() && lib != here) directories.push_back(lib);
  std::string reasons;
  for (const std::string& directory : directories) {
    const std::string path = directory + "/" + file;
    {
      const KeepSignalHandlers handlers;
      *handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
    }
    if (*handle != nullptr) {
      SCAPE_DEBUG("module %s", path.c_str());
      return Status::Ok();
    }
    const char* reason = dlerror();
    reasons += (reasons.empty() ? "" : "; ") + std::string(reason != nullptr ? reason : path);
  }
  return error(SCAPE_ERR_SYSTEM, "%s cannot be loaded (%s)", file.c_str(), reasons.c_str());
}

}  // namespace scape
