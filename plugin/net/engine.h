// The engine behind every version of NCCL's net plugin interface: what the versions have in common,
// with the widest types. Results are ncclResult_t; every failure has been said through NCCL's
// logger when it is returned. Pointers from outside are checked for null, and what can be is for
// more. Nothing blocks but init (it looks for devices), the first use of a device, and close_send
// (until what was sent has left, two seconds at most).
//
// Thread-safe, but a connection must not be used while it is closed.
#pragma once

#include <cstddef>
#include <cstdint>

#include "plugin/net/abi/common.h"
#include "plugin/net/device.h"

namespace scape::net {

// Properties, for the adapters to pick from. Strings live as long as the library.
struct Properties {
  const char* name;
  const char* pci_path;  // null: none
  uint64_t guid;
  int speed_mbps;
  int port;
  float latency_us;
  int max_comms;
  size_t max_bytes;
  const int* members;  // the physical devices it is made of
  int member_count;
};

// One per NCCL communicator from version 11 on; null stands for the one of all older ones.
int init(net_logger logger, void** context);
int finalize(void* context);
int devices(Face face, int* count);
// One device of several, of `limit` at most.
int make_device(Face face, const int* members, int count, int limit, int* device);
int properties(Face face, int device, Properties* out);

int listen(void* context, int device, void* handle, void** listen_comm);
int connect(void* context, int device, void* handle, void** send_comm);
int accept(void* listen_comm, void** receive_comm);
int close_listen(void* listen_comm);
int close_send(void* send_comm);
int close_receive(void* receive_comm);

int register_memory(void* comm, void* data, size_t bytes, int type, void** memory);
int deregister_memory(void* comm, void* memory);

int isend(void* send_comm, void* data, size_t bytes, int tag, void* memory, void** request);
int irecv(void* receive_comm, int n, void* const* data, const size_t* bytes, const int* tags,
          void* const* memories, void** request);
int test(void* request, int* done, int* sizes);

// Logs, and gives NCCL's code for, a call that cannot be served.
int refuse(const char* what);

}  // namespace scape::net
