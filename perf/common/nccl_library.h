// The NCCL in the process: its functions, found at run time.
//
// The perf programs link no NCCL. They measure whichever one the process has: a preloaded one, one
// that --nccl-lib names, or the libscape_nccl.so of this build.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "base/status.h"
#include "scape/scape.h"

namespace scape::perf {

// The part of NCCL's binary interface that the programs use (nccl.h, unchanged since 2.10).
struct NcclUniqueId {
  char internal[128];
};
using NcclComm = struct ncclComm*;
using NcclStream = void*;  // a cudaStream_t; ignored on host memory
using NcclResult = int;    // 0 is ncclSuccess
using NcclRedOp = int;
inline constexpr int kNcclScalarHostImmediate = 1;

struct NcclLibrary {
  NcclResult (*get_version)(int*) = nullptr;
  const char* (*get_error_string)(NcclResult) = nullptr;
  const char* (*get_last_error)(NcclComm) = nullptr;
  NcclResult (*get_unique_id)(NcclUniqueId*) = nullptr;
  NcclResult (*comm_init_rank)(NcclComm*, int, NcclUniqueId, int) = nullptr;
  NcclResult (*comm_destroy)(NcclComm) = nullptr;
  NcclResult (*group_start)() = nullptr;
  NcclResult (*group_end)() = nullptr;
  NcclResult (*red_op_create_premul_sum)(NcclRedOp*, void*, int, int, NcclComm) = nullptr;
  NcclResult (*red_op_destroy)(NcclRedOp, NcclComm) = nullptr;
  NcclResult (*all_reduce)(const void*, void*, size_t, int, NcclRedOp, NcclComm,
                           NcclStream) = nullptr;
  NcclResult (*reduce_scatter)(const void*, void*, size_t, int, NcclRedOp, NcclComm,
                               NcclStream) = nullptr;
  NcclResult (*all_gather)(const void*, void*, size_t, int, NcclComm, NcclStream) = nullptr;
  NcclResult (*broadcast)(const void*, void*, size_t, int, int, NcclComm, NcclStream) = nullptr;

  // Scape's own functions; null where the library in the process is another NCCL.
  decltype(&::scape_config_init) config_init = nullptr;
  decltype(&::scape_register) register_buffer = nullptr;
  decltype(&::scape_unregister) unregister_buffer = nullptr;
  decltype(&::scape_adams_step) adams_step = nullptr;
  decltype(&::scape_flush) flush = nullptr;
  decltype(&::scape_read_mask) read_mask = nullptr;
  decltype(&::scape_read_residual) read_residual = nullptr;
  decltype(&::scape_read_moment) read_moment = nullptr;
  decltype(&::scape_get_stats) get_stats = nullptr;
  decltype(&::scape_last_error) last_error = nullptr;

  std::string path;  // the file that the functions come from
  int version = 0;   // as ncclGetVersion tells it

  bool has_scape() const { return register_buffer != nullptr; }
};

// The path of this build's library of this name: ../lib beside the program.
std::string library_beside_program(const std::string& name);

// Finds the functions: in the library `path` when it is not empty, else in the process, else in
// ../lib/libscape_nccl.so beside this program. The library stays loaded. Errors name what was
// looked for and where.
Status load_nccl(const std::string& path, NcclLibrary* out);

// An error Status for a failed NCCL call, with the library's own explanation.
Status nccl_error(const NcclLibrary& nccl, NcclResult result, const char* call, NcclComm comm);

}  // namespace scape::perf
