// Which host a process is on.
#pragma once

#include <cstdint>

namespace scape::plugin {

// Tells hosts apart: the same for processes that may be able to share memory. NCCL_HOSTID where it
// is set, else host name and boot; with the user and the namespace of process ids.
uint64_t host_digest();

}  // namespace scape::plugin
