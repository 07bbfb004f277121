// Captures: what becomes part of a graph, what a launch does, what is forbidden meanwhile.
#include "check.h"

namespace simgpu::test {
namespace {

class Captures : public testing::Test {
 protected:
  void SetUp() override {
    OK(cudaStreamCreateWithFlags(&main_, cudaStreamNonBlocking));
    OK(cudaStreamCreateWithFlags(&side_, cudaStreamNonBlocking));
    OK(cudaEventCreateWithFlags(&fork_, cudaEventDisableTiming));
    OK(cudaEventCreateWithFlags(&join_, cudaEventDisableTiming));
    data_ = device_ints(4);
    OK(cudaDeviceSynchronize());
  }
  void TearDown() override {
    OK(cudaFree(data_));
    OK(cudaStreamDestroy(main_));
    OK(cudaStreamDestroy(side_));
    OK(cudaEventDestroy(fork_));
    OK(cudaEventDestroy(join_));
    (void)cudaGetLastError();
  }
  void begin(cudaStreamCaptureMode mode = cudaStreamCaptureModeThreadLocal) {
    OK(cudaStreamBeginCapture(main_, mode));
  }
  // Ends a capture that something has gone wrong in.
  void expect_end(cudaError_t error) {
    cudaGraph_t graph = nullptr;
    EXPECT_EQ(cudaStreamEndCapture(main_, &graph), error);
    EXPECT_EQ(graph, nullptr);
    cudaStreamCaptureStatus status;
    OK(cudaStreamIsCapturing(main_, &status));
    EXPECT_EQ(status, cudaStreamCaptureStatusNone);
  }
  cudaStream_t main_ = nullptr, side_ = nullptr;
  cudaEvent_t fork_ = nullptr, join_ = nullptr;
  int* data_ = nullptr;
};

TEST_F(Captures, ForkAndJoinRunAtEachLaunch) {
  begin();
  int runs = 0;
  OK(cudaMemsetAsync(data_, 1, 4, main_));
  OK(cudaEventRecord(fork_, main_));
  OK(cudaStreamWaitEvent(side_, fork_, 0));
  cudaStreamCaptureStatus status;
  OK(cudaStreamIsCapturing(side_, &status));
  EXPECT_EQ(status, cudaStreamCaptureStatusActive);
  OK(cudaMemcpyAsync(data_ + 1, data_, 4, cudaMemcpyDeviceToDevice, side_));
  OK(cudaLaunchHostFunc(
      side_, [](void* out) { ++*static_cast<int*>(out); }, &runs));
  OK(cudaEventRecord(join_, side_));
  OK(cudaMemsetAsync(data_ + 2, 2, 4, main_));
  OK(cudaStreamWaitEvent(main_, join_, 0));
  OK(cudaMemcpyAsync(data_ + 3, data_ + 1, 4, cudaMemcpyDeviceToDevice, main_));
  cudaGraph_t graph = nullptr;
  OK(cudaStreamEndCapture(main_, &graph));
  EXPECT_EQ(read_ints(data_, 4), std::vector<int>(4)) << "a capture runs nothing";
  size_t nodes = 0;
  OK(cudaGraphGetNodes(graph, nullptr, &nodes));
  EXPECT_EQ(nodes, 5u);
  cudaGraphExec_t exec = nullptr;
  OK(cudaGraphInstantiate(&exec, graph, 0));
  OK(cudaGraphDestroy(graph));
  for (int i = 1; i <= 3; ++i) {
    OK(cudaMemset(data_, 0, 16));
    OK(cudaDeviceSynchronize());
    OK(cudaGraphLaunch(exec, main_));
    OK(cudaStreamSynchronize(main_));
    EXPECT_EQ(runs, i);
    EXPECT_EQ(read_ints(data_, 4),
              (std::vector<int>{0x01010101, 0x01010101, 0x02020202, 0x01010101}));
  }
  // Behind what the stream holds, and before what follows.
  {
    Gate gate(main_);
    OK(cudaMemsetAsync(data_ + 3, 0, 4, main_));
    OK(cudaGraphLaunch(exec, main_));
    OK(cudaMemsetAsync(data_ + 2, 9, 4, main_));
    EXPECT_EQ(cudaStreamQuery(main_), cudaErrorNotReady);
  }
  OK(cudaStreamSynchronize(main_));
  EXPECT_EQ(read_ints(data_ + 2, 2), (std::vector<int>{0x09090909, 0x01010101}));
  OK(cudaGraphExecDestroy(exec));
}

TEST_F(Captures, AGraphInAGraph) {
  begin();
  OK(cudaMemsetAsync(data_, 5, 4, main_));
  cudaGraph_t inner = nullptr, outer = nullptr;
  OK(cudaStreamEndCapture(main_, &inner));
  cudaGraphExec_t exec = nullptr, whole = nullptr;
  OK(cudaGraphInstantiate(&exec, inner, 0));
  begin();
  OK(cudaGraphLaunch(exec, main_));
  OK(cudaMemcpyAsync(data_ + 1, data_, 4, cudaMemcpyDeviceToDevice, main_));
  OK(cudaStreamEndCapture(main_, &outer));
  OK(cudaGraphInstantiate(&whole, outer, 0));
  OK(cudaGraphLaunch(whole, main_));
  OK(cudaStreamSynchronize(main_));
  EXPECT_EQ(read_ints(data_, 2), (std::vector<int>{0x05050505, 0x05050505}));
  for (const auto graph : {inner, outer}) OK(cudaGraphDestroy(graph));
  for (const auto one : {exec, whole}) OK(cudaGraphExecDestroy(one));
}

TEST_F(Captures, WaitingAndAllocatingAreForbidden) {
  using Forbidden = std::function<cudaError_t()>;
  void* out = nullptr;
  const std::vector<std::pair<const char*, Forbidden>> calls = {
      {"cudaMalloc", [&] { return cudaMalloc(&out, 4); }},
      {"cudaFree", [&] { return cudaFree(data_); }},
      {"cudaMallocHost", [&] { return cudaMallocHost(&out, 4); }},
      {"cudaMallocAsync", [&] { return cudaMallocAsync(&out, 4, main_); }},
      {"cudaStreamSynchronize", [&] { return cudaStreamSynchronize(main_); }},
      {"cudaStreamQuery", [&] { return cudaStreamQuery(main_); }},
      {"cudaDeviceSynchronize", [&] { return cudaDeviceSynchronize(); }},
      {"cudaEventQuery", [&] { return cudaEventQuery(join_); }},
      {"cudaMemcpy", [&] { return cudaMemcpy(data_, data_ + 1, 4, cudaMemcpyDefault); }},
  };
  for (const auto& [name, forbidden] : calls) {
    begin();
    OK(cudaMemsetAsync(data_, 1, 4, main_));
    EXPECT_EQ(forbidden(), cudaErrorStreamCaptureUnsupported) << name;
    EXPECT_EQ(cudaMemsetAsync(data_, 1, 4, main_), cudaErrorStreamCaptureInvalidated) << name;
    expect_end(cudaErrorStreamCaptureInvalidated);
  }
}

TEST_F(Captures, ModesDecideWhomACaptureConcerns) {
  const auto elsewhere = [](cudaStreamCaptureMode mode) {
    cudaError_t result = cudaErrorUnknown;
    std::thread([&] {
      (void)cudaThreadExchangeStreamCaptureMode(&mode);
      void* out = nullptr;
      result = cudaMalloc(&out, 4);
      if (result == cudaSuccess) (void)cudaFree(out);
    }).join();
    return result;
  };
  begin(cudaStreamCaptureModeThreadLocal);
  EXPECT_EQ(elsewhere(cudaStreamCaptureModeGlobal), cudaSuccess);
  cudaGraph_t graph = nullptr;
  OK(cudaStreamEndCapture(main_, &graph));
  OK(cudaGraphDestroy(graph));

  begin(cudaStreamCaptureModeGlobal);
  EXPECT_EQ(elsewhere(cudaStreamCaptureModeRelaxed), cudaSuccess);
  EXPECT_EQ(elsewhere(cudaStreamCaptureModeThreadLocal), cudaSuccess);
  EXPECT_EQ(elsewhere(cudaStreamCaptureModeGlobal), cudaErrorStreamCaptureUnsupported);
  expect_end(cudaErrorStreamCaptureInvalidated);

  begin(cudaStreamCaptureModeRelaxed);
  void* out = nullptr;
  OK(cudaMalloc(&out, 4));
  OK(cudaFree(out));
  EXPECT_EQ(cudaStreamSynchronize(main_), cudaErrorStreamCaptureUnsupported) << "in every mode";
  expect_end(cudaErrorStreamCaptureInvalidated);

  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  OK(cudaThreadExchangeStreamCaptureMode(&mode));
  EXPECT_EQ(mode, cudaStreamCaptureModeGlobal);
  begin(cudaStreamCaptureModeGlobal);
  OK(cudaMalloc(&out, 4));
  OK(cudaThreadExchangeStreamCaptureMode(&mode));
  OK(cudaStreamEndCapture(main_, &graph));
  OK(cudaGraphDestroy(graph));
  OK(cudaFree(out));
}

TEST_F(Captures, EventsOfACaptureAreNoMoments) {
  begin();
  OK(cudaMemsetAsync(data_, 1, 4, main_));
  OK(cudaEventRecord(fork_, main_));
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  OK(cudaThreadExchangeStreamCaptureMode(&mode));
  EXPECT_EQ(cudaEventQuery(fork_), cudaErrorCapturedEvent);
  OK(cudaThreadExchangeStreamCaptureMode(&mode));
  expect_end(cudaErrorStreamCaptureInvalidated);

  OK(cudaEventRecord(join_, side_));
  begin();
  EXPECT_EQ(cudaStreamWaitEvent(main_, join_, 0), cudaErrorStreamCaptureIsolation);
  expect_end(cudaErrorStreamCaptureInvalidated);
}

TEST_F(Captures, AForkMustBeJoinedWhereItBegan) {
  begin();
  OK(cudaMemsetAsync(data_, 1, 4, main_));
  OK(cudaEventRecord(fork_, main_));
  OK(cudaStreamWaitEvent(side_, fork_, 0));
  OK(cudaMemsetAsync(data_, 1, 4, side_));
  expect_end(cudaErrorStreamCaptureUnjoined);
  cudaStreamCaptureStatus status;
  OK(cudaStreamIsCapturing(side_, &status));
  EXPECT_EQ(status, cudaStreamCaptureStatusNone);

  begin();
  OK(cudaEventRecord(fork_, main_));
  OK(cudaStreamWaitEvent(side_, fork_, 0));
  cudaGraph_t graph = nullptr;
  EXPECT_EQ(cudaStreamEndCapture(side_, &graph), cudaErrorStreamCaptureUnmatched);
  expect_end(cudaErrorStreamCaptureInvalidated);

  begin();
  cudaError_t elsewhere = cudaSuccess;
  std::thread([&] { elsewhere = cudaStreamEndCapture(main_, &graph); }).join();
  EXPECT_EQ(elsewhere, cudaErrorStreamCaptureWrongThread);
  OK(cudaStreamEndCapture(main_, &graph));
  OK(cudaGraphDestroy(graph));
}

TEST_F(Captures, TheLegacyStreamMayNotDependOnACapture) {
  cudaGraph_t graph = nullptr;
  EXPECT_EQ(cudaStreamBeginCapture(nullptr, cudaStreamCaptureModeRelaxed),
            cudaErrorStreamCaptureUnsupported);
  cudaStream_t blocking = nullptr;
  OK(cudaStreamCreate(&blocking));
  OK(cudaStreamBeginCapture(blocking, cudaStreamCaptureModeThreadLocal));
  EXPECT_EQ(cudaMemsetAsync(data_, 1, 4, nullptr), cudaErrorStreamCaptureImplicit);
  EXPECT_EQ(cudaStreamEndCapture(blocking, &graph), cudaErrorStreamCaptureInvalidated);
  OK(cudaStreamDestroy(blocking));
  begin();
  OK(cudaMemsetAsync(data_, 1, 4, nullptr)) << "a non-blocking stream has nothing to do with it";
  OK(cudaStreamEndCapture(main_, &graph));
  OK(cudaGraphDestroy(graph));
}

TEST_F(Captures, ExternalEventsAreRecordedByLaunches) {
  begin();
  OK(cudaMemsetAsync(data_, 7, 4, main_));
  OK(cudaEventRecordWithFlags(fork_, main_, cudaEventRecordExternal));
  OK(cudaStreamWaitEvent(main_, join_, cudaEventWaitExternal));
  OK(cudaMemsetAsync(data_ + 1, 8, 4, main_));
  cudaGraph_t graph = nullptr;
  OK(cudaStreamEndCapture(main_, &graph));
  cudaGraphExec_t exec = nullptr;
  OK(cudaGraphInstantiate(&exec, graph, 0));
  {
    Gate gate(side_);
    OK(cudaEventRecord(join_, side_));
    OK(cudaGraphLaunch(exec, main_));
    OK(cudaEventSynchronize(fork_));
    EXPECT_EQ(cudaStreamQuery(main_), cudaErrorNotReady);
  }
  OK(cudaStreamSynchronize(main_));
  EXPECT_EQ(read_ints(data_, 2), (std::vector<int>{0x07070707, 0x08080808}));
  OK(cudaGraphExecDestroy(exec));
  OK(cudaGraphDestroy(graph));
}

}  // namespace
}  // namespace simgpu::test
