// Engine: the memory of one place and what is computed in it, for one masked buffer.
//
// The state machine decides what happens in a step from what all ranks have alike; whatever depends
// on the elements' values is decided in here: on a device the host never waits for them. So the
// verdict on a step (whether it is a skip), the flag of the next payload and the counters stand in
// the place, and each operation reads and writes them there.
//
// Operations come in the order of their streams and return when they are enqueued; on the host,
// when they are done. Arrays are of the place or, where parameters are called send, recv or param,
// the caller's, which the place can reach. The residual alone may have its home on the host. Tables
// in StepParams are the host's and may change once the operation has returned, but for the powers,
// which an engine knows from its first one on. Masks, payloads and ages are as kernels/kernels.h
// says. An operation that cannot be enqueued says so in failure(), and those after it do nothing.
//
// One thread at a time, but for choose() and take_masks(), which are the refresher's,
// gather_ages(), which is both's, and counters(), which may be asked from any.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "base/status.h"
#include "kernels/kernels.h"
#include "plugin/masked/array.h"
#include "plugin/masked/masked_buffer.h"
#include "plugin/stream.h"

namespace scape::plugin {

// A buffer in one step, as all operations of the step have it.
struct StepView {
  Stream stream;
  kernels::StepParams params;
  scape_role role = SCAPE_ROLE_FUSED;
  kernels::Type type = kernels::Type::kFloat32;  // of the caller's elements
  size_t count = 0;
  float* moment = nullptr;
  uint16_t* last = nullptr;
  float* residual = nullptr;  // in place: the caller's buffer
  const uint64_t* mask = nullptr;
  uint64_t* before = nullptr;  // hooked role: the mask of the last step that was no skip
  size_t masked = 0;           // bits of the mask
  uint16_t* ages = nullptr;    // of the masked elements, once they are gathered
};

// What the data brought about so far; on a device, as far as it is known.
struct Counters {
  uint64_t skipped_steps = 0;
  uint64_t nonfinite_values = 0;  // met off the mask, and cleared
  uint64_t mask_overlap = 0;      // of the last count_overlap()
};

class Engine : public MemorySpace {
 public:
  // ---- elements ----
  virtual void to_float(Stream stream, kernels::Type type, const void* in, float* out,
                        size_t n) = 0;
  // out[j] = in[j] + out[j]
  virtual void add(Stream stream, const float* in, float* out, size_t n) = 0;

  // ---- step 1 ----
  // u of all elements to the residual, of the masked ones to payload. send: what the caller hands
  // to the all-reduce; null where u is the residual already.
  virtual void pack(const StepView& step, const void* send, float* payload) = 0;
  // Of the n elements the masked ones' ages at step t.
  virtual void gather_ages(Stream stream, const uint64_t* mask, size_t n, const uint16_t* last,
                           uint16_t t, uint16_t* ages) = 0;

  // ---- codecs: the masked values, and the flag behind them (plugin/masked/payload_codec.h) ----
  // Both encodings lower the flag again.
  virtual void encode_fp32(const StepView& step, float* payload) = 0;
  virtual void encode_bf16(const StepView& step, const float* payload, uint16_t* wire,
                           float* error) = 0;
  virtual void decode_bf16(const StepView& step, const uint16_t* wire, float* payload) = 0;

  // ---- the verdict, and what it decides ----
  // The step is a skip when any of the n values is not finite. Holds until the next one.
  virtual void judge(Stream stream, kernels::Type type, const void* values, size_t n) = 0;
  // After an exchange of the caller's own elements. Taken: m follows what is in recv, ages being 1;
  // a residual that only kept u for a skip is cleared. Skipped: the residual is u where that is
  // finite. unkept: u, where the residual has not got it; null where it has. recv: null in the
  // fused role, whose adams_step() does the rest.
  virtual void finish_direct(const StepView& step, const void* unkept, const void* recv) = 0;
  // After an exchange of the payload. Taken: m and recv as the role says, and clear_sent().
  // Skipped: the residual keeps u where that is finite, recv gets NaN on the mask. recv: null in
  // the fused role, where a step that is taken waits for adams_step() and clear_sent().
  virtual void finish_packed(const StepView& step, const float* reduced, const float* error,
                             void* recv) = 0;
  // Nothing in a skip. reduced: the mean of u.
  virtual void adams_step(const StepView& step, const float* reduced, float* param) = 0;
  // The residual's masked elements get the rounding errors of what was sent, 0 where error is null.
  // Nothing in a skip.
  virtual void clear_sent(const StepView& step, const float* error) = 0;
  // Of elements offset .. offset + length; `before` and `param` begin with the first of them.
  // Nothing in a skip.
  virtual void post_step(const StepView& step, size_t offset, size_t length, const float* before,
                         float* param, float decay, float age_cap) = 0;

  // ---- step 6 ----
  virtual void restamp(const StepView& step, size_t begin, size_t end) = 0;
  // Scores of the partition. Residuals in it that are not finite become 0, are counted, and raise
  // the flag.
  virtual void score(const StepView& step, const Partition& part, float scale, float* scores) = 0;
  // The k largest of n scores, as a mask and as its code (plugin/masked/mask_code.h).
  virtual void choose(Stream stream, const float* scores, size_t n, size_t k, uint64_t* mask,
                      std::byte* code) = 0;
  // From the codes of all parts, which begin `stride` bytes apart, the mask of all elements.
  // Returns the index of a part whose code is damaged, in this call or an earlier one, once that is
  // known; else -1. A mask that is used until then has the right number of bits all the same.
  virtual int take_masks(Stream stream, std::span<const Partition> parts,
                         std::span<const size_t> bits, const std::byte* codes, size_t stride,
                         uint64_t* mask) = 0;

  // ---- masks of n elements ----
  virtual void set_all_bits(Stream stream, uint64_t* mask, size_t n) = 0;
  virtual void count_overlap(Stream stream, const uint64_t* a, const uint64_t* b, size_t n) = 0;

  // ---- what the host gets to know ----
  // Whether the last verdict may have been a skip. Decides how later steps travel, so it must
  // never depend on timing: exact, or always true.
  virtual bool may_have_skipped() const = 0;
  // The largest of the ages; where the host would have to wait for it, `bound`, which none exceeds.
  virtual uint16_t oldest_age(Stream stream, const uint16_t* ages, size_t n, uint16_t bound) = 0;
  virtual Counters counters() const = 0;
  // For saved state; waits.
  virtual bool flag(Stream stream) = 0;
  // As after a step that was taken, with the flag as it was saved.
  virtual void restore(Stream stream, bool flag) = 0;

  // ---- around it all ----
  // A call of the buffer's owner is over: its stream may be gone before the next one.
  virtual void end_call(Stream stream) = 0;
  // What ended it, if anything did.
  virtual Status failure() const = 0;
};

}  // namespace scape::plugin
