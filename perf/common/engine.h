// The engine: one line of the table at a time, dense or masked.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "perf/common/collective.h"
#include "perf/common/control.h"
#include "perf/common/memory.h"
#include "perf/common/options.h"
#include "perf/common/report.h"

namespace scape::perf {

// What every measurement of one rank needs.
struct Session {
  const Collective& collective;
  const Options& options;
  const NcclLibrary& nccl;
  Control& control;
  NcclComm comm = nullptr;
  Memory send;
  Memory recv;
  uint64_t seed = 1;  // alike on all ranks; changes with each checked call
};

// Which of the two buffers' places a call uses.
struct Placement {
  std::byte* send = nullptr;
  std::byte* recv = nullptr;
};

// Times `call` (options.iterations times, after options.warmup untimed ones) and reduces the mean
// over ranks as -a says. `between` runs after each call, untimed. Collective.
Status time_calls(Session& session, const std::function<NcclResult()>& call,
                  const std::function<Status()>& between, Figures* figures);

// memcpy of `bytes` by all ranks at once: GB/s of one rank. Collective.
Status measure_roof(Session& session, size_t bytes, double* gigabytes_per_second);

// What memory gives: passes of a += b over arrays of its own by all ranks at once, taken between
// the calls that they are a measure for, since what else the machine does comes and goes.
class Stream {
 public:
  explicit Stream(Session& session) : session_(session) {}
  Status open(size_t bytes);
  Status pass();  // collective
  // Bytes read and written a second by one rank, by the median pass, each of which lasts until the
  // last rank's is over. Alike on all ranks.
  Status rate(double* gigabytes_per_second);

 private:
  Session& session_;
  Memory a_, b_;
  size_t bytes_ = 0;
  std::vector<double> times_us_;
};

// Transport bytes that this process has sent so far; empty where the library does not tell.
std::optional<uint64_t> wire_bytes_sent(const NcclLibrary& nccl);

// One half of a line of the masked all-reduce (masked.cc). *in_force turns false when calls that
// were to be compressed were not, with the reason on stderr. Collective.
Status run_masked(Session& session, size_t count, Type type, Op op, bool in_place, Figures* figures,
                  bool* in_force);

}  // namespace scape::perf
