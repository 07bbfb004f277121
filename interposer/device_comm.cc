#include "interposer/device_comm.h"

#include <chrono>
#include <shared_mutex>
#include <thread>
#include <unordered_map>

#include "base/log.h"
#include "base/overlap.h"
#include "base/settings.h"
#include "base/thread.h"
#include "interposer/buffers.h"
#include "interposer/device_launch.h"

namespace scape::interposer {

using namespace nccl;  // NOLINT: a room about NCCL's types

namespace {

// How long a call of another thread may take to leave a communicator that is aborted.
constexpr std::chrono::seconds kLeave{1};
// How often it is asked for then. Not by a timed lock: GCC 12's thread sanitizer does not know the
// system call of it, and takes the mutex for one that nobody holds.
constexpr std::chrono::milliseconds kTryAgain{1};
// How often the real NCCL is asked whether it has taken a non-blocking call.
constexpr std::chrono::microseconds kAskAgain{20};

struct Table {
  std::shared_mutex mutex;
  std::unordered_map<ncclComm_t, std::shared_ptr<DeviceComm>> comms;
};
Table& table() {
  static Table* const instance = new Table;  // never destroyed: used until the last moment
  return *instance;
}

// Once for each reason: communicators that fail alike are many.
void say_unopened(const Status& why) {
  static std::mutex* const mutex = new std::mutex;
  static std::string* const said = new std::string;
  const std::lock_guard lock(*mutex);
  if (*said == why.message()) return;
  *said = why.message();
  SCAPE_WARN("registered buffers go dense: %s", why.message().c_str());
}

}  // namespace

// ---- what the real NCCL knows ----

int DeviceComm::device() const {
  int device = -1;
  return real_.CommCuDevice(handle_, &device) == ncclSuccess ? device : -1;
}

int DeviceComm::rank() const {
  int rank = -1;
  return real_.CommUserRank(handle_, &rank) == ncclSuccess ? rank : -1;
}

int DeviceComm::size() const {
  int size = 0;
  return real_.CommCount(handle_, &size) == ncclSuccess ? size : 0;
}

bool DeviceComm::takes_calls() const {
  if (closed_.load(std::memory_order_relaxed)) return false;
  ncclResult_t state = ncclInternalError;
  if (real_.CommGetAsyncError(handle_, &state) == ncclSuccess && state == ncclSuccess) return true;
  const std::lock_guard lock(facts_mutex_);
  return !refused_masked_.ok();  // find_obstacle() says no
}

Status DeviceComm::wait_until_taken() const {
  const auto begin = std::chrono::steady_clock::now();
  const std::chrono::duration<double> limit(settings().timeout_s);
  ncclResult_t state = ncclInternalError;
  while (real_.CommGetAsyncError(handle_, &state) == ncclSuccess && state == ncclInProgress) {
    if (std::chrono::steady_clock::now() - begin > limit) {
      return error(SCAPE_ERR_TIMEOUT,
                   "earlier calls on the communicator are still in progress after %g s "
                   "(SCAPE_TIMEOUT); look for what keeps the other ranks",
                   limit.count());
    }
    std::this_thread::sleep_for(kAskAgain);
  }
  return {};
}

// ---- before calls and steps ----

Status DeviceComm::find_obstacle(const AllReduceCall& call, Obstacle* out) {
  {
    const std::lock_guard lock(facts_mutex_);
    SCAPE_RETURN_IF_ERROR(refused_masked_);
  }
  const Hold hold(mutex_);
  if (channel_ == nullptr && unopened_.empty()) {
    if (Status status = plugin::open_device_channel(real_, handle_, &channel_); !status.ok()) {
      if (settings().required) return status;
      unopened_ = status.message();
      say_unopened(status);
    } else {
      const std::lock_guard lock(facts_mutex_);
      communicator_ = shared();
      SCAPE_RETURN_IF_ERROR(refused_masked_);  // meanwhile
    }
  }
  if (!unopened_.empty()) {
    *out = {unopened_, true};
    return {};
  }
  if (!call.factor_known) {
    out->why = "its premultiplied sum has a factor in device memory, which the host does not read";
    return {};
  }
  bool capturing = false;
  SCAPE_RETURN_IF_ERROR(channel_->is_capturing(call.stream, &capturing));
  if (capturing) {
    out->why =
        "its stream is being captured into a graph, which would repeat one step's mask for ever";
    return {};
  }
  for (const void* address : {call.send, call.recv}) {
    bool reached = false;
    SCAPE_RETURN_IF_ERROR(channel_->reaches(address, &reached));
    if (!reached) {
      out->why = "its buffer is not in memory that the communicator's device can reach";
      return {};
    }
  }
  const size_t bytes = call.count * plugin::size_of(call.type);
  if (call.send != call.recv && overlap(call.send, bytes, call.recv, bytes)) {
    out->why = "sendbuff and recvbuff overlap without being equal";
  }
  return {};
}

Status DeviceComm::settle(std::string* obstacle) {
  SCAPE_RETURN_IF_ERROR(refused_);
  if (unopened_.empty()) {
    std::string why;
    SCAPE_RETURN_IF_ERROR(channel_->settle(&why));
    if (!why.empty()) {
      const Status status = error(SCAPE_ERR_SYSTEM, "%s", why.c_str());
      if (settings().required) return refused_ = status;
      unopened_ = why;
      say_unopened(status);
    }
  }
  *obstacle = unopened_;
  return {};
}

Status DeviceComm::all_reduce_dense(const void* send, void* recv, size_t count, ncclDataType_t type,
                                    ncclRedOp_t op, plugin::Stream stream) {
  const ncclResult_t result = real_.AllReduce(send, recv, count, type, op, handle_,
                                              static_cast<cudaStream_t>(stream.handle));
  if (result == ncclSuccess || result == ncclInProgress) return {};
  const char* const text = real_.GetLastError(handle_);
  return error(SCAPE_ERR_INTERNAL, "ncclAllReduce: %s: %s", real_.GetErrorString(result),
               text != nullptr ? text : "");
}

Status DeviceComm::begin_step(void* stream, std::initializer_list<const void*> addresses,
                              plugin::Stream* out) {
  if (device_group() != nullptr) {
    return error(SCAPE_ERR_USAGE,
                 "inside a group, whose calls are launched at its end only: step after "
                 "ncclGroupEnd");
  }
  bool capturing = false;
  SCAPE_RETURN_IF_ERROR(channel_->is_capturing({stream}, &capturing));
  if (capturing) {
    return error(SCAPE_ERR_USAGE,
                 "stream %p is being captured into a graph, which cannot hold a masked step: leave "
                 "the step out of the capture",
                 stream);
  }
  for (const void* address : addresses) {
    bool reached = address == nullptr;  // refused where that is no answer
    if (!reached) SCAPE_RETURN_IF_ERROR(channel_->reaches(address, &reached));
    if (!reached) {
      return error(SCAPE_ERR_ARGUMENT,
                   "%p is not in memory that device %d can reach; pass a device pointer", address,
                   device());
    }
  }
  *out = {stream};
  return {};
}

// ---- operations ----

void DeviceComm::add_op(ncclRedOp_t op, const PremulSum& sum) {
  const std::lock_guard lock(facts_mutex_);
  ops_.insert_or_assign(static_cast<int>(op), sum);
}

void DeviceComm::remove_op(ncclRedOp_t op) {
  const std::lock_guard lock(facts_mutex_);
  ops_.erase(static_cast<int>(op));
}

bool DeviceComm::find_op(ncclRedOp_t op, plugin::DataType type, PremulSum* out) const {
  const std::lock_guard lock(facts_mutex_);
  const auto found = ops_.find(static_cast<int>(op));
  if (found == ops_.end() || found->second.type != type) return false;
  *out = found->second;
  return true;
}

// ---- the end ----

void DeviceComm::interrupt(const Status& why, const std::function<void()>& end_real) {
  close();
  refuse_masked(why, end_real);
}

void DeviceComm::refuse_masked(const Status& why, const std::function<void()>& end_real) {
  std::shared_ptr<plugin::Communicator> communicator;
  {
    const std::lock_guard lock(facts_mutex_);
    if (refused_masked_.ok()) refused_masked_ = why;
    communicator = communicator_;
  }
  std::thread side;
  if (communicator != nullptr &&
      !start_thread("the end of a side channel", &side, [&] { communicator->abort(why); }).ok()) {
    communicator->abort(why);
  }
  end_real();
  if (side.joinable()) side.join();
}

void DeviceComm::end() {
  close();
  drop_buffers_of(*this);
  const Hold hold(mutex_);
  {
    // Nobody who asks for its state is the last to hold it.
    const std::lock_guard lock(facts_mutex_);
    communicator_.reset();
  }
  channel_.reset();
}

ncclResult_t DeviceComm::abort() {
  ncclResult_t result = ncclInternalError;
  interrupt(error(SCAPE_ERR_REMOTE, "the communicator was aborted"), [&] {
    // A call of another thread leaves the communicator now, but for one that is inside the real
    // NCCL, which the abort there ends.
    Hold hold(mutex_, std::try_to_lock);
    const auto limit = std::chrono::steady_clock::now() + kLeave;
    while (!hold.owns_lock() && std::chrono::steady_clock::now() < limit) {
      std::this_thread::sleep_for(kTryAgain);
      (void)hold.try_lock();
    }
    result = real_.CommAbort(handle_);
  });
  end();
  return result;
}

void DeviceComm::set_failure(const Status& failure) {
  const std::lock_guard lock(facts_mutex_);
  if (failure_.ok()) failure_ = failure;
}

Status DeviceComm::failure() const {
  const std::lock_guard lock(facts_mutex_);
  if (!failure_.ok() || communicator_ == nullptr) return failure_;
  return communicator_->async_error();
}

// ---- the table ----

void add_device_comm(const Functions& real, ncclComm_t handle) {
  if (handle == nullptr) return;
  auto comm = std::make_shared<DeviceComm>(real, handle);
  std::shared_ptr<DeviceComm> unseen;
  {
    const std::unique_lock lock(table().mutex);
    std::swap(table().comms[handle], comm);
    unseen = std::move(comm);
  }
  if (unseen == nullptr) return;
  unseen->interrupt(error(SCAPE_ERR_USAGE, "the communicator has ended"), [] {});
  unseen->end();
}

std::shared_ptr<DeviceComm> find_device_comm(ncclComm_t handle) {
  const std::shared_lock lock(table().mutex);
  const auto found = table().comms.find(handle);
  return found != table().comms.end() ? found->second : nullptr;
}

std::shared_ptr<DeviceComm> take_device_comm(ncclComm_t handle) {
  const std::unique_lock lock(table().mutex);
  const auto found = table().comms.find(handle);
  if (found == table().comms.end()) return nullptr;
  std::shared_ptr<DeviceComm> comm = std::move(found->second);
  table().comms.erase(found);
  return comm;
}

std::vector<std::shared_ptr<DeviceComm>> all_device_comms() {
  const std::shared_lock lock(table().mutex);
  std::vector<std::shared_ptr<DeviceComm>> list;
  for (const auto& [handle, comm] : table().comms) list.push_back(comm);
  return list;
}

}  // namespace scape::interposer
