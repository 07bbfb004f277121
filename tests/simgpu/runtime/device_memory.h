// Device memory and page-locked host memory: where it lies, who may touch it, what became of it.
//
// Each allocation stands alone between pages that fault, its end at the upper one; addresses are
// never used again. Fresh memory is filled with ones (not-a-number, as floats), freed memory
// faults.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>

namespace simgpu {

enum class Place { kPageable, kPinned, kDevice };

struct Allocation {
  uintptr_t begin = 0;
  size_t bytes = 0;
  uintptr_t pages = 0;  // without the guards
  size_t page_bytes = 0;
  Place place = Place::kDevice;
  int device = 0;
  bool registered = false;  // the program's own memory, named by cudaHostRegister
  bool live = true;
  uint64_t number = 0;
  bool freeing = false;  // a cudaFreeAsync of it is enqueued
};

// How host code is kept off device memory.
enum class HostGuard { kNone = 0, kKeys = 1, kClosing = 2 };

// Not thread-safe, but for access_begins() with its end under protection keys.
class DeviceMemory {
 public:
  // Chooses the guard; asks for memory protection keys where `guard` says so.
  void start(bool guard);
  HostGuard guard() const { return guard_; }

  // Null when the system has none.
  void* allocate(size_t bytes, Place place, int device);
  // Makes it fault from now on; a line to stderr, and false, where something was written past its
  // end.
  bool release(Allocation& allocation);
  void add_registered(uintptr_t begin, size_t bytes);
  void remove_registered(uintptr_t begin);

  // The allocation that holds the address, live or not; null where there is none.
  Allocation* find(const void* address);
  // That which begins there.
  Allocation* find_exact(const void* address);
  bool overlaps(uintptr_t begin, size_t bytes) const;
  const std::map<uintptr_t, Allocation>& all() const { return allocations_; }

  // Around a work of a stream, on its thread.
  void access_begins();
  void access_ends();

 private:
  void open(bool opened);

  std::map<uintptr_t, Allocation> allocations_;  // by begin
  HostGuard guard_ = HostGuard::kNone;
  int key_ = -1;
  int users_ = 0;  // works that may touch device memory now
  uint64_t next_number_ = 1;
};

// How an address lies to what was allocated, for messages.
std::string describe(const Allocation& allocation);

}  // namespace simgpu
