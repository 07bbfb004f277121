/* Version 8 of the net plugin interface. */
#ifndef SCAPE_PLUGIN_NET_ABI_V8_H
#define SCAPE_PLUGIN_NET_ABI_V8_H

#include "plugin/net/abi/common.h"

struct net_properties_v8 {
  char* name;
  char* pci_path; /* in sysfs; null when it has none */
  uint64_t guid;
  int pointer_support; /* NET_POINTER_* bits */
  int registration_is_global;
  int speed; /* Mbit/s */
  int port;
  float latency; /* microseconds; 0 when not known */
  int max_comms;
  int max_receives;
  int device_type;
  int device_version;
};
static_assert(sizeof(struct net_properties_v8) == 64, "as in NCCL");
static_assert(offsetof(struct net_properties_v8, name) == 0, "as in NCCL");
static_assert(offsetof(struct net_properties_v8, pci_path) == 8, "as in NCCL");
static_assert(offsetof(struct net_properties_v8, guid) == 16, "as in NCCL");
static_assert(offsetof(struct net_properties_v8, pointer_support) == 24, "as in NCCL");
static_assert(offsetof(struct net_properties_v8, registration_is_global) == 28, "as in NCCL");
static_assert(offsetof(struct net_properties_v8, speed) == 32, "as in NCCL");
static_assert(offsetof(struct net_properties_v8, port) == 36, "as in NCCL");
static_assert(offsetof(struct net_properties_v8, latency) == 40, "as in NCCL");
static_assert(offsetof(struct net_properties_v8, max_comms) == 44, "as in NCCL");
static_assert(offsetof(struct net_properties_v8, max_receives) == 48, "as in NCCL");
static_assert(offsetof(struct net_properties_v8, device_type) == 52, "as in NCCL");
static_assert(offsetof(struct net_properties_v8, device_version) == 56, "as in NCCL");

struct net_table_v8 {
  const char* name;
  int (*init)(net_logger logger);
  int (*devices)(int* count);
  int (*get_properties)(int device, struct net_properties_v8* properties);
  int (*listen)(int device, void* handle, void** listen_comm);
  int (*connect)(int device, void* handle, void** send_comm, void** device_comm);
  int (*accept)(void* listen_comm, void** receive_comm, void** device_comm);
  int (*register_memory)(void* comm, void* data, size_t size, int type, void** memory);
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
static_assert(sizeof(struct net_table_v8) == 19 * sizeof(void*), "as in NCCL");
static_assert(offsetof(struct net_table_v8, name) == 0 * sizeof(void*), "as in NCCL");
static_assert(offsetof(struct net_table_v8, init) == 1 * sizeof(void*), "as in NCCL");
static_assert(offsetof(struct net_table_v8, devices) == 2 * sizeof(void*), "as in NCCL");
static_assert(offsetof(struct net_table_v8, get_properties) == 3 * sizeof(void*), "as in NCCL");
static_assert(offsetof(struct net_table_v8, listen) == 4 * sizeof(void*), "as in NCCL");
static_assert(offsetof(struct net_table_v8, connect) == 5 * sizeof(void*), "as in NCCL");
static_assert(offsetof(struct net_table_v8, accept) == 6 * sizeof(void*), "as in NCCL");
static_assert(offsetof(struct net_table_v8, register_memory) == 7 * sizeof(void*), "as in NCCL");
static_assert(offsetof(struct net_table_v8, register_dmabuf) == 8 * sizeof(void*), "as in NCCL");
static_assert(offsetof(struct net_table_v8, deregister_memory) == 9 * sizeof(void*), "as in NCCL");
static_assert(offsetof(struct net_table_v8, isend) == 10 * sizeof(void*), "as in NCCL");
static_assert(offsetof(struct net_table_v8, irecv) == 11 * sizeof(void*), "as in NCCL");
static_assert(offsetof(struct net_table_v8, iflush) == 12 * sizeof(void*), "as in NCCL");
static_assert(offsetof(struct net_table_v8, test) == 13 * sizeof(void*), "as in NCCL");
static_assert(offsetof(struct net_table_v8, close_send) == 14 * sizeof(void*), "as in NCCL");
static_assert(offsetof(struct net_table_v8, close_receive) == 15 * sizeof(void*), "as in NCCL");
static_assert(offsetof(struct net_table_v8, close_listen) == 16 * sizeof(void*), "as in NCCL");
static_assert(offsetof(struct net_table_v8, get_device_memory) == 17 * sizeof(void*), "as in NCCL");
static_assert(offsetof(struct net_table_v8, receive_consumed) == 18 * sizeof(void*), "as in NCCL");

#endif
