/* Version 7 of the interface for collectives; its properties are the net plugin's. */
#ifndef SCAPE_PLUGIN_NET_ABI_COLLNET_V7_H
#define SCAPE_PLUGIN_NET_ABI_COLLNET_V7_H

#include "plugin/net/abi/net_v7.h"

struct collnet_table_v7 {
  const char* name;
  int (*init)(net_logger logger);
  int (*devices)(int* count);
  int (*get_properties)(int device, struct net_properties_v7* properties);
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
static_assert(sizeof(struct collnet_table_v7) == 15 * sizeof(void*), "as in NCCL");
static_assert(offsetof(struct collnet_table_v7, name) == 0 * sizeof(void*), "as in NCCL");
static_assert(offsetof(struct collnet_table_v7, init) == 1 * sizeof(void*), "as in NCCL");
static_assert(offsetof(struct collnet_table_v7, devices) == 2 * sizeof(void*), "as in NCCL");
static_assert(offsetof(struct collnet_table_v7, get_properties) == 3 * sizeof(void*), "as in NCCL");
static_assert(offsetof(struct collnet_table_v7, listen) == 4 * sizeof(void*), "as in NCCL");
static_assert(offsetof(struct collnet_table_v7, connect) == 5 * sizeof(void*), "as in NCCL");
static_assert(offsetof(struct collnet_table_v7, reduce_support) == 6 * sizeof(void*), "as in NCCL");
static_assert(offsetof(struct collnet_table_v7, register_memory) == 7 * sizeof(void*),
              "as in NCCL");
static_assert(offsetof(struct collnet_table_v7, register_dmabuf) == 8 * sizeof(void*),
              "as in NCCL");
static_assert(offsetof(struct collnet_table_v7, deregister_memory) == 9 * sizeof(void*),
              "as in NCCL");
static_assert(offsetof(struct collnet_table_v7, iallreduce) == 10 * sizeof(void*), "as in NCCL");
static_assert(offsetof(struct collnet_table_v7, iflush) == 11 * sizeof(void*), "as in NCCL");
static_assert(offsetof(struct collnet_table_v7, test) == 12 * sizeof(void*), "as in NCCL");
static_assert(offsetof(struct collnet_table_v7, close_coll) == 13 * sizeof(void*), "as in NCCL");
static_assert(offsetof(struct collnet_table_v7, close_listen) == 14 * sizeof(void*), "as in NCCL");

#endif
