#include "plugin/masked/host_engine.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>
#include <new>
#include <utility>
#include <vector>

#include "base/big_vector.h"
#include "plugin/masked/mask_code.h"

namespace scape::plugin {
namespace {

using kernels::Type;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// Elements converted at once where a whole converted copy would be wasteful; a multiple of 64.
constexpr size_t kChunk = 4096;

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

}  // namespace

// ---- memory ----

void* HostEngine::allocate(size_t bytes, Home) {
  try {
    return BigAllocator<std::byte>().allocate(bytes);
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}

void HostEngine::release(void* memory, size_t bytes) {
  BigAllocator<std::byte>().deallocate(static_cast<std::byte*>(memory), bytes);
}

void HostEngine::set(Stream, void* memory, std::byte value, size_t bytes) {
  if (bytes > 0) std::memset(memory, static_cast<int>(value), bytes);
}

void HostEngine::copy_in(Stream, void* memory, const void* host, size_t bytes) {
  if (bytes > 0) std::memcpy(memory, host, bytes);
}

void HostEngine::copy_out(Stream, void* host, const void* memory, size_t bytes) {
  if (bytes > 0) std::memcpy(host, memory, bytes);
}

// ---- elements ----

void HostEngine::to_float(Stream, Type type, const void* in, float* out, size_t n) {
  ops_.to_float(type, in, out, n);
}

void HostEngine::add(Stream, const float* in, float* out, size_t n) {
  for (size_t j = 0; j < n; ++j) out[j] = in[j] + out[j];
}

// ---- step 1 ----

void HostEngine::pack(const StepView& step, const void* send, float* payload) {
  if (send == nullptr) {
    ops_.gather(step.residual, step.mask, step.count, payload);
    return;
  }
  if (step.role != SCAPE_ROLE_FIRST_MOMENT) {
    ops_.accumulate_pack(step.type, send, step.residual, step.mask, step.count, payload);
    return;
  }
  if (step.type == Type::kFloat32) {
    ops_.accumulate_pack_moment(step.type, send, step.moment, step.params.beta1, step.residual,
                                step.mask, step.count, payload);
    return;
  }
  // What the caller put into x is m as it was returned: rounded to the buffer's type.
  size_t packed = 0;
  std::array<float, kChunk> returned;
  std::array<uint16_t, kChunk> narrow;
  for_each_chunk(step.count, [&](size_t begin, size_t size) {
    ops_.from_float(step.type, step.moment + begin, narrow.data(), size);
    ops_.to_float(step.type, narrow.data(), returned.data(), size);
    packed += ops_.accumulate_pack_moment(step.type, at(send, step.type, begin), returned.data(),
                                          step.params.beta1, step.residual + begin,
                                          step.mask + begin / 64, size, payload + packed);
  });
}

void HostEngine::gather_ages(Stream, const uint64_t* mask, size_t n, const uint16_t* last,
                             uint16_t t, uint16_t* ages) {
  ops_.gather_ages(mask, n, last, t, ages);
}

// ---- codecs ----

float HostEngine::take_flag() { return std::exchange(flag_, false) ? kNan : 0.0f; }

void HostEngine::encode_fp32(const StepView& step, float* payload) {
  payload[step.masked] = take_flag();
}

void HostEngine::encode_bf16(const StepView& step, const float* payload, uint16_t* wire,
                             float* error) {
  ops_.encode_bf16(payload, step.ages, step.masked, step.params, wire, error);
  const float flag = take_flag();
  ops_.from_float(Type::kBfloat16, &flag, wire + step.masked, 1);
}

void HostEngine::decode_bf16(const StepView& step, const uint16_t* wire, float* payload) {
  ops_.decode_bf16(wire, step.ages, step.masked, step.params, payload);
  ops_.to_float(Type::kBfloat16, wire + step.masked, payload + step.masked, 1);
}

// ---- the verdict, and what it decides ----

bool HostEngine::any_nonfinite(Type type, const void* values, size_t n) const {
  if (type == Type::kFloat32) return ops_.any_nonfinite(static_cast<const float*>(values), n);
  bool found = false;
  std::array<float, kChunk> chunk;
  for_each_chunk(n, [&](size_t begin, size_t size) {
    ops_.to_float(type, at(values, type, begin), chunk.data(), size);
    found = found || ops_.any_nonfinite(chunk.data(), size);
  });
  return found;
}

void HostEngine::judge(Stream, Type type, const void* values, size_t n) {
  skipped_ = any_nonfinite(type, values, n);
  if (skipped_) skipped_steps_.fetch_add(1, std::memory_order_relaxed);
}

void HostEngine::finish_direct(const StepView& step, const void* unkept, const void* recv) {
  if (skipped_) {
    if (unkept != nullptr) ops_.to_float(step.type, unkept, step.residual, step.count);
    ops_.clear_masked_nonfinite(step.residual, step.mask, step.count);
    return;
  }
  if (recv == nullptr) return;
  std::array<float, kChunk> chunk;
  for_each_chunk(step.count, [&](size_t begin, size_t size) {
    ops_.to_float(step.type, at(recv, step.type, begin), chunk.data(), size);
    ops_.moment_step(chunk.data(), step.mask + begin / 64, size, step.params, step.moment + begin,
                     step.last + begin);
  });
  if (step.role == SCAPE_ROLE_GRADIENT_HOOKED)
    std::copy_n(step.mask, kernels::mask_words(step.count), step.before);
  if (unkept == nullptr) std::fill_n(step.residual, step.count, 0.0f);
}

void HostEngine::finish_packed(const StepView& step, const float* reduced, const float* error,
                               void* recv) {
  // Off the mask the next scoring sees to what is not finite.
  if (skipped_) ops_.clear_masked_nonfinite(step.residual, step.mask, step.count);
  if (recv == nullptr) return;
  if (skipped_) {
    write_skipped_output(step, recv);
  } else {
    write_output(step, reduced, recv);
    clear_sent(step, error);
  }
}

void HostEngine::write_output(const StepView& step, const float* reduced, void* recv) {
  switch (step.role) {
    case SCAPE_ROLE_FIRST_MOMENT:
      ops_.moment_step(reduced, step.mask, step.count, step.params, step.moment, step.last);
      ops_.from_float(step.type, step.moment, recv, step.count);
      break;
    case SCAPE_ROLE_GRADIENT_HOOKED:
      ops_.hooked_step(reduced, step.mask, step.before, step.count, step.params, step.type, recv,
                       step.moment, step.last);
      std::copy_n(step.mask, kernels::mask_words(step.count), step.before);
      break;
    case SCAPE_ROLE_GRADIENT:
      ops_.moment_step(reduced, step.mask, step.count, step.params, step.moment, step.last);
      ops_.expand(step.type, reduced, step.mask, step.count, recv);
      break;
    case SCAPE_ROLE_FUSED:
      break;
  }
}

// Every masked element is NaN: none of a skipped step's values may be used.
void HostEngine::write_skipped_output(const StepView& step, void* recv) {
  std::array<float, kChunk> nothing, chunk;
  nothing.fill(kNan);
  for_each_chunk(step.count, [&](size_t begin, size_t size) {
    const uint64_t* const mask = step.mask + begin / 64;
    std::byte* const out = at(recv, step.type, begin);
    if (step.role == SCAPE_ROLE_FIRST_MOMENT) {
      std::copy_n(step.moment + begin, size, chunk.data());
      ops_.scatter(nothing.data(), mask, size, chunk.data());
      ops_.from_float(step.type, chunk.data(), out, size);
    } else {
      ops_.expand(step.type, nothing.data(), mask, size, out);
    }
  });
}

void HostEngine::adams_step(const StepView& step, const float* reduced, float* param) {
  if (skipped_) return;
  ops_.adams_step(reduced, step.mask, step.count, step.params, step.moment, step.last, param);
}

void HostEngine::clear_sent(const StepView& step, const float* error) {
  if (skipped_) return;
  if (error != nullptr) {
    ops_.scatter(error, step.mask, step.count, step.residual);
  } else {
    ops_.clear_masked(step.residual, step.mask, step.count);
  }
}

void HostEngine::post_step(const StepView& step, size_t offset, size_t length, const float* before,
                           float* param, float decay, float age_cap) {
  if (skipped_) return;
  // The kernel wants masks that begin at a word: the mask of these elements, moved there.
  const uint64_t* const mask = step.mask;
  const size_t words = kernels::mask_words(step.count);
  const size_t word = offset / 64, shift = offset % 64;
  size_t first_age = ops_.count_bits(mask, word);
  if (shift != 0) {
    const uint64_t low = mask[word] & ((uint64_t{1} << shift) - 1);
    first_age += ops_.count_bits(&low, 1);
  }
  std::vector<uint64_t> moved(kernels::mask_words(length));
  for (size_t w = 0; w < moved.size(); ++w) {
    moved[w] = mask[word + w] >> shift;
    if (shift != 0 && word + w + 1 < words) moved[w] |= mask[word + w + 1] << (64 - shift);
  }
  if (length % 64 != 0) moved.back() &= (uint64_t{1} << (length % 64)) - 1;
  ops_.post_step(before, moved.data(), step.ages + first_age, length, decay, age_cap, param);
}

// ---- step 6 ----

void HostEngine::restamp(const StepView& step, size_t begin, size_t end) {
  ops_.restamp(step.last + begin, end - begin, step.params.t);
}

void HostEngine::score(const StepView& step, const Partition& part, float scale, float* scores) {
  const size_t cleared =
      ops_.score(step.moment + part.begin, step.last + part.begin, step.residual + part.begin,
                 part.size(), step.params, scale, scores);
  flag_ = flag_ || cleared > 0;
  nonfinite_values_.fetch_add(cleared, std::memory_order_relaxed);
}

void HostEngine::choose(Stream, const float* scores, size_t n, size_t k, uint64_t* mask,
                        std::byte* code) {
  if (n == 0) return;
  const auto scratch = std::make_unique_for_overwrite<std::byte[]>(kernels::select_scratch_bytes());
  ops_.select(scores, n, k, mask, scratch.get());
  encode_mask(mask, n, k, code);
}

int HostEngine::take_masks(Stream, std::span<const Partition> parts, std::span<const size_t> bits,
                           const std::byte* codes, size_t stride, uint64_t* mask) {
  for (size_t i = 0; i < parts.size(); ++i) {
    uint64_t* const words = mask + parts[i].begin / 64;
    if (!decode_mask(codes + i * stride, parts[i].size(), bits[i], words))
      return static_cast<int>(i);
  }
  return -1;
}

// ---- masks ----

void HostEngine::set_all_bits(Stream, uint64_t* mask, size_t n) {
  std::fill_n(mask, n / 64, ~uint64_t{0});
  if (n % 64 != 0) mask[n / 64] = (uint64_t{1} << (n % 64)) - 1;
}

void HostEngine::count_overlap(Stream, const uint64_t* a, const uint64_t* b, size_t n) {
  mask_overlap_.store(ops_.count_common_bits(a, b, kernels::mask_words(n)),
                      std::memory_order_relaxed);
}

// ---- what the host gets to know ----

uint16_t HostEngine::oldest_age(Stream, const uint16_t* ages, size_t n, uint16_t) {
  return n == 0 ? uint16_t{1} : *std::max_element(ages, ages + n);
}

Counters HostEngine::counters() const {
  return {skipped_steps_.load(std::memory_order_relaxed),
          nonfinite_values_.load(std::memory_order_relaxed),
          mask_overlap_.load(std::memory_order_relaxed)};
}

bool HostEngine::flag(Stream) { return flag_; }

void HostEngine::restore(Stream, bool flag) {
  flag_ = flag;
  skipped_ = false;
}

std::shared_ptr<Engine> make_host_engine() { return std::make_shared<HostEngine>(); }

}  // namespace scape::plugin
