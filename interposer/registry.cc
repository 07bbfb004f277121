#include "interposer/registry.h"

#include <algorithm>

namespace scape::interposer {

Status Registry::add(void* buffer, size_t count, scape_dtype dtype, plugin::BufferConfig config,
                     std::shared_ptr<Registration>* out) {
  constexpr size_t kMostElements = size_t{1} << 33;
  const uintptr_t base = reinterpret_cast<uintptr_t>(buffer);
  if (buffer == nullptr)
    return error(SCAPE_ERR_ARGUMENT, "buffer is null; pass the address of the elements");
  if (count == 0 || count > kMostElements) {
    return error(SCAPE_ERR_ARGUMENT,
                 "count %zu is outside 1 .. 2^33; register the elements that are reduced", count);
  }
  auto registration = std::make_shared<Registration>();
  registration->base = base;
  registration->count = count;
  registration->dtype = dtype;
  registration->config = std::move(config);
  if (base % registration->element_size() != 0) {
    return error(SCAPE_ERR_ARGUMENT, "buffer %p is not aligned to its elements of %zu bytes",
                 buffer, registration->element_size());
  }
  if (base > UINTPTR_MAX - registration->bytes()) {
    return error(SCAPE_ERR_ARGUMENT, "%zu elements at %p pass the end of the address space", count,
                 buffer);
  }
  const std::unique_lock lock(mutex_);
  const auto after = by_address_.lower_bound(registration->end());
  if (after != by_address_.begin()) {
    const Registration& before = *std::prev(after)->second;
    if (before.end() > base) {
      return error(SCAPE_ERR_ARGUMENT,
                   "[%p, +%zu elements) overlaps the registration \"%s\" at [%p, +%zu elements); "
                   "unregister that "
                   "first",
                   buffer, count, before.name(), reinterpret_cast<void*>(before.base),
                   before.count);
    }
  }
  registration->id = next_id_++;
  registration->misses_at_hit.store(misses_near(registration->bytes()), std::memory_order_relaxed);
  next_scan_.store(std::min(next_scan_.load(), total_misses_.load() + kPatience));
  by_address_.emplace(base, registration);
  by_id_.emplace(registration->id, registration);
  refresh_bounds();
  *out = std::move(registration);
  return {};
}

Status Registry::of_call(size_t count, scape_dtype dtype, plugin::BufferConfig config,
                         std::shared_ptr<Registration>* out) {
  const std::unique_lock lock(mutex_);
  std::shared_ptr<Registration>& known = of_calls_[config.name];
  if (known == nullptr) {
    known = std::make_shared<Registration>();
    known->count = count;
    known->dtype = dtype;
    known->config = std::move(config);
  } else if (known->count != count) {
    return error(SCAPE_ERR_USAGE,
                 "SCAPE_CALL_NAME \"%s\" named %zu elements before and %zu now; give each buffer a "
                 "name of its own",
                 known->name(), known->count, count);
  } else if (known->dtype != dtype || !(known->config == config)) {
    return error(
        SCAPE_ERR_USAGE,
        "the options of \"%s\", or its type, are not those of its calls before (sparsity %g "
        "then, %g now); keep them, or take another name",
        known->name(), known->config.sparsity, config.sparsity);
  }
  *out = known;
  return {};
}

Status Registry::remove(uint64_t id, std::shared_ptr<Registration>* out) {
  const std::unique_lock lock(mutex_);
  const auto found = by_id_.find(id);
  if (found == by_id_.end()) {
    return error(SCAPE_ERR_NOT_FOUND,
                 "no such registration; it was unregistered before, or never made");
  }
  *out = found->second;
  by_address_.erase(found->second->base);
  by_id_.erase(found);
  refresh_bounds();
  return {};
}

std::shared_ptr<Registration> Registry::by_id(uint64_t id) const {
  const std::shared_lock lock(mutex_);
  const auto found = by_id_.find(id);
  return found == by_id_.end() ? nullptr : found->second;
}

std::shared_ptr<Registration> Registry::find_slowly(uintptr_t address) const {
  const std::shared_lock lock(mutex_);
  const auto after = by_address_.upper_bound(address);
  if (after == by_address_.begin()) return nullptr;
  const auto& candidate = std::prev(after)->second;
  return address < candidate->end() ? candidate : nullptr;
}

uint64_t Registry::misses_near(size_t bytes) const {
  uint64_t total = 0;
  for (uint64_t near = near_classes(bytes); near != 0; near &= near - 1) {
    total += misses_[static_cast<size_t>(std::countr_zero(near))].load(std::memory_order_relaxed);
  }
  return total;
}

void Registry::count_hit(Registration& registration) {
  registration.hits.fetch_add(1, std::memory_order_relaxed);
  registration.misses_at_hit.store(misses_near(registration.bytes()), std::memory_order_relaxed);
}

void Registry::scan(uint64_t total, std::vector<std::shared_ptr<Registration>>* unmatched) {
  const std::shared_lock lock(mutex_);
  uint64_t shortest = kPatience;
  for (const auto& [id, registration] : by_id_) {
    if (registration->warned_unmatched.load(std::memory_order_relaxed)) continue;
    const uint64_t misses = misses_of(*registration);
    if (misses < kPatience) {
      shortest = std::min(shortest, kPatience - misses);
    } else if (!registration->warned_unmatched.exchange(true)) {
      unmatched->push_back(registration);
    }
  }
  next_scan_.store(total + shortest, std::memory_order_relaxed);
}

std::vector<std::shared_ptr<Registration>> Registry::all() const {
  const std::shared_lock lock(mutex_);
  std::vector<std::shared_ptr<Registration>> list;
  for (const auto& [id, registration] : by_id_) list.push_back(registration);
  for (const auto& [name, registration] : of_calls_) list.push_back(registration);
  return list;
}

std::vector<std::shared_ptr<Registration>> Registry::of_calls() const {
  const std::shared_lock lock(mutex_);
  std::vector<std::shared_ptr<Registration>> list;
  for (const auto& [name, registration] : of_calls_) list.push_back(registration);
  return list;
}

void Registry::refresh_bounds() {
  uint64_t classes = 0;
  for (const auto& [id, registration] : by_id_)
    classes |= uint64_t{1} << size_class(registration->bytes());
  size_classes_.store(classes, std::memory_order_relaxed);
  lowest_.store(by_address_.empty() ? UINTPTR_MAX : by_address_.begin()->first,
                std::memory_order_relaxed);
  highest_.store(by_address_.empty() ? 0 : by_address_.rbegin()->second->end(),
                 std::memory_order_relaxed);
}

size_t cover(Registration& registration, size_t offset, size_t count) {
  size_t begin = offset;
  size_t end = offset + count;
  auto& covered = registration.covered;
  auto next = covered.lower_bound(begin);
  if (next != covered.begin() && std::prev(next)->second >= begin) --next;
  while (next != covered.end() && next->first <= end) {
    begin = std::min(begin, next->first);
    end = std::max(end, next->second);
    next = covered.erase(next);
  }
  covered.emplace(begin, end);
  size_t total = 0;
  for (const auto& [from, to] : covered) total += to - from;
  return total;
}

Registry& registry() {
  static Registry* const instance = new Registry;  // never destroyed: used until the last moment
  return *instance;
}

}  // namespace scape::interposer
