// What every function that NCCL calls begins and ends with.
#pragma once

#include <exception>

#include "base/exit_guard.h"
#include "base/status.h"
#include "plugin/net/abi/common.h"
#include "plugin/net/nccl_log.h"
#include "plugin/net/statistics.h"

namespace scape::net {

// Runs one call: no exception leaves it, a failure is said, and while the process exits the network
// libraries are left alone. `said`: the failure has been logged by who met it first.
template <typename Body>
int guarded(bool said, Body&& body) {
  try {
    const ExitGuard guard;
    if (ExitGuard::exiting()) return NET_SYSTEM_ERROR;
    const Status status = body();
    if (!status.ok() && !said) NET_WARN("%s", status.message().c_str());
    write_due_statistics();
    return result_of(status);
  } catch (const std::exception& failure) {
    NET_WARN("%s", failure.what());
    return NET_SYSTEM_ERROR;
  }
}

inline Status null_argument(const char* call, const char* name) {
  return error(SCAPE_ERR_ARGUMENT, "%s: %s is null", call, name);
}

// What regMr asks for can be registered at all.
inline Status check_memory(const void* data, size_t bytes, int type) {
  if (type != NET_POINTER_HOST) {
    return error(SCAPE_ERR_USAGE,
                 "regMr: memory of type 0x%x cannot be registered, only the "
                 "host's (0x%x), as the properties say",
                 type, NET_POINTER_HOST);
  }
  if (data != nullptr && bytes > 0) return Status::Ok();
  return error(SCAPE_ERR_ARGUMENT, "regMr: %zu bytes at %p are no memory", bytes, data);
}

}  // namespace scape::net
