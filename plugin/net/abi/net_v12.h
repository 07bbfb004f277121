/* Version 12 of the net plugin interface. */
#ifndef SCAPE_PLUGIN_NET_ABI_V12_H
#define SCAPE_PLUGIN_NET_ABI_V12_H

#include "plugin/net/abi/common.h"

struct net_properties_v12 {
  char* name;
  char* pci_path; /* in sysfs; null when it has none */
  uint64_t guid;
  int pointer_support; /* NET_POINTER_* bits */
  int registration_is_global;
  int force_flush;
  int speed; /* Mbit/s */
  int port;
  float latency; /* microseconds; 0 when not known */
  int max_comms;
  int max_receives;
  int device_type;
  int device_version;
  struct net_members_8 members;
  size_t max_p2p_bytes;
  size_t max_collective_bytes;
  int max_multi_request_size;
  int16_t rail_id;
  int16_t plane_id;
};
static_assert(sizeof(struct net_properties_v12) == 128, "as in NCCL");
static_assert(offsetof(struct net_properties_v12, name) == 0, "as in NCCL");
static_assert(offsetof(struct net_properties_v12, pci_path) == 8, "as in NCCL");
static_assert(offsetof(struct net_properties_v12, guid) == 16, "as in NCCL");
static_assert(offsetof(struct net_properties_v12, pointer_support) == 24, "as in NCCL");
static_assert(offsetof(struct net_properties_v12, registration_is_global) == 28, "as in NCCL");
static_assert(offsetof(struct net_properties_v12, force_flush) == 32, "as in NCCL");
static_assert(offsetof(struct net_properties_v12, speed) == 36, "as in NCCL");
static_assert(offsetof(struct net_properties_v12, port) == 40, "as in NCCL");
static_assert(offsetof(struct net_properties_v12, latency) == 44, "as in NCCL");
static_assert(offsetof(struct net_properties_v12, max_comms) == 48, "as in NCCL");
static_assert(offsetof(struct net_properties_v12, max_receives) == 52, "as in NCCL");
static_assert(offsetof(struct net_properties_v12, device_type) == 56, "as in NCCL");
static_assert(offsetof(struct net_properties_v12, device_version) == 60, "as in NCCL");
static_assert(offsetof(struct net_properties_v12, members) == 64, "as in NCCL");
static_assert(offsetof(struct net_properties_v12, max_p2p_bytes) == 104, "as in NCCL");
static_assert(offsetof(struct net_properties_v12, max_collective_bytes) == 112, "as in NCCL");
static_assert(offsetof(struct net_properties_v12, max_multi_request_size) == 120, "as in NCCL");
static_assert(offsetof(struct net_properties_v12, rail_id) == 124, "as in NCCL");
static_assert(offsetof(struct net_properties_v12, plane_id) == 126, "as in NCCL");

struct net_table_v12 {
  const char* name;
  int (*init)(void** context, uint64_t comm_id, struct net_config* config, net_logger logger,
              net_profiler profiler);
  int (*devices)(int* count);
  int (*get_properties)(int device, struct net_properties_v12* properties);
  int (*listen)(void* context, int device, void* handle, void** listen_comm);
  int (*connect)(void* context, int device, void* handle, void** send_comm, void** device_comm);
  int (*accept)(void* listen_comm, void** receive_comm, void** device_comm);
  int (*register_memory)(void* comm, void* data, size_t size, int type, void** memory);
  int (*register_dmabuf)(void* comm, void* data, size_t size, int type, uint64_t offset, int fd,
                         void** memory);
  int (*deregister_memory)(void* comm, void* memory);
  int (*isend)(void* send_comm, void* data, size_t size, int tag, void* memory, void* profile,
               void** request);
  int (*irecv)(void* receive_comm, int n, void** data, size_t* sizes, int* tags, void** memories,
               void** profiles, void** request);
  int (*iflush)(void* receive_comm, int n, void** data, int* sizes, void** memories,
                void** request);
  int (*test)(void* request, int* done, int* sizes);
  int (*close_send)(void* send_comm);
  int (*close_receive)(void* receive_comm);
  int (*close_listen)(void* listen_comm);
  int (*get_device_memory)(void* comm, void* memory, void** device_memory);
  int (*receive_consumed)(void* receive_comm, int n, void* request);
  int (*make_virtual_device)(int* device, struct net_members_8* members);
  int (*finalize)(void* context);
  int (*set_attributes)(void* context, struct net_attributes* attributes);
};
static_assert(sizeof(struct net_table_v12) == 22 * sizeof(void*), "as in NCCL");
static_assert(offsetof(struct net_table_v12, name) == 0 * sizeof(void*), "as in NCCL");
static_assert(offsetof(struct net_table_v12, init) == 1 * sizeof(void*), "as in NCCL");
static_assert(offsetof(struct net_table_v12, devices) == 2 * sizeof(void*), "as in NCCL");
static_assert(offsetof(struct net_table_v12, get_properties) == 3 * sizeof(void*), "as in NCCL");
static_assert(offsetof(struct net_table_v12, listen) == 4 * sizeof(void*), "as in NCCL");
static_assert(offsetof(struct net_table_v12, connect) == 5 * sizeof(void*), "as in NCCL");
static_assert(offsetof(struct net_table_v12, accept) == 6 * sizeof(void*), "as in NCCL");
static_assert(offsetof(struct net_table_v12, register_memory) == 7 * sizeof(void*), "as in NCCL");
static_assert(offsetof(struct net_table_v12, register_dmabuf) == 8 * sizeof(void*), "as in NCCL");
static_assert(offsetof(struct net_table_v12, deregister_memory) == 9 * sizeof(void*), "as in NCCL");
static_assert(offsetof(struct net_table_v12, isend) == 10 * sizeof(void*), "as in NCCL");
static_assert(offsetof(struct net_table_v12, irecv) == 11 * sizeof(void*), "as in NCCL");
static_assert(offsetof(struct net_table_v12, iflush) == 12 * sizeof(void*), "as in NCCL");
static_assert(offsetof(struct net_table_v12, test) == 13 * sizeof(void*), "as in NCCL");
static_assert(offsetof(struct net_table_v12, close_send) == 14 * sizeof(void*), "as in NCCL");
static_assert(offsetof(struct net_table_v12, close_receive) == 15 * sizeof(void*), "as in NCCL");
static_assert(offsetof(struct net_table_v12, close_listen) == 16 * sizeof(void*), "as in NCCL");
static_assert(offsetof(struct net_table_v12, get_device_memory) == 17 * sizeof(void*),
              "as in NCCL");
static_assert(offsetof(struct net_table_v12, receive_consumed) == 18 * sizeof(void*), "as in NCCL");
static_assert(offsetof(struct net_table_v12, make_virtual_device) == 19 * sizeof(void*),
              "as in NCCL");
static_assert(offsetof(struct net_table_v12, finalize) == 20 * sizeof(void*), "as in NCCL");
static_assert(offsetof(struct net_table_v12, set_attributes) == 21 * sizeof(void*), "as in NCCL");

#endif
