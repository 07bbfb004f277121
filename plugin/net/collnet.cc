#include "plugin/net/collnet.h"

#include <algorithm>
#include <climits>
#include <memory>
#include <utility>

#include "plugin/net/call.h"

namespace scape::net {
namespace {

// Sum, prod, max and min, as NCCL asks about. An average over a group's ranks is not one over
// NCCL's, of which several may stand behind each.
bool is_supported(int type, int op) {
  return type >= 0 && type < plugin::kDataTypes && op >= 0 &&
         op <= static_cast<int>(plugin::ReduceOp::kMin);
}

Part piece(void* address, void* memory) {
  return {static_cast<GroupMemory*>(memory), static_cast<std::byte*>(address), 0};
}

// Begins a call; `fill` takes the arguments that are its own, once the others have been looked at.
template <typename Fill>
int begin(const char* name, void* coll_comm, const Part* parts, int part_count, void** request,
          Fill&& fill) {
  GroupCall call;
  const int result = guarded(false, [&]() -> Status {
    if (request == nullptr) return null_argument(name, "request");
    *request = nullptr;
    if (coll_comm == nullptr) return null_argument(name, "collComm");
    if (part_count < 0 || (part_count > 0 && parts == nullptr)) {
      return error(SCAPE_ERR_ARGUMENT, "%s: %d parts at %p", name, part_count,
                   static_cast<const void*>(parts));
    }
    return fill(&call);
  });
  if (result != NET_SUCCESS) return result;
  return guarded(true, [&] {
    GroupRequest* taken = nullptr;
    Status status = static_cast<Group*>(coll_comm)->begin(call, parts, part_count, &taken);
    *request = taken;
    return status;
  });
}

Status take_reduction(const char* name, int type, int op, GroupCall* call) {
  if (!is_supported(type, op)) {
    return error(SCAPE_ERR_ARGUMENT,
                 "%s: reduction %d of type %d is not supported, as reduceSupport says", name, op,
                 type);
  }
  call->type = static_cast<plugin::DataType>(type);
  call->op = static_cast<plugin::ReduceOp>(op);
  return Status::Ok();
}

}  // namespace

int coll_listen(int device, void* handle, void** listen_comm) {
  return guarded(false, [&]() -> Status {
    if (handle == nullptr) return null_argument("listen", "handle");
    if (listen_comm == nullptr) return null_argument("listen", "listenComm");
    *listen_comm = nullptr;
    const Devices* devices = nullptr;
    const Device* found = nullptr;
    SCAPE_RETURN_IF_ERROR(find_device(Face::kCollective, device, &devices, &found));
    auto door = std::make_unique<Door>();
    door->counters = &counters_of(*devices, *found);
    SCAPE_RETURN_IF_ERROR(open_door(devices->library, &door->socket, &door->invitation));
    SCAPE_RETURN_IF_ERROR(door->invitation.write(handle));
    *listen_comm = door.release();
    return Status::Ok();
  });
}

int coll_connect(void* const* handles, int ranks, int rank, void* listen_comm, void** coll_comm) {
  return guarded(false, [&]() -> Status {
    if (handles == nullptr) return null_argument("connect", "handles");
    if (listen_comm == nullptr) return null_argument("connect", "listenComm");
    if (coll_comm == nullptr) return null_argument("connect", "collComm");
    *coll_comm = nullptr;
    std::unique_ptr<Group> group;
    auto* const door = static_cast<Door*>(listen_comm);
    const Status status = Group::join(door, handles, ranks, rank, &group);
    if (!status.ok()) {
      door->counters->errors[Error::kJoin].add();
      return error(status.code(), "collectives: rank %d of %d joins no group: %s", rank, ranks,
                   status.message().c_str());
    }
    *coll_comm = group.release();
    return Status::Ok();
  });
}

int coll_close_listen(void* listen_comm) {
  return guarded(false, [&] {
    if (listen_comm == nullptr) return null_argument("closeListen", "listenComm");
    delete static_cast<Door*>(listen_comm);
    return Status::Ok();
  });
}

int coll_close(void* coll_comm) {
  return guarded(false, [&] {
    if (coll_comm == nullptr) return null_argument("closeColl", "collComm");
    const std::unique_ptr<Group> group(static_cast<Group*>(coll_comm));
    group->close();
    return Status::Ok();
  });
}

int coll_reduce_support(int type, int op, int* supported) {
  return guarded(false, [&] {
    if (supported == nullptr) return null_argument("reduceSupport", "supported");
    *supported = is_supported(type, op);
    return Status::Ok();
  });
}

int coll_register_memory(void* coll_comm, void* data, size_t bytes, int type, void** memory) {
  return guarded(false, [&]() -> Status {
    if (coll_comm == nullptr) return null_argument("regMr", "collComm");
    if (memory == nullptr) return null_argument("regMr", "mhandle");
    *memory = nullptr;
    SCAPE_RETURN_IF_ERROR(check_memory(data, bytes, type));
    GroupMemory* registered = nullptr;
    SCAPE_RETURN_IF_ERROR(
        static_cast<Group*>(coll_comm)->register_memory(data, bytes, &registered));
    *memory = registered;
    return Status::Ok();
  });
}

int coll_deregister_memory(void* coll_comm, void* memory) {
  return guarded(false, [&]() -> Status {
    if (coll_comm == nullptr) return null_argument("deregMr", "collComm");
    if (memory == nullptr) return null_argument("deregMr", "mhandle");
    return static_cast<Group*>(coll_comm)->deregister_memory(static_cast<GroupMemory*>(memory));
  });
}

int coll_all_reduce(void* coll_comm, void* send, void* receive, size_t count, int type, int op,
                    void* send_memory, void* receive_memory, void** request) {
  return begin("iallreduce", coll_comm, nullptr, 0, request, [&](GroupCall* call) {
    call->count = count;
    call->send = piece(send, send_memory);
    call->receive = piece(receive, receive_memory);
    return take_reduction("iallreduce", type, op, call);
  });
}

int coll_all_gather(void* coll_comm, void* send, const Part* parts, int part_count,
                    const Window& window, void* send_memory, void** request) {
  return begin("iallgather", coll_comm, parts, part_count, request, [&](GroupCall* call) {
    call->kind = GroupCall::Kind::kAllGather;
    call->window = window;
    call->send = piece(send, send_memory);
    return Status::Ok();
  });
}

int coll_reduce_scatter(void* coll_comm, const Part* parts, int part_count, void* receive,
                        const Window& window, int type, int op, void* receive_memory,
                        void** request) {
  return begin("ireducescatter", coll_comm, parts, part_count, request, [&](GroupCall* call) {
    call->kind = GroupCall::Kind::kReduceScatter;
    call->window = window;
    call->receive = piece(receive, receive_memory);
    return take_reduction("ireducescatter", type, op, call);
  });
}

int coll_test(void* request, int* done, int* size) {
  if (request == nullptr || done == nullptr) {
    return guarded(false,
                   [&] { return null_argument("test", request == nullptr ? "request" : "done"); });
  }
  *done = 0;
  return guarded(true, [&] {
    bool ended = false;
    size_t bytes = 0;
    Status status = Group::test(static_cast<GroupRequest*>(request), &ended, &bytes);
    *done = ended;
    if (ended && size != nullptr) *size = static_cast<int>(std::min<size_t>(bytes, INT_MAX));
    return status;
  });
}

}  // namespace scape::net
