#include "tests/simgpu/nccl/comm.h"

#include <algorithm>

#include "interposer/host_mode.h"
#include "interposer/process.h"
#include "tests/simgpu/nccl/settings.h"

namespace simnccl {
namespace {

// Long enough for whatever host mode waits for; only a hang gets there.
constexpr double kDrainSeconds = 120;

struct Table {
  std::mutex mutex;
  std::map<Comm*, CommPtr> comms;
  std::map<std::string, simnccl_counters> counters;  // of all communicators that there were
};
Table& table() {
  static Table* const instance = new Table;  // never destroyed: used until the last moment
  return *instance;
}

thread_local std::string last_error_here;

// Runs counted for the failure switch.
uint64_t next_run(const std::string& function) {
  static std::mutex* const mutex = new std::mutex;
  static auto* const runs = new std::map<std::string, uint64_t>;
  const std::lock_guard lock(*mutex);
  return ++(*runs)[function];
}

void add(simnccl_counters& to, const simnccl_counters& what) {
  to.calls += what.calls;
  to.bytes += what.bytes;
  to.runs += what.runs;
  to.run_bytes += what.run_bytes;
}

void count(Comm& comm, const char* function, const simnccl_counters& what) {
  {
    const std::lock_guard lock(comm.mutex);
    add(comm.counters[function], what);
  }
  const std::lock_guard lock(table().mutex);
  add(table().counters[function], what);
}

}  // namespace

void Comm::fail(ncclResult_t result, const std::string& why) {
  const std::lock_guard lock(mutex);
  if (failure != ncclSuccess || aborted || revoked) return;
  failure = result;
  message = why;
}

ncclComm_t publish(const CommPtr& comm) {
  const std::lock_guard lock(table().mutex);
  table().comms.emplace(comm.get(), comm);
  return reinterpret_cast<ncclComm_t>(comm.get());
}

CommPtr find(ncclComm_t handle) {
  const std::lock_guard lock(table().mutex);
  const auto found = table().comms.find(reinterpret_cast<Comm*>(handle));
  return found != table().comms.end() ? found->second : nullptr;
}

CommPtr remove(ncclComm_t handle) {
  const std::lock_guard lock(table().mutex);
  const auto found = table().comms.find(reinterpret_cast<Comm*>(handle));
  if (found == table().comms.end()) return nullptr;
  CommPtr comm = std::move(found->second);
  table().comms.erase(found);
  return comm;
}

ncclResult_t usable(const CommPtr& comm) {
  if (comm == nullptr) return refuse(ncclInvalidArgument, "no such communicator");
  const std::lock_guard lock(comm->mutex);
  if (comm->jobs > 0) {
    return refuse(ncclInvalidArgument,
                  "the communicator is in progress; ask ncclCommGetAsyncError until it is not");
  }
  if (comm->failure != ncclSuccess) return refuse(comm->failure, comm->message);
  if (comm->revoked) return refuse(ncclInvalidUsage, "the communicator is revoked");
  if (comm->finalized) return refuse(ncclInvalidUsage, "the communicator is finalized");
  return ncclSuccess;
}

ncclResult_t refuse(ncclResult_t result, const std::string& why) {
  last_error_here = why;
  return result;
}

const std::string& last_error() { return last_error_here; }

void run(const CommPtr& comm, const std::vector<Call>& calls) {
  ncclComm_t host = nullptr;
  {
    const std::lock_guard lock(comm->mutex);
    if (comm->aborted || comm->revoked || comm->failure != ncclSuccess) return;
    host = comm->host;
  }
  for (const Call& call : calls) {
    const std::string name = std::string("run/") + call.function;
    const int wanted = simgpu::wanted_failure(settings().failures, name, next_run(name));
    if (wanted == 0) continue;
    comm->fail(static_cast<ncclResult_t>(wanted), name + " was made to fail");
    return;
  }
  const Functions& functions = scape::interposer::host_functions();
  ncclResult_t result = functions.GroupStart();
  for (const Call& call : calls) {
    const ncclResult_t got = call.run(functions, host);
    if (result == ncclSuccess) result = got;
  }
  const ncclResult_t end = functions.GroupEnd();
  if (result == ncclSuccess) result = end;
  if (result != ncclSuccess) {
    comm->fail(result, scape::interposer::last_error());
    return;
  }
  for (const Call& call : calls) count(*comm, call.function, {0, 0, 1, call.bytes});
}

ncclResult_t enqueue(const CommPtr& comm, std::vector<Call> calls) {
  std::vector<cudaStream_t> streams;
  for (const Call& call : calls) {
    if (std::find(streams.begin(), streams.end(), call.stream) == streams.end()) {
      streams.push_back(call.stream);
    }
  }
  const cudaError_t error = simgpu::enqueue(
      comm->device, streams, [comm, calls = std::move(calls)] { run(comm, calls); }, comm->order);
  if (error == cudaSuccess) return ncclSuccess;
  return refuse(ncclUnhandledCudaError, std::string("CUDA: ") + cudaGetErrorString(error));
}

bool drain(Comm& comm) { return simgpu::wait(*comm.order, kDrainSeconds); }

void count_call(Comm& comm, const Call& call) { count(comm, call.function, {1, call.bytes, 0, 0}); }

}  // namespace simnccl

extern "C" __attribute__((visibility("default"))) void simnccl_get_counters(const char* function,
                                                                            const void* comm,
                                                                            simnccl_counters* out) {
  using simnccl::add;
  *out = {};
  std::map<std::string, simnccl_counters> counters;
  if (comm == nullptr) {
    const std::lock_guard lock(simnccl::table().mutex);
    counters = simnccl::table().counters;
  } else {
    const auto handle = reinterpret_cast<scape::nccl::ncclComm_t>(const_cast<void*>(comm));
    const simnccl::CommPtr found = simnccl::find(handle);
    if (found == nullptr) return;
    const std::lock_guard lock(found->mutex);
    counters = found->counters;
  }
  for (const auto& [name, values] : counters) {
    if (function == nullptr || name == function) add(*out, values);
  }
}
