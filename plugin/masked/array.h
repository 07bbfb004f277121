// Arrays of a place: memory that an engine gives, and that the host may not be able to touch.
#pragma once

#include <algorithm>
#include <cstddef>
#include <new>
#include <type_traits>
#include <utility>
#include <vector>

#include "plugin/stream.h"

namespace scape::plugin {

// Where an array of a place is kept. Memory of the host is page-locked, and reached from the place
// over its link to the host; where the place is the host they are the same.
enum class Home { kPlace, kHost };

// The memory of one place. Of 0 bytes nothing is touched.
class MemorySpace {
 public:
  virtual ~MemorySpace() = default;

  // Aligned to a cache line at least; what is in it is unspecified. Null where there is none left:
  // a place may be a library of its own, which throws nothing.
  virtual void* allocate(size_t bytes, Home home) = 0;
  // Of allocate(), with the same size. What was enqueued before may still use it.
  virtual void release(void* memory, size_t bytes) = 0;
  virtual void set(Stream stream, void* memory, std::byte value, size_t bytes) = 0;
  // To and from host memory, after what `stream` holds; done when they return.
  virtual void copy_in(Stream stream, void* memory, const void* host, size_t bytes) = 0;
  virtual void copy_out(Stream stream, void* host, const void* memory, size_t bytes) = 0;

  // Host memory that works on streams reach, for copies that nobody waits for. Null where there is
  // none left.
  virtual void* allocate_staging(size_t bytes) = 0;
  // Once no work uses it any more.
  virtual void release_staging(void* memory, size_t bytes) = 0;
  // Between memory of allocate() and of allocate_staging(), in the order of the stream.
  virtual void copy(Stream stream, void* to, const void* from, size_t bytes) = 0;
};

// Owns its elements; the memory they are of must outlive it.
template <typename T>
class Array {
  static_assert(std::is_trivially_copyable_v<T>);

 public:
  explicit Array(MemorySpace& memory, Home home = Home::kPlace) : memory_(&memory), home_(home) {}
  Array(Array&& other) noexcept : memory_(other.memory_), home_(other.home_) { swap(other); }
  Array& operator=(Array&& other) noexcept {
    swap(other);
    return *this;
  }
  ~Array() { release(); }

  T* data() { return data_; }
  const T* data() const { return data_; }
  size_t size() const { return size_; }
  bool empty() const { return size_ == 0; }
  Home home() const { return home_; }

  // Makes it n elements, none of which is kept. Memory of more than twice that size is given back.
  // Throws std::bad_alloc.
  void resize(size_t n) {
    if (n > capacity_ || n + n < capacity_) {
      release();
      if (n > 0) {
        data_ = static_cast<T*>(memory_->allocate(n * sizeof(T), home_));
        if (data_ == nullptr) throw std::bad_alloc();
      }
      capacity_ = n;
    }
    size_ = n;
  }
  // The memory is kept.
  void clear() { size_ = 0; }
  // n elements of bytes that are all `value`.
  void fill(size_t n, std::byte value, Stream stream) {
    resize(n);
    memory_->set(stream, data_, value, n * sizeof(T));
  }
  // n elements from `host`, which need not be aligned.
  void assign(const void* host, size_t n, Stream stream) {
    resize(n);
    memory_->copy_in(stream, data_, host, n * sizeof(T));
  }
  // All elements to `host`, which need not be aligned.
  void copy_to(void* host, Stream stream) const {
    memory_->copy_out(stream, host, data_, size_ * sizeof(T));
  }
  std::vector<T> to_host(Stream stream) const {
    std::vector<T> host(size_);
    copy_to(host.data(), stream);
    return host;
  }
  void swap(Array& other) noexcept {
    std::swap(memory_, other.memory_);
    std::swap(home_, other.home_);
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    std::swap(capacity_, other.capacity_);
  }

 private:
  void release() {
    if (data_ != nullptr) memory_->release(data_, capacity_ * sizeof(T));
    data_ = nullptr;
    size_ = capacity_ = 0;
  }

  MemorySpace* memory_;
  Home home_;
  T* data_ = nullptr;
  size_t size_ = 0;
  size_t capacity_ = 0;
};

// visit(elements on the host, their number) for data[0 .. n) in order, a part at a time.
template <typename T, typename Visit>
void visit_on_host(MemorySpace& memory, Stream stream, const T* data, size_t n, Visit&& visit) {
  constexpr size_t kPart = (size_t{1} << 18) / sizeof(T);
  std::vector<T> part(std::min(n, kPart));
  for (size_t begin = 0; begin < n; begin += kPart) {
    const size_t size = std::min(kPart, n - begin);
    memory.copy_out(stream, part.data(), data + begin, size * sizeof(T));
    visit(part.data(), size);
  }
}

}  // namespace scape::plugin
