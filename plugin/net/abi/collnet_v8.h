/* Version 8 of the interface for collectives; its properties are the net plugin's. */
#ifndef SCAPE_PLUGIN_NET_ABI_COLLNET_V8_H
#define SCAPE_PLUGIN_NET_ABI_COLLNET_V8_H

#include "plugin/net/abi/net_v8.h"

/* A piece of what a window holds. */
struct collnet_part_v8 {
  void* memory;
  void* address;
  uint32_t size;
};
static_assert(sizeof(struct collnet_part_v8) == 24, "as in NCCL");
static_assert(offsetof(struct collnet_part_v8, memory) == 0, "as in NCCL");
static_assert(offsetof(struct collnet_part_v8, address) == 8, "as in NCCL");
static_assert(offsetof(struct collnet_part_v8, size) == 16, "as in NCCL");
static_assert(sizeof(((struct collnet_part_v8*)0)->size) == 4, "as in NCCL");

struct collnet_table_v8 {
  const char* name;
  int (*init)(net_logger logger);
  int (*devices)(int* count);
  int (*get_properties)(int device, struct net_properties_v8* properties);
  int (*listen)(int device, void* handle, void** listen_comm);
  int (*connect)(void* handles[], int ranks, int rank, void* listen_comm, void** coll_comm);
  int (*reduce_support)(int type, int op, int* supported);
  int (*register_memory)(void* coll_comm, void* data, size_t size, int type, void** memory);
  int (*register_dmabuf)(void* coll_comm, void* data, size_t size, int type, uint64_t offset,
                         int fd, void** memory);
  int (*deregister_memory)(void* coll_comm, void* memory);
  int (*iallreduce)(void* coll_comm, void* send, void* receive, int count, int type, int op,
                    void* send_memory, void* receive_memory, void** request);
  int (*iallgather)(void* coll_comm, void* send, int parts, struct collnet_part_v8* receive_parts,
                    size_t bytes_per_rank, size_t window_offset, size_t window_bytes,
                    void* send_memory, void** request);
  int (*ireducescatter)(void* coll_comm, int parts, struct collnet_part_v8* send_parts,
                        void* receive, size_t bytes_per_rank, size_t window_offset,
                        size_t window_bytes, int type, int op, void* receive_memory,
                        void** request);
  int (*iflush)(void* coll_comm, void* data, int size, void* memory, void** request);
  int (*test)(void* request, int* done, int* size);
  int (*close_coll)(void* coll_comm);
  int (*close_listen)(void* listen_comm);
};
static_assert(sizeof(struct collnet_table_v8) == 17 * sizeof(void*), "as in NCCL");
static_assert(offsetof(struct collnet_table_v8, name) == 0 * sizeof(void*), "as in NCCL");
static_assert(offsetof(struct collnet_table_v8, init) == 1 * sizeof(void*), "as in NCCL");
static_assert(offsetof(struct collnet_table_v8, devices) == 2 * sizeof(void*), "as in NCCL");
static_assert(offsetof(struct collnet_table_v8, get_properties) == 3 * sizeof(void*), "as in NCCL");
static_assert(offsetof(struct collnet_table_v8, listen) == 4 * sizeof(void*), "as in NCCL");
static_assert(offsetof(struct collnet_table_v8, connect) == 5 * sizeof(void*), "as in NCCL");
static_assert(offsetof(struct collnet_table_v8, reduce_support) == 6 * sizeof(void*), "as in NCCL");
static_assert(offsetof(struct collnet_table_v8, register_memory) == 7 * sizeof(void*),
              "as in NCCL");
static_assert(offsetof(struct collnet_table_v8, register_dmabuf) == 8 * sizeof(void*),
              "as in NCCL");
static_assert(offsetof(struct collnet_table_v8, deregister_memory) == 9 * sizeof(void*),
              "as in NCCL");
static_assert(offsetof(struct collnet_table_v8, iallreduce) == 10 * sizeof(void*), "as in NCCL");
static_assert(offsetof(struct collnet_table_v8, iallgather) == 11 * sizeof(void*), "as in NCCL");
static_assert(offsetof(struct collnet_table_v8, ireducescatter) == 12 * sizeof(void*),
              "as in NCCL");
static_assert(offsetof(struct collnet_table_v8, iflush) == 13 * sizeof(void*), "as in NCCL");
static_assert(offsetof(struct collnet_table_v8, test) == 14 * sizeof(void*), "as in NCCL");
static_assert(offsetof(struct collnet_table_v8, close_coll) == 15 * sizeof(void*), "as in NCCL");
static_assert(offsetof(struct collnet_table_v8, close_listen) == 16 * sizeof(void*), "as in NCCL");

#endif
