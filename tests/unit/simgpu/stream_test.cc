// Streams and events: what is ordered, and what is not.
#include "check.h"

namespace simgpu::test {
namespace {

class Streams : public testing::Test {
 protected:
  void SetUp() override {
    OK(cudaSetDevice(0));
    OK(cudaStreamCreateWithFlags(&apart_, cudaStreamNonBlocking));
    OK(cudaStreamCreate(&blocking_));
    OK(cudaEventCreate(&event_));
  }
  void TearDown() override {
    OK(cudaDeviceSynchronize());
    OK(cudaStreamDestroy(apart_));
    OK(cudaStreamDestroy(blocking_));
    OK(cudaEventDestroy(event_));
  }
  cudaStream_t apart_ = nullptr, blocking_ = nullptr;
  cudaEvent_t event_ = nullptr;
};

TEST_F(Streams, WorkIsEnqueuedAndRunsInOrder) {
  int* data = device_ints(100);
  int* host = nullptr;
  OK(cudaMallocHost(reinterpret_cast<void**>(&host), 400));
  {
    Gate gate(apart_);
    OK(cudaMemsetAsync(data, 1, 400, apart_));
    OK(cudaMemcpyAsync(host, data, 400, cudaMemcpyDeviceToHost, apart_));
    EXPECT_EQ(cudaStreamQuery(apart_), cudaErrorNotReady);
    EXPECT_EQ(cudaGetLastError(), cudaErrorNotReady);
    EXPECT_NE(host[99], 0x01010101);
  }
  OK(cudaStreamSynchronize(apart_));
  EXPECT_EQ(host[99], 0x01010101);
  OK(cudaStreamQuery(apart_));
  OK(cudaFreeHost(host));
  OK(cudaFree(data));
}

TEST_F(Streams, LegacyStreamWaitsForBlockingStreamsAndTheyForIt) {
  int* data = device_ints(1);
  {
    Gate gate(blocking_);
    OK(cudaMemsetAsync(data, 1, 4, nullptr));
    EXPECT_EQ(cudaStreamQuery(nullptr), cudaErrorNotReady);
    OK(cudaMemsetAsync(data, 2, 4, cudaStreamPerThread));
    EXPECT_EQ(cudaStreamQuery(cudaStreamPerThread), cudaErrorNotReady);
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    EXPECT_EQ(cudaStreamQuery(cudaStreamPerThread), cudaErrorNotReady);
  }
  OK(cudaStreamSynchronize(cudaStreamPerThread));
  OK(cudaStreamQuery(nullptr));
  EXPECT_EQ(read_ints(data, 1)[0], 0x02020202);
  OK(cudaFree(data));
  (void)cudaGetLastError();
}

TEST_F(Streams, NonBlockingStreamsGoPastTheLegacyStream) {
  int* data = device_ints(1);
  Gate gate(nullptr);
  OK(cudaMemsetAsync(data, 1, 4, apart_));
  OK(cudaStreamSynchronize(apart_));
  EXPECT_EQ(cudaStreamQuery(blocking_), cudaSuccess);
  OK(cudaMemsetAsync(data, 2, 4, blocking_));
  EXPECT_EQ(cudaStreamQuery(blocking_), cudaErrorNotReady);
  gate.open();
  OK(cudaStreamSynchronize(blocking_));
  EXPECT_EQ(read_ints(data, 1)[0], 0x02020202);
  OK(cudaFree(data));
  (void)cudaGetLastError();
}

TEST_F(Streams, AnEventHoldsTheStateOfItsRecord) {
  cudaStream_t other = nullptr;
  OK(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking));
  OK(cudaStreamWaitEvent(other, event_, 0));  // never recorded: nothing to wait for
  OK(cudaEventQuery(event_));
  OK(cudaEventSynchronize(event_));
  {
    Gate first(apart_);
    OK(cudaEventRecord(event_, apart_));
    OK(cudaStreamWaitEvent(other, event_, 0));
    // A later record does not move the wait that is there.
    Gate second(apart_);
    OK(cudaEventRecord(event_, apart_));
    EXPECT_EQ(cudaStreamQuery(other), cudaErrorNotReady);
    first.open();
    OK(cudaStreamSynchronize(other));
    EXPECT_EQ(cudaEventQuery(event_), cudaErrorNotReady);
  }
  OK(cudaEventSynchronize(event_));
  OK(cudaStreamDestroy(other));
  (void)cudaGetLastError();
}

TEST_F(Streams, EventsCrossDevicesButAreRecordedOnTheirOwn) {
  OK(cudaSetDevice(1));
  cudaStream_t second = nullptr;
  OK(cudaStreamCreateWithFlags(&second, cudaStreamNonBlocking));
  EXPECT_EQ(cudaEventRecord(event_, second), cudaErrorInvalidResourceHandle);
  int device = -1;
  OK(cudaStreamGetDevice(second, &device));
  EXPECT_EQ(device, 1);
  {
    Gate gate(apart_);
    OK(cudaEventRecord(event_, apart_));
    OK(cudaStreamWaitEvent(second, event_, 0));
    EXPECT_EQ(cudaStreamQuery(second), cudaErrorNotReady);
  }
  OK(cudaStreamSynchronize(second));
  OK(cudaStreamDestroy(second));
  (void)cudaGetLastError();
}

TEST_F(Streams, TimeBetweenEvents) {
  cudaEvent_t end = nullptr, untimed = nullptr;
  OK(cudaEventCreate(&end));
  OK(cudaEventCreateWithFlags(&untimed, cudaEventDisableTiming));
  float ms = -1;
  EXPECT_EQ(cudaEventElapsedTime(&ms, event_, end), cudaErrorInvalidResourceHandle);
  OK(cudaEventRecord(event_, apart_));
  {
    Gate gate(apart_);
    OK(cudaEventRecord(end, apart_));
    EXPECT_EQ(cudaEventElapsedTime(&ms, event_, end), cudaErrorNotReady);
    OK(cudaEventSynchronize(event_));
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  OK(cudaEventSynchronize(end));
  OK(cudaEventElapsedTime(&ms, event_, end));
  EXPECT_GE(ms, 2.0f);
  OK(cudaEventRecord(untimed, apart_));
  EXPECT_EQ(cudaEventElapsedTime(&ms, event_, untimed), cudaErrorInvalidResourceHandle);
  OK(cudaEventDestroy(end));
  OK(cudaEventDestroy(untimed));
  (void)cudaGetLastError();
}

TEST_F(Streams, ADestroyedStreamFinishesItsWork) {
  int* data = device_ints(1);
  cudaStream_t other = nullptr;
  OK(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking));
  {
    Gate gate(other);
    OK(cudaMemsetAsync(data, 3, 4, other));
    OK(cudaStreamDestroy(other));
    EXPECT_EQ(cudaStreamQuery(other), cudaErrorInvalidResourceHandle);
  }
  OK(cudaDeviceSynchronize());
  EXPECT_EQ(read_ints(data, 1)[0], 0x03030303);
  OK(cudaFree(data));
  (void)cudaGetLastError();
}

TEST_F(Streams, HostFunctionsMayNotCallTheRuntime) {
  cudaError_t seen = cudaSuccess;
  OK(cudaLaunchHostFunc(
      apart_, [](void* out) { *static_cast<cudaError_t*>(out) = cudaStreamQuery(nullptr); },
      &seen));
  OK(cudaStreamSynchronize(apart_));
  EXPECT_EQ(seen, cudaErrorNotPermitted);
}

TEST_F(Streams, DriverValuesHoldAStreamBack) {
  using Value = int (*)(cudaStream_t, unsigned long long, uint32_t, unsigned);
  Value write = nullptr, wait = nullptr;
  cudaDriverEntryPointQueryResult found;
  OK(cudaGetDriverEntryPointByVersion("cuStreamWriteValue32", reinterpret_cast<void**>(&write),
                                      13000, cudaEnableDefault, &found));
  EXPECT_EQ(found, cudaDriverEntryPointSuccess);
  OK(cudaGetDriverEntryPointByVersion("cuStreamWaitValue32", reinterpret_cast<void**>(&wait), 13000,
                                      cudaEnableDefault, &found));
  void* none = this;
  OK(cudaGetDriverEntryPointByVersion("cuNoSuchThing", &none, 13000, cudaEnableDefault, &found));
  EXPECT_EQ(found, cudaDriverEntryPointSymbolNotFound);
  EXPECT_EQ(none, nullptr);
  int* data = device_ints(1);
  OK(cudaDeviceSynchronize());
  const auto address = reinterpret_cast<unsigned long long>(data);
  ASSERT_EQ(wait(apart_, address, 7, 0), 0);
  EXPECT_EQ(cudaStreamQuery(apart_), cudaErrorNotReady);
  ASSERT_EQ(write(blocking_, address, 8, 0), 0);
  OK(cudaStreamSynchronize(apart_));
  OK(cudaFree(data));
  (void)cudaGetLastError();
}

TEST_F(Streams, CountersTellWhetherTheHostWaited) {
  int* data = device_ints(16);
  int* pinned = nullptr;
  OK(cudaMallocHost(reinterpret_cast<void**>(&pinned), 64));
  OK(cudaDeviceSynchronize());
  const simgpu_counters before = counters();
  OK(cudaMemcpyAsync(pinned, data, 64, cudaMemcpyDeviceToHost, apart_));
  OK(cudaMemcpyAsync(data, pinned, 64, cudaMemcpyHostToDevice, apart_));
  OK(cudaEventRecord(event_, apart_));
  OK(cudaStreamWaitEvent(blocking_, event_, 0));
  (void)cudaEventQuery(event_);
  EXPECT_EQ(counters().host_syncs, before.host_syncs);
  EXPECT_EQ(counters().allocations, before.allocations);
  EXPECT_EQ(counters().copied_bytes, before.copied_bytes + 128);
  int pageable[16];
  OK(cudaMemcpyAsync(pageable, data, 64, cudaMemcpyDeviceToHost, apart_));
  EXPECT_EQ(counters().host_syncs, before.host_syncs + 1) << "pageable memory makes it wait";
  OK(cudaStreamSynchronize(apart_));
  OK(cudaEventSynchronize(event_));
  OK(cudaFreeHost(pinned));
  OK(cudaFree(data));
  EXPECT_EQ(counters().host_syncs, before.host_syncs + 5);
  EXPECT_EQ(counters().frees, before.frees + 2);
  EXPECT_GE(simgpu_calls("cudaMemcpyAsync"), 3u);
  (void)cudaGetLastError();
}

}  // namespace
}  // namespace simgpu::test
