// From a hooked call to the state of its buffer.
#pragma once

#include <memory>
#include <mutex>
#include <string>

#include "base/status.h"
#include "interposer/call_options.h"
#include "interposer/masked_comm.h"
#include "interposer/registry.h"

namespace scape::interposer {

// The state of one called range, or of one scape_next() name, on one communicator.
struct Buffer {
  ~Buffer();

  // Held from the start of a call to its end and during each local step: the masked buffer itself
  // is for one thread at a time. Never taken inside Registration::mutex. MaskedComm::hold() comes
  // after it.
  std::mutex busy;
  std::shared_ptr<MaskedComm> comm;
  std::unique_ptr<plugin::MaskedBuffer> masked;
  bool dropped = false;           // guarded by `busy`: unregistered, or its communicator is gone
  const void* address = nullptr;  // of its last call; guarded, as what follows, by the registration
  size_t offset = 0;
  size_t count = 0;
  std::string next_name;   // of scape_next(); empty for one that goes by its address
  uint64_t last_used = 0;  // order of calls, for readers that name only the address
};

// The name that scape_next() gave this thread's next hooked call; taking it forgets it.
void set_next_name(const char* name);
std::string take_next_name();

// How an all-reduce goes: masked over `buffer`, or dense where that is null. A dense call of a
// registered range carries the registration's name to the other ranks, so that one that sees it
// otherwise is found out.
struct Route {
  std::shared_ptr<Buffer> buffer;
  bool registered = false;
  std::string name;
};

// Decides for one all-reduce. Counts it, and says once why a registered range goes dense. A call
// with options of its own is masked or refused (USAGE: its range is registered already, or it is
// named twice). `comm`: null where nobody knows the call's communicator.
Status route_all_reduce(const std::shared_ptr<MaskedComm>& comm, const AllReduceCall& call,
                        const CallOptions& options, Route* out);

// A collective that is never sparse met these buffers: where one is registered it is counted and
// said.
void note_other_collective(const char* function, const void* send, const void* recv, size_t bytes);

// A call of `bytes` met no registration: those that wait for such calls in vain are named.
void note_miss(size_t bytes);

// Enough of a registration was met by calls: all but a hundredth.
bool covered_enough(size_t covered, size_t count);

// The buffer that the last call of (address, count) used. NOT_FOUND says what is registered there.
Status find_buffer(const void* address, size_t count, std::shared_ptr<Buffer>* out);

// Drops the buffers of a communicator that is going away; their counters stay with their
// registrations.
void drop_buffers_of(const MaskedComm& comm);

// Drops all buffers of a registration. Waits for calls on them in other threads. Returns the
// residual that was dropped (sum of magnitudes).
double drop_buffers(Registration& registration);

// Sums counters; `step` and the figures of the last call are the latest buffer's.
void add_stats(const scape_stats& from, scape_stats* to);

// The registration's own counters and all its buffers'.
scape_stats stats_of(Registration& registration);

// Those of registrations that are gone.
scape_stats retired_stats();

}  // namespace scape::interposer
