#include "device_memory.h"

#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstring>

namespace simgpu {
namespace {

constexpr size_t kPage = 4096;
constexpr size_t kAlign = 256;  // cudaMalloc's
constexpr unsigned char kFill = 0xff;

size_t round_up(size_t value, size_t unit) { return (value + unit - 1) / unit * unit; }

// What the handler of faults reads, without a lock: entries are only added, and change in one word.
struct Known {
  std::atomic<uintptr_t> begin{0};
  size_t bytes = 0;
  uintptr_t low = 0, high = 0;  // with the guards
  uint64_t number = 0;
  Place place = Place::kDevice;
  std::atomic<bool> live{false};
};
constexpr size_t kKnown = 1 << 16;
Known known[kKnown];
std::atomic<size_t> known_count{0};
struct sigaction before {};

void say(const char* text) { (void)!::write(STDERR_FILENO, text, std::strlen(text)); }
void say(uint64_t value) {
  char digits[24];
  size_t at = sizeof digits;
  do {
    digits[--at] = static_cast<char>('0' + value % 10);
    value /= 10;
  } while (value != 0);
  (void)!::write(STDERR_FILENO, digits + at, sizeof digits - at);
}

void on_fault(int signal, siginfo_t* info, void*) {
  const uintptr_t at = reinterpret_cast<uintptr_t>(info->si_addr);
  const size_t count = std::min(known_count.load(std::memory_order_acquire), kKnown);
  for (size_t i = 0; i < count; ++i) {
    const Known& one = known[i];
    if (at < one.low || at >= one.high) continue;
    const uintptr_t begin = one.begin.load(std::memory_order_relaxed);
    say("simgpu: memory fault ");
    if (at < begin) {
      say(begin - at);
      say(" bytes before");
    } else if (at >= begin + one.bytes) {
      say(at - begin - one.bytes);
      say(" bytes after");
    } else {
      say("at byte ");
      say(at - begin);
      say(" of");
    }
    say(one.place == Place::kDevice ? " device" : " page-locked");
    say(" allocation ");
    say(one.number);
    say(" (");
    say(one.bytes);
    say(one.live.load(std::memory_order_relaxed)
            ? (at >= begin && at < begin + one.bytes ? " bytes): touched by host code outside the "
                                                       "work of a stream\n"
                                                     : " bytes): out of bounds\n")
            : " bytes): it is freed\n");
    break;
  }
  // Back to who was there before: the access is repeated, and ends there.
  ::sigaction(signal, &before, nullptr);
}

void note(const Allocation& allocation, uintptr_t low, uintptr_t high) {
  const size_t at = known_count.load(std::memory_order_relaxed);
  if (at >= kKnown) return;  // messages say less then; nothing else does
  Known& entry = known[at];
  entry.bytes = allocation.bytes;
  entry.low = low;
  entry.high = high;
  entry.number = allocation.number;
  entry.place = allocation.place;
  entry.begin.store(allocation.begin, std::memory_order_relaxed);
  entry.live.store(true, std::memory_order_relaxed);
  known_count.store(at + 1, std::memory_order_release);
}

void note_freed(uint64_t number) {
  const size_t count = known_count.load(std::memory_order_relaxed);
  for (size_t i = 0; i < count; ++i) {
    if (known[i].number == number) known[i].live.store(false, std::memory_order_relaxed);
  }
}

}  // namespace

void DeviceMemory::start(bool guard) {
  struct sigaction action {};
  action.sa_sigaction = on_fault;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
  ::sigemptyset(&action.sa_mask);
  ::sigaction(SIGSEGV, &action, &before);
  if (!guard) return;
#if defined(__x86_64__)
  key_ = ::pkey_alloc(0, PKEY_DISABLE_ACCESS);
#endif
  guard_ = key_ >= 0 ? HostGuard::kKeys : HostGuard::kClosing;
  if (guard_ == HostGuard::kClosing) {
    say("simgpu: this machine has no memory protection keys: device memory is closed to host code "
        "only while no stream works\n");
  }
}

void* DeviceMemory::allocate(size_t bytes, Place place, int device) {
  Allocation made;
  made.bytes = bytes;
  made.place = place;
  made.device = device;
  const size_t used = round_up(std::max<size_t>(bytes, 1), kAlign);
  made.page_bytes = round_up(used, kPage);
  void* mapped = ::mmap(nullptr, made.page_bytes + 2 * kPage, PROT_NONE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapped == MAP_FAILED) return nullptr;
  made.pages = reinterpret_cast<uintptr_t>(mapped) + kPage;
  void* pages = reinterpret_cast<void*>(made.pages);
  ::mprotect(pages, made.page_bytes, PROT_READ | PROT_WRITE);
  std::memset(pages, kFill, made.page_bytes);
  made.begin = made.pages + made.page_bytes - used;
  made.number = next_number_++;
  if (place == Place::kDevice) {
#if defined(__x86_64__)
    if (guard_ == HostGuard::kKeys) {
      ::pkey_mprotect(pages, made.page_bytes, PROT_READ | PROT_WRITE, key_);
    }
#endif
    if (guard_ == HostGuard::kClosing && users_ == 0) {
      ::mprotect(pages, made.page_bytes, PROT_NONE);
    }
  }
  note(made, made.pages - kPage, made.pages + made.page_bytes + kPage);
  void* result = reinterpret_cast<void*>(made.begin);
  allocations_.emplace(made.begin, made);
  return result;
}

bool DeviceMemory::release(Allocation& allocation) {
  access_begins();
  const auto* bytes = reinterpret_cast<const unsigned char*>(allocation.begin);
  const size_t slack = allocation.pages + allocation.page_bytes - allocation.begin;
  bool clean = true;
  for (size_t i = allocation.bytes; i < slack && clean; ++i) clean = bytes[i] == kFill;
  access_ends();
  if (!clean) {
    std::fprintf(stderr, "simgpu: %s was written past its end, which showed when it was freed\n",
                 describe(allocation).c_str());
  }
  // Its pages go back to the system, its addresses to nobody.
  ::mmap(reinterpret_cast<void*>(allocation.pages), allocation.page_bytes, PROT_NONE,
         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  allocation.live = false;
  note_freed(allocation.number);
  return clean;
}

void DeviceMemory::add_registered(uintptr_t begin, size_t bytes) {
  Allocation made;
  made.begin = begin;
  made.bytes = bytes;
  made.place = Place::kPinned;
  made.registered = true;
  allocations_.insert_or_assign(begin, made);
}

void DeviceMemory::remove_registered(uintptr_t begin) { allocations_.erase(begin); }

Allocation* DeviceMemory::find(const void* address) {
  const uintptr_t at = reinterpret_cast<uintptr_t>(address);
  auto after = allocations_.upper_bound(at);
  if (after == allocations_.begin()) return nullptr;
  Allocation& found = std::prev(after)->second;
  return at < found.begin + std::max<size_t>(found.bytes, 1) ? &found : nullptr;
}

Allocation* DeviceMemory::find_exact(const void* address) {
  const auto found = allocations_.find(reinterpret_cast<uintptr_t>(address));
  return found != allocations_.end() ? &found->second : nullptr;
}

bool DeviceMemory::overlaps(uintptr_t begin, size_t bytes) const {
  return std::any_of(allocations_.begin(), allocations_.end(), [&](const auto& entry) {
    const Allocation& one = entry.second;
    return one.live && one.begin < begin + bytes && begin < one.begin + one.bytes;
  });
}

void DeviceMemory::access_begins() {
#if defined(__x86_64__)
  if (guard_ == HostGuard::kKeys) ::pkey_set(key_, 0);
#endif
  if (guard_ == HostGuard::kClosing && users_++ == 0) open(true);
}

void DeviceMemory::access_ends() {
#if defined(__x86_64__)
  if (guard_ == HostGuard::kKeys) ::pkey_set(key_, PKEY_DISABLE_ACCESS);
#endif
  if (guard_ == HostGuard::kClosing && --users_ == 0) open(false);
}

void DeviceMemory::open(bool opened) {
  for (const auto& [begin, one] : allocations_) {
    if (!one.live || one.place != Place::kDevice) continue;
    ::mprotect(reinterpret_cast<void*>(one.pages), one.page_bytes,
               opened ? PROT_READ | PROT_WRITE : PROT_NONE);
  }
}

std::string describe(const Allocation& allocation) {
  return std::string(allocation.place == Place::kDevice ? "device" : "page-locked") +
         " allocation " + std::to_string(allocation.number) + " (" +
         std::to_string(allocation.bytes) + " bytes)";
}

}  // namespace simgpu
