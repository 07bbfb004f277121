// Log lines: `host:pid:tid [rank] SCAPE LEVEL text`, lower case, one fact a line, on stderr or in
// the file of SCAPE_LOG_FILE, never on stdout. Who first sees a fact logs it; nobody logs it again.
#pragma once

#include <atomic>

namespace scape {

enum class LogLevel : int { kNone = 0, kError = 1, kWarn = 2, kInfo = 3, kDebug = 4 };

// True when a line of this level would be written. The level comes from SCAPE_LOG, read once.
bool log_enabled(LogLevel level);

// The rank that log lines of this process name; -1 (shown as "-") before it is known.
void set_log_rank(int rank);

void log(LogLevel level, const char* format, ...) __attribute__((format(printf, 2, 3)));

}  // namespace scape

#define SCAPE_LOG_AT(level, ...)                                       \
  do {                                                                 \
    if (::scape::log_enabled(level)) ::scape::log(level, __VA_ARGS__); \
  } while (0)
#define SCAPE_ERROR(...) SCAPE_LOG_AT(::scape::LogLevel::kError, __VA_ARGS__)
#define SCAPE_WARN(...) SCAPE_LOG_AT(::scape::LogLevel::kWarn, __VA_ARGS__)
#define SCAPE_INFO(...) SCAPE_LOG_AT(::scape::LogLevel::kInfo, __VA_ARGS__)
#define SCAPE_DEBUG(...) SCAPE_LOG_AT(::scape::LogLevel::kDebug, __VA_ARGS__)
