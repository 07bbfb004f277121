// What the stand-in NCCL tells a test of what was asked of it.
#pragma once

#include <stdint.h>

#if defined(__cplusplus)
extern "C" {
#endif

struct simnccl_counters {
  uint64_t calls;      // that were accepted; one that a graph captured counts once
  uint64_t bytes;      // count times the element's size, of those calls
  uint64_t runs;       // what ran on a stream: one a call, or one a launch of its graph
  uint64_t run_bytes;  // of those
};

// Of a collective, send or receive by its NCCL name ("ncclAllReduce"), or of all where it is null;
// of a communicator, or of all that there were where it is null. Thread-safe.
void simnccl_get_counters(const char* function, const void* comm,
                          struct simnccl_counters* counters);

// Calls so far of any function by its NCCL name, refused ones included.
uint64_t simnccl_calls(const char* function);

#if defined(__cplusplus)
}
#endif
