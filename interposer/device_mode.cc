#include "interposer/device_mode.h"

#include <cstring>
#include <optional>

#include "base/log.h"
#include "base/settings.h"
#include "interposer/buffers.h"
#include "interposer/device_comm.h"
#include "interposer/device_launch.h"
#include "interposer/launch.h"
#include "interposer/mode.h"
#include "interposer/process.h"
#include "interposer/reentry.h"
#include "plugin/host_communicator.h"

namespace scape::interposer {

using namespace nccl;  // the rows of nccl/function_list.h name NCCL's types

namespace {

Functions real;

// Whether the real NCCL took a call, or the making of something: it may still be at it.
bool is_taken(ncclResult_t result) { return result == ncclSuccess || result == ncclInProgress; }

// A refusal of the real NCCL is this thread's last error, with the real NCCL's words.
ncclResult_t told(ncclResult_t result, ncclComm_t comm) {
  if (is_taken(result)) return result;
  const char* const words = real.GetLastError(comm);
  set_last_error(words != nullptr ? words : "");
  return result;
}

// What this library refuses: the error of the call and, inside a group, of the group.
ncclResult_t refuse(scape_status code) {
  if (DeviceGroup* group = device_group(); group != nullptr && group->first_error.ok()) {
    group->first_error = Status(code, last_error());
  }
  return to_nccl(code);
}

// ---- collectives ----

// What the call's operation is here; false where it is for the real NCCL to refuse.
bool find_reduction(const DeviceComm* comm, ncclRedOp_t op, plugin::DataType type, PremulSum* out) {
  if (op >= ncclNumOps) return comm != nullptr && comm->find_op(op, type, out);
  out->reduction.op = static_cast<plugin::ReduceOp>(op);
  return true;
}

Status route(const void* send, void* recv, size_t count, ncclDataType_t datatype, ncclRedOp_t op,
             ncclComm_t handle, cudaStream_t stream, const ncclCollConfig_t* config,
             MaskedCall* call) {
  const auto type = static_cast<plugin::DataType>(datatype);
  CallOptions options;
  SCAPE_RETURN_IF_ERROR(read_call_options(config, &options));
  if (!options.present && registry().find(send) == nullptr && registry().find(recv) == nullptr) {
    take_next_name();
    note_miss(count * plugin::size_of(type));
    return {};
  }
  SCAPE_RETURN_IF_ERROR(check_process());
  call->comm = find_device_comm(handle);
  if (call->comm != nullptr && !call->comm->takes_calls()) return {};
  PremulSum sum{};
  if (!find_reduction(call->comm.get(), op, type, &sum)) return {};
  call->send = send;
  call->recv = recv;
  call->reduction = sum.reduction;
  call->stream = {stream};
  call->count = count;
  call->type = datatype;
  call->op = op;
  return route_all_reduce(call->comm,
                          {.send = send,
                           .recv = recv,
                           .count = count,
                           .type = type,
                           .op = sum.reduction.op,
                           .stream = call->stream,
                           .factor_known = sum.scalar == nullptr},
                          options, &call->route);
}

// `go_on` hands the call to the real NCCL.
template <typename GoOn>
ncclResult_t reduce_all(const void* send, void* recv, size_t count, ncclDataType_t datatype,
                        ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream,
                        const ncclCollConfig_t* config, GoOn&& go_on) {
  const Entered entered;
  if (!entered.outermost() || datatype >= ncclNumTypes) return go_on();
  bool masked = false;
  const scape_status status = guarded("ncclAllReduce", [&]() -> Status {
    MaskedCall call;
    SCAPE_RETURN_IF_ERROR(route(send, recv, count, datatype, op, comm, stream, config, &call));
    masked = call.route.buffer != nullptr;
    if (!masked) return {};
    DeviceGroup* const group = device_group();
    if (group == nullptr) return launch_masked({std::move(call)});
    group->calls.push_back(std::move(call));
    return {};
  });
  if (status != SCAPE_OK) return refuse(status);
  return masked ? ncclSuccess : told(go_on(), comm);
}

ncclResult_t all_reduce(const void* sendbuff, void* recvbuff, size_t count, ncclDataType_t datatype,
                        ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream) {
  return reduce_all(sendbuff, recvbuff, count, datatype, op, comm, stream, nullptr, [&] {
    return real.AllReduce(sendbuff, recvbuff, count, datatype, op, comm, stream);
  });
}

ncclResult_t all_reduce_config(const void* sendbuff, void* recvbuff, size_t count,
                               ncclDataType_t datatype, ncclRedOp_t op, ncclComm_t comm,
                               cudaStream_t stream, const ncclCollConfig_t* config) {
  return reduce_all(sendbuff, recvbuff, count, datatype, op, comm, stream, config, [&] {
    return real.AllReduceConfig(sendbuff, recvbuff, count, datatype, op, comm, stream, config);
  });
}

void keep_config(const ncclCollConfig_t* config, const ncclCollConfig_t** out) { *out = config; }
template <typename Other>
void keep_config(Other, const ncclCollConfig_t**) {}

// A collective that is never sparse, of whatever buffers its first parameters name; the last one
// may be a configuration.
template <typename... Rest>
Status look_at(const char* function, const void* send, void* recv, size_t count,
               ncclDataType_t type, Rest... rest) {
  const ncclCollConfig_t* config = nullptr;
  (keep_config(rest, &config), ...);
  SCAPE_RETURN_IF_ERROR(refuse_call_options(config));
  if (type >= ncclNumTypes) return {};
  note_other_collective(function, send, recv,
                        count * plugin::size_of(static_cast<plugin::DataType>(type)));
  return {};
}
template <typename... Rest>
Status look_at(const char* function, const void* data, size_t count, ncclDataType_t type,
               Rest... rest) {
  return look_at(function, data, const_cast<void*>(data), count, type, rest...);
}
// All other functions.
template <typename... Parameters>
Status look_at(const char*, Parameters...) {
  return {};
}

template <typename Function>
constexpr bool moves_data = false;
template <typename... Rest>
constexpr bool moves_data<ncclResult_t (*)(const void*, void*, size_t, ncclDataType_t, Rest...)> =
    true;
template <typename... Rest>
constexpr bool moves_data<ncclResult_t (*)(const void*, size_t, ncclDataType_t, Rest...)> = true;
template <typename... Rest>
constexpr bool moves_data<ncclResult_t (*)(void*, size_t, ncclDataType_t, Rest...)> = true;

// ---- groups ----

ncclResult_t group_start() {
  const Entered entered;
  const ncclResult_t result = real.GroupStart();
  if (entered.outermost() && result == ncclSuccess) start_device_group();
  return result;
}

// The masked calls and the communicators of a group whose real part has ended well.
Status finish_group(const DeviceGroup& group) {
  for (const ncclComm_t* handle : group.made) add_device_comm(real, *handle);
  if (group.calls.empty()) return {};
  return launch_masked(group.calls);
}

ncclResult_t group_end() {
  const Entered entered;
  if (!entered.outermost()) return real.GroupEnd();
  const std::unique_ptr<DeviceGroup> group = leave_device_group();
  if (group == nullptr) return real.GroupEnd();
  scape_status status = guarded("ncclGroupEnd", [&]() -> Status {
    std::vector<std::function<Status()>> ends;
    for (const auto& comm : group->ended) {
      ends.push_back([&comm]() -> Status {
        const Entered ending;
        comm->end();
        return {};
      });
    }
    if (!ends.empty()) SCAPE_RETURN_IF_ERROR(run_together(ends));
    return group->first_error;
  });
  if (status != SCAPE_OK) {
    // A call that the real NCCL refuses makes it drop its part of the group.
    (void)real.AllReduce(nullptr, nullptr, 0, ncclFloat32, ncclSum, nullptr, nullptr);
    (void)real.GroupEnd();
    return to_nccl(status);
  }
  const ncclResult_t result = real.GroupEnd();
  if (!is_taken(result)) return told(result, nullptr);
  status = guarded("ncclGroupEnd", [&] { return finish_group(*group); });
  return status == SCAPE_OK ? result : to_nccl(status);
}

ncclResult_t group_simulate_end(ncclSimInfo_t* info) {
  const Entered entered;
  if (entered.outermost()) leave_device_group();
  return real.GroupSimulateEnd(info);
}

// ---- communicators ----

Status check_id(const ncclUniqueId& id) {
  plugin::UniqueId copy;
  std::memcpy(copy.bytes.data(), id.internal, sizeof id.internal);
  if (!plugin::is_host_unique_id(copy)) return {};
  return error(SCAPE_ERR_USAGE,
               "this rank is in device mode, the unique id was made in host mode; set SCAPE_MODE "
               "alike on all ranks");
}

bool of_host_mode(const ncclUniqueId& id) {
  return guarded("ncclCommInitRank", [&] { return check_id(id); }) != SCAPE_OK;
}

// Makes communicators with `make` and notes the handles that come of it. What cannot be noted is a
// communicator whose calls all go dense.
template <typename Make>
ncclResult_t make_comms(ncclComm_t* handles, int count, Make&& make) {
  const Entered entered;
  const ncclResult_t result = make();
  if (!entered.outermost() || !is_taken(result) || handles == nullptr) return result;
  (void)guarded("noting a communicator", [&]() -> Status {
    DeviceGroup* const group = device_group();
    for (int i = 0; i < count; ++i) {
      if (group != nullptr) {
        group->made.push_back(&handles[i]);
      } else {
        add_device_comm(real, handles[i]);
      }
    }
    return {};
  });
  return result;
}

ncclResult_t comm_init_rank(ncclComm_t* comm, int nranks, ncclUniqueId id, int rank) {
  if (of_host_mode(id)) return ncclInvalidUsage;
  return make_comms(comm, 1, [&] { return real.CommInitRank(comm, nranks, id, rank); });
}

ncclResult_t comm_init_rank_config(ncclComm_t* comm, int nranks, ncclUniqueId id, int rank,
                                   ncclConfig_t* config) {
  if (of_host_mode(id)) return ncclInvalidUsage;
  return make_comms(comm, 1,
                    [&] { return real.CommInitRankConfig(comm, nranks, id, rank, config); });
}

ncclResult_t comm_init_rank_scalable(ncclComm_t* comm, int nranks, int rank, int ids_count,
                                     ncclUniqueId* ids, ncclConfig_t* config) {
  for (int i = 0; ids != nullptr && i < ids_count; ++i) {
    if (of_host_mode(ids[i])) return ncclInvalidUsage;
  }
  return make_comms(comm, 1, [&] {
    return real.CommInitRankScalable(comm, nranks, rank, ids_count, ids, config);
  });
}

ncclResult_t comm_init_all(ncclComm_t* comms, int ndev, const int* devlist) {
  return make_comms(comms, ndev, [&] { return real.CommInitAll(comms, ndev, devlist); });
}

ncclResult_t comm_split(ncclComm_t comm, int color, int key, ncclComm_t* newcomm,
                        ncclConfig_t* config) {
  return make_comms(newcomm, 1, [&] { return real.CommSplit(comm, color, key, newcomm, config); });
}

// Runs `end`, which ends a communicator for this library, where the call is the program's.
template <typename End>
void end_comm(const char* function, End&& end) {
  (void)guarded(function, [&]() -> Status {
    SCAPE_RETURN_IF_ERROR(check_process());
    end();
    return {};
  });
}

ncclResult_t comm_shrink(ncclComm_t comm, int* excluded, int excluded_count, ncclComm_t* newcomm,
                         ncclConfig_t* config, int flags) {
  const auto shrink = [&] {
    return real.CommShrink(comm, excluded, excluded_count, newcomm, config, flags);
  };
  return make_comms(newcomm, 1, [&] {
    std::optional<ncclResult_t> result;
    if (const auto known = find_device_comm(comm); known != nullptr && flags == kShrinkAbort) {
      end_comm("ncclCommShrink", [&] {
        known->refuse_masked(error(SCAPE_ERR_REMOTE,
                                   "the communicator was aborted by a shrink of it; call on the "
                                   "new one"),
                             [&] { result = shrink(); });
      });
    }
    return result.has_value() ? *result : shrink();
  });
}

ncclResult_t comm_grow(ncclComm_t comm, int nranks, const ncclUniqueId* id, int rank,
                       ncclComm_t* newcomm, ncclConfig_t* config) {
  if (id != nullptr && of_host_mode(*id)) return ncclInvalidUsage;
  return make_comms(newcomm, 1,
                    [&] { return real.CommGrow(comm, nranks, id, rank, newcomm, config); });
}

ncclResult_t comm_finalize(ncclComm_t comm) {
  const Entered entered;
  const ncclResult_t result = real.CommFinalize(comm);
  if (!entered.outermost() || !is_taken(result)) return result;
  if (const auto known = find_device_comm(comm); known != nullptr) known->close();
  return result;
}

ncclResult_t comm_destroy(ncclComm_t comm) {
  const Entered entered;
  if (!entered.outermost()) return real.CommDestroy(comm);
  end_comm("ncclCommDestroy", [&] {
    auto known = take_device_comm(comm);
    if (known == nullptr) return;
    known->close();
    if (DeviceGroup* group = device_group(); group != nullptr) {
      group->ended.push_back(std::move(known));
    } else {
      known->end();
    }
  });
  return real.CommDestroy(comm);
}

ncclResult_t comm_abort(ncclComm_t comm) {
  const Entered entered;
  if (!entered.outermost()) return real.CommAbort(comm);
  const auto known = take_device_comm(comm);
  if (known == nullptr) return real.CommAbort(comm);
  ncclResult_t result = ncclInternalError;
  const scape_status status = guarded("ncclCommAbort", [&]() -> Status {
    SCAPE_RETURN_IF_ERROR(check_process());
    result = known->abort();
    return {};
  });
  return status == SCAPE_OK ? result : to_nccl(status);
}

ncclResult_t comm_revoke(ncclComm_t comm, int flags) {
  const Entered entered;
  const auto revoke = [&] { return real.CommRevoke(comm, flags); };
  std::optional<ncclResult_t> result;
  if (const auto known = entered.outermost() ? find_device_comm(comm) : nullptr; known != nullptr) {
    end_comm("ncclCommRevoke", [&] {
      known->interrupt(error(SCAPE_ERR_REMOTE, "the communicator was revoked"),
                       [&] { result = revoke(); });
    });
  }
  return result.has_value() ? *result : revoke();
}

// What ended masked calls is the communicator's error, too.
ncclResult_t comm_get_async_error(ncclComm_t comm, ncclResult_t* async_error) {
  const Entered entered;
  const ncclResult_t result = real.CommGetAsyncError(comm, async_error);
  if (!entered.outermost() || result != ncclSuccess || async_error == nullptr ||
      *async_error == ncclInProgress) {
    return result;
  }
  const auto known = find_device_comm(comm);
  if (known == nullptr) return result;
  if (const Status failure = known->failure(); !failure.ok()) {
    if (*async_error == ncclSuccess) *async_error = to_nccl(failure.code());
    set_last_error(failure.message().c_str());
  }
  return result;
}

// ---- operations ----

ncclResult_t red_op_create(ncclRedOp_t* op, void* scalar, ncclDataType_t datatype,
                           ncclScalarResidence_t residence, ncclComm_t comm) {
  const Entered entered;
  const ncclResult_t result = real.RedOpCreatePreMulSum(op, scalar, datatype, residence, comm);
  if (!entered.outermost() || !is_taken(result)) return result;
  const auto known = find_device_comm(comm);
  if (known == nullptr) return result;
  (void)guarded("ncclRedOpCreatePreMulSum", [&]() -> Status {
    PremulSum sum{.type = static_cast<plugin::DataType>(datatype),
                  .reduction = {.op = plugin::ReduceOp::kPremulSum}};
    if (residence == ncclScalarHostImmediate) {
      read_scalar(scalar, sum.type, &sum.reduction);
    } else {
      sum.scalar = scalar;
    }
    known->add_op(*op, sum);
    return {};
  });
  return result;
}

ncclResult_t red_op_destroy(ncclRedOp_t op, ncclComm_t comm) {
  const Entered entered;
  const ncclResult_t result = real.RedOpDestroy(op, comm);
  if (!entered.outermost() || result != ncclSuccess) return result;
  if (const auto known = find_device_comm(comm); known != nullptr) known->remove_op(op);
  return result;
}

}  // namespace

const Functions& device_functions(const RealNccl& found) {
  real = refusing_functions();
  load_functions(found, &real);
  static Functions* const table =
      new Functions(real);  // never destroyed: used until the last moment
#define SCAPE_NCCL_FUNCTION(type, name, params, args)
#define SCAPE_NCCL_HOST(type, name, params, args)                                               \
  if constexpr (moves_data<decltype(Functions::name)>) {                                        \
    table->name = [] params -> type {                                                           \
      const auto look = [](auto... given) { return look_at("nccl" #name, given...); };          \
      const Entered entered;                                                                    \
      if (!entered.outermost()) return real.name args;                                          \
      const scape_status status = guarded("nccl" #name, [&]() -> Status { return look args; }); \
      return status == SCAPE_OK ? real.name args : refuse(status);                              \
    };                                                                                          \
  }
#include "nccl/function_list.h"
  table->AllReduce = all_reduce;
  table->AllReduceConfig = all_reduce_config;
  table->GroupStart = group_start;
  table->GroupEnd = group_end;
  table->GroupSimulateEnd = group_simulate_end;
  table->CommInitRank = comm_init_rank;
  table->CommInitRankConfig = comm_init_rank_config;
  table->CommInitRankScalable = comm_init_rank_scalable;
  table->CommInitAll = comm_init_all;
  table->CommSplit = comm_split;
  table->CommShrink = comm_shrink;
  table->CommGrow = comm_grow;
  table->CommFinalize = comm_finalize;
  table->CommDestroy = comm_destroy;
  table->CommAbort = comm_abort;
  table->CommRevoke = comm_revoke;
  table->CommGetAsyncError = comm_get_async_error;
  table->RedOpCreatePreMulSum = red_op_create;
  table->RedOpDestroy = red_op_destroy;
  return *table;
}

const char* device_last_error(ncclComm_t comm) { return real.GetLastError(comm); }

}  // namespace scape::interposer
