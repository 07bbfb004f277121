#include "plugin/masked/masked_buffer.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <chrono>
#include <cmath>
#include <limits>
#include <mutex>
#include <new>
#include <thread>
#include <utility>

#include "base/log.h"
#include "base/settings.h"
#include "plugin/masked/agreement.h"
#include "plugin/masked/buffer_state.h"
#include "plugin/masked/mask_refresh.h"
#include "plugin/masked/payload_codec.h"
#include "plugin/masked/refresher.h"
#include "plugin/masked/score_view.h"

namespace scape::plugin {
namespace {

using kernels::Type;

// Elements converted at once where a whole converted copy would be wasteful; a multiple of 64.
constexpr size_t kChunk = 4096;

// A sweep over `last` visits each element once in so many steps, soon enough that no age wraps.
constexpr size_t kRestampSteps = size_t{1} << 14;

// The longest partition that the selection can number.
constexpr uint64_t kLongestPartition = std::numeric_limits<uint32_t>::max();

DataType data_type(scape_dtype type) {
  switch (type) {
    case SCAPE_BFLOAT16:
      return DataType::kBfloat16;
    case SCAPE_FLOAT16:
      return DataType::kFloat16;
    default:
      return DataType::kFloat32;
  }
}

uint64_t now_ns() {
  return static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(
                                   std::chrono::steady_clock::now().time_since_epoch())
                                   .count());
}

void set_all(std::vector<uint64_t>* mask, size_t n) {
  mask->assign(kernels::mask_words(n), ~uint64_t{0});
  if (n % 64 != 0) mask->back() = (uint64_t{1} << (n % 64)) - 1;
}

void warn_about_the_gradient_role(const std::string& name) {
  static std::atomic<bool> said{false};
  if (said.exchange(true, std::memory_order_relaxed)) return;
  SCAPE_WARN(
      "buffer '%s': masked gradients for an unmodified optimizer cost quality (0.4 nats at 90 %% "
      "in "
      "our study); use the fused or the hooked role where you can",
      name.c_str());
}

template <typename Visit>
void for_each_chunk(size_t n, Visit&& visit) {
  for (size_t begin = 0; begin < n; begin += kChunk) visit(begin, std::min(kChunk, n - begin));
}

std::byte* at(void* base, Type type, size_t index) {
  return static_cast<std::byte*>(base) + index * kernels::size_of(type);
}
const std::byte* at(const void* base, Type type, size_t index) {
  return static_cast<const std::byte*>(base) + index * kernels::size_of(type);
}

class MaskedBufferImpl final : public MaskedBuffer {
 public:
  MaskedBufferImpl(std::shared_ptr<Communicator> communicator, std::shared_ptr<Refresher> refresher,
                   BufferConfig config, size_t count)
      : config_(std::move(config)),
        count_(count),
        communicator_(std::move(communicator)),
        refresher_(std::move(refresher)),
        ranks_(communicator_->size()),
        type_(static_cast<Type>(config_.dtype)),
        always_dense_(ranks_ == 1 || config_.sparsity == 0),
        fused_(config_.role == SCAPE_ROLE_FUSED),
        in_place_(config_.residual == SCAPE_RESIDUAL_IN_PLACE),
        powers_(kernels::make_power_table(config_.beta1)),
        exact_codec_(make_payload_codec(SCAPE_FLOAT32)),
        codec_(make_payload_codec(config_.payload)),
        score_view_(local_score_view()) {}

  ~MaskedBufferImpl() override {
    // A refresh in flight goes on without the buffer: it owns its memory, and other ranks wait for
    // it.
    if (phase_ != Phase::kIdle && refresher_->in_owner_process()) {
      const Status why = error(SCAPE_ERR_USAGE, "buffer '%s' was dropped during its all-reduce",
                               config_.name.c_str());
      communicator_->abort(why);
      fail(why);
    }
  }

  Status begin_all_reduce(const void* send, void* recv, Reduction reduction) override;
  bool poll() override;
  bool launched() const override { return phase_ == Phase::kIdle || !holds_turn_; }
  Status status() const override { return status_; }

  Status adams_step(float* param, double lr, double weight_decay) override;
  Status post_step(size_t offset, size_t length, const float* before, float* param, double lr,
                   double weight_decay) override;
  Status clear_masked(void* buffer) override;
  Status flush(void* buffer, float* param, double lr, double weight_decay) override;
  void note_dense(const char* why) override;

  Status read_mask(uint64_t* words, size_t capacity) override;
  Status read_ages(uint16_t* ages, size_t capacity) override;
  Status read_residual(float* out, size_t capacity) override;
  Status read_moment(float* out, size_t capacity) override;
  scape_stats stats() const override;
  const BufferConfig& config() const override { return config_; }
  size_t count() const override { return count_; }

  Status save(std::vector<std::byte>* out) override;
  Status load(const std::byte* data, size_t size) override;
  double residual_l1() override;

 private:
  enum class Phase {
    kIdle,       // no call under way
    kTurn,       // calls that began earlier have works to start
    kAgreement,  // of the first call, which the second needs
    kRefresh,    // of the call before: this call's mask
    kExchange,   // the all-reduce
    kSide,       // first call: the side channel is being made
  };

  struct Call {
    const void* send = nullptr;  // null: a flush of an internal residual, whose gradient is 0
    void* recv = nullptr;
    Reduction reduction;
    bool flush = false;
    bool dense = false;  // the mask is all ones
    bool direct =
        false;  // the caller's elements travel as they are, no residual and no codec between
  };

  // ---- the state machine ----
  bool has_state() const { return fused_ || !always_dense_; }
  bool dense_at(uint64_t t) const { return always_dense_ || sparsity_at(config_, t) == 0; }
  Status check_begin(const Call& call) const;
  Status begin(const Call& call);
  Status allocate();
  // One transition; false when it has to wait.
  bool advance();
  bool wait_for(const SideJob& job, const char* what);
  void take_next_mask();
  Status launch();
  Status start_direct(WorkPtr* work);
  Status start_packed(WorkPtr* work);
  size_t pack();
  void finish_exchange();
  void finish_direct();
  void finish_packed();
  void finish_call();
  void release_turn();
  void fail(const Status& why);

  // ---- parts of a step ----
  kernels::StepParams step_params() const;
  float* residual();
  void keep_skipped_residual();
  void clear_sent_residual();
  void write_output();
  void write_skipped_output();
  void end_step();
  bool direct_output_nonfinite() const;
  void update_moment_directly();

  Status owed_or_running(const char* what) const;
  StateOwner owner() const { return {config_, count_, communicator_->rank(), ranks_}; }
  template <typename Update>
  void count_stats(Update&& update) {
    std::lock_guard lock(stats_mutex_);
    update(stats_);
  }

  const BufferConfig config_;
  const size_t count_;
  const std::shared_ptr<Communicator> communicator_;
  const std::shared_ptr<Refresher> refresher_;
  const int ranks_;
  const Type type_;
  // One rank, or sparsity 0: a plain all-reduce. No residual; a skipped gradient is dropped, as
  // dense training drops it, and every age counts as 1.
  const bool always_dense_;
  const bool fused_;
  const bool in_place_;
  const std::vector<float> powers_;
  const kernels::Ops& ops_ = kernels::ops();
  const std::unique_ptr<PayloadCodec> exact_codec_;
  const std::unique_ptr<PayloadCodec> codec_;
  const ScoreView& score_view_;

  BufferState state_;
  bool allocated_ = false;
  float* place_ = nullptr;  // in place: the caller's buffer, once it is known
  bool loaded_ = false;     // since the last call

  Phase phase_ = Phase::kIdle;
  Call call_;
  Status status_;
  Status failure_;  // ends every later call
  uint64_t turn_ = 0;
  bool holds_turn_ = false;
  WorkPtr work_;
  uint64_t waiting_since_ = 0;
  uint64_t exchange_began_ = 0;

  std::shared_ptr<Agreement> agreement_;
  bool agreed_ = false;
  std::shared_ptr<MaskRefresh> refresh_;
  bool refresh_pending_ = false;  // the next call's mask is being made by refresh_

  // Of the last call, until the next.
  bool skipped_ = false;
  bool step_owed_ = false;        // fused: adams_step() has not been called yet
  const float* error_ = nullptr;  // rounding errors of what was sent
  std::vector<float> payload_;    // the reduced u of the masked elements, and the flag
  std::vector<uint16_t> direct_;  // fused, 16-bit elements: what a direct exchange reduces into
  std::vector<uint16_t> ages_;    // of the masked elements; empty: all 1
  size_t masked_ = 0;             // bits of the mask

  mutable std::mutex stats_mutex_;
  scape_stats stats_{};
  bool noted_dense_ = false;
};

// ---- begin ----

Status MaskedBufferImpl::owed_or_running(const char* what) const {
  if (phase_ != Phase::kIdle) {
    return error(SCAPE_ERR_USAGE,
                 "buffer '%s': %s while its all-reduce is under way; finish it first",
                 config_.name.c_str(), what);
  }
  if (step_owed_) {
    return error(
        SCAPE_ERR_USAGE,
        "buffer '%s': %s before the scape_adams_step() of the all-reduce before; call that first",
        config_.name.c_str(), what);
  }
  return Status::Ok();
}

Status MaskedBufferImpl::check_begin(const Call& call) const {
  const char* name = config_.name.c_str();
  if (!refresher_->in_owner_process()) {
    return error(SCAPE_ERR_USAGE,
                 "buffer '%s' belongs to the parent process; a forked child must not use it", name);
  }
  if (!failure_.ok()) return failure_;
  SCAPE_RETURN_IF_ERROR(owed_or_running(call.flush ? "a flush" : "a second all-reduce"));
  const ReduceOp op = call.reduction.op;
  if (op != ReduceOp::kSum && op != ReduceOp::kAvg && op != ReduceOp::kPremulSum) {
    return error(SCAPE_ERR_USAGE,
                 "buffer '%s': a masked all-reduce can do sum, avg and premul-sum, not %s", name,
                 name_of(op));
  }
  const bool reads = !call.flush || in_place_;
  if (count_ > 0 && ((reads && call.send == nullptr) || (!fused_ && call.recv == nullptr))) {
    return error(SCAPE_ERR_ARGUMENT, "buffer '%s': %s is null", name,
                 reads && call.send == nullptr ? "send" : "recv");
  }
  if (in_place_ && call.send != call.recv) {
    return error(SCAPE_ERR_USAGE,
                 "buffer '%s' keeps its residual in place, which needs sendbuff == recvbuff (they "
                 "are %p and "
                 "%p); call it in place or register it with SCAPE_RESIDUAL_INTERNAL",
                 name, call.send, call.recv);
  }
  if (in_place_ && place_ != nullptr && place_ != call.send) {
    return error(
        SCAPE_ERR_USAGE,
        "buffer '%s' keeps its residual in place at %p, but this call has %p; do not replace the "
        "gradient buffer, or register it with SCAPE_RESIDUAL_INTERNAL",
        name, static_cast<const void*>(place_), call.send);
  }
  if (!call.flush && call.send != call.recv && !fused_) {
    const auto a = reinterpret_cast<uintptr_t>(call.send),
               b = reinterpret_cast<uintptr_t>(call.recv);
    if ((a < b ? b - a : a - b) < count_ * kernels::size_of(type_)) {
      return error(SCAPE_ERR_ARGUMENT,
                   "buffer '%s': send (%p) and recv (%p) overlap without being equal; make them "
                   "equal or apart",
                   name, call.send, call.recv);
    }
  }
  if (partition_of(count_, ranks_, 0).size() > kLongestPartition) {
    return error(SCAPE_ERR_ARGUMENT,
                 "buffer '%s': a partition of %zu elements over %d ranks has more than %llu; "
                 "register it in parts",
                 name, count_, ranks_, static_cast<unsigned long long>(kLongestPartition));
  }
  return Status::Ok();
}

Status MaskedBufferImpl::allocate() {
  if (allocated_ || !has_state()) return Status::Ok();
  try {
    if (state_.moment.empty()) {
      state_.moment.resize(count_);
      state_.last.assign(count_, std::numeric_limits<uint16_t>::max());  // step -1
    }
    if (!always_dense_ && !in_place_ && state_.residual.empty()) state_.residual.resize(count_);
    if (config_.role == SCAPE_ROLE_GRADIENT_HOOKED && state_.before.empty()) {
      state_.before.resize(kernels::mask_words(count_));
    }
    if (state_.mask.empty()) {
      state_.mask.resize(kernels::mask_words(count_));
    }
  } catch (const std::bad_alloc&) {
    return error(SCAPE_ERR_MEMORY, "buffer '%s': no memory for the state of %zu elements",
                 config_.name.c_str(), count_);
  }
  allocated_ = true;
  return Status::Ok();
}

Status MaskedBufferImpl::begin(const Call& call) {
  SCAPE_RETURN_IF_ERROR(check_begin(call));
  call_ = call;
  status_ = Status::Ok();
  state_.reduction = call.reduction;
  turn_ = refresher_->take_turn();
  holds_turn_ = true;
  phase_ = Phase::kTurn;
  count_stats([](scape_stats& stats) { ++stats.intercepted_calls; });
  while (phase_ != Phase::kIdle && advance()) {
  }
  return Status::Ok();
}

Status MaskedBufferImpl::begin_all_reduce(const void* send, void* recv, Reduction reduction) {
  return begin({.send = send, .recv = recv, .reduction = reduction});
}

bool MaskedBufferImpl::poll() {
  while (phase_ != Phase::kIdle && advance()) {
  }
  return phase_ == Phase::kIdle;
}

// ---- the state machine ----

bool MaskedBufferImpl::advance() {
  switch (phase_) {
    case Phase::kTurn:
      if (!refresher_->is_turn(turn_)) return false;
      phase_ = Phase::kAgreement;
      return true;
    case Phase::kAgreement:
      if (agreement_ && !agreed_) {
        if (!wait_for(*agreement_, "the agreement")) return false;
        if (phase_ == Phase::kIdle) return true;
        if (!agreement_->verdict().ok()) {
          fail(agreement_->verdict());
          return true;
        }
        agreed_ = true;
      }
      phase_ = Phase::kRefresh;
      return true;
    case Phase::kRefresh:
      if (refresh_pending_) {
        if (!wait_for(*refresh_, "the next mask")) return false;
        if (phase_ == Phase::kIdle) return true;
      }
      if (Status status = launch(); !status.ok()) {
        communicator_->abort(status);
        fail(status);
      }
      return true;
    case Phase::kExchange:
      if (!work_->done()) return false;
      finish_exchange();
      return true;
    case Phase::kSide: {
      Status status;
      if (!refresher_->side_channel_ready(&status)) return false;
      if (status.ok()) {
        finish_call();
      } else {
        fail(status);
      }
      return true;
    }
    case Phase::kIdle:
      break;
  }
  return false;
}

// True when the job is done; the call may have failed with it then.
bool MaskedBufferImpl::wait_for(const SideJob& job, const char* what) {
  if (job.done()) {
    if (waiting_since_ != 0) {
      const uint64_t waited = now_ns() - waiting_since_;
      count_stats([&](scape_stats& stats) { stats.refresh_wait_ns += waited; });
      waiting_since_ = 0;
    }
    if (!job.status().ok()) fail(job.status());
    return true;
  }
  if (waiting_since_ == 0) {
    waiting_since_ = now_ns();
    count_stats([](scape_stats& stats) { ++stats.refresh_waits; });
  }
  Status problem = communicator_->async_error();
  const double waited_s = static_cast<double>(now_ns() - waiting_since_) * 1e-9;
  if (problem.ok() && waited_s > settings().timeout_s) {
    problem =
        error(SCAPE_ERR_TIMEOUT,
              "buffer '%s': waited %.1f s for %s; see whether a rank died or is stopped, or raise "
              "SCAPE_TIMEOUT",
              config_.name.c_str(), waited_s, what);
    communicator_->abort(problem);
  }
  if (problem.ok()) return false;
  fail(problem);
  return true;
}

void MaskedBufferImpl::take_next_mask() {
  const bool known = state_.step > 0;
  const uint64_t before = known ? masked_ : 0;
  uint64_t overlap = 0;
  if (call_.dense) {
    overlap = before;
    set_all(&state_.mask, count_);
    masked_ = count_;
  } else {
    std::vector<uint64_t>& next = refresh_pending_ ? refresh_->mask() : state_.next;
    overlap = ops_.count_common_bits(next.data(), state_.mask.data(), next.size());
    std::swap(next, state_.mask);
    masked_ = ops_.count_bits(state_.mask.data(), state_.mask.size());
  }
  const bool refreshed = refresh_pending_;
  refresh_pending_ = false;
  state_.next.clear();
  count_stats([&](scape_stats& stats) {
    stats.mask_overlap = overlap;
    stats.mask_elements = masked_;
    stats.buffer_elements = count_;
    stats.step = state_.step + 1;
    ++(call_.dense ? stats.dense_calls : stats.sparse_calls);
    if (!refreshed) return;
    stats.refresh_ns += refresh_->nanoseconds();
    stats.mask_bytes += refresh_->sent_bytes();
  });
}

Status MaskedBufferImpl::launch() {
  SCAPE_RETURN_IF_ERROR(allocate());
  const bool joins = !always_dense_ && !agreement_;
  if (joins) {
    if (config_.role == SCAPE_ROLE_GRADIENT) warn_about_the_gradient_role(config_.name);
    const bool fresh = state_.step == 0 && !loaded_;
    agreement_ = std::make_shared<Agreement>(make_agreement_record(
        config_, count_, state_.step, fresh ? 0 : replicated_checksum(state_)));
    refresh_ = std::make_shared<MaskRefresh>(config_.name, count_, communicator_->rank(), ranks_,
                                             agreement_);
  }
  call_.dense = call_.flush || dense_at(state_.step);
  if (in_place_) {
    place_ = static_cast<float*>(call_.recv);
    for (size_t j = 0; j < state_.residual.size(); ++j) place_[j] = state_.residual[j] + place_[j];
    state_.residual = {};
  }
  take_next_mask();
  skipped_ = false;
  error_ = nullptr;
  ages_.clear();

  // From what all ranks have alike, never from local state: they must start the same exchange. (A
  // flag cannot be pending then: it comes from off the mask, and no masked step precedes a dense
  // one but for a flush.)
  const bool residual_free = in_place_ || !state_.residual_dirty;
  call_.direct = always_dense_ || (call_.dense && !call_.flush && residual_free &&
                                   config_.role != SCAPE_ROLE_FIRST_MOMENT);
  const uint64_t began = now_ns();
  SCAPE_RETURN_IF_ERROR(call_.direct ? start_direct(&work_) : start_packed(&work_));
  exchange_began_ = now_ns();
  count_stats([&](scape_stats& stats) { stats.pack_ns += exchange_began_ - began; });
  phase_ = Phase::kExchange;

  // Whatever else this call has to do on the two channels takes its place in their order now.
  if (joins) {
    SCAPE_RETURN_IF_ERROR(refresher_->start_side_channel());
    refresher_->submit(agreement_);
    refresher_->ready(agreement_);
  }
  if (!fused_ && !dense_at(state_.step + 1)) refresher_->submit(refresh_);
  release_turn();
  return Status::Ok();
}

Status MaskedBufferImpl::start_direct(WorkPtr* work) {
  void* target = call_.recv;
  if (fused_ && type_ == Type::kFloat32) {
    payload_.resize(count_);
    target = payload_.data();
  } else if (fused_) {
    direct_.resize(count_);
    target = direct_.data();
  } else if (!always_dense_ && call_.send == call_.recv) {
    // The exchange overwrites u, which a skipped step has to keep.
    ops_.to_float(type_, call_.send, state_.residual.data(), count_);
  }
  if (in_place_ && !always_dense_) {
    ages_.resize(count_);
    ops_.gather_ages(state_.last.data(), state_.mask.data(), count_,
                     static_cast<uint16_t>(state_.step), ages_.data());
  }
  count_stats([&](scape_stats& stats) { stats.payload_bytes += count_ * kernels::size_of(type_); });
  const CallTag tag{.registered = !always_dense_, .name = config_.name};
  return communicator_->all_reduce(call_.send, target, count_, data_type(config_.dtype),
                                   call_.reduction, tag, work);
}

Status MaskedBufferImpl::start_packed(WorkPtr* work) {
  payload_.resize(masked_ + 1);
  if (payload_.capacity() / 2 > payload_.size())
    payload_.shrink_to_fit();  // the dense steps are over
  pack();
  ages_.resize(masked_);
  ops_.gather_ages(state_.last.data(), state_.mask.data(), count_,
                   static_cast<uint16_t>(state_.step), ages_.data());
  PayloadCodec& codec = call_.dense ? *exact_codec_ : *codec_;
  void* wire =
      codec.encode(payload_.data(), ages_.data(), masked_, state_.flag_pending, step_params());
  error_ = codec.error();
  const size_t bytes = (masked_ + 1) * size_of(codec.wire_type());
  count_stats([&](scape_stats& stats) { stats.payload_bytes += bytes; });
  const CallTag tag{.registered = true, .name = config_.name};
  return communicator_->all_reduce(wire, wire, masked_ + 1, codec.wire_type(), call_.reduction, tag,
                                   work);
}

size_t MaskedBufferImpl::pack() {
  const uint64_t* mask = state_.mask.data();
  float* payload = payload_.data();
  if (in_place_ || call_.send == nullptr) {
    return ops_.gather(residual(), mask, count_, payload);
  }
  if (config_.role != SCAPE_ROLE_FIRST_MOMENT) {
    return ops_.accumulate_pack(type_, call_.send, state_.residual.data(), mask, count_, payload);
  }
  if (type_ == Type::kFloat32) {
    return ops_.accumulate_pack_moment(type_, call_.send, state_.moment.data(),
                                       static_cast<float>(config_.beta1), state_.residual.data(),
                                       mask, count_, payload);
  }
  // What the caller put into x is m as it was returned: rounded to the buffer's type.
  size_t packed = 0;
  std::array<float, kChunk> returned;
  std::array<uint16_t, kChunk> narrow;
  for_each_chunk(count_, [&](size_t begin, size_t size) {
    ops_.from_float(type_, state_.moment.data() + begin, narrow.data(), size);
    ops_.to_float(type_, narrow.data(), returned.data(), size);
    packed += ops_.accumulate_pack_moment(
        type_, at(call_.send, type_, begin), returned.data(), static_cast<float>(config_.beta1),
        state_.residual.data() + begin, mask + begin / 64, size, payload + packed);
  });
  return packed;
}

void MaskedBufferImpl::finish_exchange() {
  const uint64_t began = now_ns();
  count_stats([&](scape_stats& stats) { stats.exchange_ns += began - exchange_began_; });
  Status status = work_->status();
  work_.reset();
  if (!status.ok()) {
    if (status.code() == SCAPE_ERR_MISMATCH && !agreed_ && !always_dense_) {
      status = error(SCAPE_ERR_MISMATCH,
                     "%s (buffer '%s' %s here at step %llu: register it alike and load the same "
                     "checkpoint on every rank)",
                     status.message().c_str(), config_.name.c_str(),
                     loaded_ ? "was loaded, and goes on" : "is new, and begins",
                     static_cast<unsigned long long>(state_.step));
    }
    fail(status);
    return;
  }
  call_.direct ? finish_direct() : finish_packed();
  count_stats([&](scape_stats& stats) {
    stats.unpack_ns += now_ns() - began;
    stats.skipped_steps += skipped_;
  });
  loaded_ = false;
  // The first call also sees to it that the side channel is there, since that is made on this
  // communicator.
  phase_ = Phase::kSide;
  if (agreed_ || always_dense_) finish_call();
}

void MaskedBufferImpl::finish_direct() {
  if (fused_) {
    if (type_ != Type::kFloat32) {
      payload_.resize(count_);
      ops_.to_float(type_, direct_.data(), payload_.data(), count_);
      direct_ = {};
    }
    skipped_ = ops_.any_nonfinite(payload_.data(), count_);
  } else if (!always_dense_) {
    skipped_ = direct_output_nonfinite();
  }
  if (always_dense_) return;

  if (skipped_) {
    if (!in_place_ && (fused_ || call_.send != call_.recv)) {
      ops_.to_float(type_, call_.send, state_.residual.data(), count_);
    }
    keep_skipped_residual();
  } else if (!fused_) {
    update_moment_directly();
    if (call_.send == call_.recv) std::fill(state_.residual.begin(), state_.residual.end(), 0.0f);
  }
}

void MaskedBufferImpl::finish_packed() {
  PayloadCodec& codec = call_.dense ? *exact_codec_ : *codec_;
  codec.decode(payload_.data(), ages_.data(), masked_, step_params());
  skipped_ = ops_.any_nonfinite(payload_.data(), masked_ + 1);
  state_.flag_pending = false;
  if (skipped_) keep_skipped_residual();
  if (fused_) return;
  if (skipped_) {
    write_skipped_output();
  } else {
    write_output();
    clear_sent_residual();
  }
}

void MaskedBufferImpl::finish_call() {
  if (fused_) {
    step_owed_ = true;
  } else {
    end_step();
  }
  phase_ = Phase::kIdle;
}

void MaskedBufferImpl::release_turn() {
  if (!holds_turn_) return;
  holds_turn_ = false;
  refresher_->end_turn(turn_);
}

void MaskedBufferImpl::fail(const Status& why) {
  // Turns before this one still have to be served; their calls fail with the communicator, or end
  // theirs.
  if (holds_turn_ && refresher_->is_turn(turn_)) release_turn();
  if (refresh_) refresher_->cancel(refresh_, why);
  refresh_pending_ = false;
  work_.reset();
  status_ = why;
  failure_ = why;
  phase_ = Phase::kIdle;
}

// ---- parts of a step ----

kernels::StepParams MaskedBufferImpl::step_params() const {
  kernels::StepParams params;
  params.t = static_cast<uint16_t>(state_.step);
  params.powers = {powers_.data(), static_cast<uint32_t>(powers_.size())};
  params.beta1 = static_cast<float>(config_.beta1);
  params.beta2 = static_cast<float>(config_.beta2);
  params.eps = static_cast<float>(config_.eps);
  params.age_cap = static_cast<float>(config_.age_cap);
  params.plain = always_dense_ || config_.rule == SCAPE_RULE_PLAIN;
  return params;
}

float* MaskedBufferImpl::residual() { return in_place_ ? place_ : state_.residual.data(); }

// A skipped step: u stays where it is finite. Off the mask the next scoring sees to that.
void MaskedBufferImpl::keep_skipped_residual() {
  ops_.clear_masked_nonfinite(residual(), state_.mask.data(), count_);
  state_.residual_dirty = true;
}

void MaskedBufferImpl::clear_sent_residual() {
  if (always_dense_ && !in_place_) return;
  if (error_ != nullptr) {
    ops_.scatter(error_, state_.mask.data(), count_, residual());
  } else {
    ops_.clear_masked(residual(), state_.mask.data(), count_);
  }
  if (call_.dense) state_.residual_dirty = false;
}

void MaskedBufferImpl::write_output() {
  const kernels::StepParams params = step_params();
  const uint64_t* mask = state_.mask.data();
  switch (config_.role) {
    case SCAPE_ROLE_FIRST_MOMENT:
      ops_.moment_step(payload_.data(), mask, count_, params, state_.moment.data(),
                       state_.last.data());
      ops_.from_float(type_, state_.moment.data(), call_.recv, count_);
      break;
    case SCAPE_ROLE_GRADIENT_HOOKED:
      ops_.hooked_step(payload_.data(), mask, state_.before.data(), count_, params, type_,
                       call_.recv, state_.moment.data(), state_.last.data());
      state_.before = state_.mask;
      break;
    case SCAPE_ROLE_GRADIENT:
      ops_.moment_step(payload_.data(), mask, count_, params, state_.moment.data(),
                       state_.last.data());
      ops_.expand(type_, payload_.data(), mask, count_, call_.recv);
      break;
    case SCAPE_ROLE_FUSED:
      break;
  }
}

// Every masked element is NaN: none of a skipped step's values may be used.
void MaskedBufferImpl::write_skipped_output() {
  std::fill_n(payload_.begin(), masked_, std::numeric_limits<float>::quiet_NaN());
  if (config_.role != SCAPE_ROLE_FIRST_MOMENT) {
    ops_.expand(type_, payload_.data(), state_.mask.data(), count_, call_.recv);
    return;
  }
  std::array<float, kChunk> chunk;
  for_each_chunk(count_, [&](size_t begin, size_t size) {
    std::copy_n(state_.moment.data() + begin, size, chunk.data());
    ops_.scatter(payload_.data(), state_.mask.data() + begin / 64, size, chunk.data());
    ops_.from_float(type_, chunk.data(), at(call_.recv, type_, begin), size);
  });
}

bool MaskedBufferImpl::direct_output_nonfinite() const {
  if (type_ == Type::kFloat32)
    return ops_.any_nonfinite(static_cast<const float*>(call_.recv), count_);
  bool found = false;
  std::array<float, kChunk> chunk;
  for_each_chunk(count_, [&](size_t begin, size_t size) {
    ops_.to_float(type_, at(call_.recv, type_, begin), chunk.data(), size);
    found = found || ops_.any_nonfinite(chunk.data(), size);
  });
  return found;
}

// Gradient roles, direct: all ages are 1, the caller's buffer holds the mean, and m follows it.
void MaskedBufferImpl::update_moment_directly() {
  const kernels::StepParams params = step_params();
  std::array<float, kChunk> chunk;
  for_each_chunk(count_, [&](size_t begin, size_t size) {
    ops_.to_float(type_, at(call_.recv, type_, begin), chunk.data(), size);
    ops_.moment_step(chunk.data(), state_.mask.data() + begin / 64, size, params,
                     state_.moment.data() + begin, state_.last.data() + begin);
  });
  if (config_.role == SCAPE_ROLE_GRADIENT_HOOKED) state_.before = state_.mask;
}

// Step 6, and on to the next step.
void MaskedBufferImpl::end_step() {
  if (!always_dense_) {
    const uint64_t began = now_ns();
    const size_t begin = state_.restamp_at;
    const size_t end = std::min(count_, begin + count_ / kRestampSteps + 1);
    ops_.restamp(state_.last.data() + begin, end - begin, static_cast<uint16_t>(state_.step));
    state_.restamp_at = end == count_ ? 0 : end;

    if (!dense_at(state_.step + 1)) {
      const double factor =
          state_.reduction.op == ReduceOp::kPremulSum ? state_.reduction.factor : 1;
      const bool mean = state_.reduction.op == ReduceOp::kAvg;
      float* scores = refresh_->prepare(config_, state_.step);
      const Partition part = refresh_->scored();
      const size_t cleared =
          score_view_.score({.moment = state_.moment.data() + part.begin,
                             .last = state_.last.data() + part.begin,
                             .residual = residual() + part.begin,
                             .size = part.size(),
                             .scale = mean ? 1.0f : static_cast<float>(ranks_ * factor)},
                            step_params(), scores);
      if (cleared > 0) state_.flag_pending = true;
      refresher_->ready(refresh_);
      refresh_pending_ = true;
      count_stats([&](scape_stats& stats) {
        stats.nonfinite_values += cleared;
        ++stats.refreshes;
        stats.score_ns += now_ns() - began;
      });
    }
  }
  ++state_.step;
}

// ---- local steps ----

Status MaskedBufferImpl::adams_step(float* param, double lr, double weight_decay) {
  const char* name = config_.name.c_str();
  if (!fused_) {
    return error(SCAPE_ERR_USAGE,
                 "buffer '%s': scape_adams_step() is for the fused role, its role is %d", name,
                 static_cast<int>(config_.role));
  }
  if (!failure_.ok()) return failure_;
  if (phase_ != Phase::kIdle || !step_owed_) {
    return error(SCAPE_ERR_USAGE,
                 "buffer '%s': scape_adams_step() needs an all-reduce of it before", name);
  }
  if (param == nullptr && count_ > 0) {
    return error(SCAPE_ERR_ARGUMENT, "buffer '%s': param is null", name);
  }
  if (!std::isfinite(lr) || !(lr * weight_decay >= 0 && lr * weight_decay < 1)) {
    return error(
        SCAPE_ERR_ARGUMENT,
        "buffer '%s': lr is %g and weight_decay %g; lr must be finite and their product in [0, 1)",
        name, lr, weight_decay);
  }
  const uint64_t began = now_ns();
  state_.decay.push(lr, weight_decay);
  if (!skipped_) {
    kernels::StepParams params = step_params();
    params.lr = static_cast<float>(lr);
    const uint16_t oldest =
        params.plain || ages_.empty() ? uint16_t{1} : *std::max_element(ages_.begin(), ages_.end());
    const std::vector<float>& decay = state_.decay.table(oldest);
    params.decay = decay.empty() ? nullptr : decay.data();
    params.decay_size = static_cast<uint32_t>(decay.size());
    ops_.adams_step(payload_.data(), state_.mask.data(), count_, params, state_.moment.data(),
                    state_.last.data(), param);
  }
  // Where nothing is kept, a skipped gradient is dropped as well.
  if (!skipped_ || always_dense_) clear_sent_residual();
  step_owed_ = false;
  if (!dense_at(state_.step + 1)) refresher_->submit(refresh_);
  end_step();
  const uint64_t ended = now_ns();
  count_stats([&](scape_stats& stats) { stats.step_ns += ended - began; });
  return Status::Ok();
}

Status MaskedBufferImpl::post_step(size_t offset, size_t length, const float* before, float* param,
                                   double lr, double weight_decay) {
  const char* name = config_.name.c_str();
  if (config_.role != SCAPE_ROLE_GRADIENT_HOOKED) {
    return error(SCAPE_ERR_USAGE,
                 "buffer '%s': scape_post_step() is for the hooked gradient role, its role is %d",
                 name, static_cast<int>(config_.role));
  }
  if (offset > count_ || length > count_ - offset) {
    return error(SCAPE_ERR_ARGUMENT,
                 "buffer '%s': elements %zu .. %zu + %zu are not within its %zu", name, offset,
                 offset, length, count_);
  }
  if (length > 0 && (before == nullptr || param == nullptr)) {
    return error(SCAPE_ERR_ARGUMENT, "buffer '%s': %s is null", name,
                 before == nullptr ? "before" : "param");
  }
  if (phase_ != Phase::kIdle) return owed_or_running("scape_post_step()");
  // Where all ages count as 1 every step has its right length already.
  if (skipped_ || ages_.empty() || step_params().plain) return Status::Ok();

  // The kernel wants masks that begin at a word: the mask of these elements, moved there.
  const std::vector<uint64_t>& mask = state_.mask;
  const size_t word = offset / 64, shift = offset % 64;
  size_t first_age = ops_.count_bits(mask.data(), word);
  if (shift != 0) {
    const uint64_t low = mask[word] & ((uint64_t{1} << shift) - 1);
    first_age += ops_.count_bits(&low, 1);
  }
  std::vector<uint64_t> moved(kernels::mask_words(length));
  for (size_t w = 0; w < moved.size(); ++w) {
    moved[w] = mask[word + w] >> shift;
    if (shift != 0 && word + w + 1 < mask.size()) moved[w] |= mask[word + w + 1] << (64 - shift);
  }
  if (length % 64 != 0) moved.back() &= (uint64_t{1} << (length % 64)) - 1;
  ops_.post_step(before, moved.data(), ages_.data() + first_age, length,
                 static_cast<float>(1 - lr * weight_decay), static_cast<float>(config_.age_cap),
                 param);
  return Status::Ok();
}

Status MaskedBufferImpl::clear_masked(void* buffer) {
  if (buffer == nullptr && count_ > 0) {
    return error(SCAPE_ERR_ARGUMENT, "buffer '%s': buffer is null", config_.name.c_str());
  }
  if (phase_ != Phase::kIdle) return owed_or_running("scape_clear_masked()");
  if (!in_place_ || always_dense_ || place_ == nullptr) {
    // No residual in it: all of it is gradient.
    std::fill_n(static_cast<std::byte*>(buffer), count_ * kernels::size_of(type_), std::byte{0});
    return Status::Ok();
  }
  if (buffer != place_) {
    return error(SCAPE_ERR_USAGE, "buffer '%s' keeps its residual in place at %p, not at %p",
                 config_.name.c_str(), static_cast<void*>(place_), buffer);
  }
  if (!skipped_) clear_sent_residual();
  return Status::Ok();
}

Status MaskedBufferImpl::flush(void* buffer, float* param, double lr, double weight_decay) {
  if (always_dense_ || state_.step == 0) return owed_or_running("a flush");
  if (fused_ && param == nullptr) {
    return error(SCAPE_ERR_ARGUMENT, "buffer '%s': param is null", config_.name.c_str());
  }
  SCAPE_RETURN_IF_ERROR(begin({.send = in_place_ ? buffer : nullptr,
                               .recv = buffer,
                               .reduction = state_.reduction,
                               .flush = true}));
  while (!poll()) {
    if (!communicator_->progress()) std::this_thread::yield();
  }
  SCAPE_RETURN_IF_ERROR(status_);
  return fused_ ? adams_step(param, lr, weight_decay) : Status::Ok();
}

void MaskedBufferImpl::note_dense(const char* why) {
  bool first;
  {
    std::lock_guard lock(stats_mutex_);
    ++stats_.intercepted_calls;
    ++stats_.dense_calls;
    ++stats_.fallback_calls;
    first = !std::exchange(noted_dense_, true);
  }
  if (first) SCAPE_WARN("buffer '%s' travels dense in this call: %s", config_.name.c_str(), why);
}

// ---- reading ----

Status MaskedBufferImpl::read_mask(uint64_t* words, size_t capacity) {
  const size_t needed = kernels::mask_words(count_);
  if (capacity < needed) {
    return error(SCAPE_ERR_MEMORY, "buffer '%s': capacity is %zu words; its mask has %zu",
                 config_.name.c_str(), capacity, needed);
  }
  std::copy(state_.mask.begin(), state_.mask.end(), words);
  if (state_.mask.empty()) std::fill_n(words, needed, uint64_t{0});
  return Status::Ok();
}

Status MaskedBufferImpl::read_ages(uint16_t* ages, size_t capacity) {
  if (capacity < count_) {
    return error(SCAPE_ERR_MEMORY, "buffer '%s': capacity is %zu elements; it has %zu",
                 config_.name.c_str(), capacity, count_);
  }
  if (state_.last.empty() || always_dense_) {
    std::fill_n(ages, count_, uint16_t{1});
    return Status::Ok();
  }
  // Of the last call's step; between a fused call and its scape_adams_step() that is still the
  // current one.
  const auto t = static_cast<uint16_t>(state_.step - (step_owed_ ? 0 : 1));
  for (size_t j = 0; j < count_; ++j) ages[j] = static_cast<uint16_t>(t - state_.last[j]);
  size_t i = 0;
  for (size_t w = 0; w < state_.mask.size(); ++w) {
    for (uint64_t word = state_.mask[w]; word != 0; word &= word - 1, ++i) {
      const size_t j = w * 64 + static_cast<size_t>(std::countr_zero(word));
      ages[j] = ages_.empty() ? uint16_t{1} : ages_[i];
    }
  }
  return Status::Ok();
}

Status MaskedBufferImpl::read_residual(float* out, size_t capacity) {
  if (capacity < count_) {
    return error(SCAPE_ERR_MEMORY, "buffer '%s': capacity is %zu elements; it has %zu",
                 config_.name.c_str(), capacity, count_);
  }
  const float* from = in_place_ && place_ != nullptr ? place_ : state_.residual.data();
  if (always_dense_ || from == nullptr) {
    std::fill_n(out, count_, 0.0f);
  } else {
    std::copy_n(from, count_, out);
  }
  return Status::Ok();
}

Status MaskedBufferImpl::read_moment(float* out, size_t capacity) {
  if (capacity < count_) {
    return error(SCAPE_ERR_MEMORY, "buffer '%s': capacity is %zu elements; it has %zu",
                 config_.name.c_str(), capacity, count_);
  }
  if (!has_state()) {
    return error(SCAPE_ERR_USAGE,
                 "buffer '%s' is always dense (one rank, or sparsity 0), and its role keeps no "
                 "first moment then",
                 config_.name.c_str());
  }
  std::copy(state_.moment.begin(), state_.moment.end(), out);
  if (state_.moment.empty()) std::fill_n(out, count_, 0.0f);
  return Status::Ok();
}

scape_stats MaskedBufferImpl::stats() const {
  std::lock_guard lock(stats_mutex_);
  scape_stats copy = stats_;
  copy.size = sizeof(copy);
  return copy;
}

double MaskedBufferImpl::residual_l1() {
  if (always_dense_) return 0;
  const float* from = in_place_ && place_ != nullptr ? place_ : state_.residual.data();
  if (from == nullptr) return 0;
  double sum = 0;
  for (size_t j = 0; j < count_; ++j) sum += std::fabs(from[j]);
  return sum;
}

// ---- saving and loading ----

Status MaskedBufferImpl::save(std::vector<std::byte>* out) {
  SCAPE_RETURN_IF_ERROR(owed_or_running("saving"));
  if (!failure_.ok()) return failure_;
  try {
    if (refresh_pending_) {
      SCAPE_RETURN_IF_ERROR(refresher_->wait(*refresh_));
      std::swap(state_.next, refresh_->mask());
      refresh_pending_ = false;
    }
    const float* kept = in_place_ && place_ != nullptr ? place_ : state_.residual.data();
    save_state(owner(), state_, always_dense_ ? nullptr : kept, out);
  } catch (const std::bad_alloc&) {
    return error(SCAPE_ERR_MEMORY, "buffer '%s': no memory to save %zu elements",
                 config_.name.c_str(), count_);
  }
  return Status::Ok();
}

Status MaskedBufferImpl::load(const std::byte* data, size_t size) {
  SCAPE_RETURN_IF_ERROR(owed_or_running("loading"));
  if (!failure_.ok()) return failure_;
  try {
    BufferState loaded;
    SCAPE_RETURN_IF_ERROR(load_state(owner(), data, size, &loaded));
    state_ = std::move(loaded);
  } catch (const std::bad_alloc&) {
    return error(SCAPE_ERR_MEMORY, "buffer '%s': no memory to load %zu elements",
                 config_.name.c_str(), count_);
  }
  masked_ = ops_.count_bits(state_.mask.data(), state_.mask.size());
  allocated_ = false;
  loaded_ = true;
  count_stats([&](scape_stats& stats) { stats.step = state_.step; });
  place_ = nullptr;
  refresh_pending_ = false;
  refresh_.reset();
  agreement_.reset();
  agreed_ = false;
  skipped_ = false;
  ages_.clear();
  return Status::Ok();
}

}  // namespace

std::unique_ptr<MaskedBuffer> make_masked_buffer(std::shared_ptr<Communicator> communicator,
                                                 std::shared_ptr<Refresher> refresher,
                                                 BufferConfig config, size_t count) {
  return std::make_unique<MaskedBufferImpl>(std::move(communicator), std::move(refresher),
                                            std::move(config), count);
}

}  // namespace scape::plugin
