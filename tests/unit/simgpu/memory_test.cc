// Memory: what may be copied where, what is freed when, what is found out.
#include "check.h"

namespace simgpu::test {
namespace {

TEST(Memory, KindsOfCopies) {
  int host[4] = {1, 2, 3, 4}, back[4] = {};
  void *one = nullptr, *two = nullptr;
  OK(cudaMalloc(&one, sizeof host));
  OK(cudaMalloc(&two, sizeof host));
  OK(cudaMemcpy(one, host, sizeof host, cudaMemcpyHostToDevice));
  OK(cudaMemcpy(two, one, sizeof host, cudaMemcpyDeviceToDevice));
  OK(cudaMemcpy(back, two, sizeof host, cudaMemcpyDefault));
  EXPECT_EQ(back[3], 4);
  OK(cudaMemcpy(back, host, 4, cudaMemcpyHostToHost));
  EXPECT_EQ(cudaMemcpy(one, host, 4, cudaMemcpyDeviceToDevice), cudaErrorInvalidValue);
  EXPECT_EQ(cudaMemcpy(host, one, 4, cudaMemcpyHostToDevice), cudaErrorInvalidValue);
  EXPECT_EQ(cudaMemcpy(one, host, sizeof host + 1, cudaMemcpyHostToDevice), cudaErrorInvalidValue)
      << "beyond the allocation";
  EXPECT_EQ(cudaMemset(host, 0, 4), cudaErrorInvalidValue);
  OK(cudaFree(one));
  EXPECT_EQ(cudaMemcpy(back, one, 4, cudaMemcpyDefault), cudaErrorInvalidValue) << "freed";
  EXPECT_EQ(cudaFree(one), cudaErrorInvalidValue) << "freed";
  EXPECT_EQ(cudaFree(static_cast<char*>(two) + 4), cudaErrorInvalidValue) << "not its beginning";
  OK(cudaFree(two));
  OK(cudaFree(nullptr));
  (void)cudaGetLastError();
}

TEST(Memory, APageableSourceIsReadAtTheCall) {
  cudaStream_t stream = nullptr;
  OK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  int* data = device_ints(1);
  int* pinned = nullptr;
  OK(cudaMallocHost(reinterpret_cast<void**>(&pinned), 8));
  int pageable = 1;
  pinned[0] = 1;
  int* pinned_copy = device_ints(1);
  OK(cudaDeviceSynchronize());
  {
    Gate gate(stream);
    OK(cudaMemcpyAsync(data, &pageable, 4, cudaMemcpyHostToDevice, stream));
    OK(cudaMemcpyAsync(pinned_copy, pinned, 4, cudaMemcpyHostToDevice, stream));
    pageable = 2;
    pinned[0] = 2;  // still to be read: what a missing synchronisation does
  }
  OK(cudaStreamSynchronize(stream));
  EXPECT_EQ(read_ints(data, 1)[0], 1);
  EXPECT_EQ(read_ints(pinned_copy, 1)[0], 2);
  OK(cudaFreeHost(pinned));
  OK(cudaFree(data));
  OK(cudaFree(pinned_copy));
  OK(cudaStreamDestroy(stream));
}

TEST(Memory, FreeWaitsForTheDeviceAndFreeAsyncForItsStream) {
  cudaStream_t stream = nullptr;
  OK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  size_t before = 0, now = 0, total = 0;
  OK(cudaMemGetInfo(&before, &total));
  void* async = nullptr;
  OK(cudaMallocAsync(&async, 1 << 20, stream));
  int* data = device_ints(1);
  OK(cudaDeviceSynchronize());
  {
    Gate gate(stream);
    OK(cudaMemsetAsync(async, 0, 1 << 20, stream));
    OK(cudaFreeAsync(async, stream));
    EXPECT_EQ(cudaFreeAsync(async, stream), cudaErrorInvalidValue);
    OK(cudaMemGetInfo(&now, &total));
    EXPECT_EQ(now, before - (1 << 20) - 4);
    std::thread opener([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
      gate.open();
    });
    OK(cudaFree(data));
    OK(cudaStreamQuery(stream)) << "cudaFree has waited for all of the device";
    opener.join();
  }
  OK(cudaMemGetInfo(&now, &total));
  EXPECT_EQ(now, before);
  OK(cudaStreamDestroy(stream));
  (void)cudaGetLastError();
}

TEST(Memory, ADeviceHasSoMuchOfIt) {
  size_t free = 0, total = 0;
  OK(cudaMemGetInfo(&free, &total));
  void* out = nullptr;
  EXPECT_EQ(cudaMalloc(&out, free + 1), cudaErrorMemoryAllocation);
  EXPECT_EQ(out, nullptr);
  EXPECT_EQ(cudaGetLastError(), cudaErrorMemoryAllocation);
  OK(cudaMalloc(&out, 0));
  EXPECT_EQ(out, nullptr);
}

TEST(Memory, AttributesTellWhoseAPointerIs) {
  OK(cudaSetDevice(1));
  char* data = nullptr;
  OK(cudaMalloc(reinterpret_cast<void**>(&data), 100));
  OK(cudaSetDevice(0));
  cudaPointerAttributes attributes;
  OK(cudaPointerGetAttributes(&attributes, data + 99));
  EXPECT_EQ(attributes.type, cudaMemoryTypeDevice);
  EXPECT_EQ(attributes.device, 1);
  EXPECT_EQ(attributes.devicePointer, data + 99);
  EXPECT_EQ(attributes.hostPointer, nullptr);
  OK(cudaPointerGetAttributes(&attributes, &attributes));
  EXPECT_EQ(attributes.type, cudaMemoryTypeUnregistered);
  std::vector<char> own(1000);
  void* mapped = nullptr;
  EXPECT_EQ(cudaHostGetDevicePointer(&mapped, own.data(), 0), cudaErrorInvalidValue);
  OK(cudaHostRegister(own.data(), own.size(), cudaHostRegisterMapped));
  EXPECT_EQ(cudaHostRegister(own.data() + 999, 1, 0), cudaErrorHostMemoryAlreadyRegistered);
  OK(cudaHostGetDevicePointer(&mapped, own.data() + 10, 0));
  EXPECT_EQ(mapped, own.data() + 10);
  OK(cudaPointerGetAttributes(&attributes, own.data()));
  EXPECT_EQ(attributes.type, cudaMemoryTypeHost);
  OK(cudaHostUnregister(own.data()));
  EXPECT_EQ(cudaHostUnregister(own.data()), cudaErrorHostMemoryNotRegistered);
  OK(cudaFree(data));
  (void)cudaGetLastError();
}

TEST(Memory, PoolsCountWhatIsUsed) {
  cudaMemPool_t pool = nullptr;
  OK(cudaDeviceGetDefaultMemPool(&pool, 0));
  uint64_t threshold = UINT64_MAX, used = 0, before = 0;
  OK(cudaMemPoolSetAttribute(pool, cudaMemPoolAttrReleaseThreshold, &threshold));
  threshold = 0;
  OK(cudaMemPoolGetAttribute(pool, cudaMemPoolAttrReleaseThreshold, &threshold));
  EXPECT_EQ(threshold, UINT64_MAX);
  OK(cudaMemPoolGetAttribute(pool, cudaMemPoolAttrUsedMemCurrent, &before));
  void* data = nullptr;
  OK(cudaMallocAsync(&data, 1000, nullptr));
  OK(cudaMemPoolGetAttribute(pool, cudaMemPoolAttrUsedMemCurrent, &used));
  EXPECT_EQ(used, before + 1000);
  OK(cudaFreeAsync(data, nullptr));
  OK(cudaDeviceSynchronize());
}

}  // namespace
}  // namespace simgpu::test
