// Masked calls in device mode: one alone, or those of a group.
//
// A thread's group is open from its outermost ncclGroupStart on, as in the real NCCL. Calls that
// are not masked go to the real group as they come, and are launched with it; the masked ones wait
// here for its end, and are launched behind it, in order.
#pragma once

#include <memory>
#include <vector>

#include "base/status.h"
#include "interposer/buffers.h"
#include "interposer/device_comm.h"
#include "nccl/api.h"
#include "plugin/communicator.h"
#include "plugin/stream.h"

namespace scape::interposer {

// An all-reduce whose route has a buffer.
struct MaskedCall {
  std::shared_ptr<DeviceComm> comm;
  const void* send = nullptr;
  void* recv = nullptr;
  plugin::Reduction reduction;
  plugin::Stream stream;
  // As the real NCCL has them.
  size_t count = 0;
  nccl::ncclDataType_t type = nccl::ncclFloat32;
  nccl::ncclRedOp_t op = nccl::ncclSum;
  Route route;
};

// Launches the calls in order and returns when all are on their streams. Those of different devices
// at the same time, each device's by a thread of its own: ranks that one thread owns wait for each
// other. Returns the first error; the others are launched all the same, as on the other ranks.
Status launch_masked(const std::vector<MaskedCall>& calls);

struct DeviceGroup {
  int depth = 0;
  Status first_error;  // of a call that was refused here: nothing of the group is launched then
  std::vector<MaskedCall> calls;
  std::vector<nccl::ncclComm_t*> made;             // where handles are at the group's end
  std::vector<std::shared_ptr<DeviceComm>> ended;  // that are to be destroyed with the group
};

// The open group of this thread, or null.
DeviceGroup* device_group();
void start_device_group();
// The group, at its outermost end, else null.
std::unique_ptr<DeviceGroup> leave_device_group();

}  // namespace scape::interposer
