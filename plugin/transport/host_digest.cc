#include "plugin/transport/host_digest.h"

#include <sys/stat.h>
#include <unistd.h>

#include <fstream>
#include <string>
#include <string_view>

#include "base/settings.h"
#include "base/status.h"

namespace scape::plugin {
namespace {

// FNV-1a.
uint64_t digest_of(std::string_view text) {
  uint64_t digest = 0xcbf29ce484222325;
  for (const char c : text) digest = (digest ^ static_cast<unsigned char>(c)) * 0x100000001b3;
  return digest;
}

}  // namespace

uint64_t host_digest() {
  std::string host = settings().host_id;
  if (host.empty()) {
    char name[256] = {};
    ::gethostname(name, sizeof name - 1);
    std::string boot;
    std::getline(std::ifstream("/proc/sys/kernel/random/boot_id"), boot);
    host = std::string(name) + "/" + boot;
  }
  struct stat processes {};
  ::stat("/proc/self/ns/pid", &processes);
  return digest_of(host + format("/%llu/%u", static_cast<unsigned long long>(processes.st_ino),
                                 static_cast<unsigned>(::geteuid())));
}

}  // namespace scape::plugin
