// The engine behind every version of NCCL's CollNet interface, with the widest types. As in
// plugin/net/engine.h, where init, finalize, devices and properties are; a context is of no use
// here. Nothing blocks but coll_connect, which is called once, and whose listener NCCL closes
// when it returns, and coll_close (until what was sent has left, two seconds at most).
//
// Thread-safe, but a group must not be used while it is closed.
#pragma once

#include <cstddef>

#include "plugin/net/group.h"

namespace scape::net {

int coll_listen(int device, void* handle, void** listen_comm);
// Joins the ranks whose handles these are. What listens is spent, and remains to be closed.
int coll_connect(void* const* handles, int ranks, int rank, void* listen_comm, void** coll_comm);
int coll_close_listen(void* listen_comm);
int coll_close(void* coll_comm);

int coll_reduce_support(int type, int op, int* supported);

int coll_register_memory(void* coll_comm, void* data, size_t bytes, int type, void** memory);
int coll_deregister_memory(void* coll_comm, void* memory);

int coll_all_reduce(void* coll_comm, void* send, void* receive, size_t count, int type, int op,
                    void* send_memory, void* receive_memory, void** request);
// `parts` make up the window, which lies in the vector of all ranks' blocks; `send` and `receive`
// begin where this rank's block does, or the window, whichever is later.
int coll_all_gather(void* coll_comm, void* send, const Part* parts, int part_count,
                    const Window& window, void* send_memory, void** request);
int coll_reduce_scatter(void* coll_comm, const Part* parts, int part_count, void* receive,
                        const Window& window, int type, int op, void* receive_memory,
                        void** request);
int coll_test(void* request, int* done, int* size);

}  // namespace scape::net
