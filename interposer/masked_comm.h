// A communicator as registered buffers see it, whatever the mode: of host mode (host_comm.h), or of
// the real NCCL (device_comm.h).
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "base/status.h"
#include "plugin/communicator.h"
#include "plugin/masked/engine.h"
#include "plugin/masked/refresher.h"
#include "plugin/stream.h"

namespace scape::interposer {

// An all-reduce that may become a masked one.
struct AllReduceCall {
  const void* send = nullptr;
  const void* recv = nullptr;
  size_t count = 0;
  plugin::DataType type = plugin::DataType::kFloat32;
  plugin::ReduceOp op = plugin::ReduceOp::kSum;
  plugin::Stream stream = {};
  bool factor_known = true;  // false: a premultiplied sum whose factor the host cannot read
};

// What keeps a call dense that its registration lets be masked.
struct Obstacle {
  std::string why;    // empty: nothing does
  bool said = false;  // to the user already, for all calls that it meets
};

class MaskedComm {
 public:
  MaskedComm();
  virtual ~MaskedComm() = default;
  MaskedComm(const MaskedComm&) = delete;
  MaskedComm& operator=(const MaskedComm&) = delete;

  // Of this communicator alone, as long as the process lives.
  uint64_t id() const { return id_; }
  // -1 and 0 where it cannot be told yet.
  virtual int rank() const = 0;
  virtual int size() const = 0;

  // Asked before all that follows. An error refuses the call.
  virtual Status find_obstacle(const AllReduceCall& call, Obstacle* out) = 0;
  virtual const std::shared_ptr<plugin::Communicator>& shared() const = 0;
  virtual std::shared_ptr<plugin::Refresher> refresher() = 0;
  virtual Status make_engine(std::shared_ptr<plugin::Engine>* out) = 0;

  // Before a local step that the caller orders on `stream` and that reads or writes these
  // addresses, null ones apart: gives the stream that the buffer is to know. USAGE, ARGUMENT.
  virtual Status begin_step(void* stream, std::initializer_list<const void*> addresses,
                            plugin::Stream* out) = 0;

  // Held by whoever uses one of its buffers, where they are for one thread at a time.
  using Hold = std::unique_lock<std::recursive_mutex>;
  virtual Hold hold() = 0;

  // Whether its buffers are in memory of the host.
  virtual bool on_host() const = 0;

 private:
  const uint64_t id_;
};

// Those of this process that live.
std::vector<std::shared_ptr<MaskedComm>> live_comms();

}  // namespace scape::interposer
