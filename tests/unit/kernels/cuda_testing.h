// What the tests of the CUDA kernels share. The device is the simulated one, whose kernels read
// host memory: arrays with guards around them stand at any address, and the address sanitizer sees
// what a kernel reads outside.
#pragma once

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "kernels/cuda/cuda_ops.h"
#include "tests/simgpu/include/simt.h"
#include "tests/support/slowdown.h"
#include "tests/unit/kernels/kernel_testing.h"

namespace scape::kernels::cuda::testing {

using namespace scape::kernels::testing;

inline constexpr cudaStream_t kStream = nullptr;

#define ASSERT_ENQUEUED(operation)                              \
  do {                                                          \
    const Status scape_status_ = (operation);                   \
    ASSERT_TRUE(scape_status_.ok()) << scape_status_.message(); \
  } while (0)

// It and all that was enqueued before it are done, and went well.
#define ASSERT_RUNS(operation)                              \
  do {                                                      \
    ASSERT_ENQUEUED(operation);                             \
    ASSERT_EQ(cudaStreamSynchronize(kStream), cudaSuccess); \
  } while (0)

// n elements that memory operations of the runtime may touch, too.
template <typename T>
class OnDevice : public Guarded<T> {
 public:
  explicit OnDevice(size_t n, size_t offset = 0) : Guarded<T>(n, offset) {
    if (n == 0) return;
    EXPECT_EQ(cudaHostRegister(this->data(), n * sizeof(T), 0), cudaSuccess);
  }
  ~OnDevice() {
    if (this->size() == 0) return;
    EXPECT_EQ(cudaHostUnregister(this->data()), cudaSuccess);
  }
};

// A mask with its index.
class IndexedMask {
 public:
  explicit IndexedMask(const Guarded<uint64_t>& words, size_t n)
      : words_(words),
        index_(mask_index_bytes(n) / sizeof(uint64_t)),
        n_(n),
        bits_(bits_set(words)) {
    make();
  }

  MaskView view() const { return {words_.data(), index_.data(), n_}; }
  const Guarded<uint64_t>& words() const { return words_; }
  uint64_t index(size_t run) const { return index_[run]; }
  size_t bits() const { return bits_; }

 private:
  void make() {
    std::fill_n(index_.data(), index_.size(), ~uint64_t{0});
    ASSERT_RUNS(index_mask(kStream, words_.data(), n_, index_.data()));
    index_.check_guards();
  }

  Guarded<uint64_t> words_;
  Guarded<uint64_t> index_;
  size_t n_;
  size_t bits_;
};

inline Guarded<uint16_t> as_type(Type type, const Guarded<float>& values, size_t offset) {
  Guarded<uint16_t> out(values.size() * size_of(type) / 2, offset * size_of(type) / 2);
  scalar_ops().from_float(type, values.data(), out.data(), values.size());
  return out;
}

inline bool is_set(const Guarded<uint64_t>& mask, size_t j) {
  return (mask[j / 64] >> (j % 64) & 1) != 0;
}

// Ages 1 to 8, some far older.
inline void fill_last(Guarded<uint16_t>& last, uint16_t now, Random& random) {
  for (size_t j = 0; j < last.size(); ++j) {
    const auto age = random() % 16 == 0 ? 1 + random() % 0x8000 : 1 + random() % 8;
    last[j] = static_cast<uint16_t>(now - age);
  }
}

// Sanitizer builds take ten times as long: every so many of the short lengths are left out, and
// large arrays are smaller.
inline constexpr size_t kThinned = scape::test::kSlowdown > 1 ? 7 : 1;
inline constexpr size_t kTenMillion = scape::test::kSlowdown > 1 ? 100'019 : 10'000'019;

// Every test runs under two orders of blocks and threads.
class CudaKernels : public ::testing::TestWithParam<uint64_t> {
 protected:
  void SetUp() override { simgpu::set_order(GetParam()); }
  void TearDown() override { simgpu::set_order(0); }

  const Ops& reference() const { return scalar_ops(); }

  // Calls check(n, offset, mask): every short length, long ones around what runs, tiles and blocks
  // of offsets hold; elements 0 to 3 after a 64-byte boundary; masks of all kinds.
  template <typename Check>
  void over_shapes(Check&& check) {
    std::vector<size_t> sizes;
    for (size_t n = 0; n <= 200; n += kThinned) sizes.push_back(n);
    sizes.insert(sizes.end(), {1023, 2047, 2048, 2049, 4097, 16385, 65535, 65537, 200003});
    constexpr double kDensities[] = {0.1, 0, 0.01, 1, 0.5};
    // What a check varies by turn_ comes with another size under another seed.
    turn_ = GetParam() % 7;
    for (const size_t n : sizes) {
      const size_t offset = turn_ % 4;
      const double density = kDensities[turn_ % std::size(kDensities)];
      const IndexedMask mask(random_mask(n, density, random_, turn_ % 3 == 1), n);
      SCOPED_TRACE(::testing::Message()
                   << "n=" << n << " offset=" << offset << " density=" << density);
      check(n, offset, mask);
      if (HasFatalFailure()) return;
      ++turn_;
    }
  }

  Random random_{12345};
  size_t turn_ = 0;  // shapes so far
};

#define SCAPE_CUDA_TESTS(suite)                                                               \
  INSTANTIATE_TEST_SUITE_P(Orders, suite, ::testing::Values(uint64_t{1}, uint64_t{20260731}), \
                           [](const auto& test) { return "seed" + std::to_string(test.param); })

}  // namespace scape::kernels::cuda::testing
