// The table on stdout, as nccl-tests prints it, and the same as JSON.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "perf/common/options.h"

namespace scape::perf {

// Where one masked call spends its time, and what it sends; means over the timed calls.
struct MaskedFigures {
  double density = 0;  // elements sent / elements
  double payload_bytes = 0;
  double mask_bytes = 0;
  double pack_us = 0;
  double exchange_us = 0;
  double exchange_alone_us = 0;  // from when the last rank is there
  double unpack_us = 0;
  double score_us = 0;
  double refresh_us = 0;  // in the background
  double wait_us = 0;     // of the call, for the background
  double step_us = 0;     // scape_adams_step(), fused role
  // What the bytes that a fused call has to move take at the rate of a += b by all ranks at once.
  double memory_us = 0;
};

// One half of a line: the call out of place, or in place.
struct Figures {
  double time_us = 0;  // over ranks as -a says, mean over calls
  int calls = 0;
  double least_us = 0, median_us = 0, p99_us = 0, most_us = 0;  // rank 0's calls
  double algorithm_bandwidth = 0;                               // GB/s
  double bus_bandwidth = 0;
  std::optional<double> wire_bytes;  // sent by one rank a call, mean over ranks
  double roof_percent = 0;
  std::optional<MaskedFigures> masked;
  bool checked = false;
  uint64_t wrong = 0;
};

struct Line {
  size_t bytes = 0;
  size_t count = 0;
  Type type = Type::kFloat;
  Op op = Op::kSum;
  int root = -1;
  Figures out_of_place;
  Figures in_place;
};

// Rank 0 prints; on other ranks every function does nothing.
class Report {
 public:
  Report(const Collective& collective, const Options& options, const NcclLibrary& nccl, int rank,
         int ranks);

  void print_header() const;
  void add(const Line& line);
  // The trailer; writes the JSON file. An error names the file.
  Status finish(uint64_t wrong);

 private:
  const Collective& collective_;
  const Options& options_;
  const NcclLibrary& nccl_;
  const bool prints_;
  const int ranks_;
  double bus_bandwidth_sum_ = 0;
  int bus_bandwidths_ = 0;
  nlohmann::ordered_json results_ = nlohmann::ordered_json::array();
};

}  // namespace scape::perf
