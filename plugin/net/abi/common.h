/* What all versions of NCCL's net plugin interface share. Declarations of our own, in plain C:
 * names are ours, sizes and offsets are NCCL's, and static assertions hold them to that. */
#ifndef SCAPE_PLUGIN_NET_ABI_COMMON_H
#define SCAPE_PLUGIN_NET_ABI_COMMON_H

#include <assert.h>
#include <stddef.h>
#include <stdint.h>

/* ncclResult_t. */
enum net_result {
  NET_SUCCESS = 0,
  NET_SYSTEM_ERROR = 2,
  NET_INTERNAL_ERROR = 3,
  NET_INVALID_ARGUMENT = 4,
  NET_INVALID_USAGE = 5,
  NET_REMOTE_ERROR = 6
};

enum { NET_POINTER_HOST = 0x1, NET_POINTER_CUDA = 0x2, NET_POINTER_DMABUF = 0x4 };
enum { NET_DEVICE_HOST = 0, NET_DEVICE_INVALID_VERSION = 0 };
enum {
  NET_HANDLE_BYTES = 128, /* at most, of what listen writes */
  NET_MAX_REQUESTS = 32,  /* under way on a connection */
  NET_MAX_RECEIVES = 8,   /* in a group, of this plugin */
  NET_MAX_MEMBERS = 8,    /* of a virtual device, in the newest version */
  NET_ID_UNDEFINED = -1
};

enum { NET_LOG_WARN = 2, NET_LOG_INFO = 3 };
enum { NET_LOG_SUBSYSTEM_INIT = 0x1, NET_LOG_SUBSYSTEM_NET = 0x10 };

typedef void (*net_logger)(int level, unsigned long flags, const char* file, int line,
                           const char* format, ...);
typedef int (*net_profiler)(void** event, int type, void* parent, int64_t plugin, void* extra);

/* Of a device, "virtual" ones that stand for several physical ones included. */
struct net_members_4 {
  int count;
  int devices[4];
};
static_assert(sizeof(struct net_members_4) == 20, "as in NCCL");
struct net_members_8 {
  int count;
  int devices[8];
};
static_assert(sizeof(struct net_members_8) == 36, "as in NCCL");

struct net_config {
  int traffic_class;
};
static_assert(sizeof(struct net_config) == 4, "as in NCCL");

/* What NCCL tells from version 11 on about how a communicator will use its connections. */
struct net_connection_attributes {
  int32_t max_concurrent_peers;
  int32_t min_concurrent_peers;
  int32_t max_flows_per_peer;
  int32_t min_flows_per_peer;
};
struct net_attributes {
  struct net_connection_attributes send;
  struct net_connection_attributes receive;
  uint32_t operations;
  uint32_t algorithms;
  uint32_t protocols;
};
static_assert(sizeof(struct net_attributes) == 44, "as in NCCL");
static_assert(offsetof(struct net_attributes, receive) == 16, "as in NCCL");
static_assert(offsetof(struct net_attributes, operations) == 32, "as in NCCL");

#endif
