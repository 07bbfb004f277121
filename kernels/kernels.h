// Kernels: the seam between the algorithm and the machine. One table of functions per backend.
//
// Pure compute over memory; no allocation, no threads, no communication. The scalar table is the
// specification: every other backend gives the same bits (docs/algorithm.md, "Bit identity"): fp32
// arithmetic, IEEE division and square root, no fused multiply-add, denormals kept.
//
// Conventions. n: elements. Element types of caller buffers: fp32, bf16, fp16 (`Type`). mask: words
// of 64 bits, bit j % 64 of word j / 64 is element j, padding bits are 0; mask pointers, and the
// arrays that go with them, begin at a multiple of 64 elements. Masked values are packed in index
// order ("payload"). Any address that is aligned to its element is allowed. Arrays do not overlap
// unless said.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

namespace scape::kernels {

// Numbered as scape_dtype.
enum class Type : int { kFloat32 = 0, kBfloat16 = 1, kFloat16 = 2 };
inline size_t size_of(Type type) { return type == Type::kFloat32 ? 4 : 2; }

// Powers of beta1 that all ranks and backends share: pow[a] = float(beta1^a), made on the host by
// repeated products in double and rounded once, for ages 0 .. size - 1; beyond the end the last
// entry holds (beta1^a is 0 there in fp32, or the table reaches the largest age).
struct PowerTable {
  const float* pow = nullptr;
  uint32_t size = 0;
};
std::vector<float> make_power_table(double beta1);

// What the element-wise kernels need of step t. Ages are uint16 arithmetic: age = uint16(t - last).
struct StepParams {
  uint16_t t = 0;  // the step, modulo 2^16
  PowerTable powers;
  float beta1 = 0, beta2 = 0, eps = 0;
  float lr = 0;
  float age_cap = 100;
  bool plain = false;  // the plain rule: every age counts as 1
  // decay[a] = float of the product of (1 - lr_x * lambda) over the last a steps, for ages 0 ..
  // decay_size - 1 (the last entry holds beyond); null: no decay.
  const float* decay = nullptr;
  uint32_t decay_size = 0;
};

struct Ops {
  const char* name;  // "scalar", "baseline", "avx2", "avx512", "neon"

  // ---- conversion ----
  void (*to_float)(Type type, const void* in, float* out, size_t n);
  // Round to nearest even; NaN stays NaN, overflow becomes infinity.
  void (*from_float)(Type type, const float* in, void* out, size_t n);

  // ---- pack: step 1 and the gather of step 2 ----
  // residual[j] += gradient[j] for all j; payload gets the masked sums. Returns the number packed.
  size_t (*accumulate_pack)(Type type, const void* gradient, float* residual, const uint64_t* mask,
                            size_t n, float* payload);
  // The same for the first-moment role: gradient[j] = (x[j] - beta1 * m[j]) / (1 - beta1), in this
  // order.
  size_t (*accumulate_pack_moment)(Type type, const void* x, const float* m, float beta1,
                                   float* residual, const uint64_t* mask, size_t n, float* payload);
  // payload gets values[j] of the masked j.
  size_t (*gather)(const float* values, const uint64_t* mask, size_t n, float* payload);
  // values[j] of the masked j get payload.
  size_t (*scatter)(const float* payload, const uint64_t* mask, size_t n, float* values);
  // values[j] of the masked j get 0.
  void (*clear_masked)(float* values, const uint64_t* mask, size_t n);
  // values[j] of the masked j get 0 where they are not finite. Returns how many were not.
  size_t (*clear_masked_nonfinite)(float* values, const uint64_t* mask, size_t n);
  // ages get uint16(t - last[j]) of the masked j, in index order. Returns the number gathered.
  size_t (*gather_ages)(const uint64_t* mask, size_t n, const uint16_t* last, uint16_t t,
                        uint16_t* ages);

  // ---- codec bf16: what is sent is (1 - beta1^age) * u / age; the error, times age / (1 -
  // beta1^age), is the sender's new residual ----
  void (*encode_bf16)(const float* u, const uint16_t* ages, size_t k, const StepParams& params,
                      uint16_t* encoded, float* error);
  // Back to the mean of u: encoded * age / (1 - beta1^age).
  void (*decode_bf16)(const uint16_t* encoded, const uint16_t* ages, size_t k,
                      const StepParams& params, float* u);

  // True when any of values[0 .. n) is not finite.
  bool (*any_nonfinite)(const float* values, size_t n);

  // ---- steps 3 and 4 on the masked elements; payload holds the mean of u in index order ----
  // m, last and param are updated on the mask.
  void (*adams_step)(const float* payload, const uint64_t* mask, size_t n, const StepParams& params,
                     float* m, uint16_t* last, float* param);
  // m and last are updated on the mask (no parameter here: first-moment and gradient roles).
  void (*moment_step)(const float* payload, const uint64_t* mask, size_t n,
                      const StepParams& params, float* m, uint16_t* last);
  // Hooked gradient role. On the mask: out = g^ = payload / age, m = beta1 * m + (1 - beta1) * g^,
  // last = t. Off the mask: where `before` (the mask of the call before) has the element, out =
  // -beta1 / (1 - beta1) * m and m = 0; else out = 0.
  void (*hooked_step)(const float* payload, const uint64_t* mask, const uint64_t* before, size_t n,
                      const StepParams& params, Type type, void* out, float* m, uint16_t* last);
  // out[j] = payload on the mask, 0 off it.
  void (*expand)(Type type, const float* payload, const uint64_t* mask, size_t n, void* out);
  // Hooked role after the optimizer, with d = 1 - lr * weight decay. On the mask, where steps =
  // min(age, cap) is not 1: param = before * d + steps * (param - before * d); ages as gather_ages
  // gave them, in index order. Off the mask: param = before * d.
  void (*post_step)(const float* before, const uint64_t* mask, const uint16_t* ages, size_t n,
                    float decay, float age_cap, float* param);

  // ---- score: step 6 ----
  // out[j] = | a * beta1^a * m[j] + (1 - beta1^a) * (scale * residual[j]) |, a = the age the
  // element will have at params.t + 1; where it is not finite, 0. Non-finite residuals are set to 0
  // and counted; the count is returned.
  size_t (*score)(const float* m, const uint16_t* last, float* residual, size_t n,
                  const StepParams& params, float scale, float* out);

  // ---- select ----
  // Sets exactly k bits of mask: the k largest of scores[0 .. n) (finite, >= 0; +0 and -0 equal),
  // ties to the lower index. Any n; k <= n. scratch: select_scratch_bytes(), aligned to 8. Returns
  // the k-th largest score (0 when k is 0).
  float (*select)(const float* scores, size_t n, size_t k, uint64_t* mask, void* scratch);

  // ---- masks ----
  size_t (*count_bits)(const uint64_t* mask, size_t words);
  size_t (*count_common_bits)(const uint64_t* a, const uint64_t* b, size_t words);
  // 16-bit offsets inside blocks of 2^16 elements: for each block a uint32 count, then all offsets
  // in order. Sizes from offset_code_bytes(). Returns bytes written.
  size_t (*encode_offsets)(const uint64_t* mask, size_t n, void* out);
  // Returns false when the bytes are not such a code of exactly k bits; mask is then unspecified.
  bool (*decode_offsets)(const void* in, size_t bytes, size_t n, size_t k, uint64_t* mask);

  // last[j] of j in [0, n) older than 2^15 steps are re-stamped to that age.
  void (*restamp)(uint16_t* last, size_t n, uint16_t t);
};

inline constexpr size_t kOffsetBlock = size_t{1} << 16;
inline size_t mask_words(size_t n) { return n / 64 + (n % 64 != 0); }
inline size_t offset_code_bytes(size_t n, size_t k) {
  return (n / kOffsetBlock + (n % kOffsetBlock != 0)) * 4 + k * 2;
}
size_t select_scratch_bytes();

// The reference, and the specification.
const Ops& scalar_ops();

// Every backend that this CPU can run, best first; the scalar one is last. Thread-safe.
const std::vector<const Ops*>& available_ops();

// The backend that SCAPE_SIMD chose; by default the best, and the best also where the chosen one
// cannot run here, with one warning. Thread-safe.
const Ops& ops();

}  // namespace scape::kernels
