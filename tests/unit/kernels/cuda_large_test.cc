// Field case F14 on a device: buffers of more elements than 31 and 32 bits number.
//
// The arrays are backed lazily: their first and last 64 elements hold something, all between are
// zeros that take no memory. Grids over them run in their first and last blocks only, since those
// between would read zeros and write zeros; what a kernel does there is what the scalar reference
// does to the two ends put together. The index of a mask and the rounds of the selection read all
// of their array.
#include <sys/mman.h>

#include <bit>
#include <span>
#include <string>

#include "kernels/cuda/launch.h"
#include "kernels/cuda/scan.cuh"
#include "plugin/masked/mask_code.h"
#include "tests/unit/kernels/cuda_testing.h"

namespace scape::kernels::cuda::testing {
namespace {

constexpr size_t kEnd = 64;
constexpr size_t kBoth = 2 * kEnd;

template <typename T>
class Lazy {
 public:
  explicit Lazy(size_t n) : n_(n), bytes_(n * sizeof(T)) {
    void* const memory = ::mmap(nullptr, bytes_, PROT_READ | PROT_WRITE,
                                MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) return;
    data_ = static_cast<T*>(memory);
    (void)::madvise(memory, bytes_, MADV_HUGEPAGE);
    // Memory operations of the runtime reach it.
    registered_ = cudaHostRegister(memory, bytes_, 0) == cudaSuccess;
  }
  Lazy(const Lazy&) = delete;
  ~Lazy() {
    if (registered_) (void)cudaHostUnregister(data_);
    if (data_ != nullptr) (void)::munmap(data_, bytes_);
  }

  bool valid() const { return registered_; }
  T* data() const { return data_; }
  T& operator[](size_t j) const { return data_[j]; }
  size_t size() const { return n_; }
  // The first elements, then the last ones.
  void put(const Guarded<T>& both, size_t end) const {
    std::copy_n(both.data(), end, data_);
    std::copy_n(both.data() + end, end, data_ + n_ - end);
  }
  Guarded<T> ends(size_t end) const {
    Guarded<T> both(2 * end);
    std::copy_n(data_, end, both.data());
    std::copy_n(data_ + n_ - end, end, both.data() + end);
    return both;
  }

 private:
  size_t n_;
  size_t bytes_;
  T* data_ = nullptr;
  bool registered_ = false;
};

#define SKIP_WITHOUT_MEMORY(...)                                                        \
  for (const bool there : {__VA_ARGS__}) {                                              \
    if (!there) GTEST_SKIP() << "this system gives no address space beyond its memory"; \
  }

// ---- (a) what is planned ----

// In arithmetic that cannot overflow.
using Exact = unsigned __int128;
Exact exact_parts(Exact n, Exact part) { return (n + part - 1) / part; }

TEST(CudaPlan, IsExactBeyond32Bits) {
  for (const size_t n :
       {(size_t{1} << 31) - 1, size_t{1} << 31, (size_t{1} << 32) + 5, size_t{1} << 33}) {
    SCOPED_TRACE(n);
    const Exact runs = exact_parts(n, 2048), tiles = exact_parts(runs, 256);
    EXPECT_EQ(Exact{mask_words(n)}, exact_parts(n, 64));
    EXPECT_EQ(Exact{mask_index_runs(n)}, runs);
    EXPECT_EQ(Exact{mask_index_bytes(n)}, (runs + 1 + tiles) * 8);
    EXPECT_EQ(Exact{decode_scratch_bytes(n)}, (exact_parts(n, 65536) + 1) * 8);
    EXPECT_EQ(Exact{cuda::select_scratch_bytes(n) - cuda::select_scratch_bytes(1)},
              (runs - 1 + tiles - 1) * 8);
    for (const size_t k : {size_t{1}, n / 100, n / 10, n}) {
      const Exact offsets = exact_parts(n, 65536) * 4 + Exact{k} * 2;
      const Exact words = exact_parts(n, 64) * 8;
      EXPECT_EQ(Exact{offset_code_bytes(n, k)}, offsets);
      EXPECT_EQ(Exact{plugin::mask_code_bytes(n, k)}, std::min(offsets, words));
    }
    // Grids: of elements, runs of a mask, tiles of an index, and words.
    EXPECT_EQ(Exact{quad_blocks(n)}, exact_parts(n, 1024));
    EXPECT_EQ(Exact{run_blocks(n)}, exact_parts(n, 16384));
    EXPECT_EQ(Exact{parts_of(mask_index_runs(n), kTileRuns)}, tiles);
    EXPECT_EQ(Exact{parts_of(mask_words(n), kThreads)}, exact_parts(exact_parts(n, 64), 256));
    EXPECT_LE(quad_blocks(n), kMaxBlocks);
  }
}

TEST(CudaPlan, RefusesGridsThatNoDeviceHas) {
  constexpr size_t kTooMany = (size_t{1} << 32) + 1;  // blocks, 1 in 32 bits
  const Status status = restamp(kStream, nullptr, kTooMany * kThreads * 4, 1);
  EXPECT_EQ(status.code(), SCAPE_ERR_ARGUMENT);
  EXPECT_NE(status.message().find(std::to_string(kTooMany)), std::string::npos);
}

// ---- (b) what is done ----

class CudaLarge : public ::testing::TestWithParam<size_t> {
 protected:
  CudaLarge() : words_(mask_words(n())), index_(mask_index_bytes(n()) / sizeof(uint64_t)) {}

  void SetUp() override {
    SKIP_WITHOUT_MEMORY(words_.valid(), index_.valid());
    mask_[0] = random_() | uint64_t{1} << 5;
    mask_[1] = random_() | uint64_t{1} << 33;
    k_ = bits_set(mask_);
    words_.put(mask_, 1);
    const size_t runs = mask_index_runs(n());
    std::fill_n(index_.data() + 1, runs - 1, static_cast<uint64_t>(std::popcount(mask_[0])));
    index_[runs] = k_;
    simgpu::set_ends(2);
  }
  void TearDown() override { simgpu::set_ends(0); }

  static size_t n() { return GetParam(); }
  MaskView mask() const { return {words_.data(), index_.data(), n()}; }
  const uint64_t* mask_of_ends() const { return mask_.data(); }
  const Ops& reference() const { return scalar_ops(); }

  template <typename T>
  void expect_ends(const Guarded<T>& expected, const Lazy<T>& got, const char* what) {
    expect_same(expected, got.ends(kEnd), what);
    for (size_t i = kEnd; i < 2 * kEnd; ++i) {
      ASSERT_EQ(got[i], T{}) << what << " " << i;
      ASSERT_EQ(got[n() - 1 - i], T{}) << what << " " << n() - 1 - i;
    }
  }

  Random random_{31};
  Guarded<uint64_t> mask_{2};  // its two ends
  size_t k_ = 0;
  Lazy<uint64_t> words_, index_;
};

INSTANTIATE_TEST_SUITE_P(Sizes, CudaLarge,
                         ::testing::Values((size_t{1} << 31) + 64, (size_t{1} << 32) + 64),
                         [](const auto& test) {
                           return "Past2To" + std::to_string(std::bit_width(test.param) - 1);
                         });

TEST_P(CudaLarge, IndexesMasks) {
  const Lazy<uint64_t> index(index_.size());
  SKIP_WITHOUT_MEMORY(index.valid());
  simgpu::set_ends(0);
  ASSERT_RUNS(index_mask(kStream, words_.data(), n(), index.data()));
  EXPECT_EQ(std::memcmp(index.data(), index_.data(), (mask_index_runs(n()) + 1) * sizeof(uint64_t)),
            0);
}

TEST_P(CudaLarge, PacksAndClears) {
  const Lazy<uint16_t> in(n()), last(n());
  const Lazy<float> residual(n());
  SKIP_WITHOUT_MEMORY(in.valid(), last.valid(), residual.valid());
  Guarded<float> values(kBoth), held(kBoth), expected(k_), payload(k_ + 1);
  Guarded<uint16_t> stamps(kBoth), expected_ages(k_), ages(k_);
  fill(values, random_);
  fill(held, random_);
  fill(stamps, random_);
  const Guarded<uint16_t> narrow = as_type(Type::kBfloat16, values, 0);
  in.put(narrow, kEnd);
  last.put(stamps, kEnd);
  residual.put(held, kEnd);
  const uint16_t t = 9;
  NonfiniteFlag flag{};
  reference().accumulate_pack(Type::kBfloat16, narrow.data(), held.data(), mask_of_ends(), kBoth,
                              expected.data());
  ASSERT_RUNS(accumulate_pack(kStream, Type::kBfloat16, in.data(), residual.data(), mask(),
                              payload.data(), &flag));
  EXPECT_EQ(std::memcmp(expected.data(), payload.data(), k_ * sizeof(float)), 0);
  EXPECT_EQ(payload[k_], 0.0f);
  expect_ends(held, residual, "residual");
  payload.check_guards();
  reference().gather_ages(mask_of_ends(), kBoth, stamps.data(), t, expected_ages.data());
  ASSERT_RUNS(gather_ages(kStream, mask(), last.data(), t, ages.data()));
  expect_same(expected_ages, ages, "ages");
  ages.check_guards();

  std::fill_n(payload.data(), k_, 0.0f);
  ASSERT_RUNS(gather(kStream, residual.data(), mask(), payload.data(), &flag));
  EXPECT_EQ(std::memcmp(expected.data(), payload.data(), k_ * sizeof(float)), 0);
  reference().clear_masked(held.data(), mask_of_ends(), kBoth);
  ASSERT_RUNS(clear_masked(kStream, residual.data(), mask(), nullptr));
  expect_ends(held, residual, "cleared");
  reference().scatter(expected.data(), mask_of_ends(), kBoth, held.data());
  ASSERT_RUNS(scatter(kStream, expected.data(), mask(), residual.data(), nullptr));
  expect_ends(held, residual, "scattered");
}

TEST_P(CudaLarge, PacksMoments) {
  const Lazy<float> in(n()), m(n()), residual(n());
  SKIP_WITHOUT_MEMORY(in.valid(), m.valid(), residual.valid());
  Guarded<float> values(kBoth), moments(kBoth), held(kBoth), expected(k_), payload(k_ + 1);
  fill(values, random_);
  fill(moments, random_);
  in.put(values, kEnd);
  m.put(moments, kEnd);
  reference().accumulate_pack_moment(Type::kFloat32, values.data(), moments.data(), 0.9f,
                                     held.data(), mask_of_ends(), kBoth, expected.data());
  ASSERT_RUNS(accumulate_pack_moment(kStream, Type::kFloat32, in.data(), m.data(), 0.9f,
                                     residual.data(), mask(), payload.data(), nullptr));
  EXPECT_EQ(std::memcmp(expected.data(), payload.data(), k_ * sizeof(float)), 0);
  expect_ends(held, residual, "residual");
}

TEST_P(CudaLarge, Steps) {
  const Lazy<float> m(n()), param(n()), out(n()), residual(n());
  const Lazy<uint16_t> last(n());
  const Lazy<uint64_t> before(mask_words(n()));
  SKIP_WITHOUT_MEMORY(m.valid(), param.valid(), out.valid(), residual.valid(), last.valid(),
                      before.valid());
  const Step step(0.9, 3);
  Guarded<float> payload(k_), moments(kBoth), params(kBoth), outs(kBoth), held(kBoth);
  Guarded<uint16_t> stamps(kBoth), ages(k_);
  Guarded<uint64_t> left(2);
  fill(payload, random_);
  fill(moments, random_);
  fill(params, random_);
  fill(held, random_);
  fill_last(stamps, step.params.t, random_);
  left[0] = random_();
  left[1] = random_();
  m.put(moments, kEnd);
  param.put(params, kEnd);
  residual.put(held, kEnd);
  last.put(stamps, kEnd);
  before.put(left, 1);

  reference().gather_ages(mask_of_ends(), kBoth, stamps.data(), step.params.t, ages.data());
  reference().adams_step(payload.data(), mask_of_ends(), kBoth, step.params, moments.data(),
                         stamps.data(), params.data());
  ASSERT_RUNS(adams_step(kStream, payload.data(), mask(), step.params, m.data(), last.data(),
                         param.data(), nullptr));
  expect_ends(moments, m, "m after the step");
  expect_ends(params, param, "param after the step");
  expect_ends(stamps, last, "last after the step");

  reference().moment_step(payload.data(), mask_of_ends(), kBoth, step.params, moments.data(),
                          stamps.data());
  ASSERT_RUNS(moment_step(kStream, Type::kFloat32, payload.data(), mask(), step.params, m.data(),
                          last.data(), nullptr));
  expect_ends(moments, m, "m after the moment");
  ASSERT_RUNS(moment_output(kStream, Type::kFloat32, m.data(), mask(), out.data(), nullptr));
  expect_ends(moments, out, "output of the moment");

  reference().hooked_step(payload.data(), mask_of_ends(), left.data(), kBoth, step.params,
                          Type::kFloat32, outs.data(), moments.data(), stamps.data());
  ASSERT_RUNS(hooked_step(kStream, payload.data(), mask(), before.data(), step.params,
                          Type::kFloat32, out.data(), m.data(), last.data(), nullptr));
  expect_ends(outs, out, "output of the hooked step");
  expect_ends(moments, m, "m after the hooked step");

  reference().expand(Type::kFloat32, payload.data(), mask_of_ends(), kBoth, outs.data());
  ASSERT_RUNS(expand(kStream, Type::kFloat32, payload.data(), mask(), out.data(), nullptr));
  expect_ends(outs, out, "expanded");

  // Of the elements behind 2^31 or 2^32 alone.
  const auto in_first = static_cast<size_t>(std::popcount(mask_[0]));
  reference().post_step(moments.data() + kEnd, &mask_of_ends()[1], ages.data() + in_first, kEnd,
                        0.99f, 100, params.data() + kEnd);
  const size_t begin = n() - kEnd;
  ASSERT_RUNS(post_step(kStream, m.data() + begin, mask(), ages.data(), begin, kEnd, 0.99f, 100,
                        param.data() + begin, nullptr));
  expect_ends(params, param, "param after the optimizer");

  held[7] = held[kBoth - 7] = std::numeric_limits<float>::infinity();
  residual.put(held, kEnd);
  NonfiniteFlag flag{};
  reference().score(moments.data(), stamps.data(), held.data(), kBoth, step.params, 1, outs.data());
  ASSERT_RUNS(score(kStream, m.data(), last.data(), residual.data(), residual.data(), n(),
                    step.params, 1, out.data(), &flag));
  expect_ends(outs, out, "scores");
  expect_ends(held, residual, "residual after the score");
  EXPECT_EQ(flag.cleared, 2u);
}

TEST_P(CudaLarge, ConvertsAndSearches) {
  const Lazy<float> wide(n());
  const Lazy<uint16_t> narrow(n());
  SKIP_WITHOUT_MEMORY(wide.valid(), narrow.valid());
  Guarded<float> values(kBoth), back(kBoth);
  fill(values, random_);
  wide.put(values, kEnd);
  const Guarded<uint16_t> expected = as_type(Type::kBfloat16, values, 0);
  ASSERT_RUNS(from_float(kStream, Type::kBfloat16, wide.data(), narrow.data(), n()));
  expect_ends(expected, narrow, "narrow");
  reference().to_float(Type::kBfloat16, expected.data(), back.data(), kBoth);
  ASSERT_RUNS(to_float(kStream, Type::kBfloat16, narrow.data(), wide.data(), n()));
  expect_ends(back, wide, "wide");
  ASSERT_RUNS(add(kStream, wide.data(), wide.data(), n()));
  for (float& value : std::span(back.data(), kBoth)) value += value;
  expect_ends(back, wide, "sum");

  OnDevice<Verdict> verdict(1);
  ASSERT_RUNS(any_nonfinite(kStream, Type::kFloat32, wide.data(), n(), verdict.data()));
  EXPECT_EQ(verdict[0].skipped, 0u);
  wide[n() - 1] = std::numeric_limits<float>::quiet_NaN();
  ASSERT_RUNS(any_nonfinite(kStream, Type::kFloat32, wide.data(), n(), verdict.data()));
  EXPECT_EQ(verdict[0].skipped, 1u);

  Guarded<uint16_t> stamps(kBoth);
  fill(stamps, random_);
  narrow.put(stamps, kEnd);
  reference().restamp(stamps.data(), kBoth, 100);
  ASSERT_RUNS(restamp(kStream, narrow.data(), n(), 100));
  expect_same(stamps, narrow.ends(kEnd), "stamps");
}

TEST_P(CudaLarge, CodesMasks) {
  const Lazy<uint16_t> offsets(offset_code_bytes(n(), k_) / 2);
  const Lazy<uint64_t> decoded(mask_words(n())), scratch(decode_scratch_bytes(n()) / 8);
  SKIP_WITHOUT_MEMORY(offsets.valid(), decoded.valid(), scratch.valid());
  OnDevice<uint32_t> refused(1);
  const auto expect_decoded = [&](const char* what) {
    EXPECT_EQ(refused[0], 0u) << what;
    expect_same(mask_, decoded.ends(1), what);
    decoded.put(Guarded<uint64_t>(2), 1);
  };
  ASSERT_RUNS(encode_offsets(kStream, mask(), offsets.data()));
  // 16-bit halves of the counts of blocks, then the offsets.
  const size_t blocks = parts_of(n(), kOffsetBlock);
  EXPECT_EQ(offsets[0], std::popcount(mask_[0]));
  EXPECT_EQ(offsets[2], 0u);
  EXPECT_EQ(offsets[(blocks - 1) * 2], std::popcount(mask_[1]));
  EXPECT_EQ(offsets[blocks * 2], std::countr_zero(mask_[0]));
  EXPECT_EQ(offsets[blocks * 2 + k_ - 1], 63 - std::countl_zero(mask_[1]));
  ASSERT_RUNS(decode_offsets(kStream, offsets.data(), n(), k_, decoded.data(), scratch.data(),
                             {refused.data(), 1}));
  expect_decoded("decoded offsets");

  // Raw words are their own code. Whether they have k bits only the last of all blocks can tell.
  ASSERT_RUNS(decode_words(kStream, words_.data(), n(), k_, decoded.data(), scratch.data(),
                           {refused.data(), 1}));
  expect_decoded("decoded words");

  ASSERT_RUNS(copy_mask(kStream, words_.data(), n(), decoded.data(), nullptr));
  expect_decoded("copy");

  OnDevice<unsigned long long> common(1);
  ASSERT_RUNS(
      count_common_bits(kStream, words_.data(), words_.data(), mask_words(n()), common.data()));
  EXPECT_EQ(common[0], k_);

  refused[0] = 2;
  const size_t half = mask_words(n()) / 2 * 64 + 64;  // the second part is shorter
  ASSERT_RUNS(replace_refused(kStream, decoded.data(), n(),
                              {.size = half, .bits = 3, .last_bits = n() - half - 1},
                              refused.data()));
  EXPECT_EQ(decoded[0], 7u);
  EXPECT_EQ(decoded[1], 0u);
  EXPECT_EQ(decoded[mask_words(n()) - 2], ~uint64_t{0});
  EXPECT_EQ(decoded[mask_words(n()) - 1], ~uint64_t{0} >> 1);
}

#if defined(__OPTIMIZE__)  // else the rounds take minutes

// The rounds of the search read every score; then the mask is written at both ends, and has no bit
// between.
TEST(CudaLargeSelect, FindsTheLargest) {
  constexpr size_t kN = (size_t{1} << 31) + 64;
  const Lazy<float> scores(kN);
  const Lazy<uint64_t> words(mask_words(kN)), scratch(cuda::select_scratch_bytes(kN) / 8);
  SKIP_WITHOUT_MEMORY(scores.valid(), words.valid(), scratch.valid());
  scores[5] = 3;
  scores[(size_t{1} << 31) + 33] = 2;
  scores[kN - 1] = 1;
  OnDevice<float> threshold(1);
  threshold[0] = 1.5f;
  simgpu::set_ends(1056);  // more blocks than a round of the search has
  ASSERT_RUNS(
      cuda::select(kStream, scores.data(), kN, 2, words.data(), threshold.data(), scratch.data()));
  simgpu::set_ends(0);
  EXPECT_EQ(threshold[0], 2.0f);
  EXPECT_EQ(words[0], uint64_t{1} << 5);
  EXPECT_EQ(words[mask_words(kN) - 1], uint64_t{1} << 33);
  EXPECT_EQ(words[1], 0u);
  EXPECT_EQ(words[mask_words(kN) - 2], 0u);
}

#endif

}  // namespace
}  // namespace scape::kernels::cuda::testing
