// Counts of one direction of a transport's traffic.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace scape::plugin {

// Written by whoever drives the transport, one at a time, and read by anybody.
struct Traffic {
  std::atomic<uint64_t> bytes{0}, messages{0}, posted_again{0};

  void add(size_t more) {
    bytes.store(bytes.load(std::memory_order_relaxed) + more, std::memory_order_relaxed);
    messages.store(messages.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
  }
  void add_posted_again() {
    posted_again.store(posted_again.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
  }
};

}  // namespace scape::plugin
