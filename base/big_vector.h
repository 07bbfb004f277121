// Arrays that are passed over whole: vectors read them by cache lines, on large pages where the
// system has them.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <new>
#include <vector>

#include "base/large_pages.h"

namespace scape {

template <typename T>
struct BigAllocator {
  using value_type = T;

  BigAllocator() = default;
  template <typename U>
  BigAllocator(const BigAllocator<U>&) {}

  T* allocate(size_t n) {
    constexpr size_t kLine = 64;
    if (n > PTRDIFF_MAX / sizeof(T)) throw std::bad_alloc();
    const size_t alignment = n * sizeof(T) >= kLargePage ? kLargePage : kLine;
    const size_t bytes = (n * sizeof(T) + alignment - 1) / alignment * alignment;
    void* const memory = std::aligned_alloc(alignment, bytes);
    if (memory == nullptr) throw std::bad_alloc();
    wish_large_pages(memory, bytes);
    return static_cast<T*>(memory);
  }
  void deallocate(T* memory, size_t) { std::free(memory); }

  template <typename U>
  bool operator==(const BigAllocator<U>&) const {
    return true;
  }
};

template <typename T>
using BigVector = std::vector<T, BigAllocator<T>>;

}  // namespace scape
