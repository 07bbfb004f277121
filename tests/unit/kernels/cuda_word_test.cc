// Kernels that read a word which the host writes.
#include <chrono>
#include <thread>

#include "tests/unit/kernels/cuda_testing.h"

namespace scape::kernels::cuda::testing {
namespace {

class CudaWord : public CudaKernels {};
SCAPE_CUDA_TESTS(CudaWord);

TEST_P(CudaWord, PoisonsAllBytesWhereTheWordIsBad) {
  constexpr uint32_t kBad = 2;
  for (const size_t bytes : {0, 1, 255, 256, 257, 8191, 8192, 8193, 100'003}) {
    for (size_t offset = 0; offset < 4; ++offset) {
      for (const uint32_t value : {0u, 1u, kBad, 3u}) {
        Guarded<uint8_t> data(bytes, offset);
        Guarded<uint32_t> word(1);
        word[0] = value;
        std::fill_n(data.data(), bytes, uint8_t{0x3c});
        ASSERT_RUNS(poison_where(kStream, word.data(), kBad, data.data(), bytes));
        const uint8_t expected = value == kBad ? 0xff : 0x3c;
        for (size_t i = 0; i < bytes; ++i) ASSERT_EQ(data[i], expected) << i;
        data.check_guards();
      }
    }
  }
}

TEST_P(CudaWord, HoldsItsStreamUntilTheHostWrites) {
  uint32_t* word = nullptr;
  ASSERT_EQ(cudaMallocHost(reinterpret_cast<void**>(&word), sizeof(*word)), cudaSuccess);
  *word = 0;
  ASSERT_ENQUEUED(wait_for_word(kStream, word));
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  EXPECT_EQ(cudaStreamQuery(kStream), cudaErrorNotReady);
  (void)cudaGetLastError();
  __atomic_store_n(word, 1u, __ATOMIC_RELEASE);
  EXPECT_EQ(cudaStreamSynchronize(kStream), cudaSuccess);
  // There already.
  ASSERT_RUNS(wait_for_word(kStream, word));
  EXPECT_EQ(cudaFreeHost(word), cudaSuccess);
}

}  // namespace
}  // namespace scape::kernels::cuda::testing
