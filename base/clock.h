// The clock that durations and counters of nanoseconds are taken from.
#pragma once

#include <chrono>
#include <cstdint>

namespace scape {

// Monotonic; only differences mean anything.
inline uint64_t now_ns() {
  return static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(
                                   std::chrono::steady_clock::now().time_since_epoch())
                                   .count());
}

}  // namespace scape
