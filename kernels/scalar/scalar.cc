// The reference backend: every operation as plainly as it can be said. It is the specification that
// the other backends are tested against, bit for bit.
#include "kernels/scalar/element.h"

namespace scape::kernels {
namespace {

void to_float(Type type, const void* in, float* out, size_t n) {
  if (n == 0) return;
  if (type == Type::kFloat32) {
    std::memcpy(out, in, n * sizeof(float));  // keeps every bit of a NaN
    return;
  }
  for (size_t j = 0; j < n; ++j) out[j] = load(type, in, j);
}

void from_float(Type type, const float* in, void* out, size_t n) {
  if (n == 0) return;
  if (type == Type::kFloat32) {
    std::memcpy(out, in, n * sizeof(float));
    return;
  }
  for (size_t j = 0; j < n; ++j) store(type, out, j, in[j]);
}

// ---- pack ----

size_t gather_ages(const uint64_t* mask, size_t n, const uint16_t* last, uint16_t t,
                   uint16_t* ages) {
  return for_each_masked(mask, n, [&](size_t j) { *ages++ = age_of(last[j], t); });
}

size_t gather(const float* values, const uint64_t* mask, size_t n, float* payload) {
  return for_each_masked(mask, n, [&](size_t j) { *payload++ = values[j]; });
}

size_t accumulate_pack(Type type, const void* gradient, float* residual, const uint64_t* mask,
                       size_t n, float* payload) {
  for (size_t j = 0; j < n; ++j) residual[j] += load(type, gradient, j);
  return gather(residual, mask, n, payload);
}

size_t accumulate_pack_moment(Type type, const void* x, const float* m, float beta1,
                              float* residual, const uint64_t* mask, size_t n, float* payload) {
  for (size_t j = 0; j < n; ++j) residual[j] += gradient_of_moment(load(type, x, j), m[j], beta1);
  return gather(residual, mask, n, payload);
}

size_t scatter(const float* payload, const uint64_t* mask, size_t n, float* values) {
  return for_each_masked(mask, n, [&](size_t j) { values[j] = *payload++; });
}

void clear_masked(float* values, const uint64_t* mask, size_t n) {
  for_each_masked(mask, n, [&](size_t j) { values[j] = 0.0f; });
}

size_t clear_masked_nonfinite(float* values, const uint64_t* mask, size_t n) {
  size_t cleared = 0;
  for_each_masked(mask, n, [&](size_t j) {
    if (is_finite(values[j])) return;
    values[j] = 0.0f;
    ++cleared;
  });
  return cleared;
}

// ---- codec ----

void encode_bf16(const float* u, const uint16_t* ages, size_t k, const StepParams& params,
                 uint16_t* encoded, float* error) {
  for (size_t i = 0; i < k; ++i) {
    encode_bf16_element(u[i], counted_age(ages[i], params), params.powers, &encoded[i], &error[i]);
  }
}

void decode_bf16(const uint16_t* encoded, const uint16_t* ages, size_t k, const StepParams& params,
                 float* u) {
  for (size_t i = 0; i < k; ++i) {
    u[i] = decode_bf16_element(encoded[i], counted_age(ages[i], params), params.powers);
  }
}

bool any_nonfinite(const float* values, size_t n) {
  return !std::all_of(values, values + n, is_finite);
}

// ---- steps ----

void adams_step(const float* payload, const uint64_t* mask, size_t n, const StepParams& params,
                float* m, uint16_t* last, float* param) {
  for_each_masked(mask, n, [&](size_t j) {
    const uint16_t age = counted_age(age_of(last[j], params.t), params);
    adams_element(*payload++, age, params, &m[j], &param[j]);
    last[j] = params.t;
  });
}

void moment_step(const float* payload, const uint64_t* mask, size_t n, const StepParams& params,
                 float* m, uint16_t* last) {
  for_each_masked(mask, n, [&](size_t j) {
    const uint16_t age = counted_age(age_of(last[j], params.t), params);
    m[j] = moment_element(*payload++, m[j], age, params.powers).moment;
    last[j] = params.t;
  });
}

void hooked_step(const float* payload, const uint64_t* mask, const uint64_t* before, size_t n,
                 const StepParams& params, Type type, void* out, float* m, uint16_t* last) {
  const float factor = leaving_factor(params.beta1);
  for (size_t j = 0; j < n; ++j) {
    if (is_masked(mask, j)) {
      const uint16_t age = counted_age(age_of(last[j], params.t), params);
      const float gradient = *payload++ / static_cast<float>(age);
      store(type, out, j, gradient);
      m[j] = params.beta1 * m[j] + (1.0f - params.beta1) * gradient;
      last[j] = params.t;
    } else if (is_masked(before, j)) {
      store(type, out, j, factor * m[j]);
      m[j] = 0.0f;
    } else {
      store(type, out, j, 0.0f);
    }
  }
}

void expand(Type type, const float* payload, const uint64_t* mask, size_t n, void* out) {
  for (size_t j = 0; j < n; ++j) store(type, out, j, is_masked(mask, j) ? *payload++ : 0.0f);
}

void post_step(const float* before, const uint64_t* mask, const uint16_t* ages, size_t n,
               float decay, float age_cap, float* param) {
  for (size_t j = 0; j < n; ++j) {
    param[j] = is_masked(mask, j) ? post_step_element(before[j], *ages++, decay, age_cap, param[j])
                                  : before[j] * decay;
  }
}

// ---- score and select ----

size_t score(const float* m, const uint16_t* last, float* residual, size_t n,
             const StepParams& params, float scale, float* out) {
  const uint16_t next = static_cast<uint16_t>(params.t + 1);
  size_t cleared = 0;
  for (size_t j = 0; j < n; ++j) {
    if (!is_finite(residual[j])) {
      residual[j] = 0.0f;
      ++cleared;
    }
    const uint16_t age = counted_age(age_of(last[j], next), params);
    out[j] = score_element(m[j], residual[j], age, params.powers, scale);
  }
  return cleared;
}

// The threshold is found digit by digit: among the keys that share the digits known so far, a
// histogram of the next one says in which bucket the k-th largest lies.
float select(const float* scores, size_t n, size_t k, uint64_t* mask, void* scratch) {
  std::fill_n(mask, mask_words(n), uint64_t{0});
  k = std::min(k, n);
  if (k == 0) return 0.0f;
  auto* histogram = static_cast<uint64_t*>(scratch);
  uint32_t threshold = 0;
  size_t rank = k;  // the threshold is the rank-th largest of the keys that share its known digits
  int known = 31;   // bits of the key from here up are known
  for (const int bits : {11, 10, 10}) {
    const int shift = known - bits;
    std::fill_n(histogram, size_t{1} << bits, uint64_t{0});
    for (size_t j = 0; j < n; ++j) {
      const uint32_t key = score_key(scores[j]);
      if (uint64_t{key} >> known != uint64_t{threshold} >> known) continue;
      ++histogram[(key >> shift) & ((1u << bits) - 1)];
    }
    uint32_t digit = (1u << bits) - 1;
    for (; rank > histogram[digit]; --digit) rank -= histogram[digit];
    threshold |= digit << shift;
    known = shift;
  }
  size_t ties = rank;  // how many of those equal to the threshold are taken
  for (size_t j = 0; j < n; ++j) {
    const uint32_t key = score_key(scores[j]);
    if (key < threshold) continue;
    if (key == threshold && ties == 0) continue;
    if (key == threshold) --ties;
    mask[j / 64] |= uint64_t{1} << (j % 64);
  }
  return float_of(threshold);
}

// ---- masks ----

size_t count_bits(const uint64_t* mask, size_t words) {
  size_t count = 0;
  for (size_t w = 0; w < words; ++w) count += static_cast<size_t>(std::popcount(mask[w]));
  return count;
}

size_t count_common_bits(const uint64_t* a, const uint64_t* b, size_t words) {
  size_t count = 0;
  for (size_t w = 0; w < words; ++w) count += static_cast<size_t>(std::popcount(a[w] & b[w]));
  return count;
}

// Codes are unaligned and little-endian, as every machine that Scape runs on.
static_assert(std::endian::native == std::endian::little);

size_t encode_offsets(const uint64_t* mask, size_t n, void* out) {
  const size_t blocks = n / kOffsetBlock + (n % kOffsetBlock != 0);
  auto* counts = static_cast<unsigned char*>(out);
  auto* offsets = counts + blocks * sizeof(uint32_t);
  for (size_t b = 0; b < blocks; ++b) {
    const size_t begin = b * kOffsetBlock;
    const size_t size = std::min(kOffsetBlock, n - begin);
    const auto count =
        static_cast<uint32_t>(for_each_masked(mask + begin / 64, size, [&](size_t j) {
          const auto offset = static_cast<uint16_t>(j);
          std::memcpy(offsets, &offset, sizeof(offset));
          offsets += sizeof(offset);
        }));
    std::memcpy(counts + b * sizeof(count), &count, sizeof(count));
  }
  return static_cast<size_t>(offsets - counts);
}

bool decode_offsets(const void* in, size_t bytes, size_t n, size_t k, uint64_t* mask) {
  if (k > n || bytes != offset_code_bytes(n, k)) return false;
  std::fill_n(mask, mask_words(n), uint64_t{0});
  const size_t blocks = n / kOffsetBlock + (n % kOffsetBlock != 0);
  const auto* counts = static_cast<const unsigned char*>(in);
  const auto* offsets = counts + blocks * sizeof(uint32_t);
  size_t left = k;
  for (size_t b = 0; b < blocks; ++b) {
    const size_t begin = b * kOffsetBlock;
    const size_t size = std::min(kOffsetBlock, n - begin);
    uint32_t count;
    std::memcpy(&count, counts + b * sizeof(count), sizeof(count));
    if (count > left) return false;
    left -= count;
    int64_t previous = -1;
    for (; count > 0; --count, offsets += sizeof(uint16_t)) {
      uint16_t offset;
      std::memcpy(&offset, offsets, sizeof(offset));
      if (offset <= previous || offset >= size) return false;
      previous = offset;
      mask[(begin + offset) / 64] |= uint64_t{1} << (offset % 64);
    }
  }
  return left == 0;
}

void restamp(uint16_t* last, size_t n, uint16_t t) {
  for (size_t j = 0; j < n; ++j) last[j] = restamped(last[j], t);
}

}  // namespace

const Ops& scalar_ops() {
  static constexpr Ops kOps = {
      .name = "scalar",
      .to_float = to_float,
      .from_float = from_float,
      .accumulate_pack = accumulate_pack,
      .accumulate_pack_moment = accumulate_pack_moment,
      .gather = gather,
      .scatter = scatter,
      .clear_masked = clear_masked,
      .clear_masked_nonfinite = clear_masked_nonfinite,
      .gather_ages = gather_ages,
      .encode_bf16 = encode_bf16,
      .decode_bf16 = decode_bf16,
      .any_nonfinite = any_nonfinite,
      .adams_step = adams_step,
      .moment_step = moment_step,
      .hooked_step = hooked_step,
      .expand = expand,
      .post_step = post_step,
      .score = score,
      .select = select,
      .count_bits = count_bits,
      .count_common_bits = count_common_bits,
      .encode_offsets = encode_offsets,
      .decode_offsets = decode_offsets,
      .restamp = restamp,
  };
  return kOps;
}

}  // namespace scape::kernels
