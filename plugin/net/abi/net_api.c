#include "plugin/net/abi/net_api.h"

#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

#define TABLE(v) ((const struct net_table_v##v*)api->table)
/* The same expression for each version, T being that version's table. */
#define EACH(CALL)            \
  switch (api->version) {     \
    case 6:                   \
      return CALL(TABLE(6));  \
    case 7:                   \
      return CALL(TABLE(7));  \
    case 8:                   \
      return CALL(TABLE(8));  \
    case 9:                   \
      return CALL(TABLE(9));  \
    case 10:                  \
      return CALL(TABLE(10)); \
    case 11:                  \
      return CALL(TABLE(11)); \
    default:                  \
      return CALL(TABLE(12)); \
  }

const char* api_load(struct api* api, const char* path) {
  memset(api, 0, sizeof *api);
  api->library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  return api->library == NULL ? dlerror() : NULL;
}

int api_choose(struct api* api, int version) {
  char symbol[32];
  snprintf(symbol, sizeof symbol, "ncclNetPlugin_v%d", version);
  api->version = version;
  api->table = dlsym(api->library, symbol);
  return api->table == NULL;
}

void api_close(struct api* api) { dlclose(api->library); }

/* The name is the first slot in all. */
const char* api_name(const struct api* api) { return TABLE(6)->name; }

int api_init(struct api* api, net_logger logger) {
  struct net_config config = {-1};
  if (api->version <= 9) return TABLE(9)->init(logger);
  if (api->version == 10) return TABLE(10)->init(logger, NULL);
  if (api->version == 11) return TABLE(11)->init(&api->context, 1, &config, logger, NULL);
  return TABLE(12)->init(&api->context, 1, &config, logger, NULL);
}

int api_devices(const struct api* api, int* count) {
#define CALL(T) T->devices(count)
  EACH(CALL)
#undef CALL
}

int api_make_device(const struct api* api, int* device, const int* members, int count) {
  struct net_members_4 few = {count, {0}};
  struct net_members_8 more = {count, {0}};
  for (int i = 0; i < count && i < 4; ++i) few.devices[i] = members[i];
  for (int i = 0; i < count && i < 8; ++i) more.devices[i] = members[i];
  if (api->version < 9) return NET_INVALID_USAGE;
  if (api->version < 12) return TABLE(9)->make_virtual_device(device, &few);
  return TABLE(12)->make_virtual_device(device, &more);
}

#define COMMON_PROPERTIES                    \
  out->name = in.name;                       \
  out->pci_path = in.pci_path;               \
  out->guid = in.guid;                       \
  out->pointer_support = in.pointer_support; \
  out->speed = in.speed;                     \
  out->port = in.port;                       \
  out->latency = in.latency;                 \
  out->max_comms = in.max_comms;             \
  out->max_receives = in.max_receives;
#define DEVICE_PROPERTIES            \
  out->device_type = in.device_type; \
  out->device_version = in.device_version;
#define LARGE_PROPERTIES                                                       \
  out->registration_is_global = in.registration_is_global;                     \
  out->force_flush = in.force_flush;                                           \
  out->members.count = in.members.count;                                       \
  memcpy(out->members.devices, in.members.devices, sizeof in.members.devices); \
  out->max_p2p_bytes = in.max_p2p_bytes;                                       \
  out->max_collective_bytes = in.max_collective_bytes;
/* Bytes that the plugin leaves as they were stand out. */
#define GET(v)                                              \
  struct net_properties_v##v in;                            \
  memset(&in, 0xa5, sizeof in);                             \
  const int result = TABLE(v)->get_properties(device, &in); \
  if (result != NET_SUCCESS) return result;

int api_properties(const struct api* api, int device, struct net_properties_v12* out) {
  memset(out, 0, sizeof *out);
  switch (api->version) {
    case 6: {
      GET(6) COMMON_PROPERTIES return result;
    }
    case 7: {
      GET(7) COMMON_PROPERTIES DEVICE_PROPERTIES return result;
    }
    case 8: {
      GET(8) COMMON_PROPERTIES DEVICE_PROPERTIES return result;
    }
    case 9: {
      GET(9) COMMON_PROPERTIES DEVICE_PROPERTIES LARGE_PROPERTIES return result;
    }
    case 10: {
      GET(10) COMMON_PROPERTIES DEVICE_PROPERTIES LARGE_PROPERTIES return result;
    }
    case 11: {
      GET(11) COMMON_PROPERTIES DEVICE_PROPERTIES LARGE_PROPERTIES return result;
    }
    default: {
      GET(12)
      COMMON_PROPERTIES DEVICE_PROPERTIES LARGE_PROPERTIES out->max_multi_request_size =
          in.max_multi_request_size;
      out->rail_id = in.rail_id;
      out->plane_id = in.plane_id;
      return result;
    }
  }
}

int api_listen(const struct api* api, int device, void* handle, void** comm) {
  if (api->version >= 11) return TABLE(11)->listen(api->context, device, handle, comm);
  return TABLE(6)->listen(device, handle, comm);
}

int api_connect(const struct api* api, int device, void* handle, void** comm) {
  void* device_comm = comm; /* to be cleared: nothing runs on a device */
  struct net_config config = {-1};
  int result;
  if (api->version >= 11) {
    result = TABLE(11)->connect(api->context, device, handle, comm, &device_comm);
  } else if (api->version == 10) {
    result = TABLE(10)->connect(device, &config, handle, comm, &device_comm);
  } else if (api->version >= 7) {
    result = TABLE(7)->connect(device, handle, comm, &device_comm);
  } else {
    return TABLE(6)->connect(device, handle, comm);
  }
  return result == NET_SUCCESS && device_comm != NULL ? NET_INTERNAL_ERROR : result;
}

int api_accept(const struct api* api, void* listen_comm, void** comm) {
  void* device_comm = NULL;
  if (api->version >= 7) return TABLE(7)->accept(listen_comm, comm, &device_comm);
  return TABLE(6)->accept(listen_comm, comm);
}

int api_register(const struct api* api, void* comm, void* data, size_t size, int type,
                 void** memory) {
  if (api->version >= 8) return TABLE(8)->register_memory(comm, data, size, type, memory);
  return TABLE(6)->register_memory(comm, data, (int)size, type, memory);
}

int api_deregister(const struct api* api, void* comm, void* memory) {
#define CALL(T) T->deregister_memory(comm, memory)
  EACH(CALL)
#undef CALL
}

int api_isend(const struct api* api, void* comm, void* data, size_t size, int tag, void* memory,
              void** request) {
  if (api->version >= 10) return TABLE(10)->isend(comm, data, size, tag, memory, NULL, request);
  if (api->version == 9) return TABLE(9)->isend(comm, data, size, tag, memory, request);
  return TABLE(8)->isend(comm, data, (int)size, tag, memory, request);
}

int api_irecv(const struct api* api, void* comm, int n, void** data, const size_t* sizes, int* tags,
              void** memories, void** request) {
  size_t wide[NET_MAX_RECEIVES];
  int narrow[NET_MAX_RECEIVES];
  for (int i = 0; i < n && i < NET_MAX_RECEIVES; ++i) {
    wide[i] = sizes[i];
    narrow[i] = (int)sizes[i];
  }
  if (api->version >= 10) {
    return TABLE(10)->irecv(comm, n, data, wide, tags, memories, NULL, request);
  }
  if (api->version == 9) return TABLE(9)->irecv(comm, n, data, wide, tags, memories, request);
  return TABLE(8)->irecv(comm, n, data, narrow, tags, memories, request);
}

int api_iflush(const struct api* api, void* comm, int n, void** data, int* sizes, void** memories,
               void** request) {
#define CALL(T) T->iflush(comm, n, data, sizes, memories, request)
  EACH(CALL)
#undef CALL
}

int api_test(const struct api* api, void* request, int* done, int* sizes) {
#define CALL(T) T->test(request, done, sizes)
  EACH(CALL)
#undef CALL
}

int api_close_send(const struct api* api, void* comm) {
#define CALL(T) T->close_send(comm)
  EACH(CALL)
#undef CALL
}

int api_close_receive(const struct api* api, void* comm) {
#define CALL(T) T->close_receive(comm)
  EACH(CALL)
#undef CALL
}

int api_close_listen(const struct api* api, void* comm) {
#define CALL(T) T->close_listen(comm)
  EACH(CALL)
#undef CALL
}

int api_finalize(struct api* api) {
  if (api->version < 11) return NET_SUCCESS;
  void* const context = api->context;
  api->context = NULL;
  if (api->version == 11) return TABLE(11)->finalize(context);
  return TABLE(12)->finalize(context);
}
