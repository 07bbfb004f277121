#include "interposer/masked_comm.h"

#include <atomic>

#include "interposer/device_comm.h"
#include "interposer/host_comm.h"

namespace scape::interposer {
namespace {

constinit std::atomic<uint64_t> next_id{1};

}  // namespace

MaskedComm::MaskedComm() : id_(next_id.fetch_add(1)) {}

std::vector<std::shared_ptr<MaskedComm>> live_comms() {
  std::vector<std::shared_ptr<MaskedComm>> list;
  for (const auto& comm : all_comms()) list.push_back(comm);
  for (const auto& comm : all_device_comms()) list.push_back(comm);
  return list;
}

}  // namespace scape::interposer
