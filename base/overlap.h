// Ranges of memory that share bytes.
#pragma once

#include <cstddef>
#include <cstdint>

namespace scape {

inline bool overlap(const void* a, size_t a_bytes, const void* b, size_t b_bytes) {
  if (a_bytes == 0 || b_bytes == 0) return false;
  const auto at = reinterpret_cast<uintptr_t>(a), other = reinterpret_cast<uintptr_t>(b);
  return at < other ? other - at < a_bytes : at - other < b_bytes;
}

}  // namespace scape
