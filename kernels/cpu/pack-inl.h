// Conversion, packing and unpacking.
#if defined(SCAPE_KERNELS_CPU_PACK_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef SCAPE_KERNELS_CPU_PACK_INL_H_
#undef SCAPE_KERNELS_CPU_PACK_INL_H_
#else
#define SCAPE_KERNELS_CPU_PACK_INL_H_
#endif

#include "kernels/cpu/vec-inl.h"

HWY_BEFORE_NAMESPACE();
namespace scape::kernels::HWY_NAMESPACE {

void to_float(Type type, const void* in, float* out, size_t n) {
  if (type == Type::kFloat32) return scalar_ops().to_float(type, in, out, n);
  with_type(type, [&]<Type t>() {
    size_t j = 0;
    for (; j + kLanes <= n; j += kLanes) hn::StoreU(load_vec<t>(in, j), Floats(), out + j);
    for (; j < n; ++j) out[j] = load(t, in, j);
  });
}

void from_float(Type type, const float* in, void* out, size_t n) {
  if (type == Type::kFloat32) return scalar_ops().from_float(type, in, out, n);
  with_type(type, [&]<Type t>() {
    size_t j = 0;
    for (; j + kLanes <= n; j += kLanes) store_vec<t>(hn::LoadU(Floats(), in + j), out, j);
    for (; j < n; ++j) store(t, out, j, in[j]);
  });
}

// ---- packing ----

// How dense words are is judged for a run of them, since a branch on each word's count is hard to
// predict. From kCompress... set bits a word on, compressing vectors beats walking the bits: of
// values in memory, where a walk touches fewer cache lines, and of values just written, in the
// cache. Vectors of AVX-512 are compressed by an instruction, others through a table.
inline constexpr size_t kRun = 32;
#if HWY_TARGET == HWY_AVX3
inline constexpr size_t kCompressFromMemory = kRun;
inline constexpr size_t kCompressFromCache = kRun / 2;
#else
inline constexpr size_t kCompressFromMemory = 4 * kRun;
inline constexpr size_t kCompressFromCache = 3 * kRun;
#endif

// Set bits of kRun words, or in proportion.
HWY_INLINE size_t bits_of_run(const uint64_t* mask, size_t words) {
  size_t bits = 0;
  for (size_t w = 0; w < words; ++w) bits += static_cast<size_t>(std::popcount(mask[w]));
  return words == 0 ? 0 : bits * kRun / words;
}

// Words that may be packed with whole-vector stores, which write up to kLanes elements past the
// word's own: those after which at least kLanes masked elements follow.
HWY_INLINE size_t roomy_words(const uint64_t* mask, size_t words) {
  size_t following = 0;
  while (words > 0 && following < kLanes) {
    following += static_cast<size_t>(std::popcount(mask[--words]));
  }
  return following < kLanes ? 0 : words;
}

// The ages of kLanes elements whose bits are set, in order, first; writes kLanes of them and
// returns where the next ones go.
HWY_INLINE uint16_t* compress_ages(const uint16_t* last, uint64_t bits, uint16_t t,
                                   uint16_t* ages) {
  const Words d;
  const auto age = hn::And(hn::Sub(hn::Set(d, t), widen(last)), hn::Set(d, 0xffffu));
  narrow(hn::BitCast(d, compress(hn::BitCast(Floats(), age), bits)), ages);
  return ages + std::popcount(bits);
}

// The masked ones of values[0 .. 64), in order, first; writes up to kLanes elements more and
// returns where the next ones go. Compresses in registers and stores whole vectors: compressing
// stores to memory are microcoded on some CPUs.
HWY_INLINE float* compress_word(const float* values, uint64_t word, float* payload) {
  if (word == kFullWord) {
    std::memcpy(payload, values, 64 * sizeof(float));
    return payload + 64;
  }
  for (size_t i = 0; i < 64; i += kLanes) {
    const uint64_t bits = (word >> i) & kLaneBits;
    hn::StoreU(compress(hn::LoadU(Floats(), values + i), bits), Floats(), payload);
    payload += std::popcount(bits);
  }
  return payload;
}

// Visits masked elements of memory in order: those of dense words by dense(w), which may write a
// vector more than it has to and is called where there is room, others by single(j).
template <typename Dense, typename Single>
HWY_INLINE void gather_masked(const uint64_t* mask, size_t n, const Dense& dense,
                              const Single& single) {
  const size_t words = mask_words(n);
  const size_t roomy = roomy_words(mask, words);
  for (size_t w = 0; w < words;) {
    const size_t end = w < roomy ? std::min(w + kRun, roomy) : words;
    if (w < roomy && bits_of_run(mask + w, end - w) >= kCompressFromMemory) {
      for (; w < end; ++w) dense(w);
    } else {
      for (; w < end; ++w) for_each_bit(mask[w], w * 64, single);
    }
  }
}

size_t gather(const float* values, const uint64_t* mask, size_t n, float* payload) {
  float* out = payload;
  gather_masked(
      mask, n, [&](size_t w) HWY_ATTR { out = compress_word(values + w * 64, mask[w], out); },
      [&](size_t j) { *out++ = values[j]; });
  return static_cast<size_t>(out - payload);
}

size_t gather_ages(const uint64_t* mask, size_t n, const uint16_t* last, uint16_t t,
                   uint16_t* ages) {
  uint16_t* out = ages;
  gather_masked(
      mask, n,
      [&](size_t w) HWY_ATTR {
        for (size_t i = 0; i < 64; i += kLanes)
          out = compress_ages(last + w * 64 + i, (mask[w] >> i) & kLaneBits, t, out);
      },
      [&](size_t j) { *out++ = age_of(last[j], t); });
  return static_cast<size_t>(out - ages);
}

// residual[j] += addend(j) for all j, and packs the masked sums. `vector(j)` gives kLanes addends
// from j on, `single(j)` one.
template <typename Vector, typename Single>
HWY_INLINE size_t accumulate_and_pack(const Vector& vector, const Single& single, float* residual,
                                      const uint64_t* mask, size_t n, float* payload) {
  const Floats d;
  float* out = payload;
  const size_t words = mask_words(n);
  const size_t roomy = roomy_words(mask, words);
  const auto accumulate = [&](size_t w) HWY_ATTR {
    const size_t end = std::min(w * 64 + 64, n);
    size_t j = w * 64;
    for (; j + kLanes <= end; j += kLanes) {
      hn::StoreU(hn::Add(hn::LoadU(d, residual + j), vector(j)), d, residual + j);
    }
    for (; j < end; ++j) residual[j] += single(j);
  };
  for (size_t w = 0; w < words;) {
    const size_t end = w < roomy ? std::min(w + kRun, roomy) : words;
    if (w < roomy && bits_of_run(mask + w, end - w) >= kCompressFromCache) {
      for (; w < end; ++w) {
        accumulate(w);
        out = compress_word(residual + w * 64, mask[w], out);
      }
    } else {
      for (; w < end; ++w) {
        accumulate(w);
        for_each_bit(mask[w], w * 64, [&](size_t j) { *out++ = residual[j]; });
      }
    }
  }
  return static_cast<size_t>(out - payload);
}

size_t accumulate_pack(Type type, const void* gradient, float* residual, const uint64_t* mask,
                       size_t n, float* payload) {
  return with_type(type, [&]<Type t>() {
    return accumulate_and_pack([&](size_t j) HWY_ATTR { return load_vec<t>(gradient, j); },
                               [&](size_t j) HWY_ATTR { return load(t, gradient, j); }, residual,
                               mask, n, payload);
  });
}

size_t accumulate_pack_moment(Type type, const void* x, const float* m, float beta1,
                              float* residual, const uint64_t* mask, size_t n, float* payload) {
  const Floats d;
  const auto beta = hn::Set(d, beta1);
  const auto weight = hn::Set(d, 1.0f - beta1);
  return with_type(type, [&]<Type t>() {
    return accumulate_and_pack(
        [&](size_t j) HWY_ATTR {
          const auto held = hn::Mul(beta, hn::LoadU(d, m + j));
          return hn::Div(hn::Sub(load_vec<t>(x, j), held), weight);
        },
        [&](size_t j) HWY_ATTR { return gradient_of_moment(load(t, x, j), m[j], beta1); }, residual,
        mask, n, payload);
  });
}

// ---- back ----

size_t scatter(const float* payload, const uint64_t* mask, size_t n, float* values) {
  const float* const begin = payload;
  for (size_t w = 0; w < mask_words(n); ++w) {
    float* const out = values + w * 64;
    if (mask[w] == kFullWord) {
      std::memcpy(out, payload, 64 * sizeof(float));
      payload += 64;
    } else {
      for_each_bit(mask[w], 0, [&](size_t j) { out[j] = *payload++; });
    }
  }
  return static_cast<size_t>(payload - begin);
}

// From so many bits of a run on, storing blended vectors beats storing single elements.
inline constexpr size_t kBlend = 4 * kRun;

void clear_masked(float* values, const uint64_t* mask, size_t n) {
  const Floats d;
  const size_t words = mask_words(n);
  const size_t full_words = n / 64;
  for (size_t w = 0; w < words;) {
    const size_t end = w < full_words ? std::min(w + kRun, full_words) : words;
    if (w < full_words && bits_of_run(mask + w, end - w) >= kBlend) {
      for (; w < end; ++w) {
        for (size_t i = 0; i < 64; i += kLanes) {
          const auto masked = mask_of_bits((mask[w] >> i) & kLaneBits);
          hn::BlendedStore(hn::Zero(d), masked, d, values + w * 64 + i);
        }
      }
    } else {
      for (; w < end; ++w) for_each_bit(mask[w], w * 64, [&](size_t j) { values[j] = 0.0f; });
    }
  }
}

void expand(Type type, const float* payload, const uint64_t* mask, size_t n, void* out) {
  const size_t bytes = size_of(type);
  auto* const base = static_cast<unsigned char*>(out);
  for (size_t w = 0; w < mask_words(n); ++w) {
    void* const at = base + w * 64 * bytes;
    if (mask[w] == kFullWord) {
      from_float(type, payload, at, 64);
      payload += 64;
    } else {
      std::memset(at, 0, std::min<size_t>(64, n - w * 64) * bytes);
      for_each_bit(mask[w], 0, [&](size_t j) { store(type, at, j, *payload++); });
    }
  }
}

bool any_nonfinite(const float* values, size_t n) {
  const Ints d;
  const auto exponent = hn::Set(d, 0x7f800000);
  size_t j = 0;
  while (j + kLanes <= n) {
    // A page or so at a time: an early end where there is one, no branch per vector.
    const size_t end = std::min(n, j + 1024);
    auto found = hn::MaskFromVec(hn::Zero(d));
    for (; j + kLanes <= end; j += kLanes) {
      const auto bits = hn::BitCast(d, hn::LoadU(Floats(), values + j));
      found = hn::Or(found, hn::Eq(hn::And(bits, exponent), exponent));
    }
    if (!hn::AllFalse(d, found)) return true;
  }
  for (; j < n; ++j) {
    if (!is_finite(values[j])) return true;
  }
  return false;
}

}  // namespace scape::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
