// A worker: one transport on one device, shared by connections, with what goes with it: the memory
// registered on it, the peers it knows.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "base/status.h"
#include "plugin/net/abi/common.h"
#include "plugin/net/counters.h"
#include "plugin/net/device.h"
#include "plugin/transport/transport.h"

namespace scape::net {

class Connection;

// Memory that NCCL has registered. Handles on the same bytes share one; it ends with the last of
// them, so memory that is freed (deregistered before, as NCCL does) and mapped again is always
// registered anew.
struct Registration {
  std::pair<uintptr_t, size_t> range;
  void* region = nullptr;  // the transport's
  int handles = 0;
};

// Everything but the mutex, and what says otherwise, needs the mutex.
class Worker {
 public:
  static Status make(const Devices& devices, int device, std::shared_ptr<Worker>* out);
  // With the last connection: waits a moment until all that was sent has left, unless a peer was
  // lost. The last worker of a device has the statistics written.
  ~Worker();

  std::mutex& mutex() { return mutex_; }
  const std::string& library() const { return counters_->library(); }
  plugin::Transport& transport() { return *transport_; }
  const std::vector<std::byte>& address() const { return address_; }
  // The device's. Thread-safe.
  DeviceCounters& counters() { return *counters_; }

  // How many connections it can carry without one's receives keeping another's from their turn.
  // Thread-safe: room is taken and given back by whoever has made or ends a connection.
  bool take_place();
  void give_place_back() { --places_; }

  // The peer with this address, which connections to the same process share.
  Status peer(const std::vector<std::byte>& address, const std::string& who, int* out);

  // A number for a connection that receives here. Never given twice.
  uint32_t next_connection() { return ++connections_; }

  Status register_memory(void* data, size_t bytes, Registration** out);
  Status deregister_memory(Registration* registration);

  // Moves messages on and tells their requests.
  void progress();

  // A peer died: what was sent to it will never leave.
  void note_loss() { lost_ = true; }
  // Waits until all that was sent has left, two seconds at most.
  void flush();

  // Keeps a closed connection whose messages the transport has not given back yet.
  void keep(std::unique_ptr<Connection> closed);

 private:
  Worker() = default;

  std::mutex mutex_;
  DeviceCounters* counters_ = nullptr;
  std::unique_ptr<plugin::Transport> transport_;
  std::vector<std::byte> address_;
  int capacity_ = 0;
  std::atomic<int> places_{0};
  uint32_t connections_ = 0;
  bool lost_ = false;
  bool counted_ = false;  // the transport is among the device's
  std::vector<std::pair<std::vector<std::byte>, int>> peers_;  // by address
  std::map<std::pair<uintptr_t, size_t>, Registration> registrations_;
  std::vector<std::unique_ptr<Connection>> closed_;
};

}  // namespace scape::net
