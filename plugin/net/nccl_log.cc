#include "plugin/net/nccl_log.h"

#include <atomic>
#include <cstring>
#include <string>

#include "base/log.h"

namespace scape::net {
namespace {
std::atomic<net_logger> current_logger{nullptr};
}  // namespace

void set_logger(net_logger logger) { current_logger.store(logger, std::memory_order_release); }

void log_line(int level, const char* file, int line, const char* format, ...) {
  std::va_list args;
  va_start(args, format);
  const std::string text = vformat(format, args);
  va_end(args);
  const net_logger logger = current_logger.load(std::memory_order_acquire);
  if (logger == nullptr) {
    SCAPE_LOG_AT(level <= NET_LOG_WARN ? LogLevel::kWarn : LogLevel::kInfo, "net: %s",
                 text.c_str());
    return;
  }
  const char* const slash = std::strrchr(file, '/');
  logger(level, NET_LOG_SUBSYSTEM_INIT | NET_LOG_SUBSYSTEM_NET, slash != nullptr ? slash + 1 : file,
         line, "NET/Scape : %s", text.c_str());
}

int result_of(const Status& status) {
  switch (status.code()) {
    case SCAPE_OK:
      return NET_SUCCESS;
    case SCAPE_ERR_ARGUMENT:
      return NET_INVALID_ARGUMENT;
    case SCAPE_ERR_USAGE:
    case SCAPE_ERR_MISMATCH:
      return NET_INVALID_USAGE;
    case SCAPE_ERR_REMOTE:
    case SCAPE_ERR_TIMEOUT:
      return NET_REMOTE_ERROR;
    case SCAPE_ERR_SYSTEM:
      return NET_SYSTEM_ERROR;
    default:
      return NET_INTERNAL_ERROR;
  }
}

}  // namespace scape::net
