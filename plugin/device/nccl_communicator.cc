#include "plugin/device/nccl_communicator.h"

#include <unistd.h>
#include <chrono>

#include <cstddef>
#include <cstring>
#include <thread>
#include <utility>

#include "base/settings.h"
#include "kernels/kernels.h"

namespace scape::plugin {

using namespace nccl;  // NOLINT: a room about NCCL's types

namespace {

using Clock = std::chrono::steady_clock;

// How often NCCL is asked whether a non-blocking call has been taken.
constexpr std::chrono::microseconds kAskAgain{20};
// Of a side communicator's: its traffic is small and in the background.
constexpr int kSideCtas = 2;
// The first version that splits communicators; its ncclConfig_t ends before commName.
constexpr int kOldestVersion = 21800;
constexpr size_t kConfigBytes = offsetof(ncclConfig_t, commName);

ncclDataType_t nccl_type(DataType type) { return static_cast<ncclDataType_t>(type); }
cudaStream_t nccl_stream(const CallTag& tag) {
  return static_cast<cudaStream_t>(tag.stream.handle);
}

scape_status code_of(ncclResult_t result) {
  switch (result) {
    case ncclInvalidArgument:
      return SCAPE_ERR_ARGUMENT;
    case ncclInvalidUsage:
      return SCAPE_ERR_USAGE;
    case ncclSystemError:
      return SCAPE_ERR_SYSTEM;
    case ncclRemoteError:
      return SCAPE_ERR_REMOTE;
    case ncclTimeout:
      return SCAPE_ERR_TIMEOUT;
    default:
      return SCAPE_ERR_INTERNAL;
  }
}

}  // namespace

// ---- from one to the other ----

NcclCommunicator::NcclCommunicator(const Functions& real, ncclComm_t comm, Owner owner)
    : real_(real), comm_(comm), owner_(owner), process_(::getpid()) {}

Status NcclCommunicator::failed(ncclResult_t result, const char* what) const {
  SCAPE_RETURN_IF_ERROR(failure());  // an abort makes everything fail
  const char* const text = real_.GetLastError(comm_);
  return error(code_of(result), "%s: %s: %s%s%s", name_.c_str(), what, real_.GetErrorString(result),
               text != nullptr && *text != '\0' ? ": " : "", text != nullptr ? text : "");
}

Status NcclCommunicator::taken(ncclResult_t result, const char* what) const {
  const auto begin = Clock::now();
  const std::chrono::duration<double> limit(settings().timeout_s);
  while (result == ncclInProgress) {
    if (Clock::now() - begin > limit) {
      return error(SCAPE_ERR_TIMEOUT,
                   "%s: %s is still in progress after %g s (SCAPE_TIMEOUT); look for what keeps "
                   "the other ranks",
                   name_.c_str(), what, limit.count());
    }
    std::this_thread::sleep_for(kAskAgain);
    if (const ncclResult_t asked = real_.CommGetAsyncError(comm_, &result); asked != ncclSuccess)
      result = asked;
  }
  return result == ncclSuccess ? Status::Ok() : failed(result, what);
}

Status NcclCommunicator::wrap(const Functions& real, ncclComm_t comm,
                              std::shared_ptr<NcclCommunicator>* out) {
  std::shared_ptr<NcclCommunicator> made(new NcclCommunicator(real, comm, Owner::kCaller));
  made->name_ = format("comm %p", static_cast<void*>(comm));
  int version = 0;
  (void)real.GetVersion(&version);
  if (version < kOldestVersion) {
    return error(SCAPE_ERR_SYSTEM,
                 "NCCL's version is %d; masked collectives on a device need 2.18 or later, which "
                 "splits communicators",
                 version);
  }
  SCAPE_RETURN_IF_ERROR(made->taken(real.CommUserRank(comm, &made->rank_), "ncclCommUserRank"));
  SCAPE_RETURN_IF_ERROR(made->taken(real.CommCount(comm, &made->size_), "ncclCommCount"));
  *out = std::move(made);
  return Status::Ok();
}

NcclCommunicator::~NcclCommunicator() {
  if (comm_ == nullptr || ::getpid() != process_) return;
  Status ended = failure();
  for (const auto& made : premultiplied_) {
    if (made && ended.ok()) (void)real_.RedOpDestroy(made->op, comm_);
  }
  if (owner_ == Owner::kCaller) return;
  if (ended.ok() && !made_) ended = error(SCAPE_ERR_USAGE, "its making was given up");
  if (ended.ok()) ended = taken(real_.CommFinalize(comm_), "ncclCommFinalize");
  (void)(ended.ok() ? real_.CommDestroy(comm_) : real_.CommAbort(comm_));
}

Status NcclCommunicator::failure() const {
  const std::lock_guard lock(mutex_);
  return failure_;
}

Status NcclCommunicator::async_error() const {
  SCAPE_RETURN_IF_ERROR(failure());
  ncclResult_t state = ncclSuccess;
  const ncclResult_t asked = real_.CommGetAsyncError(comm_, &state);
  if (asked != ncclSuccess) return failed(asked, "ncclCommGetAsyncError");
  if (state != ncclSuccess && state != ncclInProgress) return failed(state, "an earlier call");
  std::shared_ptr<NcclCommunicator> side;
  {
    const std::lock_guard lock(mutex_);
    side = side_.lock();
  }
  return side != nullptr ? side->async_error() : Status::Ok();
}

void NcclCommunicator::abort(const Status& why) {
  std::shared_ptr<NcclCommunicator> side;
  {
    const std::lock_guard lock(mutex_);
    if (failure_.ok()) failure_ = why;
    side = side_.lock();
  }
  if (side != nullptr) side->abort(why);
  if (owner_ == Owner::kCaller) return;
  if (const ncclComm_t comm = comm_.exchange(nullptr); comm != nullptr) (void)real_.CommAbort(comm);
}

// ---- collectives ----

Status NcclCommunicator::operation(const Reduction& reduction, DataType type, ncclRedOp_t* out) {
  if (reduction.op != ReduceOp::kPremulSum) {
    *out = static_cast<ncclRedOp_t>(reduction.op);
    return Status::Ok();
  }
  auto& made = premultiplied_[static_cast<size_t>(type)];
  if (made && made->factor != reduction.factor) {
    SCAPE_RETURN_IF_ERROR(taken(real_.RedOpDestroy(made->op, comm_), "ncclRedOpDestroy"));
    made.reset();
  }
  if (!made) {
    auto wide = static_cast<float>(reduction.factor);
    uint16_t narrow = 0;
    void* scalar = &narrow;
    if (type == DataType::kFloat32) {
      scalar = &wide;
    } else {
      kernels::ops().from_float(
          type == DataType::kBfloat16 ? kernels::Type::kBfloat16 : kernels::Type::kFloat16, &wide,
          &narrow, 1);
    }
    ncclRedOp_t op = ncclSum;
    SCAPE_RETURN_IF_ERROR(taken(
        real_.RedOpCreatePreMulSum(&op, scalar, nccl_type(type), ncclScalarHostImmediate, comm_),
        "ncclRedOpCreatePreMulSum"));
    made = {reduction.factor, op};
  }
  *out = made->op;
  return Status::Ok();
}

Status NcclCommunicator::all_reduce(const void* send, void* recv, size_t count, DataType type,
                                    Reduction reduction, const CallTag& tag, WorkPtr* work) {
  SCAPE_RETURN_IF_ERROR(failure());
  ncclRedOp_t op = ncclSum;
  SCAPE_RETURN_IF_ERROR(operation(reduction, type, &op));
  SCAPE_RETURN_IF_ERROR(
      taken(real_.AllReduce(send, recv, count, nccl_type(type), op, comm_, nccl_stream(tag)),
            "ncclAllReduce"));
  *work = enqueued_work();
  return Status::Ok();
}

Status NcclCommunicator::all_gather(const void* send, void* recv, size_t send_count, DataType type,
                                    const CallTag& tag, WorkPtr* work) {
  SCAPE_RETURN_IF_ERROR(failure());
  SCAPE_RETURN_IF_ERROR(
      taken(real_.AllGather(send, recv, send_count, nccl_type(type), comm_, nccl_stream(tag)),
            "ncclAllGather"));
  *work = enqueued_work();
  return Status::Ok();
}

// ---- the side communicator ----

class NcclCommunicator::SplitWork final : public Work {
 public:
  explicit SplitWork(std::shared_ptr<NcclCommunicator> made) : made_(std::move(made)) {}
  bool done() const override {
    if (done_) return true;
    ncclResult_t state = ncclSuccess;
    const ncclResult_t asked = made_->real_.CommGetAsyncError(made_->comm_, &state);
    if (asked == ncclSuccess && state == ncclInProgress) return false;
    done_ = true;
    status_ = asked != ncclSuccess   ? made_->failed(asked, "ncclCommGetAsyncError")
              : state != ncclSuccess ? made_->failed(state, "ncclCommSplit")
                                     : made_->finish_split();
    return true;
  }
  Status status() const override { return status_; }

 private:
  const std::shared_ptr<NcclCommunicator> made_;
  mutable bool done_ = false;
  mutable Status status_;
};

Status NcclCommunicator::finish_split() {
  SCAPE_RETURN_IF_ERROR(taken(real_.CommUserRank(comm_, &rank_), "ncclCommUserRank"));
  SCAPE_RETURN_IF_ERROR(taken(real_.CommCount(comm_, &size_), "ncclCommCount"));
  made_ = true;
  return Status::Ok();
}

Status NcclCommunicator::side_channel(std::shared_ptr<Communicator>* side, WorkPtr* work) {
  SCAPE_RETURN_IF_ERROR(failure());
  ncclConfig_t config{};
  config.size = kConfigBytes;
  config.magic = kApiMagic;
  config.version = kOldestVersion;
  config.blocking = 0;
  config.cgaClusterSize = config.splitShare = config.trafficClass = kUndefInt;
  config.minCTAs = 1;
  config.maxCTAs = kSideCtas;
  ncclComm_t comm = nullptr;
  const ncclResult_t result = real_.CommSplit(comm_, 0, rank_, &comm, &config);
  if (result != ncclSuccess && result != ncclInProgress) return failed(result, "ncclCommSplit");
  std::shared_ptr<NcclCommunicator> made(new NcclCommunicator(real_, comm, Owner::kThis));
  made->name_ = "side channel of " + name_;
  made->rank_ = rank_;
  made->size_ = size_;
  {
    const std::lock_guard lock(mutex_);
    side_ = made;
  }
  *work = std::make_shared<SplitWork>(made);
  *side = std::move(made);
  return Status::Ok();
}

}  // namespace scape::plugin
