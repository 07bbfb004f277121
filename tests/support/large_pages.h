// How much of a range of this process's memory is on large pages, as the system tells.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <string>

namespace scape::testing {

// Bytes on large pages in the mappings that overlap the range.
inline size_t bytes_on_large_pages(const void* data, size_t bytes) {
  const auto begin = reinterpret_cast<uintptr_t>(data);
  std::ifstream smaps("/proc/self/smaps");
  bool inside = false;
  size_t found = 0;
  for (std::string line; std::getline(smaps, line);) {
    uintptr_t first = 0, last = 0;
    size_t kib = 0;
    char dash = 0;
    if (std::sscanf(line.c_str(), "%zx%c%zx ", &first, &dash, &last) == 3 && dash == '-') {
      inside = first < begin + bytes && begin < last;
    } else if (inside && std::sscanf(line.c_str(), "AnonHugePages: %zu kB", &kib) == 1) {
      found += kib * 1024;
    }
  }
  return found;
}

}  // namespace scape::testing
