#include "interposer/device_launch.h"

#include <map>
#include <string>
#include <utility>

#include "interposer/launch.h"
#include "interposer/reentry.h"
#include "interposer/saved_state.h"

namespace scape::interposer {
namespace {

constinit thread_local DeviceGroup* open_group = nullptr;

Status launch_one(const MaskedCall& call) {
  Buffer& buffer = *call.route.buffer;
  const std::lock_guard busy(buffer.busy);
  if (buffer.dropped) {
    return error(SCAPE_ERR_USAGE,
                 "registration \"%s\" was dropped while a call of it was pending; unregister, or "
                 "destroy the communicator, after ncclGroupEnd",
                 call.route.name.c_str());
  }
  const auto hold = call.comm->hold();
  SCAPE_RETURN_IF_ERROR(call.comm->wait_until_taken());
  std::string obstacle;
  if (const Status status = call.comm->settle(&obstacle); !status.ok()) {
    call.comm->set_failure(status);
    return status;
  }
  if (!obstacle.empty()) {
    buffer.masked->note_dense(obstacle.c_str());
    return call.comm->all_reduce_dense(call.send, call.recv, call.count, call.type, call.op,
                                       call.stream);
  }
  SCAPE_RETURN_IF_ERROR(claim_saved_state(buffer));
  SCAPE_RETURN_IF_ERROR(
      buffer.masked->begin_all_reduce(call.send, call.recv, call.reduction, call.stream));
  plugin::drive(*call.comm->shared(), [&] { return buffer.masked->poll(); });
  const Status status = buffer.masked->status();
  if (!status.ok()) call.comm->set_failure(status);
  return status;
}

}  // namespace

Status launch_masked(const std::vector<MaskedCall>& calls) {
  std::map<int, std::vector<const MaskedCall*>> by_device;
  for (const MaskedCall& call : calls) by_device[call.comm->device()].push_back(&call);
  std::vector<std::function<Status()>> jobs;
  for (const auto& of_device : by_device) {
    jobs.push_back([&of_device] {
      const Entered entered;
      Status first_error;
      for (const MaskedCall* call : of_device.second) {
        const Status status = launch_one(*call);
        if (first_error.ok()) first_error = status;
      }
      return first_error;
    });
  }
  return run_together(jobs);
}

DeviceGroup* device_group() { return open_group; }

void start_device_group() {
  if (open_group == nullptr) open_group = new DeviceGroup;
  ++open_group->depth;
}

std::unique_ptr<DeviceGroup> leave_device_group() {
  if (open_group == nullptr || --open_group->depth > 0) return nullptr;
  return std::unique_ptr<DeviceGroup>(std::exchange(open_group, nullptr));
}

}  // namespace scape::interposer
