// What the SIMGPU_* settings do. They hold for a process, so each test has its own.
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <map>
#include <string>

#include "check.h"
#include "tests/support/run_ranks.h"
#include "tests/support/slowdown.h"

namespace simgpu::test {
namespace {

using scape::test::RankResult;

#if defined(__SANITIZE_THREAD__)
constexpr bool kThreadSanitizer = true;
#else
constexpr bool kThreadSanitizer = false;
#endif
constexpr bool kSanitizer = scape::test::kSlowdown > 1;

// Runs `body` in a process with these settings; a failed expectation in it is its text.
template <typename Body>
RankResult with(const std::map<std::string, std::string>& settings, Body&& body) {
  return scape::test::run_ranks(1, [&](int, int) -> std::string {
    for (const auto& [name, value] : settings) ::setenv(name.c_str(), value.c_str(), 1);
    return body();
  })[0];
}

#define EXPECT_WELL(result)           \
  EXPECT_EQ((result).text, "");       \
  EXPECT_EQ((result).exit_status, 0); \
  EXPECT_EQ((result).signal, 0)

#define DEMAND(condition) \
  if (!(condition))       \
  return std::string(#condition " does not hold, line ") + std::to_string(__LINE__)

// A producer on one stream and a consumer on another; true when the consumer saw it all.
bool pipeline_is_right(bool fenced) {
  cudaStream_t producer, consumer;
  cudaEvent_t event;
  (void)cudaStreamCreateWithFlags(&producer, cudaStreamNonBlocking);
  (void)cudaStreamCreateWithFlags(&consumer, cudaStreamNonBlocking);
  (void)cudaEventCreateWithFlags(&event, cudaEventDisableTiming);
  int* data = device_ints(2);
  (void)cudaDeviceSynchronize();
  bool right = true;
  for (int round = 1; round <= 20; ++round) {
    (void)cudaMemsetAsync(data, round, 4, producer);
    if (fenced) {
      (void)cudaEventRecord(event, producer);
      (void)cudaStreamWaitEvent(consumer, event, 0);
    }
    (void)cudaMemcpyAsync(data + 1, data, 4, cudaMemcpyDeviceToDevice, consumer);
    (void)cudaDeviceSynchronize();
    right &= read_ints(data + 1, 1)[0] == round * 0x01010101;
  }
  return right;
}

TEST(Reordering, ShowsAMissingFenceAndOnlyThat) {
  for (const char* seed : {"1", "2", "3"}) {
    const RankResult fenced = with({{"SIMGPU_REORDER", seed}}, [] {
      return pipeline_is_right(true) ? std::string() : "a fence did not hold";
    });
    EXPECT_WELL(fenced) << seed;
    const RankResult missing = with({{"SIMGPU_REORDER", seed}}, [] {
      return pipeline_is_right(false) ? "a missing fence did not show" : std::string();
    });
    EXPECT_EQ(missing.text, "") << seed;
    // The thread sanitizer may see it first, as what it is: a data race.
    EXPECT_TRUE(missing.exit_status == 0 || (kThreadSanitizer && missing.exit_status == 66))
        << seed;
  }
}

TEST(Failures, ComeAtTheNamedCallWithTheNamedError) {
  const RankResult result =
      with({{"SIMGPU_FAIL", "cudaMalloc:2,cudaEventRecord:1+=cudaErrorUnknown,cudaMemset:2=1"}},
           []() -> std::string {
             void* out = nullptr;
             DEMAND(cudaMalloc(&out, 4) == cudaSuccess);
             DEMAND(cudaMalloc(&out, 4) == cudaErrorMemoryAllocation);
             DEMAND(cudaMalloc(&out, 4) == cudaSuccess);
             cudaEvent_t event;
             DEMAND(cudaEventCreate(&event) == cudaSuccess);
             DEMAND(cudaEventRecord(event, nullptr) == cudaErrorUnknown);
             DEMAND(cudaEventRecord(event, nullptr) == cudaErrorUnknown);
             DEMAND(cudaMemset(out, 0, 4) == cudaSuccess);
             DEMAND(cudaMemset(out, 0, 4) == cudaErrorInvalidValue);
             return "";
           });
  EXPECT_WELL(result);
}

TEST(Failures, OfAKernelBreakTheDeviceForGood) {
  const RankResult result = with({{"SIMGPU_FAIL", "kernel:2"}}, []() -> std::string {
    int ran = 0;
    const cudaStream_t stream = nullptr;
    const auto count = [&] { ++ran; };
    DEMAND(enqueue(0, std::span(&stream, 1), count) == cudaSuccess);
    DEMAND(cudaDeviceSynchronize() == cudaSuccess);
    DEMAND(enqueue(0, std::span(&stream, 1), count) == cudaSuccess);
    DEMAND(cudaDeviceSynchronize() == cudaErrorIllegalAddress);
    DEMAND(ran == 1);
    DEMAND(cudaGetLastError() == cudaErrorIllegalAddress);
    DEMAND(cudaGetLastError() == cudaErrorIllegalAddress);
    void* out = nullptr;
    DEMAND(cudaMalloc(&out, 4) == cudaErrorIllegalAddress);
    DEMAND(cudaSetDevice(1) == cudaSuccess);
    DEMAND(cudaMalloc(&out, 4) == cudaSuccess);
    return "";
  });
  EXPECT_WELL(result);
}

TEST(MemoryOperations, AreRefusedWhereTheDeviceLacksThem) {
  const RankResult result = with({{"SIMGPU_MEMORY_OPERATIONS", "off"}}, []() -> std::string {
    using Value = int (*)(cudaStream_t, unsigned long long, uint32_t, unsigned);
    uint32_t* word = nullptr;
    DEMAND(cudaMallocHost(reinterpret_cast<void**>(&word), sizeof(*word)) == cudaSuccess);
    *word = 5;
    for (const char* name : {"cuStreamWaitValue32", "cuStreamWriteValue32"}) {
      Value function = nullptr;
      DEMAND(cudaGetDriverEntryPointByVersion(name, reinterpret_cast<void**>(&function), 12000,
                                              cudaEnableDefault, nullptr) == cudaSuccess);
      DEMAND(function(nullptr, reinterpret_cast<uintptr_t>(word), 7, 0) == cudaErrorNotSupported);
    }
    DEMAND(cudaDeviceSynchronize() == cudaSuccess);
    DEMAND(*word == 5);
    return "";
  });
  EXPECT_WELL(result);
}

TEST(Settings, AMistakeIsRefused) {
  for (const auto& [name, value] : std::map<std::string, std::string>{
           {"SIMGPU_DEVICES", "17"}, {"SIMGPU_REORDER", "x"}, {"SIMGPU_FAIL", "cudaMalloc"}}) {
    const RankResult result = with({{name, value}}, []() -> std::string {
      int count = 0;
      DEMAND(cudaGetDeviceCount(&count) == cudaErrorInitializationError);
      return "";
    });
    EXPECT_WELL(result) << name;
  }
  const RankResult none = with({{"SIMGPU_DEVICES", "0"}}, []() -> std::string {
    int count = 0;
    DEMAND(cudaGetDeviceCount(&count) == cudaErrorNoDevice);
    return "";
  });
  EXPECT_WELL(none);
}

// ---- faults; each ends its process ----

volatile int sink;

// Ended by the fault, which a sanitizer turns into an exit of its own.
bool faulted(const RankResult& result) {
  return result.signal == SIGSEGV || (kSanitizer && result.exit_status > 0);
}

std::string touched_by_host_code() {
  int* data = device_ints(100);
  (void)cudaDeviceSynchronize();
  sink = data[3];
  return "host code read device memory";
}

// What a stream's work does to the 100 ints at `data`.
template <typename Work>
std::string in_a_stream(int* data, Work&& work) {
  const cudaStream_t stream = nullptr;
  (void)enqueue(0, std::span(&stream, 1), [=] { work(data); });
  const cudaError_t error = cudaDeviceSynchronize();
  return error == cudaSuccess ? "nothing was noticed" : cudaGetErrorName(error);
}

TEST(Faults, HostCodeOnDeviceMemory) {
  EXPECT_TRUE(faulted(with({{"SIMGPU_HOST_ACCESS", "fault"}}, touched_by_host_code)));
  EXPECT_FALSE(faulted(with({}, touched_by_host_code)));
  const RankResult fine = with({{"SIMGPU_HOST_ACCESS", "fault"}}, []() -> std::string {
    DEMAND(simgpu_host_access_guard() != 0);
    int* data = device_ints(100, 1);
    int* pinned = nullptr;
    DEMAND(cudaMallocHost(&pinned, 400) == cudaSuccess);
    DEMAND(cudaMemcpyAsync(pinned, data, 400, cudaMemcpyDefault, nullptr) == cudaSuccess);
    DEMAND(in_a_stream(data, [](int* ints) { ints[0] = 5; }) == "nothing was noticed");
    DEMAND(pinned[99] == 0x01010101);
    DEMAND(read_ints(data, 1)[0] == 5);
    DEMAND(cudaFree(data) == cudaSuccess);
    return "";
  });
  EXPECT_WELL(fine);
}

TEST(Faults, BeyondAnAllocationAndAfterItsEnd) {
  const RankResult far =
      with({}, [] { return in_a_stream(device_ints(100), [](int* ints) { ints[200] = 1; }); });
  EXPECT_TRUE(faulted(far)) << far.text;
  const RankResult before =
      with({}, [] { return in_a_stream(device_ints(1024), [](int* ints) { ints[-1] = 1; }); });
  EXPECT_TRUE(faulted(before)) << before.text;
  const RankResult freed = with({}, [] {
    int* data = device_ints(100);
    (void)cudaFree(data);
    return in_a_stream(data, [](int* ints) { sink = ints[0]; });
  });
  EXPECT_TRUE(faulted(freed)) << freed.text;
  const RankResult near = with({}, []() -> std::string {
    int* data = device_ints(100);
    (void)in_a_stream(data, [](int* ints) { ints[100] = 1; });
    DEMAND(cudaFree(data) == cudaErrorIllegalAddress);
    return "";
  });
  EXPECT_WELL(near);
}

// ---- the life of a process ----

TEST(Processes, AChildOfAUserGetsErrors) {
  const RankResult result = with({}, []() -> std::string {
    int count = 0;
    DEMAND(cudaGetDeviceCount(&count) == cudaSuccess);
    const pid_t child = ::fork();
    if (child == 0) {
      const bool refused = cudaGetDeviceCount(&count) == cudaErrorInitializationError &&
                           cudaGetLastError() == cudaErrorInitializationError;
      ::_exit(refused ? 0 : 1);
    }
    int status = -1;
    DEMAND(::waitpid(child, &status, 0) == child);
    DEMAND(status == 0);
    return "";
  });
  EXPECT_WELL(result);
}

TEST(Processes, LeaksAreToldAtTheEnd) {
  const auto end = [](bool leak) {
    return [leak]() -> std::string {
      void* out = nullptr;
      (void)cudaMalloc(&out, 1000);
      if (!leak) (void)cudaFree(out);
      std::exit(0);
    };
  };
  EXPECT_EQ(with({{"SIMGPU_LEAKS", "fail"}}, end(true)).exit_status, 99);
  EXPECT_EQ(with({{"SIMGPU_LEAKS", "fail"}}, end(false)).exit_status, 0);
  EXPECT_EQ(with({{"SIMGPU_LEAKS", "report"}}, end(true)).exit_status, 0);
}

}  // namespace
}  // namespace simgpu::test
