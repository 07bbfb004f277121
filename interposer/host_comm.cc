#include "interposer/host_comm.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <shared_mutex>
#include <unordered_map>

namespace scape::interposer {
namespace {

using plugin::DataType;

constinit std::atomic<uint64_t> next_id{1};

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

// A small float: sign, `exponent` bits, `mantissa` bits; `finite_only`: e4m3's rule, where the top
// exponent holds numbers and all ones is NaN.
double decode_small_float(unsigned bits, int exponent, int mantissa, bool finite_only) {
  const unsigned sign = bits >> (exponent + mantissa) & 1;
  const unsigned exponent_bits = bits >> mantissa & ((1u << exponent) - 1);
  const unsigned mantissa_bits = bits & ((1u << mantissa) - 1);
  const unsigned top = (1u << exponent) - 1;
  const int bias = (1 << (exponent - 1)) - 1;
  double value;
  if (exponent_bits == top && !finite_only) {
    value = mantissa_bits == 0 ? std::numeric_limits<double>::infinity()
                               : std::numeric_limits<double>::quiet_NaN();
  } else if (exponent_bits == top && mantissa_bits == (1u << mantissa) - 1) {
    value = std::numeric_limits<double>::quiet_NaN();
  } else if (exponent_bits == 0) {
    value = std::ldexp(mantissa_bits, 1 - bias - mantissa);
  } else {
    value = std::ldexp((1u << mantissa) + mantissa_bits,
                       static_cast<int>(exponent_bits) - bias - mantissa);
  }
  return sign != 0 ? -value : value;
}

template <typename T>
T read_as(const void* address) {
  T value;
  std::memcpy(&value, address, sizeof value);
  return value;
}

}  // namespace

HostComm::HostComm(std::shared_ptr<plugin::Communicator> communicator, int device)
    : communicator_(std::move(communicator)), device_(device), id_(next_id.fetch_add(1)) {}

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

void read_scalar(const void* scalar, DataType type, plugin::Reduction* out) {
  out->op = plugin::ReduceOp::kPremulSum;
  switch (type) {
    case DataType::kInt8:
      out->integer_factor = read_as<int8_t>(scalar);
      break;
    case DataType::kUint8:
      out->integer_factor = read_as<uint8_t>(scalar);
      break;
    case DataType::kInt32:
      out->integer_factor = read_as<int32_t>(scalar);
      break;
    case DataType::kUint32:
      out->integer_factor = read_as<uint32_t>(scalar);
      break;
    case DataType::kInt64:
    case DataType::kUint64:
      out->integer_factor = read_as<int64_t>(scalar);
      break;
    case DataType::kFloat16:
      out->factor = decode_small_float(read_as<uint16_t>(scalar), 5, 10, false);
      return;
    case DataType::kBfloat16:
      out->factor = decode_small_float(read_as<uint16_t>(scalar), 8, 7, false);
      return;
    case DataType::kFloat8e4m3:
      out->factor = decode_small_float(read_as<uint8_t>(scalar), 4, 3, true);
      return;
    case DataType::kFloat8e5m2:
      out->factor = decode_small_float(read_as<uint8_t>(scalar), 5, 2, false);
      return;
    case DataType::kFloat32:
      out->factor = read_as<float>(scalar);
      return;
    case DataType::kFloat64:
      out->factor = read_as<double>(scalar);
      return;
  }
  out->factor = static_cast<double>(out->integer_factor);
  return;
}

}  // namespace scape::interposer
