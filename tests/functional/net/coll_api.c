#include "tests/functional/net/coll_api.h"

#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

#define TABLE(v) ((const struct collnet_table_v##v*)api->table)
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

int coll_open(struct coll_api* api, const char* path, int version) {
  char symbol[32];
  memset(api, 0, sizeof *api);
  api->version = version;
  api->library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (api->library == NULL) {
    fprintf(stderr, "%s\n", dlerror());
    return 1;
  }
  snprintf(symbol, sizeof symbol, "ncclCollNetPlugin_v%d", version);
  api->table = dlsym(api->library, symbol);
  return api->table == NULL;
}

void coll_close_library(struct coll_api* api) { dlclose(api->library); }

/* The name is the first slot in all. */
const char* coll_name(const struct coll_api* api) { return TABLE(6)->name; }

int coll_init(struct coll_api* api, net_logger logger) {
  if (api->version <= 10) return TABLE(10)->init(logger);
  if (api->version == 11) return TABLE(11)->init(&api->context, 1, logger);
  return TABLE(12)->init(&api->context, 1, logger);
}

int coll_devices(const struct coll_api* api, int* count) {
#define CALL(T) T->devices(count)
  EACH(CALL)
#undef CALL
}

#define GET(v)                                              \
  struct net_properties_v##v in;                            \
  memset(&in, 0xa5, sizeof in);                             \
  const int result = TABLE(v)->get_properties(device, &in); \
  if (result == NET_SUCCESS && in.name == NULL) return NET_INTERNAL_ERROR;

int coll_largest(const struct coll_api* api, int device, size_t* bytes) {
  *bytes = 0;
  switch (api->version) {
    case 6: {
      GET(6) return result;
    }
    case 7: {
      GET(7) return result;
    }
    case 8: {
      GET(8) return result;
    }
    case 9: {
      GET(9)* bytes = in.max_collective_bytes;
      return result;
    }
    case 10: {
      GET(10)* bytes = in.max_collective_bytes;
      return result;
    }
    case 11: {
      GET(11)* bytes = in.max_collective_bytes;
      return result;
    }
    default: {
      GET(12)* bytes = in.max_collective_bytes;
      return result;
    }
  }
}

int coll_listen(const struct coll_api* api, int device, void* handle, void** comm) {
  if (api->version >= 11) return TABLE(11)->listen(api->context, device, handle, comm);
  return TABLE(6)->listen(device, handle, comm);
}

int coll_connect(const struct coll_api* api, void** handles, int ranks, int rank, void* listen_comm,
                 void** comm) {
#define CALL(T) T->connect(handles, ranks, rank, listen_comm, comm)
  EACH(CALL)
#undef CALL
}

int coll_reduce_support(const struct coll_api* api, int type, int op, int* supported) {
#define CALL(T) T->reduce_support(type, op, supported)
  EACH(CALL)
#undef CALL
}

int coll_register(const struct coll_api* api, void* comm, void* data, size_t size, int type,
                  void** memory) {
  if (api->version >= 8) return TABLE(8)->register_memory(comm, data, size, type, memory);
  return TABLE(6)->register_memory(comm, data, (int)size, type, memory);
}

int coll_deregister(const struct coll_api* api, void* comm, void* memory) {
#define CALL(T) T->deregister_memory(comm, memory)
  EACH(CALL)
#undef CALL
}

int coll_all_reduce(const struct coll_api* api, void* comm, void* send, void* receive, size_t count,
                    int type, int op, void* send_memory, void* receive_memory, void** request) {
  if (api->version >= 9) {
    return TABLE(9)->iallreduce(comm, send, receive, count, type, op, send_memory, receive_memory,
                                request);
  }
  return TABLE(8)->iallreduce(comm, send, receive, (int)count, type, op, send_memory,
                              receive_memory, request);
}

/* Version 8 has parts of its own. */
static void narrow(struct collnet_part_v8* out, const struct collnet_part_v12* in, int count) {
  for (int i = 0; i < count && i < COLL_MAX_PARTS; ++i) {
    out[i].memory = in[i].memory;
    out[i].address = in[i].address;
    out[i].size = (uint32_t)in[i].size;
  }
}

int coll_all_gather(const struct coll_api* api, void* comm, void* send, int parts,
                    const struct collnet_part_v12* receive_parts, struct coll_window window,
                    void* send_memory, void** request) {
  struct collnet_part_v8 narrowed[COLL_MAX_PARTS];
  if (api->version >= 9) {
    /* The parts have one layout in all versions since. */
    return TABLE(12)->iallgather(comm, send, parts, (struct collnet_part_v12*)receive_parts,
                                 window.bytes_per_rank, window.offset, window.bytes, send_memory,
                                 request);
  }
  narrow(narrowed, receive_parts, parts);
  return TABLE(8)->iallgather(comm, send, parts, narrowed, window.bytes_per_rank, window.offset,
                              window.bytes, send_memory, request);
}

int coll_reduce_scatter(const struct coll_api* api, void* comm, int parts,
                        const struct collnet_part_v12* send_parts, void* receive,
                        struct coll_window window, int type, int op, void* receive_memory,
                        void** request) {
  struct collnet_part_v8 narrowed[COLL_MAX_PARTS];
  if (api->version >= 9) {
    return TABLE(12)->ireducescatter(comm, parts, (struct collnet_part_v12*)send_parts, receive,
                                     window.bytes_per_rank, window.offset, window.bytes, type, op,
                                     receive_memory, request);
  }
  narrow(narrowed, send_parts, parts);
  return TABLE(8)->ireducescatter(comm, parts, narrowed, receive, window.bytes_per_rank,
                                  window.offset, window.bytes, type, op, receive_memory, request);
}

int coll_flush(const struct coll_api* api, void* comm, void* data, int size, void* memory,
               void** request) {
#define CALL(T) T->iflush(comm, data, size, memory, request)
  EACH(CALL)
#undef CALL
}

int coll_test(const struct coll_api* api, void* request, int* done, int* size) {
#define CALL(T) T->test(request, done, size)
  EACH(CALL)
#undef CALL
}

int coll_close(const struct coll_api* api, void* comm) {
#define CALL(T) T->close_coll(comm)
  EACH(CALL)
#undef CALL
}

int coll_close_listen(const struct coll_api* api, void* comm) {
#define CALL(T) T->close_listen(comm)
  EACH(CALL)
#undef CALL
}

int coll_finalize(struct coll_api* api) {
  if (api->version < 11) return NET_SUCCESS;
  void* const context = api->context;
  api->context = NULL;
  if (api->version == 11) return TABLE(11)->finalize(context);
  return TABLE(12)->finalize(context);
}
