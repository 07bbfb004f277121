/* Version 6 of the interface for collectives; its properties are the net plugin's. */
#ifndef SCAPE_PLUGIN_NET_ABI_COLLNET_V6_H
#define SCAPE_PLUGIN_NET_ABI_COLLNET_V6_H

#include "plugin/net/abi/net_v6.h"

struct collnet_table_v6 {
  const char* name;
  int (*init)(net_logger logger);
  int (*devices)(int* count);
  int (*get_properties)(int device, struct net_properties_v6* properties);
  int (*listen)(int device, void* handle, void** listen_comm);
  int (*connect)(void* handles[], int ranks, int rank, void* listen_comm, void** coll_comm);
  int (*reduce_support)(int type, int op, int* supported);
  int (*register_memory)(void* coll_comm, void* data, int size, int type, void** memory);
  int (*register_dmabuf)(void* coll_comm, void* data, size_t size, int type, uint64_t offset,
                         int fd, void** memory);
  int (*deregister_memory)(void* coll_comm, void* memory);
  int (*iallreduce)(void* coll_comm, void* send, void* receive, int count, int type, int op,
                    void* send_memory, void* receive_memory, void** request);
  int (*iflush)(void* coll_comm, void* data, int size, void* memory, void** request);
  int (*test)(void* request, int* done, int* size);
  int (*close_coll)(void* coll_comm);
  int (*close_listen)(void* listen_comm);
};
static_assert(sizeof(struct collnet_table_v6) == 15 * sizeof(void*), "as in NCCL");
static_assert(offsetof(struct collnet_table_v6, name) == 0 * sizeof(void*), "as in NCCL");
static_assert(offsetof(struct collnet_table_v6, init) == 1 * sizeof(void*), "as in NCCL");
static_assert(offsetof(struct collnet_table_v6, devices) == 2 * sizeof(void*), "as in NCCL");
static_assert(offsetof(struct collnet_table_v6, get_properties) == 3 * sizeof(void*), "as in NCCL");
static_assert(offsetof(struct collnet_table_v6, listen) == 4 * sizeof(void*), "as in NCCL");
static_assert(offsetof(struct collnet_table_v6, connect) == 5 * sizeof(void*), "as in NCCL");
static_assert(offsetof(struct collnet_table_v6, reduce_support) == 6 * sizeof(void*), "as in NCCL");
static_assert(offsetof(struct collnet_table_v6, register_memory) == 7 * sizeof(void*),
              "as in NCCL");
static_assert(offsetof(struct collnet_table_v6, register_dmabuf) == 8 * sizeof(void*),
              "as in NCCL");
static_assert(offsetof(struct collnet_table_v6, deregister_memory) == 9 * sizeof(void*),
              "as in NCCL");
static_assert(offsetof(struct collnet_table_v6, iallreduce) == 10 * sizeof(void*), "as in NCCL");
static_assert(offsetof(struct collnet_table_v6, iflush) == 11 * sizeof(void*), "as in NCCL");
static_assert(offsetof(struct collnet_table_v6, test) == 12 * sizeof(void*), "as in NCCL");
static_assert(offsetof(struct collnet_table_v6, close_coll) == 13 * sizeof(void*), "as in NCCL");
static_assert(offsetof(struct collnet_table_v6, close_listen) == 14 * sizeof(void*), "as in NCCL");

#endif
