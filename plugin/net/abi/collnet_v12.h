/* Version 12 of the interface for collectives; its properties are the net plugin's. */
#ifndef SCAPE_PLUGIN_NET_ABI_COLLNET_V12_H
#define SCAPE_PLUGIN_NET_ABI_COLLNET_V12_H

#include "plugin/net/abi/net_v12.h"

/* A piece of what a window holds. */
struct collnet_part_v12 {
  void* memory;
  void* address;
  size_t size;
};
static_assert(sizeof(struct collnet_part_v12) == 24, "as in NCCL");
static_assert(offsetof(struct collnet_part_v12, memory) == 0, "as in NCCL");
static_assert(offsetof(struct collnet_part_v12, address) == 8, "as in NCCL");
static_assert(offsetof(struct collnet_part_v12, size) == 16, "as in NCCL");
static_assert(sizeof(((struct collnet_part_v12*)0)->size) == 8, "as in NCCL");

struct collnet_table_v12 {
  const char* name;
  int (*init)(void** context, uint64_t comm_id, net_logger logger);
  int (*devices)(int* count);
  int (*get_properties)(int device, struct net_properties_v12* properties);
  int (*listen)(void* context, int device, void* handle, void** listen_comm);
  int (*connect)(void* handles[], int ranks, int rank, void* listen_comm, void** coll_comm);
  int (*reduce_support)(int type, int op, int* supported);
  int (*register_memory)(void* coll_comm, void* data, size_t size, int type, void** memory);
  int (*register_dmabuf)(void* coll_comm, void* data, size_t size, int type, uint64_t offset,
                         int fd, void** memory);
  int (*deregister_memory)(void* coll_comm, void* memory);
  int (*iallreduce)(void* coll_comm, void* send, void* receive, size_t count, int type, int op,
                    void* send_memory, void* receive_memory, void** request);
  int (*iallgather)(void* coll_comm, void* send, int parts, struct collnet_part_v12* receive_parts,
                    size_t bytes_per_rank, size_t window_offset, size_t window_bytes,
                    void* send_memory, void** request);
  int (*ireducescatter)(void* coll_comm, int parts, struct collnet_part_v12* send_parts,
                        void* receive, size_t bytes_per_rank, size_t window_offset,
                        size_t window_bytes, int type, int op, void* receive_memory,
                        void** request);
  int (*iflush)(void* coll_comm, void* data, int size, void* memory, void** request);
  int (*test)(void* request, int* done, int* size);
  int (*close_coll)(void* coll_comm);
  int (*close_listen)(void* listen_comm);
  int (*make_virtual_device)(int* device, struct net_members_8* members);
  int (*finalize)(void* context);
};
static_assert(sizeof(struct collnet_table_v12) == 19 * sizeof(void*), "as in NCCL");
static_assert(offsetof(struct collnet_table_v12, name) == 0 * sizeof(void*), "as in NCCL");
static_assert(offsetof(struct collnet_table_v12, init) == 1 * sizeof(void*), "as in NCCL");
static_assert(offsetof(struct collnet_table_v12, devices) == 2 * sizeof(void*), "as in NCCL");
static_assert(offsetof(struct collnet_table_v12, get_properties) == 3 * sizeof(void*),
              "as in NCCL");
static_assert(offsetof(struct collnet_table_v12, listen) == 4 * sizeof(void*), "as in NCCL");
static_assert(offsetof(struct collnet_table_v12, connect) == 5 * sizeof(void*), "as in NCCL");
static_assert(offsetof(struct collnet_table_v12, reduce_support) == 6 * sizeof(void*),
              "as in NCCL");
static_assert(offsetof(struct collnet_table_v12, register_memory) == 7 * sizeof(void*),
              "as in NCCL");
static_assert(offsetof(struct collnet_table_v12, register_dmabuf) == 8 * sizeof(void*),
              "as in NCCL");
static_assert(offsetof(struct collnet_table_v12, deregister_memory) == 9 * sizeof(void*),
              "as in NCCL");
static_assert(offsetof(struct collnet_table_v12, iallreduce) == 10 * sizeof(void*), "as in NCCL");
static_assert(offsetof(struct collnet_table_v12, iallgather) == 11 * sizeof(void*), "as in NCCL");
static_assert(offsetof(struct collnet_table_v12, ireducescatter) == 12 * sizeof(void*),
              "as in NCCL");
static_assert(offsetof(struct collnet_table_v12, iflush) == 13 * sizeof(void*), "as in NCCL");
static_assert(offsetof(struct collnet_table_v12, test) == 14 * sizeof(void*), "as in NCCL");
static_assert(offsetof(struct collnet_table_v12, close_coll) == 15 * sizeof(void*), "as in NCCL");
static_assert(offsetof(struct collnet_table_v12, close_listen) == 16 * sizeof(void*), "as in NCCL");
static_assert(offsetof(struct collnet_table_v12, make_virtual_device) == 17 * sizeof(void*),
              "as in NCCL");
static_assert(offsetof(struct collnet_table_v12, finalize) == 18 * sizeof(void*), "as in NCCL");

#endif
