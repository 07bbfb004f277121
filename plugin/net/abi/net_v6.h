/* Version 6 of the net plugin interface. */
#ifndef SCAPE_PLUGIN_NET_ABI_V6_H
#define SCAPE_PLUGIN_NET_ABI_V6_H

#include "plugin/net/abi/common.h"

struct net_properties_v6 {
  char* name;
  char* pci_path; /* in sysfs; null when it has none */
  uint64_t guid;
  int pointer_support; /* NET_POINTER_* bits */
  int speed;           /* Mbit/s */
  int port;
  float latency; /* microseconds; 0 when not known */
  int max_comms;
  int max_receives;
};
static_assert(sizeof(struct net_properties_v6) == 48, "as in NCCL");
static_assert(offsetof(struct net_properties_v6, name) == 0, "as in NCCL");
static_assert(offsetof(struct net_properties_v6, pci_path) == 8, "as in NCCL");
static_assert(offsetof(struct net_properties_v6, guid) == 16, "as in NCCL");
static_assert(offsetof(struct net_properties_v6, pointer_support) == 24, "as in NCCL");
static_assert(offsetof(struct net_properties_v6, speed) == 28, "as in NCCL");
static_assert(offsetof(struct net_properties_v6, port) == 32, "as in NCCL");
static_assert(offsetof(struct net_properties_v6, latency) == 36, "as in NCCL");
static_assert(offsetof(struct net_properties_v6, max_comms) == 40, "as in NCCL");
static_assert(offsetof(struct net_properties_v6, max_receives) == 44, "as in NCCL");

struct net_table_v6 {
  const char* name;
  int (*init)(net_logger logger);
  int (*devices)(int* count);
  int (*get_properties)(int device, struct net_properties_v6* properties);
  int (*listen)(int device, void* handle, void** listen_comm);
  int (*connect)(int device, void* handle, void** send_comm);
  int (*accept)(void* listen_comm, void** receive_comm);
  int (*register_memory)(void* comm, void* data, int size, int type, void** memory);
  int (*register_dmabuf)(void* comm, void* data, size_t size, int type, uint64_t offset, int fd,
                         void** memory);
  int (*deregister_memory)(void* comm, void* memory);
  int (*isend)(void* send_comm, void* data, int size, int tag, void* memory, void** request);
  int (*irecv)(void* receive_comm, int n, void** data, int* sizes, int* tags, void** memories,
               void** request);
  int (*iflush)(void* receive_comm, int n, void** data, int* sizes, void** memories,
                void** request);
  int (*test)(void* request, int* done, int* sizes);
  int (*close_send)(void* send_comm);
  int (*close_receive)(void* receive_comm);
  int (*close_listen)(void* listen_comm);
};
static_assert(sizeof(struct net_table_v6) == 17 * sizeof(void*), "as in NCCL");
static_assert(offsetof(struct net_table_v6, name) == 0 * sizeof(void*), "as in NCCL");
static_assert(offsetof(struct net_table_v6, init) == 1 * sizeof(void*), "as in NCCL");
static_assert(offsetof(struct net_table_v6, devices) == 2 * sizeof(void*), "as in NCCL");
static_assert(offsetof(struct net_table_v6, get_properties) == 3 * sizeof(void*), "as in NCCL");
static_assert(offsetof(struct net_table_v6, listen) == 4 * sizeof(void*), "as in NCCL");
static_assert(offsetof(struct net_table_v6, connect) == 5 * sizeof(void*), "as in NCCL");
static_assert(offsetof(struct net_table_v6, accept) == 6 * sizeof(void*), "as in NCCL");
static_assert(offsetof(struct net_table_v6, register_memory) == 7 * sizeof(void*), "as in NCCL");
static_assert(offsetof(struct net_table_v6, register_dmabuf) == 8 * sizeof(void*), "as in NCCL");
static_assert(offsetof(struct net_table_v6, deregister_memory) == 9 * sizeof(void*), "as in NCCL");
static_assert(offsetof(struct net_table_v6, isend) == 10 * sizeof(void*), "as in NCCL");
static_assert(offsetof(struct net_table_v6, irecv) == 11 * sizeof(void*), "as in NCCL");
static_assert(offsetof(struct net_table_v6, iflush) == 12 * sizeof(void*), "as in NCCL");
static_assert(offsetof(struct net_table_v6, test) == 13 * sizeof(void*), "as in NCCL");
static_assert(offsetof(struct net_table_v6, close_send) == 14 * sizeof(void*), "as in NCCL");
static_assert(offsetof(struct net_table_v6, close_receive) == 15 * sizeof(void*), "as in NCCL");
static_assert(offsetof(struct net_table_v6, close_listen) == 16 * sizeof(void*), "as in NCCL");

#endif
