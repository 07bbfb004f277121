#include "plugin/transport/descriptors.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <vector>

namespace scape::plugin {

Status check_descriptors(const char* transport, int needed) {
  std::vector<int> taken;
  int reason = 0;
  while (static_cast<int>(taken.size()) < needed) {
    const int descriptor = ::eventfd(0, EFD_CLOEXEC);
    if (descriptor < 0) {
      reason = errno;
      break;
    }
    taken.push_back(descriptor);
  }
  for (const int descriptor : taken) ::close(descriptor);
  if (reason == 0) return Status::Ok();
  return error(SCAPE_ERR_SYSTEM,
               "%s: a communicator needs up to %d more file descriptors, and %zu are left (%s); "
               "raise the limit (ulimit -n), or destroy communicators that are not needed",
               transport, needed, taken.size(), std::strerror(reason));
}

}  // namespace scape::plugin
