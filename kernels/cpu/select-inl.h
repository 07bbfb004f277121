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

#include "kernels/cpu/vec-inl.h"

HWY_BEFORE_NAMESPACE();
namespace scape::kernels::HWY_NAMESPACE {

// The parts of select()'s scratch memory.
struct Scratch {
  static constexpr int kBucketBits = 11;
  static constexpr size_t kBuckets = size_t{1} << kBucketBits;
  // Two histograms take turns, so that equal neighbours do not wait for each other's increment.
  static constexpr size_t kHistograms = 2;
  static constexpr size_t kSlack = 64;  // room for the last whole-vector store
  static constexpr size_t kCapacity = (size_t{1} << 18) - 2 * kHistograms * kBuckets - kSlack;

  uint64_t histogram[kHistograms][kBuckets];
  float keys[kCapacity + kSlack];  // the sample, then scores collected
};
static_assert(sizeof(Scratch) <= (size_t{1} << 20), "see select_scratch_bytes()");

// Fewer scores than this are not sampled.
inline constexpr size_t kSampled = size_t{1} << 15;

// Keys low .. high, both included. Keys are scores without their signs, compared as integers.
struct Range {
  uint32_t low;
  uint32_t high;
};
inline constexpr Range kAllKeys = {0, 0x7fffffffu};

// How many keys lie above a range, and how many in it.
struct Tally {
  size_t above = 0;
  size_t inside = 0;
  bool holds(size_t k) const { return k > above && k <= above + inside; }
};

// The k-th largest key, and how many keys equal to it are among the k largest.
struct Threshold {
  uint32_t key;
  size_t ties;
};

HWY_INLINE WordVec key_vec(const float* scores) {
  const Words d;
  return hn::And(hn::BitCast(d, hn::LoadU(Floats(), scores)), hn::Set(d, 0x7fffffffu));
}

// Calls visit(j, above, inside) with the lanes' bits for each vector that has a key in or above the
// range, and for each single element at the end as for a vector of one.
template <typename Visit>
HWY_INLINE void scan(const float* scores, size_t n, Range range, Visit&& visit) {
  const Words d;
  const auto high = hn::Set(d, range.high);
  const auto low = hn::BitCast(d, hn::Set(Ints(), static_cast<int32_t>(range.low) - 1));
  size_t j = 0;
  for (; j + kLanes <= n; j += kLanes) {
    const auto keys = key_vec(scores + j);
    const uint64_t not_below = bits_of_mask(d, greater(keys, low));
    if (not_below == 0) continue;
    const uint64_t above = bits_of_mask(d, greater(keys, high));
    visit(j, above, not_below & ~above);
  }
  for (; j < n; ++j) {
    const uint32_t key = score_key(scores[j]);
    if (key > range.high) {
      visit(j, 1, 0);
    } else if (key >= range.low) {
      visit(j, 0, 1);
    }
  }
}

// Puts the keys of the range into scratch->keys, where `scores` may be as well. More than kCapacity
// are counted but not kept.
Tally collect(const float* scores, size_t n, Range range, Scratch* scratch) {
  Tally tally;
  scan(scores, n, range, [&](size_t j, uint64_t above, uint64_t inside) HWY_ATTR {
    tally.above += static_cast<size_t>(std::popcount(above));
    if (inside == 0) return;
    if (tally.inside <= Scratch::kCapacity) {
      float* const out = scratch->keys + tally.inside;
      if (j + kLanes <= n) {
        hn::StoreU(compress(hn::Abs(hn::LoadU(Floats(), scores + j)), inside), Floats(), out);
      } else {
        *out = float_of(score_key(scores[j]));
      }
    }
    tally.inside += static_cast<size_t>(std::popcount(inside));
  });
  return tally;
}

// Counts the keys of the range in equal buckets, 2^shift keys wide. `all_inside`: no key is
// elsewhere.
Tally fill_histogram(const float* scores, size_t n, Range range, int shift, bool all_inside,
                     Scratch* scratch) {
  std::memset(scratch->histogram, 0, sizeof(scratch->histogram));
  const auto count = [&](size_t j) {
    ++scratch->histogram[j % Scratch::kHistograms][(score_key(scores[j]) - range.low) >> shift];
  };
  if (all_inside) {
    for (size_t j = 0; j < n; ++j) count(j);
    return {0, n};
  }
  Tally tally;
  scan(scores, n, range, [&](size_t j, uint64_t above, uint64_t inside) HWY_ATTR {
    tally.above += static_cast<size_t>(std::popcount(above));
    tally.inside += static_cast<size_t>(std::popcount(inside));
    for_each_bit(inside, j, count);
  });
  return tally;
}

// A range that probably holds the k-th largest key, and how many keys to expect in it.
Range sample_range(const float* scores, size_t n, size_t k, Scratch* scratch, double* expected) {
  const size_t size = std::clamp<size_t>(n / 256, 1024, 65536);
  const size_t stride = n / size;
  float* const sample = scratch->keys;
  for (size_t i = 0; i < size; ++i) sample[i] = float_of(score_key(scores[i * stride]));
  const auto descending = [](float a, float b) { return score_key(a) > score_key(b); };
  const auto nth = [&](size_t i, size_t end) {
    std::nth_element(sample, sample + i, sample + end, descending);
    return score_key(sample[i]);
  };
  // The number of the k largest among the sampled deviates from its mean by the mean's square root;
  // four of them are exceeded once in tens of thousands of times.
  const double mean = static_cast<double>(k) / static_cast<double>(n) * static_cast<double>(size);
  const double margin = 4 * std::sqrt(mean) + 4;
  *expected = 2 * margin / static_cast<double>(size) * static_cast<double>(n);
  Range range = kAllKeys;
  const auto below = static_cast<size_t>(mean + margin);
  if (below < size) range.low = nth(below, size);
  const auto above = static_cast<size_t>(std::max(0.0, mean - margin));
  if (above > 0) range.high = nth(above, std::min(below, size));
  return range;
}

// Narrows a range of keys down to the threshold. 1 <= k <= n.
Threshold find_threshold(const float* scores, size_t n, size_t k, Scratch* scratch) {
  Range range = kAllKeys;
  bool all_inside = true;
  const auto keep_collected = [&](Tally tally) {
    scores = scratch->keys;
    n = tally.inside;
    k -= tally.above;
    all_inside = true;
  };
  if (n >= kSampled) {
    double expected = 0;
    range = sample_range(scores, n, k, scratch, &expected);
    all_inside = false;
    if (expected < 0.75 * Scratch::kCapacity) {
      const Tally tally = collect(scores, n, range, scratch);
      if (tally.holds(k) && tally.inside <= Scratch::kCapacity) {
        keep_collected(tally);
      } else if (!tally.holds(k)) {
        range = kAllKeys;
        all_inside = true;
      }
    }
  }
  while (true) {
    const auto width = static_cast<int>(std::bit_width(range.high - range.low));
    const int shift = std::max(0, width - Scratch::kBucketBits);
    const Tally tally = fill_histogram(scores, n, range, shift, all_inside, scratch);
    if (!tally.holds(k)) {  // the sample misled; all keys cannot
      range = kAllKeys;
      all_inside = true;
      continue;
    }
    size_t rank = k - tally.above;
    uint32_t bucket = (range.high - range.low) >> shift;
    size_t count = 0;
    for (;; --bucket) {
      count = scratch->histogram[0][bucket] + scratch->histogram[1][bucket];
      if (rank <= count) break;
      rank -= count;
    }
    range.low += bucket << shift;
    range.high = std::min(range.high, range.low + ((1u << shift) - 1));
    if (range.low == range.high) return {range.low, rank};
    if (count <= Scratch::kCapacity) {
      keep_collected(collect(scores, n, range, scratch));
    } else {
      all_inside = false;
    }
  }
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

float select(const float* scores, size_t n, size_t k, uint64_t* mask, void* scratch) {
  k = std::min(k, n);
  if (k == 0) {
    std::fill_n(mask, mask_words(n), uint64_t{0});
    return 0.0f;
  }
  const Threshold threshold = find_threshold(scores, n, k, static_cast<Scratch*>(scratch));
  write_mask(scores, n, threshold, mask);
  return float_of(threshold.key);
}

}  // namespace scape::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
