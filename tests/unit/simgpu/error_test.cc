// Errors: which are kept, for whom, and how long.
#include "check.h"

namespace simgpu::test {
namespace {

TEST(Errors, TheLastOneStaysUntilItIsTaken) {
  (void)cudaGetLastError();
  EXPECT_EQ(cudaSetDevice(99), cudaErrorInvalidDevice);
  OK(cudaSetDevice(0));
  EXPECT_EQ(cudaPeekAtLastError(), cudaErrorInvalidDevice);
  std::thread([] { EXPECT_EQ(cudaPeekAtLastError(), cudaSuccess); }).join();
  EXPECT_EQ(cudaGetLastError(), cudaErrorInvalidDevice);
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
}

TEST(Errors, NamesAndTexts) {
  EXPECT_STREQ(cudaGetErrorName(cudaErrorIllegalAddress), "cudaErrorIllegalAddress");
  EXPECT_STREQ(cudaGetErrorString(cudaSuccess), "no error");
  EXPECT_STREQ(cudaGetErrorString(static_cast<cudaError_t>(998)), "unrecognized error code");
}

TEST(Errors, DevicesAndVersions) {
  int count = 0, version = 0, value = 0;
  OK(cudaGetDeviceCount(&count));
  EXPECT_EQ(count, 2);
  OK(cudaRuntimeGetVersion(&version));
  EXPECT_EQ(version, CUDART_VERSION);
  OK(cudaDriverGetVersion(&version));
  cudaDeviceProp properties;
  OK(cudaGetDeviceProperties(&properties, 1));
  OK(cudaDeviceGetAttribute(&value, cudaDevAttrMultiProcessorCount, 1));
  EXPECT_EQ(value, properties.multiProcessorCount);
  EXPECT_EQ(cudaDeviceGetAttribute(&value, cudaDevAttrWarpSize, 2), cudaErrorInvalidDevice);
  char bus[16];
  OK(cudaDeviceGetPCIBusId(bus, sizeof bus, 1));
  EXPECT_STREQ(bus, "0000:02:00.0");
}

}  // namespace
}  // namespace simgpu::test
