// A group: the processes that NCCL's CollNet does collectives over, by the library's own (schedules
// run by an executor) on a transport of the group's.
//
// Calls are taken in one order, the same on all ranks. A few are under way at once, the others wait
// for their turn. Everything moves in begin() and test(); there is no thread, and calls that repeat
// themselves allocate nothing (but for windows in several parts, at first).
#pragma once

#include <array>
#include <cstddef>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "base/status.h"
#include "plugin/communicator.h"
#include "plugin/net/abi/common.h"
#include "plugin/net/counters.h"
#include "plugin/net/handshake.h"
#include "plugin/transport/socket.h"

namespace scape::net {

// Where a process waits to join a group.
struct Door {
  DeviceCounters* counters = nullptr;  // of the device, a physical one
  plugin::Socket socket;
  Invitation invitation;
};

// Memory that NCCL has registered with a group.
struct GroupMemory {
  const std::byte* data = nullptr;
  size_t bytes = 0;
  void* region = nullptr;  // the communicator's
};

struct Part {
  GroupMemory* memory = nullptr;  // that it lies in; may be null
  std::byte* address = nullptr;
  size_t bytes = 0;
};

// A stretch of the vector that all ranks' blocks make, in rank order.
struct Window {
  size_t bytes_per_rank = 0;
  size_t offset = 0;
  size_t bytes = 0;
};

struct GroupCall {
  enum class Kind { kAllReduce, kAllGather, kReduceScatter };
  Kind kind = Kind::kAllReduce;
  plugin::DataType type = plugin::DataType::kUint8;
  plugin::ReduceOp op = plugin::ReduceOp::kSum;
  size_t count = 0;  // kAllReduce: elements
  Window window;     // the others
  // What lies in one piece. Of an all-gather's sending and a reduce-scatter's receiving side: what
  // the window has of this rank's block.
  Part send, receive;
};

class Group;

// What NCCL holds of a call.
struct GroupRequest {
  enum class State { kFree, kWaiting, kUnderWay, kHandingOut, kDone };
  Group* group = nullptr;
  State state = State::kFree;
  GroupCall call;
  plugin::WorkPtr work;
  size_t result_bytes = 0;
  // A window in several parts is staged in one piece: how far it has been copied.
  std::vector<Part> parts;
  std::vector<std::byte> staging;
  size_t copied = 0;
};

class Group {
 public:
  // At once: more than NCCL ever asks for.
  static constexpr size_t kRequests = 128;
  // The largest call, which the properties name.
  static constexpr size_t kMaxBytes = size_t{512} << 20;

  // Blocking: waits until all have come to rank 0's door, or SCAPE_BOOTSTRAP_TIMEOUT is over. The
  // handles are in rank order. Takes the door's socket.
  static Status join(Door* door, void* const* handles, int ranks, int rank,
                     std::unique_ptr<Group>* out);

  // Begins a call; the request is null where none is free now. `parts`: of the side that holds the
  // whole window, where there is one. Failures have been logged.
  Status begin(const GroupCall& call, const Part* parts, int part_count, GroupRequest** request);
  // *done, and how many bytes of result there are: the request is over and may be taken again.
  static Status test(GroupRequest* request, bool* done, size_t* bytes);

  Status register_memory(void* data, size_t bytes, GroupMemory** out);
  Status deregister_memory(GroupMemory* memory);

  // The last call. Where calls are under way, all ranks hear of it.
  void close();

 private:
  // The executor keeps scratch memory for as many.
  static constexpr size_t kMostAtOnce = 8;

  Group() = default;

  Status check(GroupCall* call, const Part* parts, int part_count) const;
  // How much of a rank's block is in the window.
  static size_t block_bytes(const Window& window, int rank);
  GroupRequest* free_request();
  // Moves everything on: what is under way, then what waits for its turn.
  Status progress();
  Status start(GroupRequest* request);
  // The first failure is logged, and all calls from then on return it.
  Status fail(const Status& why);

  std::mutex mutex_;
  DeviceCounters* counters_ = nullptr;
  const plugin::Transport* transport_ = nullptr;  // the communicator's; null in a group of one
  int rank_ = 0, ranks_ = 1;
  size_t at_once_ = kMostAtOnce;
  std::shared_ptr<plugin::Communicator> communicator_;
  std::vector<std::unique_ptr<GroupMemory>> memories_;
  std::vector<size_t> counts_;  // per rank, of the call that is being started
  Status failure_;
  std::array<GroupRequest*, kMostAtOnce> under_way_{};
  size_t under_way_count_ = 0;
  std::array<GroupRequest*, kRequests> waiting_{};  // a ring
  size_t first_waiting_ = 0, waiting_count_ = 0;
  std::array<GroupRequest, kRequests> requests_;
};

}  // namespace scape::net
