/* A network plugin that passes everything on to the one that FAULTY_NET_PLUGIN names, and with the
 * isend that FAULT_CALL counts does what FAULT names, so that the tests see net_perf notice. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

#include "plugin/net/abi/net_v12.h"

__attribute__((visibility("default"))) struct net_table_v12 ncclNetPlugin_v12;

static struct net_table_v12 real;

static int faulty_isend(void* comm, void* data, size_t size, int tag, void* memory, void* profile,
                        void** request) {
  static int calls;
  const char* const fault = getenv("FAULT");
  const int now = ++calls == atoi(getenv("FAULT_CALL"));
  if (now && strcmp(fault, "corrupt") == 0) ((unsigned char*)data)[size / 2] ^= 1;
  if (now && strcmp(fault, "shorten") == 0) --size;
  if (now && strcmp(fault, "refuse") == 0) return NET_INTERNAL_ERROR;
  if (now && strcmp(fault, "die") == 0) _Exit(9);
  return real.isend(comm, data, size, tag, memory, profile, request);
}

__attribute__((constructor)) static void load(void) {
  void* const library = dlopen(getenv("FAULTY_NET_PLUGIN"), RTLD_NOW | RTLD_LOCAL);
  const struct net_table_v12* const table =
      library != NULL ? dlsym(library, "ncclNetPlugin_v12") : NULL;
  if (table == NULL) return; /* whoever looks for a name finds none */
  real = ncclNetPlugin_v12 = *table;
  ncclNetPlugin_v12.isend = faulty_isend;
}
