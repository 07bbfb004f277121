// The counters as a file, for people (JSON) and for Prometheus (the text that node_exporter's
// textfile collector reads). SCAPE_NET_STATS names it. No thread writes it: it is written when the
// plugin is initialised, when the last worker of a device or a group ends, at finalize and at
// exit(), and every SCAPE_NET_STATS_INTERVAL seconds by the call of NCCL's that comes next.
//
// A file that cannot be written is said once, through NCCL's logger, and fails nothing.
#pragma once

#include <atomic>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/status.h"
#include "plugin/net/counters.h"

namespace scape::net {

// Whose counters they are.
struct Origin {
  std::string host;
  int process = 0;
  int rank = -1;  // -1: not known
};

// This process. Its rank is what its launcher (torchrun, Open MPI, PMI, Slurm) says.
Origin find_origin();

// One device's counters at a moment, in the order of the table of metrics.
struct Reading {
  std::string device, library;
  std::vector<uint64_t> values;
};
Reading read_counters(const DeviceCounters& counters);

// `time_ms`: of the reading, in milliseconds since 1970; the text has seconds.
std::string json_of(const Origin& origin, int64_t time_ms, std::span<const Reading> readings);
std::string prometheus_of(const Origin& origin, std::span<const Reading> readings);

// The file that SCAPE_NET_STATS names: %h, %p, %r and %% replaced, and a name added to a folder.
Status statistics_path(const std::string& setting, const Origin& origin, std::string* out);

// Replaces the file in one step, readable by all; whoever reads it sees all of the old text or all
// of the new one.
Status replace_file(const std::string& path, const std::string& text);

// At init; the first call writes the file and has it written from then on.
void start_statistics(const Devices& devices);

// Writes it now.
void write_statistics() noexcept;

namespace detail {
extern constinit std::atomic<uint64_t> statistics_due_ns;
void write_statistics_if_due() noexcept;
}  // namespace detail

// Writes it where the interval is over: at the end of every call of NCCL's.
inline void write_due_statistics() noexcept {
  if (detail::statistics_due_ns.load(std::memory_order_relaxed) != UINT64_MAX) [[unlikely]] {
    detail::write_statistics_if_due();
  }
}

}  // namespace scape::net
