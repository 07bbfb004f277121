// Exact selection of the k largest scores.
//
// A sample of the scores brackets the k-th largest; one pass counts what lies above the bracket and
// collects what lies in it, and only that is ranked; one more pass writes the mask. Where the
// bracket misses, or too much lies in it (many equal scores), the threshold is found by histograms
// of all scores instead. Either way it is the same threshold: sampling decides the time taken,
// never the result.
#if defined(SCAPE_KERNELS_CPU_SELECT_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef SCAPE_KERNELS_CPU_SELECT_INL_H_
#undef SCAPE_KERNELS_CPU_SELECT_INL_H_
#else
#define SCAPE_KERNELS_CPU_SELECT_INL_H_
#endif

#include <functional>

#include "kernels/cpu/vec-inl.h"

HWY_BEFORE_NAMESPACE();
namespace scape::kernels::HWY_NAMESPACE {

inline constexpr int kKeyBits = 31;
inline constexpr int kDigits[] = {11, 10, 10};
inline constexpr size_t kBuckets = size_t{1} << 11;
inline constexpr size_t kHistograms = 2;

// The parts of select()'s scratch memory.
struct Scratch {
  // Two histograms take turns, so that equal neighbours do not wait for each other's increment.
  uint64_t histogram[kHistograms][kBuckets];
  // Keys: the sample, then those in the bracket. A vector's worth of room lies after `kCapacity`.
  static constexpr size_t kCapacity = (size_t{1} << 18) - 4 * kHistograms * kBuckets - 64;
  uint32_t keys[kCapacity + 64];
};
static_assert(sizeof(Scratch) <= (size_t{1} << 20), "see select_scratch_bytes()");

// The k-th largest key, and how many keys equal to it are among the k largest.
struct Threshold {
  uint32_t key;
  size_t ties;
};

HWY_INLINE WordVec key_vec(const float* scores) {
  const Words d;
  return hn::And(hn::BitCast(d, hn::LoadU(Floats(), scores)), hn::Set(d, 0x7fffffffu));
}

// Counts the digit at `shift` of those keys whose bits from `known` up are `prefix`'s.
HWY_INLINE void count_digit(const float* keys, size_t n, uint32_t prefix, int known, int shift,
                            int bits, Scratch* scratch) {
  const Words d;
  const uint32_t digit_mask = (1u << bits) - 1;
  for (auto& histogram : scratch->histogram) std::fill_n(histogram, size_t{1} << bits, uint64_t{0});
  size_t j = 0;
  if (known == kKeyBits) {
    for (; j + kHistograms <= n; j += kHistograms) {
      for (size_t i = 0; i < kHistograms; ++i) {
        ++scratch->histogram[i][(score_key(keys[j + i]) >> shift) & digit_mask];
      }
    }
  } else {
    const auto known_mask = hn::Set(d, ~uint32_t{0} << known);
    const auto wanted = hn::Set(d, prefix);
    for (; j + kLanes <= n; j += kLanes) {
      const auto equal = hn::Eq(hn::And(key_vec(keys + j), known_mask), wanted);
      for_each_bit(bits_of_mask(d, equal), j, [&](size_t i) {
        ++scratch->histogram[i % kHistograms][(score_key(keys[i]) >> shift) & digit_mask];
      });
    }
  }
  for (; j < n; ++j) {
    const uint32_t key = score_key(keys[j]);
    if (uint64_t{key} >> known != uint64_t{prefix} >> known) continue;
    ++scratch->histogram[0][(key >> shift) & digit_mask];
  }
}

// By histograms, digit by digit as in scalar.cc. 1 <= rank <= n.
Threshold rank_by_digits(const float* keys, size_t n, size_t rank, Scratch* scratch) {
  uint32_t prefix = 0;
  int known = kKeyBits;
  for (const int bits : kDigits) {
    const int shift = known - bits;
    count_digit(keys, n, prefix, known, shift, bits, scratch);
    uint32_t digit = (1u << bits) - 1;
    for (;; --digit) {
      const uint64_t count = scratch->histogram[0][digit] + scratch->histogram[1][digit];
      if (rank <= count) break;
      rank -= count;
    }
    prefix |= digit << shift;
    known = shift;
  }
  return {prefix, rank};
}

// Keys low .. high, both included, that probably hold the k-th largest of n >= kSampled scores.
struct Bracket {
  uint32_t low;
  uint32_t high;
};
inline constexpr size_t kSampled = size_t{1} << 15;  // fewer scores are ranked directly

Bracket sample_bracket(const float* scores, size_t n, size_t k, uint32_t* sample) {
  const size_t size = std::clamp<size_t>(n / 64, 1024, 16384);
  const size_t stride = n / size;
  for (size_t i = 0; i < size; ++i) sample[i] = score_key(scores[i * stride]);
  // The number of the k largest among the sampled has a standard deviation of at most the square
  // root of its mean; four of them miss once in tens of thousands of times.
  const double mean = static_cast<double>(k) / static_cast<double>(n) * static_cast<double>(size);
  const double margin = 4 * std::sqrt(mean) + 4;
  const auto above = static_cast<size_t>(std::max(0.0, mean - margin));
  const auto within = static_cast<size_t>(mean + margin);
  Bracket bracket = {0, 0x7fffffffu};
  if (within < size) {
    std::nth_element(sample, sample + within, sample + size, std::greater<>());
    bracket.low = sample[within];
    size_t end = within;
    if (above > 0) {
      std::nth_element(sample, sample + above, sample + end, std::greater<>());
      bracket.high = sample[above];
    }
  } else if (above > 0) {
    std::nth_element(sample, sample + above, sample + size, std::greater<>());
    bracket.high = sample[above];
  }
  return bracket;
}

// One pass over the scores. False when the bracket does not hold the k-th largest, or too many.
bool rank_in_bracket(const float* scores, size_t n, size_t k, Bracket bracket, Scratch* scratch,
                     Threshold* threshold) {
  const Words d;
  const auto high = hn::Set(d, bracket.high);
  const auto below_low = hn::BitCast(d, hn::Set(Ints(), static_cast<int32_t>(bracket.low) - 1));
  size_t above = 0;
  size_t inside = 0;
  size_t j = 0;
  // Every vector's store may reach past the keys collected; the room after kCapacity takes it.
  for (; j + kLanes <= n && inside <= Scratch::kCapacity; j += kLanes) {
    const auto keys = key_vec(scores + j);
    const uint64_t not_below = bits_of_mask(d, greater(keys, below_low));
    if (not_below == 0) continue;
    const uint64_t beyond = bits_of_mask(d, greater(keys, high));
    const uint64_t in = not_below & ~beyond;
    above += static_cast<size_t>(std::popcount(beyond));
    if (in == 0) continue;
    const auto packed = hn::Compress(hn::BitCast(Floats(), keys), mask_of_bits(in));
    hn::StoreU(hn::BitCast(d, packed), d, scratch->keys + inside);
    inside += static_cast<size_t>(std::popcount(in));
  }
  for (; j < n && inside <= Scratch::kCapacity; ++j) {
    const uint32_t key = score_key(scores[j]);
    if (key > bracket.high) {
      ++above;
    } else if (key >= bracket.low) {
      scratch->keys[inside++] = key;
    }
  }
  if (inside > Scratch::kCapacity || k <= above || k > above + inside) return false;
  const auto* keys = reinterpret_cast<const float*>(scratch->keys);
  *threshold = rank_by_digits(keys, inside, k - above, scratch);
  return true;
}

// Sets the bits of the scores above the threshold, and of the first `ties` equal to it.
void write_mask(const float* scores, size_t n, Threshold threshold, uint64_t* mask) {
  const Words d;
  const auto bound = hn::Set(d, threshold.key);
  size_t ties = threshold.ties;
  const auto take_ties = [&](uint64_t equal) {
    uint64_t taken = 0;
    for (; equal != 0 && ties > 0; equal &= equal - 1, --ties) taken |= equal & -equal;
    return taken;
  };
  size_t w = 0;
  for (; w < n / 64; ++w) {
    uint64_t larger = 0;
    uint64_t equal = 0;
    for (size_t i = 0; i < 64; i += kLanes) {
      const auto keys = key_vec(scores + w * 64 + i);
      larger |= bits_of_mask(d, greater(keys, bound)) << i;
      equal |= bits_of_mask(d, hn::Eq(keys, bound)) << i;
    }
    mask[w] = larger;
    if (equal != 0) mask[w] |= take_ties(equal);
  }
  if (w == mask_words(n)) return;
  uint64_t larger = 0;
  uint64_t equal = 0;
  for (size_t j = w * 64; j < n; ++j) {
    const uint32_t key = score_key(scores[j]);
    larger |= uint64_t{key > threshold.key} << (j % 64);
    equal |= uint64_t{key == threshold.key} << (j % 64);
  }
  mask[w] = larger | take_ties(equal);
}

float select(const float* scores, size_t n, size_t k, uint64_t* mask, void* scratch_bytes) {
  k = std::min(k, n);
  if (k == 0) {
    std::fill_n(mask, mask_words(n), uint64_t{0});
    return 0.0f;
  }
  auto* scratch = static_cast<Scratch*>(scratch_bytes);
  Threshold threshold;
  if (n < kSampled || !rank_in_bracket(scores, n, k, sample_bracket(scores, n, k, scratch->keys),
                                       scratch, &threshold)) {
    threshold = rank_by_digits(scores, n, k, scratch);
  }
  write_mask(scores, n, threshold, mask);
  return float_of(threshold.key);
}

}  // namespace scape::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
