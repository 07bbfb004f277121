// What tells one collective from another, for the engine that measures them.
#pragma once

#include <cstddef>

#include "perf/common/nccl_library.h"
#include "perf/common/types.h"

namespace scape::perf {

// Element counts of one call, and where its two buffers lie when they share memory.
struct Shape {
  size_t send_count = 0;
  size_t recv_count = 0;
  size_t argument = 0;  // the count that the NCCL function is given
  size_t in_place_send_offset = 0;
  size_t in_place_recv_offset = 0;
  // Place of the buffers in the pattern of the whole collective.
  size_t send_first = 0;
  size_t recv_first = 0;
};

class Collective {
 public:
  virtual ~Collective() = default;

  virtual const char* name() const = 0;
  virtual bool reduces() const { return false; }
  virtual bool has_root() const { return false; }
  // The masked collective serves it.
  virtual bool can_be_sparse() const { return false; }
  // `count` elements is the larger of the two buffers, as the table's size column counts.
  virtual Shape shape(size_t count, int rank, int ranks) const = 0;
  // Bus bandwidth is this times size / time: what a ring moves over each link
  // (docs/performance.md).
  virtual double bus_factor(int ranks) const = 0;
  virtual NcclResult launch(const NcclLibrary& nccl, const void* send, void* recv, size_t argument,
                            Type type, NcclRedOp op, int root, NcclComm comm) const = 0;
};

// Runs a perf program: everything that main() does. Returns the exit code (control.h).
int run_program(const Collective& collective, int argc, char** argv);

}  // namespace scape::perf
