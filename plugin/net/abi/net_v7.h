/* Version 7 of the net plugin interface. */
#ifndef SCAPE_PLUGIN_NET_ABI_V7_H
#define SCAPE_PLUGIN_NET_ABI_V7_H

#include "plugin/net/abi/common.h"

struct net_properties_v7 {
  char* name;
  char* pci_path; /* in sysfs; null when it has none */
  uint64_t guid;
  int pointer_support; /* NET_POINTER_* bits */
  int speed;           /* Mbit/s */
  int port;
  float latency; /* microseconds; 0 when not known */
  int max_comms;
  int max_receives;
  int device_type;
  int device_version;
};
static_assert(sizeof(struct net_properties_v7) == 56, "as in NCCL");
static_assert(offsetof(struct net_properties_v7, name) == 0, "as in NCCL");
static_assert(offsetof(struct net_properties_v7, pci_path) == 8, "as in NCCL");
static_assert(offsetof(struct net_properties_v7, guid) == 16, "as in NCCL");
static_assert(offsetof(struct net_properties_v7, pointer_support) == 24, "as in NCCL");
static_assert(offsetof(struct net_properties_v7, speed) == 28, "as in NCCL");
static_assert(offsetof(struct net_properties_v7, port) == 32, "as in NCCL");
static_assert(offsetof(struct net_properties_v7, latency) == 36, "as in NCCL");
static_assert(offsetof(struct net_properties_v7, max_comms) == 40, "as in NCCL");
static_assert(offsetof(struct net_properties_v7, max_receives) == 44, "as in NCCL");
static_assert(offsetof(struct net_properties_v7, device_type) == 48, "as in NCCL");
static_assert(offsetof(struct net_properties_v7, device_version) == 52, "as in NCCL");

struct net_table_v7 {
  const char* name;
  int (*init)(net_logger logger);
  int (*devices)(int* count);
  int (*get_properties)(int device, struct net_properties_v7* properties);
  int (*listen)(int device, void* handle, void** listen_comm);
  int (*connect)(int device, void* handle, void** send_comm, void** device_comm);
  int (*accept)(void* listen_comm, void** receive_comm, void** device_comm);
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
  int (*get_device_memory)(void* comm, void* memory, void** device_memory);
  int (*receive_consumed)(void* receive_comm, int n, void* request);
};
static_assert(sizeof(struct net_table_v7) == 19 * sizeof(void*), "as in NCCL");
static_assert(offsetof(struct net_table_v7, name) == 0 * sizeof(void*), "as in NCCL");
static_assert(offsetof(struct net_table_v7, init) == 1 * sizeof(void*), "as in NCCL");
static_assert(offsetof(struct net_table_v7, devices) == 2 * sizeof(void*), "as in NCCL");
static_assert(offsetof(struct net_table_v7, get_properties) == 3 * sizeof(void*), "as in NCCL");
static_assert(offsetof(struct net_table_v7, listen) == 4 * sizeof(void*), "as in NCCL");
static_assert(offsetof(struct net_table_v7, connect) == 5 * sizeof(void*), "as in NCCL");
static_assert(offsetof(struct net_table_v7, accept) == 6 * sizeof(void*), "as in NCCL");
static_assert(offsetof(struct net_table_v7, register_memory) == 7 * sizeof(void*), "as in NCCL");
static_assert(offsetof(struct net_table_v7, register_dmabuf) == 8 * sizeof(void*), "as in NCCL");
static_assert(offsetof(struct net_table_v7, deregister_memory) == 9 * sizeof(void*), "as in NCCL");
static_assert(offsetof(struct net_table_v7, isend) == 10 * sizeof(void*), "as in NCCL");
static_assert(offsetof(struct net_table_v7, irecv) == 11 * sizeof(void*), "as in NCCL");
static_assert(offsetof(struct net_table_v7, iflush) == 12 * sizeof(void*), "as in NCCL");
static_assert(offsetof(struct net_table_v7, test) == 13 * sizeof(void*), "as in NCCL");
static_assert(offsetof(struct net_table_v7, close_send) == 14 * sizeof(void*), "as in NCCL");
static_assert(offsetof(struct net_table_v7, close_receive) == 15 * sizeof(void*), "as in NCCL");
static_assert(offsetof(struct net_table_v7, close_listen) == 16 * sizeof(void*), "as in NCCL");
static_assert(offsetof(struct net_table_v7, get_device_memory) == 17 * sizeof(void*), "as in NCCL");
static_assert(offsetof(struct net_table_v7, receive_consumed) == 18 * sizeof(void*), "as in NCCL");

#endif
