#include "interposer/host_comm.h"

#include <shared_mutex>
#include <unordered_map>

namespace scape::interposer {
namespace {

using plugin::DataType;

// Apart from any address a program can have, so that following one by mistake faults at once.
constexpr uintptr_t kHandleTag = uintptr_t{0x5ca9} << 48;

struct Table {
  std::shared_mutex mutex;
  std::unordered_map<uint64_t, std::shared_ptr<HostComm>> comms;
};
Table& table() {
  static Table* const instance = new Table;  // never destroyed: used until the last moment
  return *instance;
}

Status unknown_handle(nccl::ncclComm_t handle) {
  if (handle == nullptr) {
    return error(SCAPE_ERR_ARGUMENT, "the communicator is null; pass what ncclCommInitRank gave");
  }
  return error(
      SCAPE_ERR_ARGUMENT,
      "%p is no live communicator of host mode: it was destroyed, aborted, or never made here",
      static_cast<const void*>(handle));
}

}  // namespace

HostComm::HostComm(std::shared_ptr<plugin::Communicator> communicator, int device)
    : communicator_(std::move(communicator)), device_(device) {}

Status HostComm::usable() const {
  switch (state()) {
    case State::kReady:
      break;
    case State::kFinalized:
      return error(SCAPE_ERR_USAGE, "%s is finalized; only ncclCommDestroy may follow",
                   std::string(communicator_->name()).c_str());
    case State::kRevoked:
      return error(SCAPE_ERR_USAGE, "%s is revoked; split, shrink or destroy it",
                   std::string(communicator_->name()).c_str());
  }
  return communicator_->async_error();
}

nccl::ncclRedOp_t HostComm::add_op(const PremulSum& op) {
  const std::lock_guard lock(mutex_);
  ops_.emplace(next_op_, op);
  return static_cast<nccl::ncclRedOp_t>(next_op_++);
}

Status HostComm::remove_op(nccl::ncclRedOp_t op) {
  const std::lock_guard lock(mutex_);
  if (ops_.erase(static_cast<int>(op)) == 1) return {};
  return error(SCAPE_ERR_ARGUMENT, "operation %d was not made on %s, or is destroyed",
               static_cast<int>(op), std::string(communicator_->name()).c_str());
}

Status HostComm::find_op(nccl::ncclRedOp_t op, DataType type, PremulSum* out) const {
  const std::lock_guard lock(mutex_);
  const auto found = ops_.find(static_cast<int>(op));
  if (found == ops_.end()) {
    return error(SCAPE_ERR_ARGUMENT, "operation %d is neither built in nor made on %s",
                 static_cast<int>(op), std::string(communicator_->name()).c_str());
  }
  if (found->second.type != type) {
    return error(SCAPE_ERR_ARGUMENT, "operation %d was made for %s, the call is of %s",
                 static_cast<int>(op), plugin::name_of(found->second.type), plugin::name_of(type));
  }
  *out = found->second;
  return {};
}

void* HostComm::add_memory(size_t size) {
  const std::lock_guard lock(mutex_);
  const uintptr_t handle = kHandleTag | next_memory_++ << 4;
  memory_.emplace(handle, size);
  return reinterpret_cast<void*>(handle);
}

Status HostComm::remove_memory(void* handle) {
  const std::lock_guard lock(mutex_);
  if (memory_.erase(reinterpret_cast<uintptr_t>(handle)) == 1) return {};
  return error(SCAPE_ERR_ARGUMENT, "%p is no registration of %s", handle,
               std::string(communicator_->name()).c_str());
}

std::shared_ptr<plugin::Refresher> HostComm::refresher() {
  const std::lock_guard lock(mutex_);
  if (refresher_ == nullptr) refresher_ = plugin::make_refresher(communicator_);
  return refresher_;
}

Status HostComm::make_engine(std::shared_ptr<plugin::Engine>* out) {
  *out = plugin::make_host_engine();
  return {};
}

nccl::ncclComm_t add_comm(std::shared_ptr<HostComm> comm) {
  const uint64_t id = comm->id();
  const std::unique_lock lock(table().mutex);
  table().comms.emplace(id, std::move(comm));
  return reinterpret_cast<nccl::ncclComm_t>(kHandleTag | id << 4);
}

Status find_comm(nccl::ncclComm_t handle, std::shared_ptr<HostComm>* out) {
  const uintptr_t value = reinterpret_cast<uintptr_t>(handle);
  if ((value & ~(uintptr_t{0xffff'ffff'fff0})) == kHandleTag) {
    const std::shared_lock lock(table().mutex);
    const auto found = table().comms.find((value ^ kHandleTag) >> 4);
    if (found != table().comms.end()) {
      *out = found->second;
      return {};
    }
  }
  return unknown_handle(handle);
}

Status remove_comm(nccl::ncclComm_t handle, std::shared_ptr<HostComm>* out) {
  SCAPE_RETURN_IF_ERROR(find_comm(handle, out));
  const std::unique_lock lock(table().mutex);
  // Two threads may destroy one handle at once: only one of them finds it here.
  if (table().comms.erase((*out)->id()) == 1) return {};
  out->reset();
  return unknown_handle(handle);
}

std::vector<std::shared_ptr<HostComm>> all_comms() {
  const std::shared_lock lock(table().mutex);
  std::vector<std::shared_ptr<HostComm>> list;
  for (const auto& [id, comm] : table().comms) list.push_back(comm);
  return list;
}

}  // namespace scape::interposer
