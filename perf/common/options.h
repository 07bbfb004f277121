// The options of the perf programs: nccl-tests' flags where they mean something on host memory, and
// Scape's own.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "perf/common/collective.h"
#include "perf/common/sizes.h"

namespace scape::perf {

struct Options : SizeRange {
  int iterations = 20;
  double seconds = 0;  // above 0: as many calls as take about this long, instead of `iterations`
  int warmup = 1;
  int checks = 1;
  int aggregated = 1;
  int average = 1;  // 0 rank 0, 1 mean, 2 least, 3 most
  double timeout_s = 600;
  std::vector<Type> types;
  std::vector<Op> ops;
  std::vector<int> roots;  // -1: all
  int local_ranks = 1;
  std::string worker;
  std::string id_file;
  std::string nccl_lib;
  std::string json;

  // Sparse runs.
  bool sparse = false;
  double sparsity = 0;
  scape_role role = SCAPE_ROLE_GRADIENT;
  scape_dtype payload = SCAPE_FLOAT32;
  // In place there are no calls out of place.
  scape_residual residual = SCAPE_RESIDUAL_INTERNAL;
  int64_t compute_us = 0, idle_us = 0;
};

// Fills *out. False when the program is to end with *exit_code at once (--help, a bad option, which
// is reported on stderr).
bool parse_options(const Collective& collective, int argc, char** argv, Options* out,
                   int* exit_code);

}  // namespace scape::perf
