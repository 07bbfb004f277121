// Lines through NCCL's own logger, so that they stand where its users look, with NCCL_DEBUG as
// their filter.
#pragma once

#include "base/status.h"
#include "plugin/net/abi/common.h"

namespace scape::net {

// The logger to use from now on; null: the project's own log. Thread-safe.
void set_logger(net_logger logger);

void log_line(int level, const char* file, int line, const char* format, ...)
    __attribute__((format(printf, 4, 5)));

// NCCL's code for a failure.
int result_of(const Status& status);

}  // namespace scape::net

#define NET_WARN(...) ::scape::net::log_line(NET_LOG_WARN, __FILE__, __LINE__, __VA_ARGS__)
#define NET_INFO(...) ::scape::net::log_line(NET_LOG_INFO, __FILE__, __LINE__, __VA_ARGS__)
