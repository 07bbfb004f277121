// NCCL's functions over simulated devices: what each checks, counts, and puts on streams.
#include "tests/simgpu/nccl/comm.h"

#include <span>

#include "interposer/host_mode.h"
#include "interposer/mode.h"
#include "interposer/process.h"
#include "tests/simgpu/nccl/group.h"
#include "tests/simgpu/nccl/settings.h"

namespace simnccl {
namespace {

constexpr double kAbortSeconds = 30;

const Functions& host() { return scape::interposer::host_functions(); }

// What host mode said of its refusal.
ncclResult_t from_host(ncclResult_t result) {
  if (result != ncclSuccess) (void)refuse(result, scape::interposer::last_error());
  return result;
}

ncclResult_t need(bool condition, const char* why) {
  return condition ? ncclSuccess : refuse(ncclInvalidArgument, why);
}

#define RETURN_IF_REFUSED(expression)                                                         \
  do {                                                                                        \
    if (const ncclResult_t refused_ = (expression); refused_ != ncclSuccess) return refused_; \
  } while (false)

// ---- unique ids: marked as a real NCCL's, which host mode would refuse ----

constexpr char kMark = 0x5a;

ncclUniqueId marked(ncclUniqueId id) {
  for (char& byte : id.internal) byte = static_cast<char>(byte ^ kMark);
  return id;
}

ncclResult_t GetUniqueId(ncclUniqueId* id) {
  RETURN_IF_REFUSED(from_host(host().GetUniqueId(id)));
  *id = marked(*id);
  return ncclSuccess;
}

// ---- communicators ----

// The caller's, as far as it reaches, over the defaults: it may be gone when a job runs.
ncclResult_t read_config(const ncclConfig_t* config, ncclConfig_t* out) {
  *out = {};
  out->size = sizeof *out;
  out->magic = kApiMagic;
  out->version = kVersionCode;
  out->blocking = kUndefInt;
  if (config == nullptr) return ncclSuccess;
  RETURN_IF_REFUSED(need(
      config->size >= offsetof(ncclConfig_t, blocking) + sizeof(int) && config->magic == kApiMagic,
      "ncclConfig_t is not initialised"));
  out->blocking = config->blocking;
  return need(out->blocking == kUndefInt || out->blocking == 0 || out->blocking == 1,
              "ncclConfig_t.blocking is neither 0 nor 1");
}

// A communicator that a job will make: its handle is there at once.
CommPtr begin_comm(int device, bool blocking, ncclComm_t* handle) {
  auto comm = std::make_shared<Comm>();
  comm->device = device;
  comm->blocking = blocking;
  *handle = publish(comm);
  return comm;
}

// Takes what host mode has made; null is a split's that this rank has no part in.
ncclResult_t complete(const CommPtr& comm, ncclComm_t made) {
  if (made == nullptr) return ncclSuccess;
  int rank = -1, size = 0;
  RETURN_IF_REFUSED(from_host(host().CommUserRank(made, &rank)));
  RETURN_IF_REFUSED(from_host(host().CommCount(made, &size)));
  const std::lock_guard lock(comm->mutex);
  if (comm->aborted) return from_host(host().CommAbort(made));
  comm->rank = rank;
  comm->size = size;
  comm->host = made;
  return ncclSuccess;
}

// Begins the job that makes *handle. A blocking caller gets none where that fails.
ncclResult_t make(ncclComm_t* handle, const CommPtr& comm,
                  std::function<ncclResult_t(const Functions&, ncclComm_t*)> connect) {
  const ncclResult_t result = submit(Job{comm, [comm, connect](const Functions& functions) {
                                           ncclComm_t made = nullptr;
                                           RETURN_IF_REFUSED(from_host(connect(functions, &made)));
                                           return complete(comm, made);
                                         }});
  if (result != ncclSuccess && result != ncclInProgress) {
    remove(*handle);
    *handle = nullptr;
  }
  return result;
}

int here() {
  int device = 0;
  (void)cudaGetDevice(&device);
  return device;
}

ncclResult_t init(ncclComm_t* comm, int nranks, std::span<const ncclUniqueId> ids, int rank,
                  const ncclConfig_t* given) {
  RETURN_IF_REFUSED(need(comm != nullptr, "comm is null"));
  *comm = nullptr;
  RETURN_IF_REFUSED(need(nranks >= 1 && rank >= 0 && rank < nranks, "rank or nranks is invalid"));
  ncclConfig_t config;
  RETURN_IF_REFUSED(read_config(given, &config));
  const CommPtr made = begin_comm(here(), config.blocking != 0, comm);
  std::vector<ncclUniqueId> own;
  for (const ncclUniqueId& id : ids) own.push_back(marked(id));
  return make(comm, made, [=](const Functions& functions, ncclComm_t* out) mutable {
    return functions.CommInitRankScalable(out, nranks, rank, static_cast<int>(own.size()),
                                          own.data(), &config);
  });
}

ncclResult_t CommInitRank(ncclComm_t* comm, int nranks, ncclUniqueId id, int rank) {
  return in_group(init(comm, nranks, {&id, 1}, rank, nullptr));
}
ncclResult_t CommInitRankConfig(ncclComm_t* comm, int nranks, ncclUniqueId id, int rank,
                                ncclConfig_t* config) {
  return in_group(init(comm, nranks, {&id, 1}, rank, config));
}
ncclResult_t CommInitRankScalable(ncclComm_t* comm, int nranks, int rank, int ids_count,
                                  ncclUniqueId* ids, ncclConfig_t* config) {
  RETURN_IF_REFUSED(
      need(ids != nullptr && ids_count >= 1 && ids_count <= nranks, "commId or nId is invalid"));
  return in_group(init(comm, nranks, {ids, static_cast<size_t>(ids_count)}, rank, config));
}

ncclResult_t CommInitAll(ncclComm_t* comms, int ndev, const int* devlist) {
  int devices = 0;
  (void)cudaGetDeviceCount(&devices);
  RETURN_IF_REFUSED(need(comms != nullptr && ndev >= 1, "comms is null or ndev less than 1"));
  for (int i = 0; i < ndev; ++i) {
    const int device = devlist != nullptr ? devlist[i] : i;
    RETURN_IF_REFUSED(need(device >= 0 && device < devices, "devlist names no device"));
  }
  ncclUniqueId id;
  RETURN_IF_REFUSED(GetUniqueId(&id));
  const int before = here();
  group_start();
  for (int i = 0; i < ndev; ++i) {
    (void)cudaSetDevice(devlist != nullptr ? devlist[i] : i);
    (void)in_group(init(&comms[i], ndev, {&id, 1}, i, nullptr));
  }
  (void)cudaSetDevice(before);
  const ncclResult_t result = group_end(false);
  for (int i = 0; i < ndev && result != ncclSuccess; ++i) {
    remove(comms[i]);
    comms[i] = nullptr;
  }
  return result;
}

// The communicator that others are made of. Where it failed or was revoked, that may be so.
ncclResult_t find_parent(ncclComm_t handle, bool must_be_well, CommPtr* out) {
  *out = find(handle);
  RETURN_IF_REFUSED(need(*out != nullptr, "no such communicator"));
  if (must_be_well) return usable(*out);
  const std::lock_guard lock((*out)->mutex);
  return need((*out)->jobs == 0 && (*out)->host != nullptr, "the communicator is in progress");
}

ncclResult_t CommSplit(ncclComm_t comm, int color, int key, ncclComm_t* newcomm,
                       ncclConfig_t* given) {
  return in_group([&]() -> ncclResult_t {
    RETURN_IF_REFUSED(need(newcomm != nullptr, "newcomm is null"));
    *newcomm = nullptr;
    CommPtr parent;
    RETURN_IF_REFUSED(find_parent(comm, false, &parent));
    ncclConfig_t config;
    RETURN_IF_REFUSED(read_config(given, &config));
    const bool blocking =
        given != nullptr && config.blocking != kUndefInt ? config.blocking != 0 : parent->blocking;
    ncclComm_t handle = nullptr;
    const CommPtr made = begin_comm(parent->device, blocking, &handle);
    if (color != kSplitNoColor) *newcomm = handle;
    const ncclResult_t result =
        make(&handle, made, [=](const Functions& functions, ncclComm_t* out) {
          drain(*parent);  // calls of the parent that are under way, and this, share its order
          return functions.CommSplit(parent->host, color, key, out, nullptr);
        });
    if (color == kSplitNoColor) remove(handle);
    if (handle == nullptr) *newcomm = nullptr;
    return result;
  }());
}

ncclResult_t CommShrink(ncclComm_t comm, int* excluded, int excluded_count, ncclComm_t* newcomm,
                        ncclConfig_t* given, int flags) {
  return in_group([&]() -> ncclResult_t {
    RETURN_IF_REFUSED(need(newcomm != nullptr, "newcomm is null"));
    *newcomm = nullptr;
    CommPtr parent;
    RETURN_IF_REFUSED(find_parent(comm, flags == kShrinkDefault, &parent));
    RETURN_IF_REFUSED(need(excluded != nullptr && excluded_count > 0, "nobody is excluded"));
    ncclConfig_t config;
    RETURN_IF_REFUSED(read_config(given, &config));
    const bool blocking =
        given != nullptr && config.blocking != kUndefInt ? config.blocking != 0 : parent->blocking;
    const CommPtr made = begin_comm(parent->device, blocking, newcomm);
    std::vector<int> ranks(excluded, excluded + excluded_count);
    return make(newcomm, made, [=](const Functions& functions, ncclComm_t* out) mutable {
      if (flags == kShrinkDefault) drain(*parent);
      return functions.CommShrink(parent->host, ranks.data(), excluded_count, out, nullptr, flags);
    });
  }());
}

ncclResult_t CommGetUniqueId(ncclComm_t comm, ncclUniqueId* id) {
  const CommPtr found = find(comm);
  RETURN_IF_REFUSED(usable(found));
  RETURN_IF_REFUSED(from_host(host().CommGetUniqueId(found->host, id)));
  *id = marked(*id);
  return ncclSuccess;
}

ncclResult_t CommGrow(ncclComm_t comm, int nranks, const ncclUniqueId* id, int rank,
                      ncclComm_t* newcomm, ncclConfig_t* given) {
  return in_group([&]() -> ncclResult_t {
    RETURN_IF_REFUSED(need(newcomm != nullptr, "newcomm is null"));
    *newcomm = nullptr;
    CommPtr parent;
    if (comm != nullptr) RETURN_IF_REFUSED(find_parent(comm, true, &parent));
    ncclConfig_t config;
    RETURN_IF_REFUSED(read_config(given, &config));
    const bool blocking = given != nullptr && config.blocking != kUndefInt ? config.blocking != 0
                          : parent != nullptr                              ? parent->blocking
                                                                           : true;
    const CommPtr made = begin_comm(parent != nullptr ? parent->device : here(), blocking, newcomm);
    const bool with_id = id != nullptr;
    const ncclUniqueId own = with_id ? marked(*id) : ncclUniqueId{};
    return make(newcomm, made, [=](const Functions& functions, ncclComm_t* out) {
      if (parent != nullptr) drain(*parent);
      return functions.CommGrow(parent != nullptr ? parent->host.load() : nullptr, nranks,
                                with_id ? &own : nullptr, rank, out, nullptr);
    });
  }());
}

ncclResult_t CommFinalize(ncclComm_t comm) {
  const CommPtr found = find(comm);
  RETURN_IF_REFUSED(usable(found));
  return submit(Job{found, [found](const Functions& functions) {
                      drain(*found);
                      const std::lock_guard lock(found->mutex);
                      found->finalized = true;
                      return functions.CommFinalize(found->host);
                    }});
}

ncclResult_t CommDestroy(ncclComm_t comm) {
  if (comm == nullptr) return ncclSuccess;
  const CommPtr found = remove(comm);
  RETURN_IF_REFUSED(need(found != nullptr, "no such communicator"));
  std::unique_lock lock(found->mutex);
  found->changed.wait(lock, [&] { return found->jobs == 0; });
  const ncclComm_t own = found->host;
  lock.unlock();
  if (!drain(*found)) return refuse(ncclInternalError, "calls of the communicator do not end");
  lock.lock();
  found->host = nullptr;
  lock.unlock();
  return own != nullptr ? from_host(host().CommDestroy(own)) : ncclSuccess;
}

ncclResult_t CommAbort(ncclComm_t comm) {
  if (comm == nullptr) return ncclSuccess;
  const CommPtr found = remove(comm);
  RETURN_IF_REFUSED(need(found != nullptr, "no such communicator"));
  ncclComm_t own = nullptr;
  {
    const std::lock_guard lock(found->mutex);
    found->aborted = true;  // a job that still makes it aborts what it has made
    own = found->host.exchange(nullptr);
  }
  const ncclResult_t result = own != nullptr ? from_host(host().CommAbort(own)) : ncclSuccess;
  if (!simgpu::wait(*found->order, kAbortSeconds)) {
    return refuse(ncclInternalError, "calls of the communicator go on after the abort");
  }
  return result;
}

ncclResult_t CommRevoke(ncclComm_t comm, int flags) {
  const CommPtr found = find(comm);
  RETURN_IF_REFUSED(need(found != nullptr, "no such communicator"));
  ncclComm_t own = nullptr;
  {
    const std::lock_guard lock(found->mutex);
    RETURN_IF_REFUSED(
        need(found->jobs == 0 && found->host != nullptr, "the communicator is in progress"));
    own = found->host;
    found->revoked = flags == 0;
  }
  return from_host(host().CommRevoke(own, flags));
}

ncclResult_t CommGetAsyncError(ncclComm_t comm, ncclResult_t* async_error) {
  const CommPtr found = find(comm);
  RETURN_IF_REFUSED(need(found != nullptr, "no such communicator"));
  RETURN_IF_REFUSED(need(async_error != nullptr, "asyncError is null"));
  const std::lock_guard lock(found->mutex);
  if (found->jobs > 0) {
    *async_error = ncclInProgress;
  } else if (found->failure != ncclSuccess) {
    *async_error = found->failure;
  } else if (found->host == nullptr) {
    *async_error = ncclSuccess;
  } else {
    return from_host(host().CommGetAsyncError(found->host, async_error));
  }
  return ncclSuccess;
}

ncclResult_t ask(ncclComm_t comm, int* out, int Comm::*what) {
  const CommPtr found = find(comm);
  RETURN_IF_REFUSED(need(found != nullptr && out != nullptr, "no such communicator, or null"));
  const std::lock_guard lock(found->mutex);
  RETURN_IF_REFUSED(need(found->host != nullptr, "the communicator is in progress or failed"));
  *out = (*found).*what;
  return ncclSuccess;
}
ncclResult_t CommCount(const ncclComm_t comm, int* count) { return ask(comm, count, &Comm::size); }
ncclResult_t CommUserRank(const ncclComm_t comm, int* rank) { return ask(comm, rank, &Comm::rank); }
ncclResult_t CommCuDevice(const ncclComm_t comm, int* device) {
  return ask(comm, device, &Comm::device);
}

// ---- memory and operations ----

ncclResult_t from_cuda(cudaError_t error) {
  if (error == cudaSuccess) return ncclSuccess;
  return refuse(ncclUnhandledCudaError, std::string("CUDA: ") + cudaGetErrorString(error));
}
ncclResult_t MemAlloc(void** ptr, size_t size) { return from_cuda(cudaMalloc(ptr, size)); }
ncclResult_t MemFree(void* ptr) { return from_cuda(cudaFree(ptr)); }

ncclResult_t CommRegister(const ncclComm_t comm, void* buff, size_t size, void** handle) {
  const CommPtr found = find(comm);
  RETURN_IF_REFUSED(usable(found));
  RETURN_IF_REFUSED(need(simgpu::reachable(buff, size, found->device), "buff is no device memory"));
  return from_host(host().CommRegister(found->host, buff, size, handle));
}
ncclResult_t CommDeregister(const ncclComm_t comm, void* handle) {
  const CommPtr found = find(comm);
  RETURN_IF_REFUSED(need(found != nullptr, "no such communicator"));
  return from_host(host().CommDeregister(found->host, handle));
}

ncclResult_t CommWindowRegister(ncclComm_t comm, void* buff, size_t size, ncclWindow_t* window,
                                int) {
  const CommPtr found = find(comm);
  RETURN_IF_REFUSED(usable(found));
  RETURN_IF_REFUSED(need(window != nullptr && simgpu::reachable(buff, size, found->device),
                         "window is null, or buff no device memory"));
  const std::lock_guard lock(found->mutex);
  const uintptr_t number = found->windows.empty() ? 1 : found->windows.rbegin()->first + 1;
  found->windows[number] = buff;
  *window = reinterpret_cast<ncclWindow_t>(number);
  return ncclSuccess;
}
ncclResult_t CommWindowDeregister(ncclComm_t comm, ncclWindow_t window) {
  const CommPtr found = find(comm);
  RETURN_IF_REFUSED(need(found != nullptr, "no such communicator"));
  const std::lock_guard lock(found->mutex);
  return need(found->windows.erase(reinterpret_cast<uintptr_t>(window)) == 1, "no such window");
}
ncclResult_t WinGetUserPtr(ncclComm_t comm, ncclWindow_t window, void** pointer) {
  const CommPtr found = find(comm);
  RETURN_IF_REFUSED(need(found != nullptr && pointer != nullptr, "no such communicator, or null"));
  const std::lock_guard lock(found->mutex);
  const auto entry = found->windows.find(reinterpret_cast<uintptr_t>(window));
  RETURN_IF_REFUSED(need(entry != found->windows.end(), "no such window"));
  *pointer = entry->second;
  return ncclSuccess;
}

ncclResult_t RedOpCreatePreMulSum(ncclRedOp_t* op, void* scalar, ncclDataType_t datatype,
                                  ncclScalarResidence_t residence, ncclComm_t comm) {
  const CommPtr found = find(comm);
  RETURN_IF_REFUSED(usable(found));
  RETURN_IF_REFUSED(
      from_host(host().RedOpCreatePreMulSum(op, scalar, datatype, residence, found->host)));
  const std::lock_guard lock(found->mutex);
  found->ops.insert(static_cast<int>(*op));
  return ncclSuccess;
}
// Calls that use it may not have run yet: host mode keeps it as long as the communicator.
ncclResult_t RedOpDestroy(ncclRedOp_t op, ncclComm_t comm) {
  const CommPtr found = find(comm);
  RETURN_IF_REFUSED(need(found != nullptr, "no such communicator"));
  const std::lock_guard lock(found->mutex);
  return need(found->ops.erase(static_cast<int>(op)) == 1, "no such operation");
}

// ---- groups ----

ncclResult_t GroupStart() {
  group_start();
  return ncclSuccess;
}
ncclResult_t GroupEnd() { return group_end(false); }
ncclResult_t GroupSimulateEnd(ncclSimInfo_t* info) {
  RETURN_IF_REFUSED(
      need(info == nullptr || info->magic == kSimInfoMagic, "ncclSimInfo_t is not initialised"));
  if (info != nullptr) info->estimatedTime = 0;  // there is no time to speak of
  return group_end(true);
}

// ---- collectives ----

size_t size_of(ncclDataType_t type) {
  constexpr size_t kSizes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
  return kSizes[type];
}

// The checks of one call that moves data; the first refusal counts.
class Checks {
 public:
  Checks(const Comm& comm, size_t count, ncclDataType_t type)
      : comm_(comm), bytes_(count * size_of(type)) {}

  size_t ranks() const { return static_cast<size_t>(comm_.size); }
  bool is_rank(int rank) const { return comm_.rank == rank; }

  void buffer(const void* address, size_t blocks = 1) {
    keep(bytes_ == 0 || simgpu::reachable(address, bytes_ * blocks, comm_.device),
         "a buffer is not in memory of the communicator's device");
  }
  void peer(int rank) { keep(rank >= 0 && rank < comm_.size, "root or peer is no rank"); }
  void op(ncclRedOp_t op) {
    keep(op < ncclNumOps || comm_.ops.contains(static_cast<int>(op)), "no such operation");
  }

  ncclResult_t result() const { return result_; }

 private:
  void keep(bool condition, const char* why) {
    if (result_ == ncclSuccess) result_ = need(condition, why);
  }
  const Comm& comm_;
  const size_t bytes_;
  ncclResult_t result_ = ncclSuccess;
};

// Checks a call with `check(Checks&)` and enqueues `run`. A call with a configuration counts as the
// one without.
template <typename Check, typename Run>
ncclResult_t collective(const char* function, ncclComm_t handle, size_t count, ncclDataType_t type,
                        cudaStream_t stream, const ncclCollConfig_t* config, Check&& check,
                        Run&& run) {
  return in_group([&]() -> ncclResult_t {
    const CommPtr comm = find(handle);
    RETURN_IF_REFUSED(usable(comm));
    RETURN_IF_REFUSED(need(type < ncclNumTypes, "no such datatype"));
    RETURN_IF_REFUSED(need(config == nullptr || config->magic == kApiMagic,
                           "ncclCollConfig_t is not initialised"));
    {
      const std::lock_guard lock(comm->mutex);
      Checks checks(*comm, count, type);
      check(checks);
      RETURN_IF_REFUSED(checks.result());
    }
    RETURN_IF_REFUSED(need(simgpu::device_of(stream, comm->device) == comm->device,
                           "the stream is none, or of another device than the communicator"));
    const ncclResult_t result =
        submit(comm, Call{function, count * size_of(type), stream, std::forward<Run>(run)});
    constexpr size_t kWithEvent =
        offsetof(ncclCollConfig_t, launchCompletionEvent) + sizeof(cudaEvent_t);
    if (result != ncclSuccess || config == nullptr || config->size < kWithEvent ||
        config->launchCompletionEvent == nullptr) {
      return result;
    }
    return from_cuda(cudaEventRecord(config->launchCompletionEvent, stream));
  }());
}

ncclResult_t AllReduceConfig(const void* send, void* recv, size_t count, ncclDataType_t type,
                             ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream,
                             const ncclCollConfig_t* config) {
  return collective(
      "ncclAllReduce", comm, count, type, stream, config,
      [&](Checks& checks) {
        checks.op(op);
        checks.buffer(send);
        checks.buffer(recv);
      },
      [=](const Functions& functions, ncclComm_t own) {
        return functions.AllReduce(send, recv, count, type, op, own, nullptr);
      });
}

ncclResult_t ReduceScatterConfig(const void* send, void* recv, size_t count, ncclDataType_t type,
                                 ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream,
                                 const ncclCollConfig_t* config) {
  return collective(
      "ncclReduceScatter", comm, count, type, stream, config,
      [&](Checks& checks) {
        checks.op(op);
        checks.buffer(send, checks.ranks());
        checks.buffer(recv);
      },
      [=](const Functions& functions, ncclComm_t own) {
        return functions.ReduceScatter(send, recv, count, type, op, own, nullptr);
      });
}

ncclResult_t AllGatherConfig(const void* send, void* recv, size_t count, ncclDataType_t type,
                             ncclComm_t comm, cudaStream_t stream, const ncclCollConfig_t* config) {
  return collective(
      "ncclAllGather", comm, count, type, stream, config,
      [&](Checks& checks) {
        checks.buffer(send);
        checks.buffer(recv, checks.ranks());
      },
      [=](const Functions& functions, ncclComm_t own) {
        return functions.AllGather(send, recv, count, type, own, nullptr);
      });
}

ncclResult_t AlltoAllConfig(const void* send, void* recv, size_t count, ncclDataType_t type,
                            ncclComm_t comm, cudaStream_t stream, const ncclCollConfig_t* config) {
  return collective(
      "ncclAlltoAll", comm, count, type, stream, config,
      [&](Checks& checks) {
        checks.buffer(send, checks.ranks());
        checks.buffer(recv, checks.ranks());
      },
      [=](const Functions& functions, ncclComm_t own) {
        return functions.AlltoAll(send, recv, count, type, own, nullptr);
      });
}

ncclResult_t BroadcastConfig(const void* send, void* recv, size_t count, ncclDataType_t type,
                             int root, ncclComm_t comm, cudaStream_t stream,
                             const ncclCollConfig_t* config) {
  return collective(
      "ncclBroadcast", comm, count, type, stream, config,
      [&](Checks& checks) {
        checks.peer(root);
        if (checks.is_rank(root)) checks.buffer(send);
        checks.buffer(recv);
      },
      [=](const Functions& functions, ncclComm_t own) {
        return functions.Broadcast(send, recv, count, type, root, own, nullptr);
      });
}

ncclResult_t ReduceConfig(const void* send, void* recv, size_t count, ncclDataType_t type,
                          ncclRedOp_t op, int root, ncclComm_t comm, cudaStream_t stream,
                          const ncclCollConfig_t* config) {
  return collective(
      "ncclReduce", comm, count, type, stream, config,
      [&](Checks& checks) {
        checks.op(op);
        checks.peer(root);
        checks.buffer(send);
        if (checks.is_rank(root)) checks.buffer(recv);
      },
      [=](const Functions& functions, ncclComm_t own) {
        return functions.Reduce(send, recv, count, type, op, root, own, nullptr);
      });
}

ncclResult_t GatherConfig(const void* send, void* recv, size_t count, ncclDataType_t type, int root,
                          ncclComm_t comm, cudaStream_t stream, const ncclCollConfig_t* config) {
  return collective(
      "ncclGather", comm, count, type, stream, config,
      [&](Checks& checks) {
        checks.peer(root);
        checks.buffer(send);
        if (checks.is_rank(root)) checks.buffer(recv, checks.ranks());
      },
      [=](const Functions& functions, ncclComm_t own) {
        return functions.Gather(send, recv, count, type, root, own, nullptr);
      });
}

ncclResult_t ScatterConfig(const void* send, void* recv, size_t count, ncclDataType_t type,
                           int root, ncclComm_t comm, cudaStream_t stream,
                           const ncclCollConfig_t* config) {
  return collective(
      "ncclScatter", comm, count, type, stream, config,
      [&](Checks& checks) {
        checks.peer(root);
        if (checks.is_rank(root)) checks.buffer(send, checks.ranks());
        checks.buffer(recv);
      },
      [=](const Functions& functions, ncclComm_t own) {
        return functions.Scatter(send, recv, count, type, root, own, nullptr);
      });
}

ncclResult_t Send(const void* send, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                  cudaStream_t stream) {
  return collective(
      "ncclSend", comm, count, type, stream, nullptr,
      [&](Checks& checks) {
        checks.peer(peer);
        checks.buffer(send);
      },
      [=](const Functions& functions, ncclComm_t own) {
        return functions.Send(send, count, type, peer, own, nullptr);
      });
}

ncclResult_t Recv(void* recv, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                  cudaStream_t stream) {
  return collective(
      "ncclRecv", comm, count, type, stream, nullptr,
      [&](Checks& checks) {
        checks.peer(peer);
        checks.buffer(recv);
      },
      [=](const Functions& functions, ncclComm_t own) {
        return functions.Recv(recv, count, type, peer, own, nullptr);
      });
}

ncclResult_t AllReduce(const void* send, void* recv, size_t count, ncclDataType_t type,
                       ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream) {
  return AllReduceConfig(send, recv, count, type, op, comm, stream, nullptr);
}
ncclResult_t ReduceScatter(const void* send, void* recv, size_t count, ncclDataType_t type,
                           ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream) {
  return ReduceScatterConfig(send, recv, count, type, op, comm, stream, nullptr);
}
ncclResult_t AllGather(const void* send, void* recv, size_t count, ncclDataType_t type,
                       ncclComm_t comm, cudaStream_t stream) {
  return AllGatherConfig(send, recv, count, type, comm, stream, nullptr);
}
ncclResult_t AlltoAll(const void* send, void* recv, size_t count, ncclDataType_t type,
                      ncclComm_t comm, cudaStream_t stream) {
  return AlltoAllConfig(send, recv, count, type, comm, stream, nullptr);
}
ncclResult_t Broadcast(const void* send, void* recv, size_t count, ncclDataType_t type, int root,
                       ncclComm_t comm, cudaStream_t stream) {
  return BroadcastConfig(send, recv, count, type, root, comm, stream, nullptr);
}
ncclResult_t Bcast(void* buffer, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
                   cudaStream_t stream) {
  return BroadcastConfig(buffer, buffer, count, type, root, comm, stream, nullptr);
}
ncclResult_t Reduce(const void* send, void* recv, size_t count, ncclDataType_t type, ncclRedOp_t op,
                    int root, ncclComm_t comm, cudaStream_t stream) {
  return ReduceConfig(send, recv, count, type, op, root, comm, stream, nullptr);
}
ncclResult_t Gather(const void* send, void* recv, size_t count, ncclDataType_t type, int root,
                    ncclComm_t comm, cudaStream_t stream) {
  return GatherConfig(send, recv, count, type, root, comm, stream, nullptr);
}
ncclResult_t Scatter(const void* send, void* recv, size_t count, ncclDataType_t type, int root,
                     ncclComm_t comm, cudaStream_t stream) {
  return ScatterConfig(send, recv, count, type, root, comm, stream, nullptr);
}

// ---- what needs no communicator ----

ncclResult_t GetVersion(int* version) {
  RETURN_IF_REFUSED(need(version != nullptr, "version is null"));
  *version = settings().version;
  return ncclSuccess;
}

const char* GetErrorString(ncclResult_t result) {
  return scape::interposer::get_error_string(result);
}

const char* GetLastError(ncclComm_t comm) {
  const CommPtr found = find(comm);
  if (found == nullptr || !last_error().empty()) return last_error().c_str();
  const std::lock_guard lock(found->mutex);
  return found->message.c_str();
}

// What the stand-in has no notion of.
template <typename Type>
Type refusal(const char* name) {
  const ncclResult_t result = refuse(ncclInvalidUsage, std::string(name) + " is not simulated");
  if constexpr (std::is_same_v<Type, ncclResult_t>) {
    return result;
  } else if constexpr (!std::is_void_v<Type>) {
    return Type{};
  }
}

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wunused-parameter"
Functions make_functions() {
  Functions made = {
#define SCAPE_NCCL_FUNCTION(type, name, params, args) \
  .name = [] params -> type { return refusal<type>("nccl" #name); },
#include "nccl/function_list.h"
  };
#define SCAPE_NCCL_COMMON(type, name, params, args) made.name = name;
#define SCAPE_NCCL_HOST(type, name, params, args) made.name = name;
#define SCAPE_NCCL_DEVICE(type, name, params, args)
#include "nccl/function_list.h"
  made.CommWindowRegister = CommWindowRegister;
  made.CommWindowDeregister = CommWindowDeregister;
  made.WinGetUserPtr = WinGetUserPtr;
  return made;
}
#pragma GCC diagnostic pop

std::mutex counting;
std::map<std::string, uint64_t>& calls_of() {
  static auto* const calls = new std::map<std::string, uint64_t>;
  return *calls;
}

// Counts the call; what the settings have it fail with.
ncclResult_t enter(const char* name) {
  if (!settings().mistake.empty()) return refuse(ncclInvalidUsage, settings().mistake);
  const std::lock_guard lock(counting);
  const int wanted = simgpu::wanted_failure(settings().failures, name, ++calls_of()[name]);
  if (wanted == 0) return ncclSuccess;
  return refuse(static_cast<ncclResult_t>(wanted), std::string(name) + " was made to fail");
}

}  // namespace

const Functions& functions() {
  static const Functions* const table = new Functions(make_functions());
  return *table;
}

template <typename Type, typename Run>
Type entered(const char* name, Run&& run) {
  const ncclResult_t refused = enter(name);
  if constexpr (std::is_same_v<Type, ncclResult_t>) {
    if (refused != ncclSuccess) return in_group(refused);
  }
  return run();
}

}  // namespace simnccl

// Inside the namespace only for the sake of the types: C linkage makes the names global.
namespace scape::nccl {
extern "C" {

#define SIMNCCL_EXPORT __attribute__((visibility("default")))
#define SCAPE_NCCL_FUNCTION(type, name, params, args)                                            \
  SIMNCCL_EXPORT type nccl##name params {                                                        \
    return simnccl::entered<type>("nccl" #name, [&] { return simnccl::functions().name args; }); \
  }                                                                                              \
  SIMNCCL_EXPORT type pnccl##name params {                                                       \
    return simnccl::entered<type>("nccl" #name, [&] { return simnccl::functions().name args; }); \
  }
#include "nccl/function_list.h"

SIMNCCL_EXPORT uint64_t simnccl_calls(const char* function) {
  const std::lock_guard lock(simnccl::counting);
  const auto found = simnccl::calls_of().find(function);
  return found != simnccl::calls_of().end() ? found->second : 0;
}

}  // extern "C"
}  // namespace scape::nccl
