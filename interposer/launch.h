// Running collectives: one alone, or the calls of a group together.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/status.h"
#include "interposer/buffers.h"
#include "interposer/host_comm.h"
#include "plugin/communicator.h"

namespace scape::interposer {

// One call, checked and ready to start.
struct Call {
  enum class Kind {
    kAllReduce,
    kReduceScatter,
    kAllGather,
    kAllToAll,
    kBroadcast,
    kReduce,
    kGather,
    kScatter,
    kSend,
    kRecv
  };
  Kind kind = Kind::kAllReduce;
  std::shared_ptr<HostComm> comm;
  const void* send = nullptr;
  void* recv = nullptr;
  size_t count = 0;
  plugin::DataType type = plugin::DataType::kFloat32;
  plugin::Reduction reduction;
  const void* scalar = nullptr;  // of a premultiplied sum whose factor is read when the call starts
  int peer = 0;                  // or root
  Route route;                   // of an all-reduce
};

// Starts the calls in order and drives them, all communicators together, until all are over. On one
// communicator a masked call begins when those before it have begun, and those after it begin when
// it is over: its inner collectives then follow in the same order on all ranks. Returns the first
// error.
Status launch(std::vector<Call>& calls);

// What a group of this thread has gathered. Made by the outermost ncclGroupStart.
struct Group {
  int depth = 0;
  Status first_error;  // of a call in the group: nothing of it is launched then
  std::vector<Call> calls;
  // Collective works of communicators (inits, splits, ...): each runs on a thread of its own,
  // because one thread may own several ranks.
  std::vector<std::function<Status()>> jobs;
};

// The open group of this thread, or null.
Group* current_group();
Status group_start();
// At the outermost level launches what was gathered, or drops it where `discard` or an error says
// so.
Status group_end(bool discard);

// Runs it now, or with the open group.
Status submit(Call call);
Status submit_job(std::function<Status()> job);

// Runs all on threads of their own and waits for them; the first error counts.
Status run_together(const std::vector<std::function<Status()>>& jobs);

}  // namespace scape::interposer
