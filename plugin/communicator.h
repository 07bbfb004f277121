// Communicator: the seam between who moves bytes and who decides which.
//
// Dense collectives over the ranks of one communicator, asynchronous. The masked collective, the
// host mode of the hooks and the perf programs all stand on this interface alone. Implementations:
// HostCommunicator over a Transport, on host memory; on a device's (plugin/device/),
// NcclCommunicator over the real NCCL, and ProxiedCommunicator over a HostCommunicator.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string_view>

#include "base/status.h"
#include "plugin/stream.h"

namespace scape::plugin {

// Numbered as ncclDataType_t.
enum class DataType : int {
  kInt8 = 0,
  kUint8 = 1,
  kInt32 = 2,
  kUint32 = 3,
  kInt64 = 4,
  kUint64 = 5,
  kFloat16 = 6,
  kFloat32 = 7,
  kFloat64 = 8,
  kBfloat16 = 9,
  kFloat8e4m3 = 10,
  kFloat8e5m2 = 11,
};
inline constexpr int kDataTypes = 12;
size_t size_of(DataType type);
const char* name_of(DataType type);

// Numbered as ncclRedOp_t; kPremulSum stands for every op that ncclRedOpCreatePreMulSum made.
enum class ReduceOp : int { kSum = 0, kProd = 1, kMax = 2, kMin = 3, kAvg = 4, kPremulSum = 5 };
const char* name_of(ReduceOp op);

struct Reduction {
  ReduceOp op = ReduceOp::kSum;
  // kPremulSum: each rank's own factor, applied once to its input, in fp32 for 8- and 16-bit floats
  // (fp64 for fp64, modulo 2^n for integers, from the bits below).
  double factor = 1;
  int64_t integer_factor = 1;
};

// One collective under way. Made by a Communicator, completed by its progress().
class Work {
 public:
  virtual ~Work() = default;
  // True when the result is there or the work failed; then status() is final.
  virtual bool done() const = 0;
  virtual Status status() const = 0;
};
using WorkPtr = std::shared_ptr<Work>;

// Bytes that this rank's transport has moved, headers of collectives included.
struct ByteCounters {
  uint64_t sent_bytes = 0;
  uint64_t received_bytes = 0;
  uint64_t sent_messages = 0;
  uint64_t received_messages = 0;
};

// What goes with a call. Everything but the regions and the stream is part of its descriptor
// (docs/architecture.md, "Descriptors"): ranks whose descriptors differ get SCAPE_ERR_MISMATCH on
// all sides, naming both.
struct CallTag {
  bool registered = false;     // the call is one of a registered buffer
  std::string_view name = {};  // its name; the first 23 bytes travel
  // What its last optimizer step was given: ranks that differ would drift apart.
  float learning_rate = 0, weight_decay = 0;
  // Of memory that holds the sending and the receiving buffer, from register_memory().
  void* send_region = nullptr;
  void* recv_region = nullptr;
  // The buffers are read and written in its order.
  Stream stream = {};
};

// Where payloads stand that ranks of one host reduce without copying: each packs into its operand
// and reads the result. What the others read or write meanwhile is this room's business; unmapped
// with the last reference, which must not go during an all-reduce of it.
class SharedPayload {
 public:
  virtual ~SharedPayload() = default;
  // Bytes of the operand, and of the result.
  virtual size_t capacity() const = 0;
  // The caller's between two all-reduces.
  virtual void* operand() = 0;
  // Of the last all-reduce, until the caller starts the next one. The others of the host read the
  // same bytes: not to be written.
  virtual const void* result() const = 0;
  // False where an all-reduce has to go the usual way; alike on all ranks.
  virtual bool can_reduce(DataType type, ReduceOp op) const = 0;
};

// The making of a shared payload.
class SharingWork : public Work {
 public:
  // When done() and ok. Null, on all ranks, where no host has two of them, or theirs can share no
  // memory, of which a log line has told then.
  virtual std::shared_ptr<SharedPayload> payload() const = 0;
};

// Rank's view of a communicator. Every start function returns at once: a refusal of the arguments
// is returned and nothing starts; whatever happens later is the Work's status. Buffers stay the
// caller's and must live until the work is done. Sending and receiving buffers may be equal or,
// where NCCL's in-place rules say so, offset; count may be 0 (done at once).
//
// Thread-safe: calls from several threads are taken one after another; ranks must start
// the same works in the same order. progress() may be called from any thread.
//
// Every reduction is done in the order that plugin/collectives/order.h documents, the same in each
// run. 8- and 16-bit floats are accumulated in fp32 and rounded once.
class Communicator {
 public:
  virtual ~Communicator() = default;

  virtual int rank() const = 0;
  virtual int size() const = 0;
  // A name for messages: "comm 0x1a2b".
  virtual std::string_view name() const = 0;

  virtual Status all_reduce(const void* send, void* recv, size_t count, DataType type,
                            Reduction reduction, const CallTag& tag, WorkPtr* work) = 0;
  // recv_count elements to each rank; send holds size() * recv_count.
  virtual Status reduce_scatter(const void* send, void* recv, size_t recv_count, DataType type,
                                Reduction reduction, const CallTag& tag, WorkPtr* work) = 0;
  // Like reduce_scatter with a count per rank, known to all: send holds their sum, in rank order.
  virtual Status reduce_scatter_v(const void* send, void* recv, std::span<const size_t> counts,
                                  DataType type, Reduction reduction, const CallTag& tag,
                                  WorkPtr* work) = 0;
  // send_count elements from each rank; recv holds size() * send_count.
  virtual Status all_gather(const void* send, void* recv, size_t send_count, DataType type,
                            const CallTag& tag, WorkPtr* work) = 0;
  // Like all_gather with a count per rank, known to all: recv holds their sum, in rank order.
  virtual Status all_gather_v(const void* send, void* recv, std::span<const size_t> counts,
                              DataType type, const CallTag& tag, WorkPtr* work) = 0;
  // count elements to and from each rank.
  virtual Status all_to_all(const void* send, void* recv, size_t count, DataType type,
                            const CallTag& tag, WorkPtr* work) = 0;
  virtual Status broadcast(const void* send, void* recv, size_t count, DataType type, int root,
                           const CallTag& tag, WorkPtr* work) = 0;
  virtual Status reduce(const void* send, void* recv, size_t count, DataType type,
                        Reduction reduction, int root, const CallTag& tag, WorkPtr* work) = 0;
  virtual Status gather(const void* send, void* recv, size_t count, DataType type, int root,
                        const CallTag& tag, WorkPtr* work) = 0;
  virtual Status scatter(const void* send, void* recv, size_t count, DataType type, int root,
                         const CallTag& tag, WorkPtr* work) = 0;
  // Makes a payload of up to `bytes` that ranks of one host share. Collective; nothing else may be
  // started on the communicator until the work is done.
  virtual Status share_payload(size_t bytes, std::shared_ptr<SharingWork>* work) = 0;
  // From operand() to result(). USAGE where can_reduce() says no.
  virtual Status all_reduce(SharedPayload& payload, size_t count, DataType type,
                            Reduction reduction, const CallTag& tag, WorkPtr* work) = 0;
  // Point to point; matched in order per pair of ranks; rank() itself is a legal peer.
  virtual Status send(const void* data, size_t count, DataType type, int peer, WorkPtr* work) = 0;
  virtual Status recv(void* data, size_t count, DataType type, int peer, WorkPtr* work) = 0;

  // Makes memory known to the network device, for calls that name the region: no message has to
  // pin its bytes then. To be given back when no call uses it any more, and before the
  // communicator ends. Null where nothing needs to be known.
  virtual Status register_memory(void* data, size_t bytes, void** region) = 0;
  virtual void deregister_memory(void* region) = 0;

  // Moves whatever can be moved now; never blocks. Returns true when something moved.
  virtual bool progress() = 0;

  // Sleeps until the transport has something to do or the time is over, or for a moment where the
  // transport cannot wake its owner. Only for side channels; others return at once.
  virtual void wait_event(int timeout_ms) = 0;

  // The error that ended this communicator, or ok. Once it failed, every work fails with it at
  // once.
  virtual Status async_error() const = 0;

  // Fails everything under way here and, by message, on the other ranks. Returns at once, but for a
  // time-out: then it asks the others for a second who keeps them, and names those ranks.
  virtual void abort(const Status& why) = 0;

  // Starts to make a second, independent communicator over the same ranks for background traffic.
  // Collective. *side is set when the work is done; its wait_event() works.
  virtual Status side_channel(std::shared_ptr<Communicator>* side, WorkPtr* work) = 0;

  virtual ByteCounters counters() const = 0;
};

// Drives the communicator until over() says so. Where nothing moves for SCAPE_TIMEOUT the
// communicator is aborted, after which over() must come true. Spins, then yields, since ranks may
// outnumber cores.
void drive(Communicator& communicator, const std::function<bool()>& over);

// The same until the work is done; its status.
Status wait(Communicator& communicator, const Work& work);

}  // namespace scape::plugin
