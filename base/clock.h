// The clock that durations and counters of nanoseconds are taken from.
#pragma once

#include <time.h>

#include <chrono>
#include <cstdint>

namespace scape {

// Monotonic; only differences mean anything.
inline uint64_t now_ns() {
  return static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(
                                   std::chrono::steady_clock::now().time_since_epoch())
                                   .count());
}

// The same to within a tick of the kernel (some milliseconds), at a tenth of the cost: for what is
// looked at with every message.
inline uint64_t coarse_now_ns() {
  timespec now{};
  ::clock_gettime(CLOCK_MONOTONIC_COARSE, &now);
  return static_cast<uint64_t>(now.tv_sec) * 1000000000u + static_cast<uint64_t>(now.tv_nsec);
}

}  // namespace scape
