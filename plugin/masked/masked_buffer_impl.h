// The one implementation of MaskedBuffer: its state, and what its parts give each other. In
//   masked_buffer.cc    a call from begin to end: the state machine
//   masked_exchange.cc  what a call does to the elements: what travels, and what comes back
//   masked_steps.cc     the local steps after a call, and the flush
//   masked_access.cc    reading, saving and loading
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "base/status.h"
#include "kernels/kernels.h"
#include "plugin/communicator.h"
#include "plugin/masked/agreement.h"
#include "plugin/masked/array.h"
#include "plugin/masked/buffer_state.h"
#include "plugin/masked/dense_reasons.h"
#include "plugin/masked/engine.h"
#include "plugin/masked/mask_refresh.h"
#include "plugin/masked/masked_buffer.h"
#include "plugin/masked/payload_codec.h"
#include "plugin/masked/refresher.h"
#include "plugin/masked/score_view.h"

namespace scape::plugin {

class MaskedBufferImpl final : public MaskedBuffer {
 public:
  MaskedBufferImpl(std::shared_ptr<Engine> engine, std::shared_ptr<Communicator> communicator,
                   std::shared_ptr<Refresher> refresher, BufferConfig config, size_t count);
  ~MaskedBufferImpl() override;

  Status begin_all_reduce(const void* send, void* recv, Reduction reduction,
                          Stream stream) override;
  bool poll() override;
  bool launched() const override {
    return phase_ == Phase::kIdle || (!holds_turn_ && refresher_->communicator_is_free());
  }
  Status status() const override { return status_; }

  Status adams_step(float* param, double lr, double weight_decay, Stream stream) override;
  Status post_step(size_t offset, size_t length, const float* before, float* param, double lr,
                   double weight_decay, Stream stream) override;
  Status clear_masked(void* buffer, Stream stream) override;
  Status flush(void* buffer, float* param, double lr, double weight_decay, Stream stream) override;
  void note_dense(const char* why) override;
  std::string dense_reason() const override;
  Status failure() const override;

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
    kShare,      // of the first call at full sparsity: memory shared with the host's ranks is made
    kExchange,   // the all-reduce
    kSide,       // first call: the side channel is being made
  };

  struct Call {
    const void* send = nullptr;  // null: a flush of an internal residual, whose gradient is 0
    void* recv = nullptr;
    Reduction reduction;
    bool flush = false;
    bool dense = false;   // the mask is all ones
    bool direct = false;  // the caller's elements travel as they are: no residual, no codec
  };

  // ---- the state machine ----
  bool has_state() const { return fused_ || !always_dense_; }
  bool dense_at(uint64_t t) const { return always_dense_ || sparsity_at(config_, t) == 0; }
  Status check_begin(const Call& call) const;
  Status begin(const Call& call, Stream stream);
  void allocate();
  // One transition; false when it has to wait.
  bool advance();
  bool wait_for(const std::shared_ptr<SideJob>& job, const char* what);
  bool may_share() const;
  // Bits of the mask that was chosen for step t.
  size_t masked_at(uint64_t t) const;
  void take_next_mask();
  // Of what this rank starts in a call: the other ranks hear of a refusal.
  void fail_unless(const Status& started);
  Status launch();
  // Where ranks differ before they have agreed: with what this one's buffer is.
  Status with_origin(const Status& status) const;
  void finish_exchange();
  void finish_call();
  Status end_local_step();
  void release_turn();
  void fail(const Status& why);
  // In the middle of a call or a step: the other ranks are in it, or will be, and hear of the end
  // instead of waiting for this one.
  void run_out_of_memory(const char* where);

  // ---- what a call does to the elements ----
  Status start_direct(WorkPtr* work);
  Status start_packed(WorkPtr* work);
  void finish_direct();
  void finish_packed();
  // Of the call's mask.
  void gather_ages();
  void end_step();

  // ---- local steps ----
  Status check_step(const void* data, const float* param, double lr, double weight_decay) const;
  void do_adams_step(float* param, double lr, double weight_decay);

  // ---- what several parts need ----
  Status owed_or_running(const char* what) const;
  CallTag tag() const;
  StepView step_view();
  // In place, once it is known where: the caller's buffer.
  float* residual() { return in_place_ && place_ != nullptr ? place_ : state_.residual.data(); }
  PayloadCodec& codec() { return call_.dense ? *exact_codec_ : *codec_; }
  StateOwner owner() const { return {config_, count_, communicator_->rank(), ranks_}; }
  template <typename Update>
  void count_stats(Update&& update) {
    std::lock_guard lock(stats_mutex_);
    update(stats_);
  }

  const BufferConfig config_;
  const size_t count_;
  const std::shared_ptr<Engine> engine_;
  const std::shared_ptr<Communicator> communicator_;
  const std::shared_ptr<Refresher> refresher_;
  const int ranks_;
  const kernels::Type type_;
  // One rank, or sparsity 0: a plain all-reduce. No residual; a skipped gradient is dropped, as
  // dense training drops it, and every age counts as 1.
  const bool always_dense_;
  const bool fused_;
  const bool in_place_;
  const std::vector<float> powers_;
  const std::unique_ptr<PayloadCodec> exact_codec_;
  const std::unique_ptr<PayloadCodec> codec_;
  const ScoreView& score_view_;

  BufferState state_{*engine_,
                     config_.residual == SCAPE_RESIDUAL_HOST ? Home::kHost : Home::kPlace};
  bool allocated_ = false;
  float* place_ = nullptr;  // in place: the caller's buffer, once it is known
  bool loaded_ = false;     // since the last call

  Phase phase_ = Phase::kIdle;
  Call call_;
  Status status_;
  Status failure_;  // ends every later call; written under stats_mutex_, for failure()
  Stream stream_;   // of the call or step under way, else of the last
  uint64_t turn_ = 0;
  bool holds_turn_ = false;
  WorkPtr work_;
  uint64_t waiting_since_ = 0;
  uint64_t exchange_began_ = 0;

  std::shared_ptr<SharedPayload> shared_;  // null where ranks share nothing
  std::shared_ptr<SharingWork> sharing_;
  bool travels_shared_ = false;  // this call's payload

  std::shared_ptr<Agreement> agreement_;
  bool agreed_ = false;
  std::shared_ptr<MaskRefresh> refresh_;
  bool refresh_pending_ = false;  // the next call's mask is being made by refresh_

  // Of the last call, until the next.
  float last_rate_ = 0, last_decay_ = 0;  // fused: what the last step was given
  bool step_owed_ = false;                // fused: adams_step() has not been called yet
  const float* error_ = nullptr;          // rounding errors of what was sent
  Array<float> payload_{*engine_};        // u of the masked elements, and the flag
  Array<std::byte> wire_{*engine_};       // its encoding
  // The reduced payload: in payload_, or in what ranks of this host share.
  const float* reduced_ = nullptr;
  Array<uint16_t> direct_{*engine_};  // fused, 16-bit elements: what a direct exchange reduces into
  Array<uint16_t> ages_{*engine_};    // of the masked elements; empty: all 1
  size_t masked_ = 0;                 // bits of the mask

  mutable std::mutex stats_mutex_;
  scape_stats stats_{};         // but for what the engine counts
  bool overlap_known_ = false;  // stats_ has the last call's mask_overlap, else the engine
  DenseReasons dense_reasons_;
};

}  // namespace scape::plugin
