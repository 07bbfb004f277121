// Masked calls whose payloads and masks travel over a host communicator: what only that way can do
// wrong. That its bits are host mode's is held by the cases of masked_cases.cc, which run over it,
// too.
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <memory>
#include <thread>

#include "simgpu.h"
#include "tests/functional/simgpu/gradient.h"
#include "tests/support/slowdown.h"

namespace scape::cases {
namespace {

using Clock = std::chrono::steady_clock;
using test::kSlowdown;

// Threads of the library that are there now.
int progress_threads() {
  int found = 0;
  for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
    std::string name;
    std::getline(std::ifstream(task.path() / "comm"), name);
    found += name == "scape-progress";
  }
  return found;
}

bool all_poisoned(const std::vector<float>& values) {
  return std::all_of(values.begin(), values.end(), [](float value) { return std::isnan(value); });
}

// Holds a stream until it is opened.
class Barrier {
 public:
  explicit Barrier(cudaStream_t stream) {
    CUDA(cudaLaunchHostFunc(
        stream,
        [](void* open) {
          while (!static_cast<std::atomic<bool>*>(open)->load())
            std::this_thread::sleep_for(std::chrono::milliseconds(1));
        },
        open_));
  }
  Barrier(const Barrier&) = delete;
  Barrier& operator=(const Barrier&) = delete;
  ~Barrier() { open(); }
  void open() { open_->store(true); }

 private:
  // Never freed: the stream may look at it later.
  std::atomic<bool>* const open_ = new std::atomic<bool>(false);
};

// Until the communicator has an error and its words have this text. The stand-in may have heard of
// the same cause first.
void wait_for_error(ncclComm_t comm, double seconds, const std::string& text = "") {
  const auto start = Clock::now();
  while (state_of(comm) == ncclSuccess || !contains(scape_last_error(), text)) {
    CHECK_SAYING(since(start) < seconds, scape_last_error());
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
}

RANKED_CASE(DEVICE_proxied_nothing_over_nccl, 2) {
  const ncclComm_t comm = self.init();
  const cudaStream_t stream = make_stream();
  constexpr size_t kCount = 100'000;
  {
    Gradient gradient(kCount, "large", 0.01);
    Balance balance(kCount);
    step(self, comm, stream, gradient, balance, 0);
    // What rank 0's id travelled by.
    CHECK(counters_of("ncclAllGather", comm).calls == 1);
    CHECK(progress_threads() == 1);
    const uint64_t before = counters_of(nullptr, nullptr).calls;
    const scape_stats stats_before = gradient.stats();
    for (int turn = 1; turn < 6; ++turn) step(self, comm, stream, gradient, balance, turn);
    CUDA(cudaDeviceSynchronize());
    CHECK(counters_of(nullptr, nullptr).calls == before);
    const scape_stats stats = gradient.stats();
    CHECK(stats.sparse_calls - stats_before.sparse_calls == 5);
    CHECK(stats.payload_bytes - stats_before.payload_bytes ==
          5 * (kCount / 100 + 1) * sizeof(float));
    CHECK(stats.mask_bytes > 0);
    balance.check(comm, stream, gradient);
  }
  NCCL(ncclCommDestroy(comm));
  CHECK(progress_threads() == 0);
}

// The trainer's thread waits neither for its device nor for the other ranks.
RANKED_CASE(DEVICE_proxied_calls_return_at_once, 2) {
  const ncclComm_t comm = self.init();
  const cudaStream_t stream = make_stream();
  constexpr size_t kCount = 4096;
  constexpr int kAhead = 12;
  Gradient gradient(kCount, "ahead", 0.05);
  Balance balance(kCount);
  for (int turn = 0; turn < 3; ++turn) step(self, comm, stream, gradient, balance, turn);
  CUDA(cudaDeviceSynchronize());
  self.meet("settled");
  const auto start = Clock::now();
  {
    Barrier barrier(stream);
    // Rank 1 comes when rank 0 is done with all its calls.
    if (self.rank == 1) self.meet("rank 0 has called");
    for (int turn = 0; turn < kAhead; ++turn) NCCL(gradient.call(comm, stream));
    if (self.rank == 0) {
      CHECK_SAYING(since(start) < 2 * kSlowdown, std::to_string(since(start)));
      CHECK(cudaStreamQuery(stream) == cudaErrorNotReady);
      self.meet("rank 0 has called");
    }
  }
  (void)cudaGetLastError();
  CUDA(cudaStreamSynchronize(stream));
  CHECK(gradient.stats().sparse_calls == 2 + kAhead);
  NCCL(ncclCommDestroy(comm));
}

// Several communicators, streams and buffers at once, far ahead of the device. Each rank's streams
// get to their works in another order.
void many_streams(Rank& self) {
  constexpr size_t kComms = 2, kStreams = 3, kCount = 3000;
  constexpr int kSteps = 25;
  std::vector<ncclComm_t> comms;
  for (size_t i = 0; i < kComms; ++i) comms.push_back(self.init());
  struct Lane {
    cudaStream_t stream;
    ncclComm_t comm;
    std::unique_ptr<Gradient> gradient;
    float* in = nullptr;   // of all steps, page-locked
    float* out = nullptr;  // likewise
  };
  std::vector<Lane> lanes;
  for (size_t i = 0; i < kComms * kStreams; ++i) {
    Lane lane{
        .stream = make_stream(),
        .comm = comms[i % kComms],
        .gradient = std::make_unique<Gradient>(kCount, ("lane " + std::to_string(i)).c_str(), 0.1)};
    for (float** memory : {&lane.in, &lane.out}) {
      CUDA(cudaMallocHost(reinterpret_cast<void**>(memory), kSteps * kCount * sizeof(float)));
    }
    for (int turn = 0; turn < kSteps; ++turn) {
      const std::vector<float> values = values_of(self, turn + static_cast<int>(i) * 100, kCount);
      std::copy(values.begin(), values.end(), lane.in + static_cast<size_t>(turn) * kCount);
    }
    lanes.push_back(std::move(lane));
  }
  for (int turn = 0; turn < kSteps; ++turn) {
    std::vector<std::unique_ptr<Barrier>> barriers;
    for (Lane& lane : lanes) {
      const size_t at = static_cast<size_t>(turn) * kCount, bytes = kCount * sizeof(float);
      CUDA(cudaMemcpyAsync(lane.gradient->get(), lane.in + at, bytes, cudaMemcpyHostToDevice,
                           lane.stream));
      if (turn > 2) barriers.push_back(std::make_unique<Barrier>(lane.stream));
      NCCL(lane.gradient->call(lane.comm, lane.stream));
      CUDA(cudaMemcpyAsync(lane.out + at, lane.gradient->get(), bytes, cudaMemcpyDeviceToHost,
                           lane.stream));
    }
    if (self.rank % 2 == 1) std::reverse(barriers.begin(), barriers.end());
    for (auto& barrier : barriers) {
      barrier->open();
      std::this_thread::sleep_for(std::chrono::microseconds(200));
    }
  }
  for (Lane& lane : lanes) {
    CUDA(cudaStreamSynchronize(lane.stream));
    Balance balance(kCount);
    for (int turn = 0; turn < kSteps; ++turn) {
      const size_t at = static_cast<size_t>(turn) * kCount;
      balance.in({lane.in + at, lane.in + at + kCount});
      balance.out({lane.out + at, lane.out + at + kCount});
    }
    balance.check(lane.comm, lane.stream, *lane.gradient);
    CHECK(lane.gradient->stats().sparse_calls == kSteps - 1);
    CUDA(cudaFreeHost(lane.in));
    CUDA(cudaFreeHost(lane.out));
    lane.gradient.reset();
  }
  for (const ncclComm_t comm : comms) NCCL(ncclCommDestroy(comm));
  CHECK(progress_threads() == 0);
}
RANKED_CASE(DEVICE_proxied_many_streams, 2) { many_streams(self); }
RANKED_CASE(DEVICE_proxied_many_streams_of_three, 3) { many_streams(self); }

// A communicator that is destroyed right behind its last call ends that first.
RANKED_CASE(DEVICE_proxied_destroy_ends_what_is_under_way, 2) {
  for (int round = 0; round < 3; ++round) {
    const ncclComm_t comm = self.init();
    const cudaStream_t stream = make_stream();
    DeviceFloats data(2000, 0);
    const scape_registration registration = add(data.get(), 2000, "last", 0.1);
    for (int turn = 0; turn < 4; ++turn) {
      CUDA(cudaMemsetAsync(data.get(), 0, 2000 * sizeof(float), stream));
      NCCL(ncclAllReduce(data.get(), data.get(), 2000, ncclFloat32, ncclSum, comm, stream));
    }
    NCCL(ncclCommDestroy(comm));
    CHECK(progress_threads() == 0);
    data.expect(stream, 0);
    SCAPE(scape_unregister(registration));
  }
}

// ---- failures ----

LAUNCHED_CASE(DEVICE_proxied_killed_rank) {
  std::vector<Run> runs = rank_runs("DEVICE_proxied_killed_rank", 3);
  expect(runs, {0, 0, 128 + SIGKILL});
}
RANK_PART(DEVICE_proxied_killed_rank) {
  const ncclComm_t comm = self.init();
  const cudaStream_t stream = make_stream();
  Gradient gradient(1000, "bereft", 0.1);
  Balance balance(1000);
  for (int turn = 0; turn < 3; ++turn) step(self, comm, stream, gradient, balance, turn);
  gradient.put(std::vector<float>(1000, 1));
  if (self.rank != 2) NCCL(gradient.call(comm, stream));
  self.meet("called");
  if (self.rank == 2) ::kill(::getpid(), SIGKILL);
  const auto start = Clock::now();
  wait_for_error(comm, 5 * kSlowdown, "rank 2");
  // The stream goes on, and nobody takes what is there for a result.
  const std::vector<float> out = gradient.read(stream);
  CHECK(since(start) < 10 * kSlowdown);
  CHECK(std::any_of(out.begin(), out.end(), [](float value) { return std::isnan(value); }));
  for (const float value : out) CHECK(std::isnan(value) || value == 0);
  NCCL(ncclCommAbort(comm));
  CHECK(progress_threads() == 0);
  CHECK(since(start) < 20 * kSlowdown);
}

// The first call of two ranks, in which they make the host communicator.
void settle(Rank& self, ncclComm_t comm, cudaStream_t stream, Gradient& gradient) {
  gradient.put(std::vector<float>(gradient.count(), 1));
  NCCL(gradient.call(comm, stream));
  CHECK(gradient.read(stream) == std::vector<float>(gradient.count(), 2));
  self.meet("settled");
}

// A dense step's own elements are poisoned, too.
LAUNCHED_CASE(DEVICE_proxied_time_out) {
  std::vector<Run> runs = rank_runs("DEVICE_proxied_time_out", 2);
  for (Run& one : runs) one.environment["SCAPE_TIMEOUT"] = "2";
  expect(runs, {0, 0});
}
RANK_PART(DEVICE_proxied_time_out) {
  const ncclComm_t comm = self.init();
  const cudaStream_t stream = make_stream();
  Gradient first(100, "both", 0.1), second(100, "one", 0.1);
  settle(self, comm, stream, first);
  second.put(std::vector<float>(100, 1));
  if (self.rank == 0) {
    const auto start = Clock::now();
    NCCL(second.call(comm, stream));
    CHECK(all_poisoned(second.read(stream)));
    CHECK(since(start) < 15 * kSlowdown);
    wait_for_error(comm, kSlowdown, "rank 1");
    CHECK_SAYING(contains(scape_last_error(), "SCAPE_TIMEOUT"), scape_last_error());
    // No later call is taken, of no buffer.
    CHECK(first.call(comm, stream) != ncclSuccess);
    CHECK_SAYING(contains(ncclGetLastError(comm), "rank 1"), ncclGetLastError(comm));
  }
  self.meet("over");
  NCCL(ncclCommAbort(comm));
  CHECK(progress_threads() == 0);
}

// Rank 1 never calls: the stream of rank 0 waits for it until the communicator is aborted.
RANKED_CASE(DEVICE_proxied_abort_frees_the_stream, 2) {
  const ncclComm_t comm = self.init();
  const cudaStream_t stream = make_stream();
  Gradient first(100, "both", 0.1), second(100, "one", 0.1);
  settle(self, comm, stream, first);
  second.put(std::vector<float>(100, 1));
  if (self.rank == 0) {
    NCCL(second.call(comm, stream));
    std::this_thread::sleep_for(std::chrono::milliseconds(300));
    CHECK(cudaStreamQuery(stream) == cudaErrorNotReady);
    (void)cudaGetLastError();
    const auto start = Clock::now();
    NCCL(ncclCommAbort(comm));
    CHECK(all_poisoned(second.read(stream)));
    CHECK(since(start) < 5 * kSlowdown);
    CHECK(progress_threads() == 0);
  }
  self.meet("aborted");
  if (self.rank == 1) {
    // It hears of it in its next call.
    (void)second.call(comm, stream);
    wait_for_error(comm, 5 * kSlowdown);
    NCCL(ncclCommAbort(comm));
  }
}

// A device that breaks down releases everybody.
RANKED_CASE(DEVICE_proxied_broken_device, 2) {
  const ncclComm_t comm = self.init();
  const cudaStream_t stream = make_stream();
  Gradient gradient(1000, "broken", 0.1);
  Balance balance(1000);
  for (int turn = 0; turn < 3; ++turn) step(self, comm, stream, gradient, balance, turn);
  std::unique_ptr<Barrier> barrier;
  if (self.rank == 1) barrier = std::make_unique<Barrier>(stream);
  NCCL(gradient.call(comm, stream));
  self.meet("called");
  if (self.rank == 1) simgpu_break_device(0, cudaErrorIllegalAddress);
  wait_for_error(comm, 5 * kSlowdown, "CUDA");
  if (self.rank == 0) CUDA(cudaStreamSynchronize(stream));
  self.meet("over");
  ::_exit(0);  // a broken device is for good
}

// ---- ranks that cannot ----

// One rank lacks the transport: all go dense, and each says which rank it was.
LAUNCHED_CASE(DEVICE_proxied_transport_missing) {
  const std::filesystem::path whole = std::filesystem::path(SCAPE_NCCL).parent_path();
  for (const char* required : {"0", "1"}) {
    std::vector<Run> runs = rank_runs("DEVICE_proxied_transport_missing", 3);
    const std::filesystem::path folder = runs[0].environment.at("FIELD_CASE_FOLDER");
    for (const char* name : {"libscape_nccl.so", "libscape_cuda.so"})
      std::filesystem::copy_file(whole / name, folder / name);
    const char* first = std::getenv("FIELD_CASES_PRELOAD_FIRST");
    for (Run& one : runs) one.environment["SCAPE_REQUIRED"] = required;
    runs[1].environment["LD_PRELOAD"] =
        std::string(first != nullptr ? first : "") + " " + (folder / "libscape_nccl.so").string();
    for (const Outcome& outcome : expect(runs, {0, 0, 0})) {
      CHECK_SAYING(contains(outcome.err, "rank 1: transport "), outcome.err);
      const size_t at = outcome.err.find("registered buffers go dense");
      CHECK_SAYING((at != std::string::npos) == (std::string(required) == "0"), outcome.err);
      if (at == std::string::npos) continue;
      CHECK_SAYING(!contains(outcome.err.substr(at + 30), "go dense"), outcome.err);
    }
  }
}
RANK_PART(DEVICE_proxied_transport_missing) {
  const ncclComm_t comm = self.init();
  const cudaStream_t stream = make_stream();
  Gradient gradient(100, "dense", 0.1), second(100, "dense, too", 0.1);
  const bool required = std::string(std::getenv("SCAPE_REQUIRED")) == "1";
  for (int turn = 0; turn < 3; ++turn) {
    gradient.put(std::vector<float>(100, 1));
    second.put(std::vector<float>(100, 2));
    if (required) {
      CHECK(gradient.call(comm, stream) == ncclSystemError);
      continue;
    }
    NCCL(ncclGroupStart());
    NCCL(gradient.call(comm, stream));
    NCCL(second.call(comm, stream));
    NCCL(ncclGroupEnd());
    CHECK(gradient.read(stream) == std::vector<float>(100, 3));
    CHECK(second.read(stream) == std::vector<float>(100, 6));
  }
  if (!required) CHECK(gradient.stats().fallback_calls == 3);
  NCCL(ncclCommDestroy(comm));
}

}  // namespace
}  // namespace scape::cases
