// Launches of kernels: what is checked, and what reaches the grid. Grids are a loop here, so that
// only the launch is under test.
#include "check.h"

namespace simgpu {

std::string run_grid(const Launch& launch, const std::function<void()>& thread) {
  for (size_t i = 0; i < launch.grid.count() * launch.block.count(); ++i) thread();
  return launch.grid.z == 2 ? "a grid that went wrong" : "";
}

namespace test {
namespace {

void add(int* out, int value, long scale) { *out += static_cast<int>(value * scale); }

cudaLaunchConfig_t config_of(dim3 grid, dim3 block, size_t dynamic_smem, cudaStream_t stream) {
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = dynamic_smem;
  config.stream = stream;
  return config;
}

TEST(Launches, ArgumentsAreCopiedAndEachThreadRuns) {
  cudaStream_t stream = nullptr;
  OK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  int* data = device_ints(1);
  OK(cudaDeviceSynchronize());
  const cudaLaunchConfig_t config = config_of({2, 3}, 4, 0, stream);
  const uint64_t before = counters().kernels;
  {
    Gate gate(stream);
    int value = 5;
    OK(cudaLaunchKernelEx(&config, add, data, value, 2));
    value = 7;
  }
  OK(cudaStreamSynchronize(stream));
  EXPECT_EQ(read_ints(data, 1)[0], 2 * 3 * 4 * 5 * 2);
  EXPECT_EQ(counters().kernels, before + 1);
  OK(cudaFree(data));
  OK(cudaStreamDestroy(stream));
}

TEST(Launches, ImpossibleOnesAreRefused) {
  const auto launched = [](dim3 grid, dim3 block, size_t dynamic_smem = 0,
                           cudaStream_t stream = nullptr) {
    const cudaLaunchConfig_t config = config_of(grid, block, dynamic_smem, stream);
    static int out = 0;
    return cudaLaunchKernelEx(&config, add, &out, 0, 0);
  };
  EXPECT_EQ(launched(0, 1), cudaErrorInvalidConfiguration);
  EXPECT_EQ(launched(1, 1025), cudaErrorInvalidConfiguration);
  EXPECT_EQ(launched(1, {32, 33}), cudaErrorInvalidConfiguration);
  EXPECT_EQ(launched({1, 65536}, 1), cudaErrorInvalidConfiguration);
  EXPECT_EQ(launched(1, 1, (48 << 10) + 1), cudaErrorInvalidValue);
  OK(cudaFuncSetAttribute(reinterpret_cast<const void*>(add),
                          cudaFuncAttributeMaxDynamicSharedMemorySize, 100 << 10));
  OK(launched(1, 1, 100 << 10));
  OK(cudaSetDevice(1));
  cudaStream_t elsewhere = nullptr;
  OK(cudaStreamCreate(&elsewhere));
  OK(cudaSetDevice(0));
  EXPECT_EQ(launched(1, 1, 0, elsewhere), cudaErrorInvalidResourceHandle);
  OK(cudaDeviceSynchronize());
  OK(cudaStreamDestroy(elsewhere));
  (void)cudaGetLastError();
}

// The last one: it leaves device 1 broken.
TEST(Launches, OfAGridThatGoesWrongBreakTheDevice) {
  OK(cudaSetDevice(1));
  int* data = device_ints(1);
  const cudaLaunchConfig_t config = config_of({1, 1, 2}, 1, 0, nullptr);
  OK(cudaLaunchKernelEx(&config, add, data, 1, 1));
  EXPECT_EQ(cudaDeviceSynchronize(), cudaErrorLaunchFailure);
  EXPECT_EQ(cudaFree(data), cudaErrorLaunchFailure);
  EXPECT_EQ(cudaGetLastError(), cudaErrorLaunchFailure);
  EXPECT_EQ(cudaGetLastError(), cudaErrorLaunchFailure);
  OK(cudaSetDevice(0));
}

}  // namespace
}  // namespace test
}  // namespace simgpu
