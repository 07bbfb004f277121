// Preloaded before the library under test: passes ncclAllReduce on to it, and on the call that
// FAULT_CALL counts does what FAULT names on rank 1, so that the tests see the perf programs
// notice.
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <atomic>
#include <cstddef>

namespace {

using AllReduce = int (*)(const void*, void*, size_t, int, int, void*, void*);
using CommUserRank = int (*)(void*, int*);

}  // namespace

extern "C" __attribute__((visibility("default"))) int ncclAllReduce(const void* send, void* recv,
                                                                    size_t count, int type, int op,
                                                                    void* comm, void* stream) {
  static const auto next = reinterpret_cast<AllReduce>(dlsym(RTLD_NEXT, "ncclAllReduce"));
  static const auto rank_of = reinterpret_cast<CommUserRank>(dlsym(RTLD_NEXT, "ncclCommUserRank"));
  static const char* const fault = getenv("FAULT");
  static const int fault_call = atoi(getenv("FAULT_CALL"));
  static std::atomic<int> calls{0};
  int rank = 0;
  rank_of(comm, &rank);
  const bool now = ++calls >= fault_call && rank == 1;
  if (now && strcmp(fault, "die") == 0) _exit(9);
  if (now && strcmp(fault, "hang") == 0) pause();
  const int result = next(send, recv, count, type, op, comm, stream);
  if (now && count > 0 && strcmp(fault, "corrupt") == 0) static_cast<unsigned char*>(recv)[0] ^= 1;
  if (now && strcmp(fault, "overrun") == 0) {
    // Types are at most 8 bytes: this is one element or more behind the result's last.
    static_cast<unsigned char*>(recv)[count * 4] ^= 1;
  }
  return now && strcmp(fault, "refuse") == 0 ? 4 : result;
}
