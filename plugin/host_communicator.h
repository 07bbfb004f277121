// Makes host communicators: bootstrap over TCP from a unique id, then a transport.
#pragma once

#include <array>
#include <cstddef>
#include <memory>
#include <span>
#include <string>

#include "plugin/communicator.h"
#include "plugin/transport/lifeline.h"
#include "plugin/transport/socket.h"
#include "plugin/transport/transport.h"

namespace scape::plugin {

// The 128 bytes of a ncclUniqueId: version, mode, addresses of the root's listening socket, port, a
// random 64-bit cookie.
struct UniqueId {
  std::array<std::byte, 128> bytes{};
};

// Opens the listening socket that ranks will meet at and writes its address into *id. A thread of
// this process serves them there, whichever rank it will be, until all have come or the time is
// over; then both are gone.
Status make_unique_id(UniqueId* id);

// True when the bytes are a Scape host-mode id (and not a real NCCL's).
bool is_host_unique_id(const UniqueId& id);

// Ends the meeting place of an id that no rank will use, where this process made it.
void drop_unique_id(const UniqueId& id);

// Blocking and collective: meets the other ranks at the id and connects the transport. Errors (a
// rank twice, other world sizes, other transports, a used id, nobody there in time) are reported on
// every rank that came. A single rank needs nobody and opens no socket.
Status create_communicator(const UniqueId& id, int rank, int size,
                           std::shared_ptr<Communicator>* out);

// What a rank brings to ranks that all listen already and know where rank 0 does.
struct Joining {
  int rank = 0, size = 1;
  Endpoint root;        // rank 0's endpoint
  uint64_t cookie = 0;  // rank 0's, which strangers do not know
  Socket listener;      // this rank's
  Endpoint endpoint;    // where that is reached
  // Not for a single rank. The name is compared with the others'.
  std::unique_ptr<Transport> transport;
  std::string transport_name;
};

// Blocking and collective, as create_communicator, without a unique id: rank 0 holds the meeting
// where it listens. Who waits for a rank that does not come names it when SCAPE_BOOTSTRAP_TIMEOUT
// is over.
Status join_communicator(Joining joining, std::shared_ptr<Communicator>* out);

// Blocking and collective over the parent: ranks of the same color, ordered by (key, rank), form a
// communicator; color < 0 (NCCL_SPLIT_NOCOLOR): *out is null. The parent need not outlive it.
Status split_communicator(Communicator& parent, int color, int key,
                          std::shared_ptr<Communicator>* out);

// Blocking, collective over the ranks that stay: `excluded` are ranks of the parent that take no
// part (they may be dead: the parent may have failed). New ranks keep the old order.
Status shrink_communicator(Communicator& parent, std::span<const int> excluded,
                           std::shared_ptr<Communicator>* out);

// Blocking, collective over the parent's ranks and the new ones, as ncclCommGrow. A rank of the
// parent passes the parent and keeps its rank; one of them, the root, passes the id (from
// make_unique_id()), the others null. A new rank passes no parent, the id, and its rank in parent's
// size .. size - 1.
Status grow_communicator(Communicator* parent, const UniqueId* id, int rank, int size,
                         std::shared_ptr<Communicator>* out);

// How a call reads in messages: "AllReduce(count 4, float32, sum)". Any bytes have a description: a
// peer's may be anything.
std::string describe_call(const Descriptor& descriptor);

// Bytes moved by all transports of the process so far.
ByteCounters process_counters();

}  // namespace scape::plugin
