// The registered address ranges, and who finds them.
//
// find() is on the path of every hooked call: an address outside all ranges costs two loads. All
// functions are thread-safe.
#pragma once

#include <array>
#include <atomic>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <vector>

#include "base/status.h"
#include "plugin/masked/dense_reasons.h"
#include "plugin/masked/masked_buffer.h"
#include "scape/scape.h"

namespace scape::interposer {

// How many unmatched calls a registration waits for before it is reported.
inline constexpr uint64_t kPatience = 10;

struct Buffer;  // interposer/buffers.h: the state of one called range on one communicator

// One registration. Lives as long as anyone holds it; `dropped` once it is unregistered.
struct Registration {
  uint64_t id = 0;     // 0: of calls that bring their options themselves
  uintptr_t base = 0;  // theirs has none: each call says where its buffer is
  size_t count = 0;
  scape_dtype dtype = SCAPE_FLOAT32;
  plugin::BufferConfig config;

  size_t element_size() const { return dtype == SCAPE_FLOAT32 ? 4 : 2; }
  size_t bytes() const { return count * element_size(); }
  uintptr_t end() const { return base + bytes(); }
  const char* name() const { return config.name.c_str(); }

  // Hooked calls on the range that no Buffer saw: other collectives, types and lengths.
  std::atomic<uint64_t> intercepted{0};
  std::atomic<uint64_t> fallbacks{0};
  std::atomic<uint64_t> hits{0};
  std::atomic<uint64_t> misses_at_hit{0};  // what Registry::misses_near() was at the last hit
  std::atomic<bool> warned_unmatched{false};
  std::atomic<bool> warned_partial{false};
  std::atomic<bool> on_large_pages{false};  // as far as the system could; asked for once

  std::mutex mutex;  // guards what follows
  bool dropped = false;
  std::vector<std::shared_ptr<Buffer>> buffers;
  std::map<size_t, size_t> covered;  // disjoint [first, second) that calls have met, in elements
  plugin::DenseReasons reasons;
  scape_stats retired{};  // of buffers whose communicator is gone
};

// A range of a registration as a call names it.
struct Hit {
  std::shared_ptr<Registration> registration;
  size_t offset = 0;  // elements from the registration's start
  size_t count = 0;
};

class Registry {
 public:
  // Refuses a null or misaligned address, a count of 0 or beyond 2^33, and a range that overlaps
  // another.
  Status add(void* buffer, size_t count, scape_dtype dtype, plugin::BufferConfig config,
             std::shared_ptr<Registration>* out);

  // The registration of calls that bring their options themselves, made at the first of a name. It
  // is found by its name alone, never by an address. USAGE where the count, the type or an option
  // is not that of the calls before.
  Status of_call(size_t count, scape_dtype dtype, plugin::BufferConfig config,
                 std::shared_ptr<Registration>* out);

  // Takes it out; later calls do not find it. NOT_FOUND when there is none of this number.
  Status remove(uint64_t id, std::shared_ptr<Registration>* out);

  std::shared_ptr<Registration> by_id(uint64_t id) const;

  // The registration whose range holds `address`, or null.
  std::shared_ptr<Registration> find(const void* address) const {
    const uintptr_t value = reinterpret_cast<uintptr_t>(address);
    // Two relaxed loads: a thread that registers and then calls sees its own stores.
    if (value < lowest_.load(std::memory_order_relaxed) ||
        value >= highest_.load(std::memory_order_relaxed)) {
      return nullptr;
    }
    return find_slowly(value);
  }

  // A hooked call met the registration.
  void count_hit(Registration& registration);

  // A hooked call of `bytes` met no registration. Names those of about that size that have waited
  // for kPatience such calls in vain: in `unmatched`, once each.
  void count_miss(size_t bytes, std::vector<std::shared_ptr<Registration>>* unmatched) {
    if ((size_classes_.load(std::memory_order_relaxed) & near_classes(bytes)) == 0) return;
    misses_[static_cast<size_t>(size_class(bytes))].fetch_add(1, std::memory_order_relaxed);
    const uint64_t total = total_misses_.fetch_add(1, std::memory_order_relaxed) + 1;
    if (total >= next_scan_.load(std::memory_order_relaxed)) scan(total, unmatched);
  }

  // Calls of about the registration's size that met none, since its last hit.
  uint64_t misses_of(const Registration& registration) const {
    return misses_near(registration.bytes()) -
           registration.misses_at_hit.load(std::memory_order_relaxed);
  }

  // Those of calls included.
  std::vector<std::shared_ptr<Registration>> all() const;
  std::vector<std::shared_ptr<Registration>> of_calls() const;

 private:
  // Sizes are alike within three powers of two: far enough for bytes given as elements.
  static constexpr int kNear = 3;
  static int size_class(size_t bytes) { return std::bit_width(bytes | 1) - 1; }
  static uint64_t near_classes(size_t bytes) {
    constexpr uint64_t kWindow = (uint64_t{1} << (2 * kNear + 1)) - 1;
    const int middle = size_class(bytes);
    return middle >= kNear ? kWindow << (middle - kNear) : kWindow >> (kNear - middle);
  }
  uint64_t misses_near(size_t bytes) const;
  std::shared_ptr<Registration> find_slowly(uintptr_t address) const;
  void scan(uint64_t total, std::vector<std::shared_ptr<Registration>>* unmatched);
  void refresh_bounds();

  std::atomic<uintptr_t> lowest_{UINTPTR_MAX};
  std::atomic<uintptr_t> highest_{0};
  std::atomic<uint64_t> size_classes_{
      0};  // bit c: a registration of 2^c .. 2^(c+1) - 1 bytes is live
  std::array<std::atomic<uint64_t>, 64> misses_{};  // by size class
  std::atomic<uint64_t> total_misses_{0};
  std::atomic<uint64_t> next_scan_{
      UINT64_MAX};  // at this many misses some registration may have waited enough
  mutable std::shared_mutex mutex_;
  std::map<uintptr_t, std::shared_ptr<Registration>> by_address_;
  std::map<uint64_t, std::shared_ptr<Registration>> by_id_;
  std::map<std::string, std::shared_ptr<Registration>> of_calls_;  // by name
  uint64_t next_id_ = 1;
};

// Marks [offset, offset + count) as met by a call and returns how many elements of the registration
// have been met so far. The caller holds registration.mutex.
size_t cover(Registration& registration, size_t offset, size_t count);

Registry& registry();

}  // namespace scape::interposer
