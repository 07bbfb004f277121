// Calls that the real NCCL makes to its own exported functions, and so to this library again.
#pragma once

namespace scape::interposer {

// Held by whoever calls the real NCCL: calls of this thread meanwhile are its own, and go straight
// on.
class Entered {
 public:
  Entered() : outermost_(!inside_) { inside_ = true; }
  ~Entered() {
    if (outermost_) inside_ = false;
  }
  Entered(const Entered&) = delete;
  Entered& operator=(const Entered&) = delete;
  bool outermost() const { return outermost_; }

 private:
  static constinit inline thread_local bool inside_ = false;
  const bool outermost_;
};

}  // namespace scape::interposer
