#include "interposer/host_mode.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <optional>

#include "base/log.h"
#include "interposer/launch.h"
#include "interposer/mode.h"
#include "interposer/process.h"
#include "plugin/host_communicator.h"

namespace scape::interposer {

using namespace nccl;  // the rows of nccl/function_list.h name NCCL's types

namespace {

using plugin::DataType;
using plugin::ReduceOp;

// ---- checks of arguments ----

Status check_pointer(const void* pointer, const char* what) {
  if (pointer != nullptr) return {};
  return error(SCAPE_ERR_ARGUMENT, "%s is null", what);
}

Status check_type(ncclDataType_t type, DataType* out) {
  if (type < 0 || type >= ncclNumTypes) {
    return error(SCAPE_ERR_ARGUMENT, "datatype %d is outside 0 .. %d", static_cast<int>(type),
                 static_cast<int>(ncclNumTypes) - 1);
  }
  *out = static_cast<DataType>(type);
  return {};
}

Status check_rank(int rank, int size, const char* what) {
  if (rank >= 0 && rank < size) return {};
  return error(SCAPE_ERR_ARGUMENT, "%s %d is outside 0 .. %d", what, rank, size - 1);
}

// A structure that NCCL versions by its leading size, magic and version. `T` is its newest form.
template <typename T>
class Versioned {
 public:
  explicit Versioned(const T* value) : value_(value) {}

  Status check(const char* what, unsigned magic) const {
    if (value_ == nullptr) return {};
    if (!reaches(offsetof(T, version) + sizeof value_->version) || value_->magic != magic) {
      return error(SCAPE_ERR_ARGUMENT, "%s is not initialised; start from NCCL's initializer macro",
                   what);
    }
    note_caller_version(value_->version);
    return {};
  }

  // The caller's structure holds its first `bytes` bytes.
  bool reaches(size_t bytes) const { return value_ != nullptr && value_->size >= bytes; }

 private:
  const T* value_;
};

Status check_config(const ncclConfig_t* config) {
  const Versioned<ncclConfig_t> versioned(config);
  SCAPE_RETURN_IF_ERROR(versioned.check("ncclConfig_t", kApiMagic));
  if (versioned.reaches(offsetof(ncclConfig_t, blocking) + sizeof config->blocking)) {
    // Calls of host mode are over when they return: that is what blocking = 0 allows, too.
    if (config->blocking != kUndefInt && config->blocking != 0 && config->blocking != 1) {
      return error(SCAPE_ERR_ARGUMENT, "ncclConfig_t.blocking %d is neither 0 nor 1",
                   config->blocking);
    }
  }
  return {};
}

// What tunes kernels and launches has no meaning on host memory; of the vendor extensions Scape's
// own count, where there is a place for them.
Status check_config(const ncclCollConfig_t* config, CallOptions* options) {
  SCAPE_RETURN_IF_ERROR(Versioned<ncclCollConfig_t>(config).check("ncclCollConfig_t", kApiMagic));
  return options != nullptr ? read_call_options(config, options) : refuse_call_options(config);
}

struct Range {
  uintptr_t begin = 0;
  uintptr_t end = 0;
};

// Where `blocks` blocks of `count` elements from `address` on lie. Null is legal for no bytes at
// all.
Status check_buffer(const void* address, size_t count, size_t blocks, DataType type,
                    const char* what, Range* out) {
  size_t bytes = 0;
  if (__builtin_mul_overflow(count, plugin::size_of(type), &bytes) ||
      __builtin_mul_overflow(bytes, blocks, &bytes) || bytes > PTRDIFF_MAX) {
    return error(SCAPE_ERR_ARGUMENT,
                 "%s: %zu times %zu elements of %s are more than memory can hold", what, blocks,
                 count, plugin::name_of(type));
  }
  if (bytes == 0) return {};
  SCAPE_RETURN_IF_ERROR(check_pointer(address, what));
  out->begin = reinterpret_cast<uintptr_t>(address);
  out->end = out->begin + bytes;
  return {};
}

// The buffers are apart, or their beginnings differ by exactly what the collective's in-place form
// has: recvbuff = sendbuff + `recv_ahead` bytes.
Status check_overlap(const Range& send, const Range& recv, ptrdiff_t recv_ahead) {
  if (send.begin >= recv.end || recv.begin >= send.end) return {};
  if (static_cast<ptrdiff_t>(recv.begin - send.begin) == recv_ahead) return {};
  return error(SCAPE_ERR_ARGUMENT,
               "sendbuff and recvbuff overlap, recvbuff %td bytes after sendbuff; in place it is "
               "%td: pass buffers that "
               "are apart, or the in-place form",
               static_cast<ptrdiff_t>(recv.begin - send.begin), recv_ahead);
}

Status check_comm(ncclComm_t handle, std::shared_ptr<HostComm>* out) {
  SCAPE_RETURN_IF_ERROR(check_process());
  return find_comm(handle, out);
}

// ---- collectives ----

// What every call that moves data checks first; the rest is filled in by its own function.
Status begin_call(Call::Kind kind, ncclComm_t comm, const void* send, void* recv, size_t count,
                  ncclDataType_t type, Call* call) {
  call->kind = kind;
  call->send = send;
  call->recv = recv;
  call->count = count;
  SCAPE_RETURN_IF_ERROR(check_comm(comm, &call->comm));
  SCAPE_RETURN_IF_ERROR(call->comm->usable());
  return check_type(type, &call->type);
}

// Without a place for Scape's options the call is one that has none.
Status begin_collective(Call::Kind kind, ncclComm_t comm, const void* send, void* recv,
                        size_t count, ncclDataType_t type, const ncclCollConfig_t* config,
                        Call* call, CallOptions* options = nullptr) {
  SCAPE_RETURN_IF_ERROR(begin_call(kind, comm, send, recv, count, type, call));
  return check_config(config, options);
}

Status begin_rooted(Call::Kind kind, ncclComm_t comm, const void* send, void* recv, size_t count,
                    ncclDataType_t type, int root, const ncclCollConfig_t* config, Call* call) {
  SCAPE_RETURN_IF_ERROR(begin_collective(kind, comm, send, recv, count, type, config, call));
  call->peer = root;
  return check_rank(root, call->comm->size(), "root");
}

Status set_reduction(ncclRedOp_t op, Call* call) {
  if (op >= 0 && op < ncclNumOps) {
    call->reduction.op = static_cast<ReduceOp>(op);
    return {};
  }
  PremulSum premul;
  SCAPE_RETURN_IF_ERROR(call->comm->find_op(op, call->type, &premul));
  call->reduction = premul.reduction;
  call->scalar = premul.scalar;
  return {};
}

// Inside a group an error also fails the group.
template <typename Body>
Status collective(Body&& body) {
  Status status = body();
  if (Group* group = current_group(); group != nullptr && !status.ok() && group->first_error.ok()) {
    group->first_error = status;
  }
  return status;
}

Status AllReduceConfig(const void* sendbuff, void* recvbuff, size_t count, ncclDataType_t datatype,
                       ncclRedOp_t op, ncclComm_t comm, cudaStream_t,
                       const ncclCollConfig_t* config) {
  return collective([&]() -> Status {
    Call call;
    CallOptions options;
    SCAPE_RETURN_IF_ERROR(begin_collective(Call::Kind::kAllReduce, comm, sendbuff, recvbuff, count,
                                           datatype, config, &call, &options));
    SCAPE_RETURN_IF_ERROR(set_reduction(op, &call));
    Range send, recv;
    SCAPE_RETURN_IF_ERROR(check_buffer(sendbuff, count, 1, call.type, "sendbuff", &send));
    SCAPE_RETURN_IF_ERROR(check_buffer(recvbuff, count, 1, call.type, "recvbuff", &recv));
    SCAPE_RETURN_IF_ERROR(check_overlap(send, recv, 0));
    SCAPE_RETURN_IF_ERROR(route_all_reduce(call.comm,
                                           {.send = sendbuff,
                                            .recv = recvbuff,
                                            .count = count,
                                            .type = call.type,
                                            .op = call.reduction.op},
                                           options, &call.route));
    return submit(std::move(call));
  });
}

Status ReduceScatterConfig(const void* sendbuff, void* recvbuff, size_t recvcount,
                           ncclDataType_t datatype, ncclRedOp_t op, ncclComm_t comm, cudaStream_t,
                           const ncclCollConfig_t* config) {
  return collective([&]() -> Status {
    Call call;
    SCAPE_RETURN_IF_ERROR(begin_collective(Call::Kind::kReduceScatter, comm, sendbuff, recvbuff,
                                           recvcount, datatype, config, &call));
    SCAPE_RETURN_IF_ERROR(set_reduction(op, &call));
    Range send, recv;
    const size_t ranks = static_cast<size_t>(call.comm->size());
    SCAPE_RETURN_IF_ERROR(check_buffer(sendbuff, recvcount, ranks, call.type, "sendbuff", &send));
    SCAPE_RETURN_IF_ERROR(check_buffer(recvbuff, recvcount, 1, call.type, "recvbuff", &recv));
    const size_t bytes = recv.end - recv.begin;
    SCAPE_RETURN_IF_ERROR(check_overlap(
        send, recv, static_cast<ptrdiff_t>(bytes * static_cast<size_t>(call.comm->rank()))));
    note_other_collective("ncclReduceScatter", sendbuff, recvbuff, bytes * ranks);
    return submit(std::move(call));
  });
}

Status AllGatherConfig(const void* sendbuff, void* recvbuff, size_t sendcount,
                       ncclDataType_t datatype, ncclComm_t comm, cudaStream_t,
                       const ncclCollConfig_t* config) {
  return collective([&]() -> Status {
    Call call;
    SCAPE_RETURN_IF_ERROR(begin_collective(Call::Kind::kAllGather, comm, sendbuff, recvbuff,
                                           sendcount, datatype, config, &call));
    Range send, recv;
    const size_t ranks = static_cast<size_t>(call.comm->size());
    SCAPE_RETURN_IF_ERROR(check_buffer(sendbuff, sendcount, 1, call.type, "sendbuff", &send));
    SCAPE_RETURN_IF_ERROR(check_buffer(recvbuff, sendcount, ranks, call.type, "recvbuff", &recv));
    const size_t bytes = send.end - send.begin;
    SCAPE_RETURN_IF_ERROR(check_overlap(
        send, recv, -static_cast<ptrdiff_t>(bytes * static_cast<size_t>(call.comm->rank()))));
    note_other_collective("ncclAllGather", sendbuff, recvbuff, bytes * ranks);
    return submit(std::move(call));
  });
}

Status AlltoAllConfig(const void* sendbuff, void* recvbuff, size_t count, ncclDataType_t datatype,
                      ncclComm_t comm, cudaStream_t, const ncclCollConfig_t* config) {
  return collective([&]() -> Status {
    Call call;
    SCAPE_RETURN_IF_ERROR(begin_collective(Call::Kind::kAllToAll, comm, sendbuff, recvbuff, count,
                                           datatype, config, &call));
    Range send, recv;
    const size_t ranks = static_cast<size_t>(call.comm->size());
    SCAPE_RETURN_IF_ERROR(check_buffer(sendbuff, count, ranks, call.type, "sendbuff", &send));
    SCAPE_RETURN_IF_ERROR(check_buffer(recvbuff, count, ranks, call.type, "recvbuff", &recv));
    if (ranks > 1 && send.begin == recv.begin && send.begin != 0) {
      return error(SCAPE_ERR_ARGUMENT,
                   "ncclAlltoAll has no in-place form; pass a recvbuff apart from sendbuff");
    }
    SCAPE_RETURN_IF_ERROR(check_overlap(send, recv, 0));
    note_other_collective("ncclAlltoAll", sendbuff, recvbuff, send.end - send.begin);
    return submit(std::move(call));
  });
}

Status BroadcastConfig(const void* sendbuff, void* recvbuff, size_t count, ncclDataType_t datatype,
                       int root, ncclComm_t comm, cudaStream_t, const ncclCollConfig_t* config) {
  return collective([&]() -> Status {
    Call call;
    SCAPE_RETURN_IF_ERROR(begin_rooted(Call::Kind::kBroadcast, comm, sendbuff, recvbuff, count,
                                       datatype, root, config, &call));
    Range send, recv;
    SCAPE_RETURN_IF_ERROR(check_buffer(recvbuff, count, 1, call.type, "recvbuff", &recv));
    if (call.comm->rank() == root) {
      SCAPE_RETURN_IF_ERROR(check_buffer(sendbuff, count, 1, call.type, "sendbuff", &send));
      SCAPE_RETURN_IF_ERROR(check_overlap(send, recv, 0));
    }
    note_other_collective("ncclBroadcast", recvbuff, recvbuff, recv.end - recv.begin);
    return submit(std::move(call));
  });
}

Status ReduceConfig(const void* sendbuff, void* recvbuff, size_t count, ncclDataType_t datatype,
                    ncclRedOp_t op, int root, ncclComm_t comm, cudaStream_t,
                    const ncclCollConfig_t* config) {
  return collective([&]() -> Status {
    Call call;
    SCAPE_RETURN_IF_ERROR(begin_rooted(Call::Kind::kReduce, comm, sendbuff, recvbuff, count,
                                       datatype, root, config, &call));
    SCAPE_RETURN_IF_ERROR(set_reduction(op, &call));
    Range send, recv;
    SCAPE_RETURN_IF_ERROR(check_buffer(sendbuff, count, 1, call.type, "sendbuff", &send));
    if (call.comm->rank() == root) {
      SCAPE_RETURN_IF_ERROR(check_buffer(recvbuff, count, 1, call.type, "recvbuff", &recv));
      SCAPE_RETURN_IF_ERROR(check_overlap(send, recv, 0));
    }
    note_other_collective("ncclReduce", sendbuff, sendbuff, send.end - send.begin);
    return submit(std::move(call));
  });
}

Status GatherConfig(const void* sendbuff, void* recvbuff, size_t count, ncclDataType_t datatype,
                    int root, ncclComm_t comm, cudaStream_t, const ncclCollConfig_t* config) {
  return collective([&]() -> Status {
    Call call;
    SCAPE_RETURN_IF_ERROR(begin_rooted(Call::Kind::kGather, comm, sendbuff, recvbuff, count,
                                       datatype, root, config, &call));
    Range send, recv;
    SCAPE_RETURN_IF_ERROR(check_buffer(sendbuff, count, 1, call.type, "sendbuff", &send));
    if (call.comm->rank() == root) {
      SCAPE_RETURN_IF_ERROR(check_buffer(recvbuff, count, static_cast<size_t>(call.comm->size()),
                                         call.type, "recvbuff", &recv));
      const size_t ahead = (send.end - send.begin) * static_cast<size_t>(root);
      SCAPE_RETURN_IF_ERROR(check_overlap(send, recv, -static_cast<ptrdiff_t>(ahead)));
    }
    note_other_collective("ncclGather", sendbuff, sendbuff, send.end - send.begin);
    return submit(std::move(call));
  });
}

Status ScatterConfig(const void* sendbuff, void* recvbuff, size_t count, ncclDataType_t datatype,
                     int root, ncclComm_t comm, cudaStream_t, const ncclCollConfig_t* config) {
  return collective([&]() -> Status {
    Call call;
    SCAPE_RETURN_IF_ERROR(begin_rooted(Call::Kind::kScatter, comm, sendbuff, recvbuff, count,
                                       datatype, root, config, &call));
    Range send, recv;
    SCAPE_RETURN_IF_ERROR(check_buffer(recvbuff, count, 1, call.type, "recvbuff", &recv));
    if (call.comm->rank() == root) {
      SCAPE_RETURN_IF_ERROR(check_buffer(sendbuff, count, static_cast<size_t>(call.comm->size()),
                                         call.type, "sendbuff", &send));
      const size_t ahead = (recv.end - recv.begin) * static_cast<size_t>(root);
      SCAPE_RETURN_IF_ERROR(check_overlap(send, recv, static_cast<ptrdiff_t>(ahead)));
    }
    note_other_collective("ncclScatter", recvbuff, recvbuff, recv.end - recv.begin);
    return submit(std::move(call));
  });
}

Status AllReduce(const void* sendbuff, void* recvbuff, size_t count, ncclDataType_t datatype,
                 ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream) {
  return AllReduceConfig(sendbuff, recvbuff, count, datatype, op, comm, stream, nullptr);
}
Status ReduceScatter(const void* sendbuff, void* recvbuff, size_t recvcount,
                     ncclDataType_t datatype, ncclRedOp_t op, ncclComm_t comm,
                     cudaStream_t stream) {
  return ReduceScatterConfig(sendbuff, recvbuff, recvcount, datatype, op, comm, stream, nullptr);
}
Status AllGather(const void* sendbuff, void* recvbuff, size_t sendcount, ncclDataType_t datatype,
                 ncclComm_t comm, cudaStream_t stream) {
  return AllGatherConfig(sendbuff, recvbuff, sendcount, datatype, comm, stream, nullptr);
}
Status AlltoAll(const void* sendbuff, void* recvbuff, size_t count, ncclDataType_t datatype,
                ncclComm_t comm, cudaStream_t stream) {
  return AlltoAllConfig(sendbuff, recvbuff, count, datatype, comm, stream, nullptr);
}
Status Broadcast(const void* sendbuff, void* recvbuff, size_t count, ncclDataType_t datatype,
                 int root, ncclComm_t comm, cudaStream_t stream) {
  return BroadcastConfig(sendbuff, recvbuff, count, datatype, root, comm, stream, nullptr);
}
Status Bcast(void* buff, size_t count, ncclDataType_t datatype, int root, ncclComm_t comm,
             cudaStream_t stream) {
  return BroadcastConfig(buff, buff, count, datatype, root, comm, stream, nullptr);
}
Status Reduce(const void* sendbuff, void* recvbuff, size_t count, ncclDataType_t datatype,
              ncclRedOp_t op, int root, ncclComm_t comm, cudaStream_t stream) {
  return ReduceConfig(sendbuff, recvbuff, count, datatype, op, root, comm, stream, nullptr);
}
Status Gather(const void* sendbuff, void* recvbuff, size_t count, ncclDataType_t datatype, int root,
              ncclComm_t comm, cudaStream_t stream) {
  return GatherConfig(sendbuff, recvbuff, count, datatype, root, comm, stream, nullptr);
}
Status Scatter(const void* sendbuff, void* recvbuff, size_t count, ncclDataType_t datatype,
               int root, ncclComm_t comm, cudaStream_t stream) {
  return ScatterConfig(sendbuff, recvbuff, count, datatype, root, comm, stream, nullptr);
}

Status point_to_point(Call::Kind kind, const void* send, void* recv, size_t count,
                      ncclDataType_t datatype, int peer, ncclComm_t comm) {
  return collective([&]() -> Status {
    Call call;
    SCAPE_RETURN_IF_ERROR(begin_call(kind, comm, send, recv, count, datatype, &call));
    SCAPE_RETURN_IF_ERROR(check_rank(peer, call.comm->size(), "peer"));
    call.peer = peer;
    const bool sends = kind == Call::Kind::kSend;
    const void* data = sends ? send : recv;
    Range range;
    SCAPE_RETURN_IF_ERROR(
        check_buffer(data, count, 1, call.type, sends ? "sendbuff" : "recvbuff", &range));
    if (peer == call.comm->rank() && current_group() == nullptr) {
      return error(SCAPE_ERR_USAGE,
                   "peer %d is this rank: put the send and the receive into one group", peer);
    }
    note_other_collective(sends ? "ncclSend" : "ncclRecv", data, data, range.end - range.begin);
    return submit(std::move(call));
  });
}

Status Send(const void* sendbuff, size_t count, ncclDataType_t datatype, int peer, ncclComm_t comm,
            cudaStream_t) {
  return point_to_point(Call::Kind::kSend, sendbuff, nullptr, count, datatype, peer, comm);
}
Status Recv(void* recvbuff, size_t count, ncclDataType_t datatype, int peer, ncclComm_t comm,
            cudaStream_t) {
  return point_to_point(Call::Kind::kRecv, nullptr, recvbuff, count, datatype, peer, comm);
}

// ---- groups ----

Status GroupStart() { return group_start(); }
Status GroupEnd() { return group_end(false); }
Status GroupSimulateEnd(ncclSimInfo_t* info) {
  SCAPE_RETURN_IF_ERROR(group_end(true));
  SCAPE_RETURN_IF_ERROR(Versioned<ncclSimInfo_t>(info).check("ncclSimInfo_t", kSimInfoMagic));
  return error(SCAPE_ERR_USAGE, "host mode has no model of its own speed; the group is dropped");
}

// ---- operations and memory ----

Status RedOpCreatePreMulSum(ncclRedOp_t* op, void* scalar, ncclDataType_t datatype,
                            ncclScalarResidence_t residence, ncclComm_t comm) {
  SCAPE_RETURN_IF_ERROR(check_pointer(op, "op"));
  SCAPE_RETURN_IF_ERROR(check_pointer(scalar, "scalar"));
  std::shared_ptr<HostComm> host;
  SCAPE_RETURN_IF_ERROR(check_comm(comm, &host));
  PremulSum premul;
  SCAPE_RETURN_IF_ERROR(check_type(datatype, &premul.type));
  if (residence != ncclScalarDevice && residence != ncclScalarHostImmediate) {
    return error(SCAPE_ERR_ARGUMENT,
                 "residence %d is neither ncclScalarDevice nor ncclScalarHostImmediate",
                 static_cast<int>(residence));
  }
  premul.reduction.op = ReduceOp::kPremulSum;
  if (residence == ncclScalarHostImmediate) {
    read_scalar(scalar, premul.type, &premul.reduction);
  } else {
    premul.scalar = scalar;
  }
  *op = host->add_op(premul);
  return {};
}

Status RedOpDestroy(ncclRedOp_t op, ncclComm_t comm) {
  std::shared_ptr<HostComm> host;
  SCAPE_RETURN_IF_ERROR(check_comm(comm, &host));
  if (op >= 0 && op < ncclNumOps) {
    return error(SCAPE_ERR_ARGUMENT, "operation %d is built in and cannot be destroyed",
                 static_cast<int>(op));
  }
  return host->remove_op(op);
}

Status MemAlloc(void** ptr, size_t size) {
  SCAPE_RETURN_IF_ERROR(check_pointer(ptr, "ptr"));
  constexpr size_t kPage = 4096;
  if (size > SIZE_MAX - kPage)
    return error(SCAPE_ERR_ARGUMENT, "size %zu is more than memory can hold", size);
  const size_t whole = std::max<size_t>((size + kPage - 1) / kPage, 1) * kPage;
  *ptr = std::aligned_alloc(kPage, whole);
  if (*ptr == nullptr) return error(SCAPE_ERR_MEMORY, "no %zu bytes of memory left", size);
  return {};
}

Status MemFree(void* ptr) {
  std::free(ptr);
  return {};
}

Status CommRegister(const ncclComm_t comm, void* buff, size_t size, void** handle) {
  SCAPE_RETURN_IF_ERROR(check_pointer(buff, "buff"));
  SCAPE_RETURN_IF_ERROR(check_pointer(handle, "handle"));
  std::shared_ptr<HostComm> host;
  SCAPE_RETURN_IF_ERROR(check_comm(comm, &host));
  *handle = host->add_memory(size);
  return {};
}

Status CommDeregister(const ncclComm_t comm, void* handle) {
  std::shared_ptr<HostComm> host;
  SCAPE_RETURN_IF_ERROR(check_comm(comm, &host));
  return host->remove_memory(handle);
}

// ---- communicators ----

plugin::UniqueId to_plugin(const ncclUniqueId& id) {
  plugin::UniqueId out;
  static_assert(sizeof out.bytes == sizeof id.internal);
  std::memcpy(out.bytes.data(), id.internal, sizeof id.internal);
  return out;
}

Status check_id(const ncclUniqueId& id) {
  if (plugin::is_host_unique_id(to_plugin(id))) return {};
  if (std::all_of(std::begin(id.internal), std::end(id.internal), [](char c) { return c == 0; })) {
    return error(SCAPE_ERR_ARGUMENT,
                 "the unique id is all zeros; have one rank call ncclGetUniqueId, and hand its id "
                 "to every rank");
  }
  return error(SCAPE_ERR_USAGE,
               "this rank is in host mode, the unique id was made in device mode; set SCAPE_MODE "
               "alike on all ranks");
}

Status make_id(ncclUniqueId* id) {
  SCAPE_RETURN_IF_ERROR(check_pointer(id, "uniqueId"));
  SCAPE_RETURN_IF_ERROR(check_process());
  plugin::UniqueId made;
  SCAPE_RETURN_IF_ERROR(plugin::make_unique_id(&made));
  std::memcpy(id->internal, made.bytes.data(), sizeof id->internal);
  return {};
}

Status GetUniqueId(ncclUniqueId* id) { return make_id(id); }

// Puts a made communicator into the table; null (a split's no colour) gives a null handle.
void publish(std::shared_ptr<plugin::Communicator> made, int device, ncclComm_t* out) {
  if (made == nullptr) {
    *out = nullptr;
    return;
  }
  claim_process();
  *out = add_comm(std::make_shared<HostComm>(std::move(made), device));
}

Status connect(const ncclUniqueId& id, int rank, int size, int device, ncclComm_t* out) {
  std::shared_ptr<plugin::Communicator> made;
  SCAPE_RETURN_IF_ERROR(plugin::create_communicator(to_plugin(id), rank, size, &made));
  // Not a split's: log lines are sorted by the rank that the launcher gave.
  set_log_rank(made->rank());
  publish(std::move(made), device, out);
  return {};
}

Status init_rank(ncclComm_t* comm, int nranks, const ncclUniqueId& id, int rank,
                 const ncclConfig_t* config) {
  return collective([&]() -> Status {
    SCAPE_RETURN_IF_ERROR(check_pointer(comm, "comm"));
    *comm = nullptr;
    SCAPE_RETURN_IF_ERROR(check_process());
    SCAPE_RETURN_IF_ERROR(check_config(config));
    if (nranks < 1) return error(SCAPE_ERR_ARGUMENT, "nranks %d is less than 1", nranks);
    SCAPE_RETURN_IF_ERROR(check_rank(rank, nranks, "rank"));
    SCAPE_RETURN_IF_ERROR(check_id(id));
    return submit_job([=] { return connect(id, rank, nranks, 0, comm); });
  });
}

Status CommInitRank(ncclComm_t* comm, int nranks, ncclUniqueId id, int rank) {
  return init_rank(comm, nranks, id, rank, nullptr);
}

Status CommInitRankConfig(ncclComm_t* comm, int nranks, ncclUniqueId id, int rank,
                          ncclConfig_t* config) {
  return init_rank(comm, nranks, id, rank, config);
}

Status CommInitRankScalable(ncclComm_t* comm, int nranks, int rank, int ids_count,
                            ncclUniqueId* ids, ncclConfig_t* config) {
  SCAPE_RETURN_IF_ERROR(check_pointer(ids, "commIds"));
  if (ids_count < 1 || ids_count > nranks) {
    return error(SCAPE_ERR_ARGUMENT, "nId %d is outside 1 .. nranks (%d)", ids_count, nranks);
  }
  for (int i = 0; i < ids_count; ++i) SCAPE_RETURN_IF_ERROR(check_id(ids[i]));
  // All ranks pass the same ids in the same order, and one meeting place is enough on hosts.
  SCAPE_RETURN_IF_ERROR(init_rank(comm, nranks, ids[0], rank, config));
  for (int i = 1; i < ids_count; ++i) plugin::drop_unique_id(to_plugin(ids[i]));
  return {};
}

Status CommInitAll(ncclComm_t* comms, int ndev, const int* devlist) {
  SCAPE_RETURN_IF_ERROR(check_pointer(comms, "comms"));
  SCAPE_RETURN_IF_ERROR(check_process());
  if (ndev < 1) return error(SCAPE_ERR_ARGUMENT, "ndev %d is less than 1", ndev);
  for (int i = 0; devlist != nullptr && i < ndev; ++i) {
    if (devlist[i] < 0)
      return error(SCAPE_ERR_ARGUMENT, "devlist[%d] is %d; devices count from 0", i, devlist[i]);
  }
  ncclUniqueId id;
  SCAPE_RETURN_IF_ERROR(make_id(&id));
  std::vector<std::function<Status()>> jobs;
  for (int i = 0; i < ndev; ++i) {
    comms[i] = nullptr;
    const int device = devlist != nullptr ? devlist[i] : i;
    jobs.push_back([=] { return connect(id, i, ndev, device, &comms[i]); });
  }
  return run_together(jobs);
}

// A communicator that can serve the making of others: the parent, or where it was revoked or failed
// a fresh one over the same ranks.
Status usable_parent(HostComm& parent, std::shared_ptr<plugin::Communicator>* out) {
  if (parent.state() == HostComm::State::kFinalized) return parent.usable();
  if (parent.usable().ok()) {
    *out = parent.shared();
    return {};
  }
  return plugin::shrink_communicator(parent.communicator(), {}, out);
}

Status CommSplit(ncclComm_t comm, int color, int key, ncclComm_t* newcomm, ncclConfig_t* config) {
  return collective([&]() -> Status {
    SCAPE_RETURN_IF_ERROR(check_pointer(newcomm, "newcomm"));
    *newcomm = nullptr;
    std::shared_ptr<HostComm> parent;
    SCAPE_RETURN_IF_ERROR(check_comm(comm, &parent));
    SCAPE_RETURN_IF_ERROR(check_config(config));
    if (color < 0 && color != kSplitNoColor) {
      return error(SCAPE_ERR_ARGUMENT, "color %d is neither 0 or more nor NCCL_SPLIT_NOCOLOR",
                   color);
    }
    return submit_job([=]() -> Status {
      std::shared_ptr<plugin::Communicator> base;
      SCAPE_RETURN_IF_ERROR(usable_parent(*parent, &base));
      std::shared_ptr<plugin::Communicator> made;
      SCAPE_RETURN_IF_ERROR(plugin::split_communicator(*base, color, key, &made));
      publish(std::move(made), parent->device(), newcomm);
      return {};
    });
  });
}

Status CommShrink(ncclComm_t comm, int* excluded, int excluded_count, ncclComm_t* newcomm,
                  ncclConfig_t* config, int flags) {
  return collective([&]() -> Status {
    SCAPE_RETURN_IF_ERROR(check_pointer(newcomm, "newcomm"));
    *newcomm = nullptr;
    std::shared_ptr<HostComm> parent;
    SCAPE_RETURN_IF_ERROR(check_comm(comm, &parent));
    SCAPE_RETURN_IF_ERROR(check_config(config));
    SCAPE_RETURN_IF_ERROR(check_pointer(excluded, "excludeRanksList"));
    if (excluded_count < 1 || excluded_count >= parent->size()) {
      return error(SCAPE_ERR_ARGUMENT, "excludeRanksCount %d is outside 1 .. %d", excluded_count,
                   parent->size() - 1);
    }
    if (flags != kShrinkDefault && flags != kShrinkAbort) {
      return error(SCAPE_ERR_ARGUMENT,
                   "shrinkFlags %d is neither NCCL_SHRINK_DEFAULT nor NCCL_SHRINK_ABORT", flags);
    }
    std::vector<int> ranks(excluded, excluded + excluded_count);
    std::sort(ranks.begin(), ranks.end());
    for (size_t i = 0; i < ranks.size(); ++i) {
      SCAPE_RETURN_IF_ERROR(check_rank(ranks[i], parent->size(), "excluded rank"));
      if (i > 0 && ranks[i] == ranks[i - 1]) {
        return error(SCAPE_ERR_ARGUMENT, "rank %d is excluded twice", ranks[i]);
      }
      if (ranks[i] == parent->rank()) {
        return error(SCAPE_ERR_ARGUMENT,
                     "rank %d excludes itself; only ranks that stay call ncclCommShrink", ranks[i]);
      }
    }
    if (flags == kShrinkDefault) SCAPE_RETURN_IF_ERROR(parent->usable());
    return submit_job([=]() -> Status {
      if (flags == kShrinkAbort) {
        parent->communicator().abort(
            error(SCAPE_ERR_REMOTE, "rank %d shrinks the communicator", parent->rank()));
      }
      std::shared_ptr<plugin::Communicator> made;
      SCAPE_RETURN_IF_ERROR(plugin::shrink_communicator(parent->communicator(), ranks, &made));
      publish(std::move(made), parent->device(), newcomm);
      return {};
    });
  });
}

Status CommGetUniqueId(ncclComm_t comm, ncclUniqueId* id) {
  std::shared_ptr<HostComm> host;
  SCAPE_RETURN_IF_ERROR(check_comm(comm, &host));
  SCAPE_RETURN_IF_ERROR(host->usable());
  if (!host->begin_grow()) {
    return error(SCAPE_ERR_USAGE,
                 "an id of this communicator waits for its ncclCommGrow; use it first");
  }
  const Status status = make_id(id);
  if (!status.ok()) host->end_grow();
  return status;
}

Status CommGrow(ncclComm_t comm, int nranks, const ncclUniqueId* id, int rank, ncclComm_t* newcomm,
                ncclConfig_t* config) {
  return collective([&]() -> Status {
    SCAPE_RETURN_IF_ERROR(check_pointer(newcomm, "newcomm"));
    *newcomm = nullptr;
    SCAPE_RETURN_IF_ERROR(check_process());
    SCAPE_RETURN_IF_ERROR(check_config(config));
    if (id != nullptr) SCAPE_RETURN_IF_ERROR(check_id(*id));
    if (comm == nullptr) {
      SCAPE_RETURN_IF_ERROR(check_pointer(id, "uniqueId of a new rank"));
      SCAPE_RETURN_IF_ERROR(check_rank(rank, nranks, "rank"));
      return submit_job([=, given = *id] { return connect(given, rank, nranks, 0, newcomm); });
    }
    std::shared_ptr<HostComm> parent;
    SCAPE_RETURN_IF_ERROR(check_comm(comm, &parent));
    SCAPE_RETURN_IF_ERROR(parent->usable());
    if (rank != -1) {
      return error(SCAPE_ERR_ARGUMENT, "rank %d of an existing member: it keeps its rank, pass -1",
                   rank);
    }
    if (nranks <= parent->size()) {
      return error(SCAPE_ERR_ARGUMENT, "nRanks %d is no more than the %d there are", nranks,
                   parent->size());
    }
    std::optional<plugin::UniqueId> given;
    if (id != nullptr) given = to_plugin(*id);
    return submit_job([=]() -> Status {
      std::shared_ptr<plugin::Communicator> made;
      const Status status = plugin::grow_communicator(&parent->communicator(),
                                                      given ? &*given : nullptr, -1, nranks, &made);
      parent->end_grow();
      SCAPE_RETURN_IF_ERROR(status);
      publish(std::move(made), parent->device(), newcomm);
      return {};
    });
  });
}

Status CommFinalize(ncclComm_t comm) {
  std::shared_ptr<HostComm> host;
  SCAPE_RETURN_IF_ERROR(check_comm(comm, &host));
  SCAPE_RETURN_IF_ERROR(host->usable());
  // Calls are over when they return: there is nothing left to flush.
  host->set_state(HostComm::State::kFinalized);
  return {};
}

Status CommRevoke(ncclComm_t comm, int flags) {
  std::shared_ptr<HostComm> host;
  SCAPE_RETURN_IF_ERROR(check_comm(comm, &host));
  if (flags != 0)
    return error(SCAPE_ERR_ARGUMENT, "revokeFlags %d is not NCCL_REVOKE_DEFAULT", flags);
  if (host->state() == HostComm::State::kFinalized) return host->usable();
  if (host->state() == HostComm::State::kRevoked) {
    return error(SCAPE_ERR_USAGE, "the communicator is revoked already");
  }
  host->set_state(HostComm::State::kRevoked);
  host->communicator().abort(
      error(SCAPE_ERR_REMOTE, "rank %d revoked the communicator", host->rank()));
  return {};
}

Status CommDestroy(ncclComm_t comm) {
  if (comm == nullptr) return {};
  std::shared_ptr<HostComm> host;
  SCAPE_RETURN_IF_ERROR(check_process());
  SCAPE_RETURN_IF_ERROR(remove_comm(comm, &host));
  drop_buffers_of(*host);
  return {};
}

Status CommAbort(ncclComm_t comm) {
  if (comm == nullptr) return {};
  std::shared_ptr<HostComm> host;
  SCAPE_RETURN_IF_ERROR(check_process());
  SCAPE_RETURN_IF_ERROR(remove_comm(comm, &host));
  // First, so that a call that is stuck in another thread ends and lets go of its buffer.
  host->communicator().abort(
      error(SCAPE_ERR_REMOTE, "rank %d aborted the communicator", host->rank()));
  drop_buffers_of(*host);
  return {};
}

Status CommGetAsyncError(ncclComm_t comm, ncclResult_t* async_error) {
  SCAPE_RETURN_IF_ERROR(check_pointer(async_error, "asyncError"));
  std::shared_ptr<HostComm> host;
  SCAPE_RETURN_IF_ERROR(check_comm(comm, &host));
  const Status failure = host->communicator().async_error();
  const bool expected =
      host->state() == HostComm::State::kRevoked;  // quiescent, as NCCL reports it
  *async_error = expected ? ncclSuccess : to_nccl(failure.code());
  if (*async_error != ncclSuccess) set_last_error(failure.message().c_str());
  return {};
}

Status CommCount(const ncclComm_t comm, int* count) {
  SCAPE_RETURN_IF_ERROR(check_pointer(count, "count"));
  std::shared_ptr<HostComm> host;
  SCAPE_RETURN_IF_ERROR(check_comm(comm, &host));
  *count = host->size();
  return {};
}

Status CommCuDevice(const ncclComm_t comm, int* device) {
  SCAPE_RETURN_IF_ERROR(check_pointer(device, "device"));
  std::shared_ptr<HostComm> host;
  SCAPE_RETURN_IF_ERROR(check_comm(comm, &host));
  *device = host->device();
  return {};
}

Status CommUserRank(const ncclComm_t comm, int* rank) {
  SCAPE_RETURN_IF_ERROR(check_pointer(rank, "rank"));
  std::shared_ptr<HostComm> host;
  SCAPE_RETURN_IF_ERROR(check_comm(comm, &host));
  *rank = host->rank();
  return {};
}

}  // namespace

const Functions& host_functions() {
  static const Functions* const table = [] {
    auto* functions = new Functions(refusing_functions());
#define SCAPE_NCCL_FUNCTION(type, name, params, args)
#define SCAPE_NCCL_HOST(type, name, params, args)                                 \
  functions->name = [] params -> type {                                           \
    return to_nccl(guarded("nccl" #name, [&]() -> Status { return name args; })); \
  };
#include "nccl/function_list.h"
    return functions;
  }();
  return *table;
}

const char* host_last_error(ncclComm_t comm) {
  if (*last_error() != '\0' || comm == nullptr) return last_error();
  (void)guarded("ncclGetLastError", [&]() -> Status {
    std::shared_ptr<HostComm> host;
    if (check_process().ok() && find_comm(comm, &host).ok()) {
      set_last_error(host->communicator().async_error().message().c_str());
    }
    return {};
  });
  return last_error();
}

}  // namespace scape::interposer
