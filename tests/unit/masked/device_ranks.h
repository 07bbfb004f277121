// Ranks as threads of one process, each on a simulated device, with the stand-in NCCL between them.
#pragma once

#include <functional>
#include <memory>

#include "nccl/functions.h"
#include "plugin/device/device_channel.h"
#include "scenario.h"

namespace scape::plugin::test {

struct DeviceRank : Rank {
  DeviceRank(const nccl::Functions& f, nccl::ncclComm_t c, std::shared_ptr<DeviceChannel> ch,
             Stream s);
  const nccl::Functions& nccl;
  nccl::ncclComm_t comm;
  std::shared_ptr<DeviceChannel> channel;
};

// Runs body(rank) of each rank in a thread of its own, on a stream of its own that is independent
// of the legacy one, and joins them. Errors on the way there fail the test.
void run_device_ranks(int ranks, const std::function<void(const DeviceRank&)>& body);

}  // namespace scape::plugin::test
