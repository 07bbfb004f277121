// A worker: a transport on each rail of a device, shared by connections, with what goes with them:
// the memory registered on them, the peers they know. A rail is a physical device; most devices
// have one.
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
  std::vector<void*> regions;  // the transports', by rail
  int handles = 0;
};

// What a peer needs to know of a rail.
struct RailAddress {
  uint32_t speed_mbps = 1;
  std::vector<std::byte> address;
};

// Of a connection: a rail at each end.
struct Channel {
  int rail = 0;  // here
  int peer = -1;
  uint32_t weight = 1;  // the slower one's speed; the same on both sides
};

// Everything but the mutex, and what says otherwise, needs the mutex.
class Worker {
 public:
  static Status make(const Devices& devices, const Device& device, std::shared_ptr<Worker>* out);
  // With the last connection: waits a moment until all that was sent has left, unless a peer was
  // lost. The last worker of a device has the statistics written.
  ~Worker();

  std::mutex& mutex() { return mutex_; }
  const std::string& library() const { return counters_of_rail(0).library(); }
  plugin::Transport& transport(int rail) { return *rails_[static_cast<size_t>(rail)].transport; }
  // The physical device's name.
  const std::string& name_of(int rail) const {
    return counters_of_rail(static_cast<size_t>(rail)).device();
  }
  const std::vector<RailAddress>& addresses() const { return addresses_; }
  // What is not of one rail counts with the first one's device. Thread-safe.
  DeviceCounters& counters() { return counters_of_rail(0); }

  // How many connections it can carry without one's receives keeping another's from their turn.
  // Thread-safe: room is taken and given back by whoever has made or ends a connection.
  bool take_place();
  void give_place_back() { --places_; }

  // The channels of the connection with this number to a worker with these rails: as many as the
  // side with fewer has. Connections to the same process share what the transports know of it.
  Status channels_to(const std::vector<RailAddress>& rails, const std::string& who, uint32_t number,
                     std::vector<Channel>* out);

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
  struct Rail {
    DeviceCounters* counters = nullptr;
    std::unique_ptr<plugin::Transport> transport;
    std::vector<std::pair<std::vector<std::byte>, int>> peers;  // by address
  };

  Worker() = default;
  DeviceCounters& counters_of_rail(size_t rail) const { return *rails_[rail].counters; }
  void deregister(const Registration& registration);
  void move(Rail* rail, bool* ended);

  std::mutex mutex_;
  std::vector<Rail> rails_;
  std::vector<RailAddress> addresses_;
  int capacity_ = 0;
  std::atomic<int> places_{0};
  uint32_t connections_ = 0;
  bool lost_ = false;
  bool counted_ = false;  // the transports are among their devices'
  std::map<std::pair<uintptr_t, size_t>, Registration> registrations_;
  std::vector<std::unique_ptr<Connection>> closed_;
};

}  // namespace scape::net
