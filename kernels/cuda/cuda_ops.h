// The operations of kernels/kernels.h on a CUDA device: the same bits, in the order of a stream.
//
// Every function enqueues its work on `stream` and returns; none waits for the device, allocates,
// or keeps anything between calls, so all may be captured into a graph and called from any thread.
// All pointers are device memory that the caller owns and keeps until the work is done; those in
// StepParams too. Addresses need their element's alignment only; 16-byte aligned ones are faster.
// Nothing outside the named elements is read or written. Arrays do not overlap unless said. n <
// 2^33 + 1; sizes are in elements unless said. Errors are of the launch; what happens on the device
// is in device memory.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "base/status.h"
#include "kernels/kernels.h"

namespace scape::kernels::cuda {

// What an exchange brought. `skipped` is not 0 where any of it was not finite. Functions that act
// after the exchange take the skipped branch of docs/masked-collective.md by themselves; null says
// that there is nothing to skip.
struct Verdict {
  uint32_t skipped;
};

// Non-finite values that the score has cleared off the mask. The next packed payload takes the flag
// element's value from it and lowers it. All zero at first.
struct NonfiniteFlag {
  unsigned long long cleared;  // in all calls so far
  uint32_t raised;
};

// A mask and its index, which index_mask() makes once a mask.
struct MaskView {
  const uint64_t* words = nullptr;
  const uint64_t* index = nullptr;
  size_t n = 0;
};

// Where a decoder says that it refused a code: `*word` gets `code` (not 0) if it is still 0.
struct Refusal {
  uint32_t* word = nullptr;
  uint32_t code = 1;
};

// ---- masks ----

// The index of a mask of n elements: before each run of 2048 elements, how many bits are set, then
// the total (at mask_index_runs(n)); what follows is scratch of index_mask(). Aligned to 8 bytes.
size_t mask_index_bytes(size_t n);
inline size_t mask_index_runs(size_t n) { return n / 2048 + (n % 2048 != 0); }
Status index_mask(cudaStream_t stream, const uint64_t* words, size_t n, uint64_t* index);

// to = from, n elements' words; not after a skipped step.
Status copy_mask(cudaStream_t stream, const uint64_t* from, size_t n, uint64_t* to,
                 const Verdict* verdict);

// *count = bits set in both.
Status count_common_bits(cudaStream_t stream, const uint64_t* a, const uint64_t* b, size_t words,
                         unsigned long long* count);

// The codes of plugin/masked/mask_code.h: 16-bit offsets, and raw words. `out` and `in` are aligned
// to 2 bytes; offset_code_bytes(n, k) or 8 * mask_words(n) bytes of them are used. A code that is
// not one of exactly k bits is refused, and the mask is unspecified then.
Status encode_offsets(cudaStream_t stream, const MaskView& mask, void* out);
Status encode_words(cudaStream_t stream, const uint64_t* words, size_t n, void* out);
// scratch: decode_scratch_bytes(n), aligned to 8.
size_t decode_scratch_bytes(size_t n);
Status decode_offsets(cudaStream_t stream, const void* in, size_t n, size_t k, uint64_t* words,
                      void* scratch, const Refusal& refusal);
Status decode_words(cudaStream_t stream, const void* in, size_t n, size_t k, uint64_t* words,
                    void* scratch, const Refusal& refusal);

// A mask in parts of `size` elements, a multiple of 64, of which the last may be shorter, and how
// many bits each has.
struct MaskParts {
  size_t size = 0;
  size_t bits = 0;
  size_t last_bits = 0;  // of the shorter one
};
// Where *refused is not 0: the mask gets the lowest bits of each part, so that whoever uses it
// before the refusal is known finds no more bits than were agreed, and none beyond the end.
Status replace_refused(cudaStream_t stream, uint64_t* words, size_t n, const MaskParts& parts,
                       const uint32_t* refused);

// ---- conversion ----

Status to_float(cudaStream_t stream, Type type, const void* in, float* out, size_t n);
Status from_float(cudaStream_t stream, Type type, const float* in, void* out, size_t n);

// out[j] = in[j] + out[j]
Status add(cudaStream_t stream, const float* in, float* out, size_t n);

// ---- pack ----
// `flag`, where it is not null, makes the element behind the payload: NaN where it was raised, else
// 0.

Status accumulate_pack(cudaStream_t stream, Type type, const void* gradient, float* residual,
                       const MaskView& mask, float* payload, NonfiniteFlag* flag);
// The m that is subtracted is rounded to the buffer's type, as the caller got it.
Status accumulate_pack_moment(cudaStream_t stream, Type type, const void* x, const float* m,
                              float beta1, float* residual, const MaskView& mask, float* payload,
                              NonfiniteFlag* flag);
// Touches the masked elements only.
Status gather(cudaStream_t stream, const float* values, const MaskView& mask, float* payload,
              NonfiniteFlag* flag);
Status gather_ages(cudaStream_t stream, const MaskView& mask, const uint16_t* last, uint16_t t,
                   uint16_t* ages);

// *element is what `flag` makes of it.
Status put_flag(cudaStream_t stream, NonfiniteFlag* flag, float* element);
// k elements of bf16, and with `flag` one more.
Status encode_bf16(cudaStream_t stream, const float* u, const uint16_t* ages, size_t k,
                   const StepParams& params, uint16_t* encoded, float* error, NonfiniteFlag* flag);

// ---- after the exchange ----

// The verdict over values[0 .. n), the flag element among them.
Status any_nonfinite(cudaStream_t stream, Type type, const void* values, size_t n,
                     Verdict* verdict);
// Decodes k elements, and makes the verdict over them and encoded[k], the flag element.
Status decode_bf16(cudaStream_t stream, const uint16_t* encoded, const uint16_t* ages, size_t k,
                   const StepParams& params, float* u, Verdict* verdict);

// Adds 1 to *skips after a skipped step.
Status count_skip(cudaStream_t stream, const Verdict* verdict, unsigned long long* skips);

// Residuals of what was sent: 0, or `payload` (rounding errors). Skipped: the value stays where it
// is finite, and is 0 where not.
Status clear_masked(cudaStream_t stream, float* values, const MaskView& mask,
                    const Verdict* verdict);
Status scatter(cudaStream_t stream, const float* payload, const MaskView& mask, float* values,
               const Verdict* verdict);
// Adds to *cleared, unless null, how many were not finite.
Status clear_masked_nonfinite(cudaStream_t stream, float* values, const MaskView& mask,
                              unsigned long long* cleared);

// Skipped: nothing changes. The payload of moment_step() may be of any type.
Status adams_step(cudaStream_t stream, const float* payload, const MaskView& mask,
                  const StepParams& params, float* m, uint16_t* last, float* param,
                  const Verdict* verdict);
Status moment_step(cudaStream_t stream, Type type, const void* payload, const MaskView& mask,
                   const StepParams& params, float* m, uint16_t* last, const Verdict* verdict);
// First-moment role: out[j] = m[j]. Skipped: NaN on the mask.
Status moment_output(cudaStream_t stream, Type type, const float* m, const MaskView& mask,
                     void* out, const Verdict* verdict);
// Skipped: out is NaN on the mask, 0 off it, and nothing else changes.
Status hooked_step(cudaStream_t stream, const float* payload, const MaskView& mask,
                   const uint64_t* before, const StepParams& params, Type type, void* out, float* m,
                   uint16_t* last, const Verdict* verdict);
// Skipped: out is NaN on the mask, 0 off it.
Status expand(cudaStream_t stream, Type type, const float* payload, const MaskView& mask, void* out,
              const Verdict* verdict);
// Of the buffer's elements begin .. begin + length; before and param point at element `begin`, ages
// at those of the whole mask. Skipped: nothing changes.
Status post_step(cudaStream_t stream, const float* before, const MaskView& mask,
                 const uint16_t* ages, size_t begin, size_t length, float decay, float age_cap,
                 float* param, const Verdict* verdict);

// ---- score and select ----

// `home`: where residuals that are not finite are cleared: `residual` itself, or what it is a copy
// of.
Status score(cudaStream_t stream, const float* m, const uint16_t* last, const float* residual,
             float* home, size_t n, const StepParams& params, float scale, float* out,
             NonfiniteFlag* flag);

// Sets exactly k bits of the mask. *threshold holds a guess, the k-th largest score of a similar
// selection (0: none), which saves time where it is near and never changes the result; it gets the
// k-th largest score. scratch: select_scratch_bytes(n), aligned to 8.
size_t select_scratch_bytes(size_t n);
Status select(cudaStream_t stream, const float* scores, size_t n, size_t k, uint64_t* words,
              float* threshold, void* scratch);

Status restamp(cudaStream_t stream, uint16_t* last, size_t n, uint16_t t);

// ---- words that the host writes ----
// They are in page-locked memory, where the device reads them; 0 says that the host is not there
// yet.

// What the stream gets from now on waits for the word: for devices whose streams cannot wait for
// memory by themselves. A thread of the device looks again and again until then.
Status wait_for_word(cudaStream_t stream, const uint32_t* word);
// Where the word is `bad`, all bytes of data become 0xff: a not-a-number in every type of a float.
Status poison_where(cudaStream_t stream, const uint32_t* word, uint32_t bad, void* data,
                    size_t bytes);

}  // namespace scape::kernels::cuda
