#include "plugin/masked/masked_buffer.h"

#include <atomic>
#include <limits>
#include <new>
#include <utility>

#include "base/clock.h"
#include "base/fault.h"
#include "base/log.h"
#include "base/overlap.h"
#include "base/settings.h"
#include "plugin/masked/masked_buffer_impl.h"

namespace scape::plugin {
namespace {

// The longest partition that the selection can number.
constexpr uint64_t kLongestPartition = std::numeric_limits<uint32_t>::max();

void warn_about_the_gradient_role(const std::string& name) {
  static std::atomic<bool> said{false};
  if (said.exchange(true, std::memory_order_relaxed)) return;
  SCAPE_WARN(
      "buffer '%s': masked gradients for an unmodified optimizer cost quality (0.4 nats at "
      "90 %% in our study); use the fused or the hooked role where you can",
      name.c_str());
}

}  // namespace

MaskedBufferImpl::MaskedBufferImpl(std::shared_ptr<Engine> engine,
                                   std::shared_ptr<Communicator> communicator,
                                   std::shared_ptr<Refresher> refresher, BufferConfig config,
                                   size_t count)
    : config_(std::move(config)),
      count_(count),
      engine_(std::move(engine)),
      communicator_(std::move(communicator)),
      refresher_(std::move(refresher)),
      ranks_(communicator_->size()),
      type_(static_cast<kernels::Type>(config_.dtype)),
      always_dense_(ranks_ == 1 || config_.sparsity == 0),
      fused_(config_.role == SCAPE_ROLE_FUSED),
      in_place_(config_.residual == SCAPE_RESIDUAL_IN_PLACE),
      powers_(kernels::make_power_table(config_.beta1)),
      exact_codec_(make_payload_codec(*engine_, SCAPE_FLOAT32)),
      codec_(make_payload_codec(*engine_, config_.payload)),
      score_view_(local_score_view()) {}

MaskedBufferImpl::~MaskedBufferImpl() {
  // A refresh in flight goes on without the buffer: it owns its memory, and other ranks wait for
  // it.
  if (phase_ != Phase::kIdle && refresher_->in_owner_process()) {
    const Status why = error(SCAPE_ERR_USAGE, "buffer '%s' was dropped during its all-reduce",
                             config_.name.c_str());
    communicator_->abort(why);
    fail(why);
  }
}

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
                 "%p); call it in place or register it with SCAPE_RESIDUAL_INTERNAL or "
                 "SCAPE_RESIDUAL_HOST",
                 name, call.send, call.recv);
  }
  if (in_place_ && place_ != nullptr && place_ != call.send) {
    return error(
        SCAPE_ERR_USAGE,
        "buffer '%s' keeps its residual in place at %p, but this call has %p; do not replace the "
        "gradient buffer, or register it with SCAPE_RESIDUAL_INTERNAL or SCAPE_RESIDUAL_HOST",
        name, static_cast<const void*>(place_), call.send);
  }
  const size_t bytes = count_ * kernels::size_of(type_);
  if (!call.flush && call.send != call.recv && !fused_ &&
      overlap(call.send, bytes, call.recv, bytes)) {
    return error(SCAPE_ERR_ARGUMENT,
                 "buffer '%s': send (%p) and recv (%p) overlap without being equal; make them "
                 "equal or apart",
                 name, call.send, call.recv);
  }
  if (partition_of(count_, ranks_, 0).size() > kLongestPartition) {
    return error(SCAPE_ERR_ARGUMENT,
                 "buffer '%s': a partition of %zu elements over %d ranks has more than %llu; "
                 "register it in parts",
                 name, count_, ranks_, static_cast<unsigned long long>(kLongestPartition));
  }
  return Status::Ok();
}

void MaskedBufferImpl::allocate() {
  if (allocated_ || !has_state()) return;
  constexpr std::byte kZero{0};
  if (state_.moment.empty()) {
    state_.moment.fill(count_, kZero, stream_);
    state_.last->fill(count_, std::byte{0xff}, stream_);  // step -1
  }
  if (!always_dense_ && !in_place_ && state_.residual.empty())
    state_.residual.fill(count_, kZero, stream_);
  const size_t words = kernels::mask_words(count_);
  if (config_.role == SCAPE_ROLE_GRADIENT_HOOKED && state_.before.empty())
    state_.before.fill(words, kZero, stream_);
  if (state_.mask.empty()) state_.mask.fill(words, kZero, stream_);
  allocated_ = true;
}

Status MaskedBufferImpl::begin(const Call& call, Stream stream) {
  SCAPE_RETURN_IF_ERROR(check_begin(call));
  call_ = call;
  stream_ = stream;
  status_ = Status::Ok();
  state_.reduction = call.reduction;
  turn_ = refresher_->take_turn();
  holds_turn_ = true;
  phase_ = Phase::kTurn;
  count_stats([](scape_stats& stats) { ++stats.intercepted_calls; });
  poll();
  return Status::Ok();
}

Status MaskedBufferImpl::begin_all_reduce(const void* send, void* recv, Reduction reduction,
                                          Stream stream) {
  return begin({.send = send, .recv = recv, .reduction = reduction}, stream);
}

bool MaskedBufferImpl::poll() {
  if (phase_ == Phase::kIdle) return true;
  try {
    while (phase_ != Phase::kIdle && advance()) {
    }
  } catch (const std::bad_alloc&) {
    run_out_of_memory("its all-reduce");
  }
  if (phase_ != Phase::kIdle) return false;
  engine_->end_call(stream_);
  return true;
}

// ---- the state machine ----

bool MaskedBufferImpl::advance() {
  switch (phase_) {
    case Phase::kTurn:
      if (!refresher_->is_turn(turn_)) {
        // The call that holds the turn may have been dropped, with the communicator.
        const Status problem = communicator_->async_error();
        if (problem.ok()) return false;
        fail(problem);
        return true;
      }
      phase_ = Phase::kAgreement;
      return true;
    case Phase::kAgreement:
      if (agreement_ && !agreed_) {
        if (!wait_for(agreement_, "the agreement")) return false;
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
        if (!wait_for(refresh_, "the next mask")) return false;
        if (phase_ == Phase::kIdle) return true;
      }
      if (may_share()) {
        phase_ = Phase::kShare;
        const size_t bytes = (masked_at(state_.step) + 1) * size_of(codec_->wire_type());
        fail_unless(communicator_->share_payload(bytes, &sharing_));
      } else {
        fail_unless(launch());
      }
      return true;
    case Phase::kShare:
      if (!sharing_->done()) return false;
      if (Status status = sharing_->status(); status.ok()) {
        shared_ = sharing_->payload();
        fail_unless(launch());
      } else {
        fail(with_origin(status));
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

void MaskedBufferImpl::fail_unless(const Status& started) {
  if (started.ok()) return;
  communicator_->abort(started);
  fail(started);
}

// From what all ranks have alike: where it is agreed on in this very call, as after state was
// loaded, ranks that differ start other collectives, and hear of it. The sum's order depends on
// sharing, so a resumed run must begin to share with the same step.
bool MaskedBufferImpl::may_share() const {
  return sharing_ == nullptr && !always_dense_ && !call_.flush &&
         sparsity_at(config_, state_.step) == config_.sparsity;
}

size_t MaskedBufferImpl::masked_at(uint64_t t) const {
  size_t bits = 0;
  for (int q = 0; q < ranks_; ++q)
    bits += bits_at(config_, t, partition_of(count_, ranks_, q).size());
  return bits;
}

// True when the job is done; the call may have failed with it then.
bool MaskedBufferImpl::wait_for(const std::shared_ptr<SideJob>& job, const char* what) {
  if (refresher_->join(job, stream_)) {
    if (waiting_since_ != 0) {
      const uint64_t waited = now_ns() - waiting_since_;
      count_stats([&](scape_stats& stats) { stats.refresh_wait_ns += waited; });
      waiting_since_ = 0;
    }
    if (!job->status().ok()) fail(job->status());
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
    // It adds who is to blame, where it can tell.
    if (const Status known = communicator_->async_error(); !known.ok()) problem = known;
  }
  if (problem.ok()) return false;
  fail(problem);
  return true;
}

void MaskedBufferImpl::take_next_mask() {
  const uint64_t before = state_.step > 0 ? masked_ : 0;
  ages_.clear();
  if (call_.dense) {
    state_.mask.resize(kernels::mask_words(count_));
    engine_->set_all_bits(stream_, state_.mask.data(), count_);
    masked_ = count_;
  } else {
    Array<uint64_t>& next = refresh_pending_ ? refresh_->mask() : state_.next;
    engine_->count_overlap(stream_, next.data(), state_.mask.data(), count_);
    next.swap(state_.mask);
    masked_ = masked_at(state_.step);
    if (refresh_pending_) ages_.swap(refresh_->ages());
  }
  const bool refreshed = refresh_pending_;
  refresh_pending_ = false;
  state_.next.clear();
  count_stats([&](scape_stats& stats) {
    overlap_known_ = call_.dense;
    stats.mask_overlap = before;
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
  allocate();
  const bool joins = !always_dense_ && !agreement_;
  if (joins) {
    if (config_.role == SCAPE_ROLE_GRADIENT) warn_about_the_gradient_role(config_.name);
    const bool fresh = state_.step == 0 && !loaded_;
    agreement_ = std::make_shared<Agreement>(
        engine_,
        make_agreement_record(config_, count_, state_.step,
                              fresh ? 0 : replicated_checksum(state_, stream_)),
        ranks_);
    refresh_ = std::make_shared<MaskRefresh>(engine_, config_.name, count_, communicator_->rank(),
                                             ranks_, agreement_);
  }
  call_.dense = call_.flush || dense_at(state_.step);
  if (in_place_) {
    place_ = static_cast<float*>(call_.recv);
    engine_->add(stream_, state_.residual.data(), place_, state_.residual.size());
    state_.residual.resize(0);
  }
  take_next_mask();
  error_ = nullptr;

  // From what all ranks have alike, never from local state: they must start the same exchange. So
  // where the engine cannot tell a skip, residual is taken to be left from the first dense step on.
  // (A flag cannot be pending then: it comes from off the mask, and no masked step precedes a dense
  // one but for a flush.)
  const bool residual_free = in_place_ || !state_.residual_dirty;
  call_.direct = always_dense_ || (call_.dense && !call_.flush && residual_free &&
                                   config_.role != SCAPE_ROLE_FIRST_MOMENT);
  if (!call_.dense) fault_point(Fault::kPack);
  const uint64_t began = now_ns();
  SCAPE_RETURN_IF_ERROR(call_.direct ? start_direct(&work_) : start_packed(&work_));
  exchange_began_ = now_ns();
  count_stats([&](scape_stats& stats) { stats.pack_ns += exchange_began_ - began; });
  phase_ = Phase::kExchange;
  if (!call_.dense) fault_point(Fault::kExchange);
  SCAPE_RETURN_IF_ERROR(engine_->failure());

  // Whatever else this call has to do on the two channels takes its place in their order now.
  if (joins) {
    const void* const data = call_.recv != nullptr ? call_.recv : call_.send;
    SCAPE_RETURN_IF_ERROR(refresher_->start_side_channel(
        data, data != nullptr ? count_ * size_of(data_type_of(config_.dtype)) : 0));
    refresher_->submit(agreement_);
    refresher_->ready(agreement_, stream_);
    fault_point(Fault::kAgreement);
  }
  if (!fused_ && !dense_at(state_.step + 1)) refresher_->submit(refresh_);
  release_turn();
  return Status::Ok();
}

Status MaskedBufferImpl::with_origin(const Status& status) const {
  if (status.code() != SCAPE_ERR_MISMATCH || agreed_ || always_dense_) return status;
  return error(SCAPE_ERR_MISMATCH,
               "%s (buffer '%s', role \"%s\", sparsity %g, %s here at step %llu: register it "
               "alike and load the same checkpoint on every rank)",
               status.message().c_str(), config_.name.c_str(), role_text(config_.role).c_str(),
               config_.sparsity, loaded_ ? "was loaded, and goes on" : "is new, and begins",
               static_cast<unsigned long long>(state_.step));
}

void MaskedBufferImpl::finish_exchange() {
  const uint64_t began = now_ns();
  count_stats([&](scape_stats& stats) { stats.exchange_ns += began - exchange_began_; });
  const Status status = work_->status();
  work_.reset();
  if (!status.ok()) {
    fail(with_origin(status));
    return;
  }
  if (!call_.dense) fault_point(Fault::kUnpack);
  call_.direct ? finish_direct() : finish_packed();
  count_stats([&](scape_stats& stats) { stats.unpack_ns += now_ns() - began; });
  loaded_ = false;
  if (fail_unless(engine_->failure()); phase_ == Phase::kIdle) return;
  // The first call also sees to it that the side channel is there, since that is made on this
  // communicator.
  phase_ = Phase::kSide;
  if (agreed_ || always_dense_) finish_call();
}

void MaskedBufferImpl::finish_call() {
  if (fused_) {
    step_owed_ = true;
  } else {
    end_step();
    fail_unless(engine_->failure());
  }
  phase_ = Phase::kIdle;
}

Status MaskedBufferImpl::end_local_step() {
  engine_->end_call(stream_);
  if (failure_.ok()) fail_unless(engine_->failure());
  return failure_;
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
  {
    std::lock_guard lock(stats_mutex_);
    failure_ = why;
  }
  phase_ = Phase::kIdle;
}

void MaskedBufferImpl::run_out_of_memory(const char* where) {
  const std::string held_on_host =
      config_.residual == SCAPE_RESIDUAL_HOST
          ? format(
                "; %zu bytes of it are page-locked memory of the host (SCAPE_RESIDUAL_HOST), and "
                "two "
                "chunks on the way to it may take %lld bytes of the device: see what both have "
                "left, register less, make chunks smaller (SCAPE_RESIDUAL_CHUNK), or keep the "
                "residual on the device (SCAPE_RESIDUAL=device)",
                count_ * sizeof(float), 2 * static_cast<long long>(settings().residual_chunk))
          : std::string();
  const Status why = error(SCAPE_ERR_MEMORY, "buffer '%s': no memory for %zu elements in %s%s",
                           config_.name.c_str(), count_, where, held_on_host.c_str());
  communicator_->abort(why);
  fail(why);
}

std::unique_ptr<MaskedBuffer> make_masked_buffer(std::shared_ptr<Engine> engine,
                                                 std::shared_ptr<Communicator> communicator,
                                                 std::shared_ptr<Refresher> refresher,
                                                 BufferConfig config, size_t count) {
  return std::make_unique<MaskedBufferImpl>(std::move(engine), std::move(communicator),
                                            std::move(refresher), std::move(config), count);
}

}  // namespace scape::plugin
