#include "interposer/device_mode.h"

#include <atomic>
#include <cstring>

#include "base/log.h"
#include "interposer/buffers.h"
#include "interposer/mode.h"
#include "interposer/process.h"
#include "plugin/host_communicator.h"

namespace scape::interposer {

using namespace nccl;  // the rows of nccl/function_list.h name NCCL's types

namespace {

Functions real;

// The real NCCL calls its own exported functions now and then, and so this library again.
constinit thread_local bool inside = false;

class Entered {
 public:
  Entered() : outermost_(!inside) { inside = true; }
  ~Entered() {
    if (outermost_) inside = false;
  }
  Entered(const Entered&) = delete;
  Entered& operator=(const Entered&) = delete;
  bool outermost() const { return outermost_; }

 private:
  const bool outermost_;
};

// The call itself goes on whatever becomes of the note.
void note_call(const void* send, const void* recv, size_t count, ncclDataType_t type) {
  if (type >= ncclNumTypes) return;
  (void)guarded("ncclAllReduce", [&]() -> Status {
    note_other_collective("ncclAllReduce in device mode", send, recv,
                          count * plugin::size_of(static_cast<plugin::DataType>(type)));
    return {};
  });
}

// Options that ask for a masked call, which the real NCCL ignores.
void note_options(const ncclCollConfig_t* config) {
  static std::atomic<bool> said{false};
  (void)guarded("ncclAllReduceConfig", [&]() -> Status {
    CallOptions options;
    SCAPE_RETURN_IF_ERROR(read_call_options(config, &options));
    if (options.present && !said.exchange(true)) {
      SCAPE_WARN(
          "\"%s\" goes dense, as all calls with SCAPE_CALL_NAME do: this version has no masked "
          "collective in device mode (said once)",
          options.config.name);
    }
    return {};
  });
}

ncclResult_t all_reduce(const void* sendbuff, void* recvbuff, size_t count, ncclDataType_t datatype,
                        ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream) {
  const Entered entered;
  if (entered.outermost()) note_call(sendbuff, recvbuff, count, datatype);
  return real.AllReduce(sendbuff, recvbuff, count, datatype, op, comm, stream);
}

ncclResult_t all_reduce_config(const void* sendbuff, void* recvbuff, size_t count,
                               ncclDataType_t datatype, ncclRedOp_t op, ncclComm_t comm,
                               cudaStream_t stream, const ncclCollConfig_t* config) {
  const Entered entered;
  if (entered.outermost()) {
    note_call(sendbuff, recvbuff, count, datatype);
    note_options(config);
  }
  return real.AllReduceConfig(sendbuff, recvbuff, count, datatype, op, comm, stream, config);
}

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

ncclResult_t comm_init_rank(ncclComm_t* comm, int nranks, ncclUniqueId id, int rank) {
  if (of_host_mode(id)) return ncclInvalidUsage;
  return real.CommInitRank(comm, nranks, id, rank);
}

ncclResult_t comm_init_rank_config(ncclComm_t* comm, int nranks, ncclUniqueId id, int rank,
                                   ncclConfig_t* config) {
  if (of_host_mode(id)) return ncclInvalidUsage;
  return real.CommInitRankConfig(comm, nranks, id, rank, config);
}

ncclResult_t comm_init_rank_scalable(ncclComm_t* comm, int nranks, int rank, int ids_count,
                                     ncclUniqueId* ids, ncclConfig_t* config) {
  for (int i = 0; ids != nullptr && i < ids_count; ++i) {
    if (of_host_mode(ids[i])) return ncclInvalidUsage;
  }
  return real.CommInitRankScalable(comm, nranks, rank, ids_count, ids, config);
}

}  // namespace

const Functions& device_functions(const RealNccl& found) {
  real = refusing_functions();
  load_functions(found, &real);
  static Functions* const table =
      new Functions(real);  // never destroyed: used until the last moment
  table->AllReduce = all_reduce;
  table->AllReduceConfig = all_reduce_config;
  table->CommInitRank = comm_init_rank;
  table->CommInitRankConfig = comm_init_rank_config;
  table->CommInitRankScalable = comm_init_rank_scalable;
  return *table;
}

const char* device_last_error(ncclComm_t comm) { return real.GetLastError(comm); }

}  // namespace scape::interposer
