#include "base/log.h"

#include <fcntl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <string>

#include "base/settings.h"
#include "base/status.h"

namespace scape {
namespace {

std::atomic<int> log_rank{-1};

int log_descriptor() {
  static const int descriptor = [] {
    const std::string& path = settings().log_file;
    if (path.empty()) return STDERR_FILENO;
    const int opened = ::open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
    if (opened >= 0) return opened;
    ::dprintf(STDERR_FILENO,
              "scape: SCAPE_LOG_FILE=\"%s\" cannot be opened: %s; log lines come here instead\n",
              path.c_str(), std::strerror(errno));
    return STDERR_FILENO;
  }();
  return descriptor;
}

const char* name_of(LogLevel level) {
  switch (level) {
    case LogLevel::kError:
      return "ERROR";
    case LogLevel::kWarn:
      return "WARN";
    case LogLevel::kInfo:
      return "INFO";
    default:
      return "DEBUG";
  }
}

}  // namespace

bool log_enabled(LogLevel level) { return static_cast<int>(level) <= settings().log; }

void set_log_rank(int rank) { log_rank.store(rank, std::memory_order_relaxed); }

void log(LogLevel level, const char* format, ...) {
  std::va_list args;
  va_start(args, format);
  const std::string text = vformat(format, args);
  va_end(args);
  char host[64] = "?";
  ::gethostname(host, sizeof host);
  host[sizeof host - 1] = '\0';
  const int rank = log_rank.load(std::memory_order_relaxed);
  const std::string line = scape::format(
      "%s:%d:%ld [%s] SCAPE %s %s\n", host, static_cast<int>(::getpid()), ::syscall(SYS_gettid),
      rank < 0 ? "-" : std::to_string(rank).c_str(), name_of(level), text.c_str());
  // One write, so that the lines of several ranks do not mix.
  [[maybe_unused]] const ssize_t written = ::write(log_descriptor(), line.data(), line.size());
}

}  // namespace scape
