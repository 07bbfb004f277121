// A buffer for one side of a call, with guard bytes on both ends.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstring>

#include "base/status.h"

namespace scape::perf {

// Page-aligned memory, touched at once so that no timed call takes page faults.
class Memory {
 public:
  Memory() = default;
  ~Memory() {
    if (base_ != nullptr) munmap(base_, mapped_);
  }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  Status allocate(size_t size) {
    mapped_ = kMargin + (size + kGuard + kMargin - 1) / kMargin * kMargin;
    void* mapped = mmap(nullptr, mapped_, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
    if (mapped == MAP_FAILED) {
      return error(SCAPE_ERR_MEMORY, "no memory for a buffer of %zu bytes; lower -e or -g", size);
    }
    base_ = static_cast<std::byte*>(mapped);
    std::memset(base_, 0, mapped_);
    return Status::Ok();
  }

  std::byte* data() const { return base_ + kMargin; }

  // Around [begin, begin + size), which lies in the buffer: writes the guard, counts its bytes that
  // changed.
  void set_guard(std::byte* begin, size_t size) const {
    std::memset(begin - kGuard, kGuardByte, kGuard);
    std::memset(begin + size, kGuardByte, kGuard);
  }
  size_t broken_guard(const std::byte* begin, size_t size) const {
    size_t broken = 0;
    for (size_t i = 0; i < kGuard; ++i) {
      broken += begin[i - kGuard] != std::byte{kGuardByte};
      broken += begin[size + i] != std::byte{kGuardByte};
    }
    return broken;
  }

 private:
  static constexpr size_t kMargin = 4096;
  static constexpr size_t kGuard = 64;
  static constexpr unsigned char kGuardByte = 0xa7;
  std::byte* base_ = nullptr;
  size_t mapped_ = 0;
};

}  // namespace scape::perf
