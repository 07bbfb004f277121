// Where the library's background threads run. The program's own threads are never moved.
#pragma once

#include <cstddef>

#include "base/cpu_set.h"
#include "plugin/placement/topology.h"

namespace scape::plugin {

struct PlacementQuestion {
  Topology topology;
  CpuSet allowed;  // where the process may run
  CpuSet caller;   // where the thread may run that this one works for; this one inherits it
  CpuSet near;     // the CPUs next to the memory that is worked on; empty: not known
  int ranks = 1;   // processes that may share these CPUs, each with a caller and such a thread
};

// The CPUs for such a thread, out of `allowed`; none where it is best left as it is:
//
//  - Where there are fewer cores than threads, as it is.
//  - A caller that is kept from some of the CPUs (pinned, say) is left alone: the thread goes to
//  other cores, else to other CPUs of the caller's. A caller that may run anywhere has no place to
//  be kept off from: it may move there at any time, and the system keeps the two apart.
//  - Of those, to the ones next to the memory, if they have cores for all ranks.
CpuSet choose_cpus(const PlacementQuestion& question);

// Places the calling thread as SCAPE_PROGRESS_CPUS says, never outside of where the process may
// run. It works on these bytes (which need not be there any more) for one of `ranks` ranks.
// Whatever hinders it is a line of the log, and the thread stays as it is.
void place_this_thread(const char* purpose, const void* data, size_t bytes, int ranks);

}  // namespace scape::plugin
