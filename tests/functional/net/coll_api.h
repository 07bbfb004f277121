/* CollNet as NCCL sees it, as net_api.h has it for the net plugin. */
#ifndef SCAPE_TESTS_COLL_API_H
#define SCAPE_TESTS_COLL_API_H

#include "plugin/net/abi/collnet_v10.h"
#include "plugin/net/abi/collnet_v11.h"
#include "plugin/net/abi/collnet_v12.h"
#include "plugin/net/abi/collnet_v6.h"
#include "plugin/net/abi/collnet_v7.h"
#include "plugin/net/abi/collnet_v8.h"
#include "plugin/net/abi/collnet_v9.h"

enum { COLL_MAX_PARTS = 4, OLDEST_WINDOWS = 8 /* the first version with windows */ };

struct coll_api {
  int version;
  void* library;
  void* table;
  void* context; /* from version 11 on */
};

struct coll_window {
  size_t bytes_per_rank, offset, bytes;
};

/* 0 when the library has a table of this version. */
int coll_open(struct coll_api* api, const char* path, int version);
void coll_close_library(struct coll_api* api);

const char* coll_name(const struct coll_api* api);
int coll_init(struct coll_api* api, net_logger logger);
int coll_devices(const struct coll_api* api, int* count);
/* Success and 0 where the version does not say. */
int coll_largest(const struct coll_api* api, int device, size_t* bytes);
int coll_listen(const struct coll_api* api, int device, void* handle, void** comm);
int coll_connect(const struct coll_api* api, void** handles, int ranks, int rank, void* listen_comm,
                 void** comm);
int coll_reduce_support(const struct coll_api* api, int type, int op, int* supported);
int coll_register(const struct coll_api* api, void* comm, void* data, size_t size, int type,
                  void** memory);
int coll_deregister(const struct coll_api* api, void* comm, void* memory);
int coll_all_reduce(const struct coll_api* api, void* comm, void* send, void* receive, size_t count,
                    int type, int op, void* send_memory, void* receive_memory, void** request);
/* The parts as in the newest version. Not before OLDEST_WINDOWS. */
int coll_all_gather(const struct coll_api* api, void* comm, void* send, int parts,
                    const struct collnet_part_v12* receive_parts, struct coll_window window,
                    void* send_memory, void** request);
int coll_reduce_scatter(const struct coll_api* api, void* comm, int parts,
                        const struct collnet_part_v12* send_parts, void* receive,
                        struct coll_window window, int type, int op, void* receive_memory,
                        void** request);
int coll_flush(const struct coll_api* api, void* comm, void* data, int size, void* memory,
               void** request);
int coll_test(const struct coll_api* api, void* request, int* done, int* size);
int coll_close(const struct coll_api* api, void* comm);
int coll_close_listen(const struct coll_api* api, void* comm);
/* Success where the version has no such call. */
int coll_finalize(struct coll_api* api);

#endif
