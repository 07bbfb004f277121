/* The plugin as NCCL sees it: looked up by name, one of its versions, called through that version's
 * signatures. What a version lacks is left out; the rest looks the same here. */
#ifndef SCAPE_PLUGIN_NET_ABI_NET_API_H
#define SCAPE_PLUGIN_NET_ABI_NET_API_H

#include "plugin/net/abi/net_v10.h"
#include "plugin/net/abi/net_v11.h"
#include "plugin/net/abi/net_v12.h"
#include "plugin/net/abi/net_v6.h"
#include "plugin/net/abi/net_v7.h"
#include "plugin/net/abi/net_v8.h"
#include "plugin/net/abi/net_v9.h"

enum { OLDEST_VERSION = 6, NEWEST_VERSION = 12 };

struct api {
  int version;
  void* library;
  void* table;
  void* context; /* from version 11 on */
};

#ifdef __cplusplus
extern "C" {
#endif

/* Null, or why the library cannot be loaded. */
const char* api_load(struct api* api, const char* path);
/* 0 when it has a table of this version. */
int api_choose(struct api* api, int version);
void api_close(struct api* api);

const char* api_name(const struct api* api);
int api_init(struct api* api, net_logger logger);
int api_devices(const struct api* api, int* count);
/* Joins several to one; refused where the version has no such call. More than it has room for are
 * asked for as they are, with the first ones named. */
int api_make_device(const struct api* api, int* device, const int* members, int count);
/* All fields, at their place in the newest version. */
int api_properties(const struct api* api, int device, struct net_properties_v12* out);
int api_listen(const struct api* api, int device, void* handle, void** comm);
int api_connect(const struct api* api, int device, void* handle, void** comm);
int api_accept(const struct api* api, void* listen_comm, void** comm);
int api_register(const struct api* api, void* comm, void* data, size_t size, int type,
                 void** memory);
int api_deregister(const struct api* api, void* comm, void* memory);
int api_isend(const struct api* api, void* comm, void* data, size_t size, int tag, void* memory,
              void** request);
int api_irecv(const struct api* api, void* comm, int n, void** data, const size_t* sizes, int* tags,
              void** memories, void** request);
int api_iflush(const struct api* api, void* comm, int n, void** data, int* sizes, void** memories,
               void** request);
int api_test(const struct api* api, void* request, int* done, int* sizes);
int api_close_send(const struct api* api, void* comm);
int api_close_receive(const struct api* api, void* comm);
int api_close_listen(const struct api* api, void* comm);
/* Success where the version has no such call. */
int api_finalize(struct api* api);

#ifdef __cplusplus
}
#endif

#endif
