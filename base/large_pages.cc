#include "base/large_pages.h"

#include <sys/mman.h>

#include <cstdint>

#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25  // Linux 6.1; headers of Debian 12's C library do not have it
#endif

namespace scape {
namespace {

// The whole large pages inside a range, which madvise() takes by pages.
struct Inside {
  Inside(const void* data, size_t bytes) {
    const auto address = reinterpret_cast<uintptr_t>(data);
    const uintptr_t first = (address + kLargePage - 1) / kLargePage * kLargePage;
    const uintptr_t last = (address + bytes) / kLargePage * kLargePage;
    begin = static_cast<char*>(const_cast<void*>(data)) + (first - address);
    size = last > first ? last - first : 0;
  }
  void* begin;
  size_t size;
};

}  // namespace

void wish_large_pages(void* data, size_t bytes) {
  const Inside inside(data, bytes);
  if (inside.size > 0) ::madvise(inside.begin, inside.size, MADV_HUGEPAGE);
}

void move_to_large_pages(const void* data, size_t bytes) {
  const Inside inside(data, bytes);
  if (inside.size == 0) return;
  ::madvise(inside.begin, inside.size, MADV_HUGEPAGE);
  ::madvise(inside.begin, inside.size, MADV_COLLAPSE);
}

}  // namespace scape
