// What the plugin counts of each device, over all its connections and groups in this process, past
// ones included. Bytes and messages are the transports' own counters, read when somebody asks, and
// all else is off the way of a message that moves: counting costs nothing there.
//
// Everything may be used by any thread.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "plugin/net/device.h"
#include "plugin/transport/transport.h"

namespace scape::net {

class Counter {
 public:
  void add(uint64_t more = 1) { value_.fetch_add(more, std::memory_order_relaxed); }
  void take(uint64_t less = 1) { value_.fetch_sub(less, std::memory_order_relaxed); }
  uint64_t value() const { return value_.load(std::memory_order_relaxed); }

 private:
  std::atomic<uint64_t> value_{0};
};

struct Interface {
  enum Kind : size_t { kNet, kCollNet, kCount };
};

struct Direction {
  enum Kind : size_t { kSend, kReceive, kCount };
};

// What had to be done again. Posts are the transports' to count.
struct Retry {
  enum Kind : size_t {
    kSend,        // isend without a request: all of the connection's are under way
    kReceive,     // irecv, likewise
    kConnect,     // connect that has no connection yet
    kAccept,      // accept, likewise
    kCollective,  // a collective without a request
    kAddress,     // a further address of the peer, after one that was not reached
    kCount
  };
};

struct Error {
  enum Kind : size_t {
    kSend,        // connections that failed once they were made, of those who send
    kReceive,     // of those who receive
    kConnect,     // calls of connect that failed
    kAccept,      // calls of accept, strangers left out
    kJoin,        // groups that did not come about
    kCollective,  // groups that failed once they were made
    kRegister,    // registrations that the library refused
    kCount
  };
};

class DeviceCounters {
 public:
  DeviceCounters(std::string device, std::string library)
      : device_(std::move(device)), library_(std::move(library)) {}

  const std::string& device() const { return device_; }
  const std::string& library() const { return library_; }

  Counter retries[Retry::kCount];
  Counter errors[Error::kCount];
  Counter connections_opened[Direction::kCount], connections[Direction::kCount];
  Counter groups_opened, groups;
  // Made with the library; served by one that was there; there now.
  Counter registrations[Interface::kCount], registration_hits[Interface::kCount],
      registered[Interface::kCount];

  // The transport's traffic is the device's from its first message on, and remains so when it is
  // taken out, before it is destroyed. How many are left is what taking one out returns.
  void add_transport(Interface::Kind interface, const plugin::Transport* transport);
  size_t remove_transport(Interface::Kind interface, const plugin::Transport* transport);
  plugin::TransportCounters traffic(Interface::Kind interface) const;

 private:
  const std::string device_, library_;
  mutable std::mutex mutex_;
  std::vector<const plugin::Transport*> transports_[Interface::kCount];
  plugin::TransportCounters past_[Interface::kCount];
};

// Of the device; of several that are joined, the first one's. Made at the first call, never
// destroyed.
DeviceCounters& counters_of(const Devices& devices, const Device& device);

}  // namespace scape::net
