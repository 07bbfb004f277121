// How the hooks of device mode meet a program: groups, several devices and communicators, captures,
// what goes dense, and the ends.
#include "tests/functional/simgpu/gradient.h"

#include <dlfcn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <thread>

#include "simgpu.h"

namespace scape::cases {
namespace {

using Clock = std::chrono::steady_clock;

// ---- groups ----

RANKED_CASE(DEVICE_F20_groups, 2) {
  const ncclComm_t comm = self.init(), other = self.init();
  const cudaStream_t a = make_stream(), b = make_stream();
  {
    std::vector<std::unique_ptr<Gradient>> registered;
    std::vector<Balance> balances(3, Balance(64));
    for (const char* name : {"g0", "g1", "g2"})
      registered.push_back(std::make_unique<Gradient>(64, name, 0.25));
    DeviceFloats plain(64, 3), more(64, 3);
    for (int turn = 0; turn < 6; ++turn) {
      plain.write(std::vector<float>(64, 3));
      more.write(std::vector<float>(64, 3));
      for (size_t i = 0; i < 3; ++i) {
        const std::vector<float> values = values_of(self, turn * 3 + static_cast<int>(i), 64);
        registered[i]->put(values);
        balances[i].in(values);
      }
      const uint64_t before = counters_of(nullptr, nullptr).calls;
      NCCL(ncclGroupStart());
      NCCL(registered[0]->call(comm, a));
      NCCL(ncclAllReduce(plain.get(), plain.get(), 64, ncclFloat32, ncclSum, other, a));
      NCCL(ncclGroupStart());
      NCCL(registered[1]->call(other, b));
      NCCL(ncclAllReduce(more.get(), more.get(), 64, ncclFloat32, ncclSum, comm, b));
      NCCL(ncclGroupEnd());
      NCCL(registered[2]->call(comm, b));
      // Of the masked ones nothing is there before the outermost end.
      CHECK(counters_of(nullptr, nullptr).calls == before + 2);
      CHECK(turn > 0 || registered[0]->stats().intercepted_calls == 0);
      NCCL(ncclGroupEnd());
      plain.expect(a, 6);
      more.expect(b, 6);
      balances[0].out(registered[0]->read(a));
      balances[1].out(registered[1]->read(b));
      balances[2].out(registered[2]->read(b));
    }
    for (size_t i = 0; i < 3; ++i) {
      balances[i].check(i == 1 ? other : comm, a, *registered[i]);
      CHECK(registered[i]->stats().sparse_calls == 5);
    }

    // A call that the real NCCL refuses drops the group; so does one that Scape refuses.
    Gradient& gradient = *registered[0];
    gradient.put(std::vector<float>(64, 1));
    plain.write(std::vector<float>(64, 1));
    const uint64_t steps = gradient.stats().step;
    NCCL(ncclGroupStart());
    NCCL(gradient.call(comm, a));
    NCCL(ncclAllReduce(plain.get(), plain.get(), 64, ncclFloat32, ncclSum, comm, a));
    CHECK(ncclAllReduce(plain.get(), plain.get(), 64, static_cast<ncclDataType_t>(99), ncclSum,
                        comm, a) == ncclInvalidArgument);
    CHECK(ncclGroupEnd() == ncclInvalidArgument);
    ncclConfigExt_t option{};
    option.key = {SCAPE_VENDOR_ID, SCAPE_CALL_NAME};
    option.val.s = "integers";
    ncclCollConfig_t config{};
    config.size = sizeof config;
    config.magic = kApiMagic;
    config.version = kVersionCode;
    config.ext = &option;
    NCCL(ncclGroupStart());
    NCCL(gradient.call(comm, a));
    NCCL(ncclAllReduce(plain.get(), plain.get(), 64, ncclFloat32, ncclSum, comm, a));
    CHECK(ncclAllReduceConfig(more.get(), more.get(), 64, ncclInt32, ncclSum, comm, a, &config) ==
          ncclInvalidArgument);
    CHECK(ncclGroupEnd() == ncclInvalidArgument);
    CHECK(contains(ncclGetLastError(comm), "integers"));
    NCCL(ncclGroupStart());
    NCCL(gradient.call(comm, a));
    NCCL(ncclGroupSimulateEnd(nullptr));
    plain.expect(a, 1);
    CHECK(gradient.read(a) == std::vector<float>(64, 1));
    CHECK(gradient.stats().step == steps);
    CHECK(ncclGroupEnd() == ncclInvalidUsage);

    // A step needs its call on the stream first.
    NCCL(ncclGroupStart());
    NCCL(gradient.call(comm, a));
    CHECK(scape_clear_masked(gradient.get(), 64, a) == SCAPE_ERR_USAGE);
    CHECK(contains(scape_last_error(), "ncclGroupEnd"));
    // The same buffer twice in a group is two steps.
    NCCL(gradient.call(comm, a));
    NCCL(ncclGroupEnd());
    CHECK(gradient.stats().step == steps + 2);
    NCCL(ncclGroupStart());
    NCCL(ncclGroupEnd());
  }
  NCCL(ncclCommDestroy(other));
  NCCL(ncclCommDestroy(comm));
}

// Two ranks of one thread.
RANKED_CASE(DEVICE_two_devices_in_one_process, 1) {
  ncclComm_t comms[2];
  NCCL(ncclCommInitAll(comms, 2, nullptr));
  constexpr size_t kCount = 5000;
  cudaStream_t streams[2];
  // Registrations of one name: the ranks are of one process.
  std::vector<std::unique_ptr<DeviceFloats>> data;
  std::vector<scape_registration> registrations;
  std::vector<float> in(kCount), out(kCount);
  for (int device = 0; device < 2; ++device) {
    CUDA(cudaSetDevice(device));
    streams[device] = make_stream();
    data.push_back(std::make_unique<DeviceFloats>(kCount, 0));
    registrations.push_back(add(data.back()->get(), kCount, "both", 0.1));
  }
  for (int turn = 0; turn < 8; ++turn) {
    for (int rank = 0; rank < 2; ++rank) {
      const std::vector<float> values = values_of({rank, 2, "", 0}, turn, kCount);
      data[static_cast<size_t>(rank)]->write(values);
      for (size_t i = 0; i < kCount; ++i) in[i] += values[i];
    }
    NCCL(ncclGroupStart());
    for (size_t rank = 0; rank < 2; ++rank) {
      float* const buffer = data[rank]->get();
      NCCL(ncclAllReduce(buffer, buffer, kCount, ncclFloat32, ncclSum, comms[rank], streams[rank]));
    }
    NCCL(ncclGroupEnd());
    const std::vector<float> first = data[0]->read(streams[0]);
    CHECK(first == data[1]->read(streams[1]));
    for (size_t i = 0; i < kCount; ++i) out[i] += first[i];
  }
  for (size_t rank = 0; rank < 2; ++rank) {
    std::vector<float> residual(kCount);
    SCAPE(scape_read_residual(data[rank]->get(), kCount, residual.data(), kCount));
    for (size_t i = 0; i < kCount; ++i) out[i] += residual[i];
    CHECK(stats_of(data[rank]->get(), 0).sparse_calls == 7);
  }
  CHECK(in == out);
  NCCL(ncclGroupStart());
  for (const ncclComm_t comm : comms) NCCL(ncclCommDestroy(comm));
  NCCL(ncclGroupEnd());
  for (const scape_registration registration : registrations) SCAPE(scape_unregister(registration));
}

// ---- communicators and their ends ----

RANKED_CASE(DEVICE_F30_split_and_ends, 2) {
  ncclComm_t parent = self.init();
  const cudaStream_t stream = make_stream();
  ncclComm_t child = nullptr, grouped[2] = {}, none = nullptr;
  NCCL(ncclCommSplit(parent, 0, self.rank, &child, nullptr));
  NCCL(ncclCommSplit(parent, self.rank == 0 ? 0 : kSplitNoColor, 0, &none, nullptr));
  CHECK((none != nullptr) == (self.rank == 0));
  const ncclUniqueId ids[] = {self.next_id(), self.next_id()};
  NCCL(ncclGroupStart());
  for (int i = 0; i < 2; ++i) NCCL(ncclCommInitRank(&grouped[i], 2, ids[i], self.rank));
  NCCL(ncclGroupEnd());

  // One buffer in turn on several communicators: a state of its own on each.
  Gradient gradient(128, "everywhere", 0.2);
  const ncclComm_t all[] = {parent, child, grouped[0], grouped[1]};
  std::vector<Balance> balances(4, Balance(128));
  for (int turn = 0; turn < 4; ++turn) {
    for (size_t i = 0; i < 4; ++i) step(self, all[i], stream, gradient, balances[i], turn);
  }
  CHECK(gradient.stats().sparse_calls == 12);
  balances[3].check(grouped[1], stream, gradient);
  // Alone in a communicator nothing is held back.
  if (none != nullptr) {
    const std::vector<float> values = values_of(self, 9, 128);
    gradient.put(values);
    NCCL(gradient.call(none, stream));
    CHECK(gradient.read(stream) == values);
    NCCL(ncclCommDestroy(none));
  }

  // The parent goes first; what is gone keeps its counters.
  NCCL(ncclCommDestroy(parent));
  for (int turn = 4; turn < 9; ++turn) step(self, child, stream, gradient, balances[1], turn);
  balances[1].check(child, stream, gradient);
  CHECK(gradient.stats().sparse_calls == 17);
  CHECK(ncclCommDestroy(parent) == ncclInvalidArgument);
  CHECK(gradient.call(parent, stream) == ncclInvalidArgument);
  // A finalized communicator refuses as the real NCCL does, and leaves the state readable.
  NCCL(ncclCommFinalize(child));
  CHECK(gradient.call(child, stream) == ncclInvalidUsage);
  balances[1].check(grouped[0], stream, gradient);
  NCCL(ncclCommDestroy(child));
  // A revoked one, too.
  NCCL(ncclCommRevoke(grouped[0], 0));
  CHECK(gradient.call(grouped[0], stream) == ncclInvalidUsage);
  NCCL(ncclCommDestroy(grouped[0]));
  NCCL(ncclCommDestroy(grouped[1]));
  CHECK(scape_clear_masked(gradient.get(), 128, stream) == SCAPE_ERR_NOT_FOUND);
  // A new communicator begins anew, wherever its handle is.
  const ncclComm_t again = self.init();
  Balance balance(128);
  for (int turn = 0; turn < 3; ++turn) step(self, again, stream, gradient, balance, turn);
  balance.check(again, stream, gradient);
  NCCL(ncclCommDestroy(again));
}

// The other rank never calls: the first call waits for the side communicator.
RANKED_CASE(DEVICE_abort_ends_a_waiting_call, 2) {
  const ncclComm_t comm = self.init();
  const cudaStream_t stream = make_stream();
  self.meet("ready");
  if (self.rank == 0) {
    Gradient gradient(1000, "waiting", 0.1);
    ncclResult_t result = ncclSuccess;
    std::thread caller([&] { result = gradient.call(comm, stream); });
    std::this_thread::sleep_for(std::chrono::milliseconds(300));
    const auto start = Clock::now();
    NCCL(ncclCommAbort(comm));
    caller.join();
    CHECK(since(start) < 10 * test::kSlowdown);
    CHECK(result == ncclRemoteError);
    CUDA(cudaStreamSynchronize(stream));
  }
  self.meet("aborted");
  if (self.rank == 1) NCCL(ncclCommAbort(comm));
}

// The other rank does not call, so that the stream stands still, and the refresh behind it.
RANKED_CASE(DEVICE_abort_beside_a_stream_that_stands_still, 2) {
  const ncclComm_t comm = self.init();
  const cudaStream_t stream = make_stream();
  Gradient gradient(1000, "stuck", 0.1);
  Balance balance(1000);
  for (int turn = 0; turn < 4; ++turn) step(self, comm, stream, gradient, balance, turn);
  self.meet("trained");
  if (self.rank == 0) {
    NCCL(gradient.call(comm, stream));
    const auto start = Clock::now();
    NCCL(ncclCommAbort(comm));
    CHECK(since(start) < 5 * test::kSlowdown);
    CUDA(cudaStreamSynchronize(stream));
  }
  self.meet("aborted");
  if (self.rank == 1) NCCL(ncclCommAbort(comm));
}

LAUNCHED_CASE(DEVICE_a_rank_that_never_answers) {
  std::vector<Run> runs = rank_runs("DEVICE_a_rank_that_never_answers", 2);
  for (Run& one : runs) one.environment["SCAPE_TIMEOUT"] = "3";
  expect(runs, {0, 0});
}
RANK_PART(DEVICE_a_rank_that_never_answers) {
  const ncclComm_t comm = self.init();
  const cudaStream_t stream = make_stream();
  self.meet("ready");
  if (self.rank == 0) {
    Gradient gradient(1000, "unanswered", 0.1);
    const auto start = Clock::now();
    const ncclResult_t result = gradient.call(comm, stream);
    CHECK_SAYING(result == ncclRemoteError || result == ncclTimeout, std::to_string(result));
    CHECK(since(start) < 20 * test::kSlowdown);
    CHECK(state_of(comm) != ncclSuccess);
  }
  self.meet("over");
  NCCL(ncclCommAbort(comm));
}

RANKED_CASE(DEVICE_F16_options_that_differ, 2) {
  const ncclComm_t comm = self.init();
  const cudaStream_t stream = make_stream();
  Gradient gradient(1000, "differs", self.rank == 0 ? 0.1 : 0.2);
  NCCL(gradient.call(comm, stream));
  CHECK(gradient.call(comm, stream) == ncclInvalidUsage);
  CHECK_SAYING(contains(ncclGetLastError(comm), "sparsity"), ncclGetLastError(comm));
  CHECK(gradient.call(comm, stream) == ncclInvalidUsage);
  CHECK(scape_self_check(gradient.registration()) != SCAPE_OK);
  CHECK_SAYING(contains(scape_last_error(), "sparsity"), scape_last_error());
  self.meet("refused");
  NCCL(ncclCommAbort(comm));
}

// ---- other preloads ----

void take_ten_steps(Rank& self) {
  const ncclComm_t comm = self.init();
  const cudaStream_t stream = make_stream();
  Gradient gradient(4096, "beside others", 0.25);
  Balance balance(4096);
  for (int turn = 0; turn < 10; ++turn) {
    step(self, comm, stream, gradient, balance, turn);
    const std::vector<float> mine = gradient.read(stream);
    std::vector<float> twice = mine;
    for (float& value : twice) value *= 2;
    CHECK(sum_of_all(comm, stream, mine) == twice);  // both ranks have the same
  }
  balance.check(comm, stream, gradient);
  CHECK(gradient.stats().sparse_calls == 9);
  NCCL(ncclCommDestroy(comm));
}

void launch_with(const std::string& name, const std::vector<std::string>& preloads) {
  const char* const first = std::getenv("FIELD_CASES_PRELOAD_FIRST");  // a sanitizer's runtime
  for (const std::string& order : preloads) {
    std::vector<Run> runs = rank_runs(name, 2);
    for (Run& one : runs)
      one.environment["LD_PRELOAD"] = std::string(first != nullptr ? first : "") + " " + order;
    expect(runs, {0, 0});
  }
}

// An allocator of one's own before or after this library, whose CUDA module comes later still.
LAUNCHED_CASE(DEVICE_F05_other_allocator) {
  const std::string allocator = NOISY_ALLOCATOR;
  launch_with("DEVICE_F05_other_allocator",
              {allocator + ":" + preload_path(), preload_path() + " " + allocator});
}
RANK_PART(DEVICE_F05_other_allocator) {
  const auto* const seen =
      static_cast<std::atomic<long>*>(::dlsym(RTLD_DEFAULT, "allocations_seen"));
  CHECK(seen != nullptr);
  const long before = *seen;
  take_ten_steps(self);
  CHECK(*seen > before);
}

// Libraries that do nothing, with either separator, on both sides.
LAUNCHED_CASE(DEVICE_F05_other_libraries) {
  const std::string a = EMPTY_A, b = EMPTY_B;
  launch_with("DEVICE_F05_other_libraries",
              {a + " " + b + ":" + preload_path(), a + ":" + preload_path() + " " + b});
}
RANK_PART(DEVICE_F05_other_libraries) {
  for (const char* one : {EMPTY_A, EMPTY_B, SCAPE_NCCL})
    CHECK(::dlopen(one, RTLD_NOW | RTLD_NOLOAD) != nullptr);
  take_ten_steps(self);
}

// ---- processes ----

RANKED_CASE(DEVICE_F06_fork, 2) {
  const ncclComm_t comm = self.init();
  const cudaStream_t stream = make_stream();
  Gradient gradient(512, "parent's", 0.25);
  Balance balance(512);
  for (int turn = 0; turn < 3; ++turn) step(self, comm, stream, gradient, balance, turn);
  const pid_t child = ::fork();
  CHECK(child >= 0);
  if (child == 0) ::_exit(gradient.call(comm, stream) == ncclInvalidUsage ? 0 : 1);
  for (int turn = 3; turn < 6; ++turn) step(self, comm, stream, gradient, balance, turn);
  int status = -1;
  CHECK(::waitpid(child, &status, 0) == child);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  balance.check(comm, stream, gradient);
  NCCL(ncclCommDestroy(comm));
}

// A communicator of another copy of NCCL, and a program that goes past the hooks.
RANKED_CASE(DEVICE_F04_another_nccl, 2) {
  const ncclComm_t comm = self.init();
  const cudaStream_t stream = make_stream();
  Gradient gradient(100, "elsewhere", 0.1);
  using AllReduce = ncclResult_t(const void*, void*, size_t, ncclDataType_t, ncclRedOp_t,
                                 ncclComm_t, cudaStream_t);
  void* const real = ::dlopen(SIMNCCL, RTLD_NOW | RTLD_NOLOAD);
  CHECK(real != nullptr);
  const auto around = reinterpret_cast<AllReduce*>(::dlsym(real, "ncclAllReduce"));
  for (int turn = 0; turn < 20; ++turn) {
    gradient.put(std::vector<float>(100, 1));
    NCCL(around(gradient.get(), gradient.get(), 100, ncclFloat32, ncclSum, comm, stream));
    CHECK(gradient.read(stream) == std::vector<float>(100, 2));
  }
  CHECK(gradient.stats().intercepted_calls == 0);
  CHECK(scape_self_check(gradient.registration()) == SCAPE_ERR_USAGE);

  const std::string copy = self.folder + "/libother." + std::to_string(self.rank);
  std::filesystem::copy_file(SIMNCCL, copy);
  void* const other = ::dlopen(copy.c_str(), RTLD_NOW | RTLD_LOCAL);
  CHECK_SAYING(other != nullptr, ::dlerror());
  ncclUniqueId id{};
  ncclComm_t foreign = nullptr;
  NCCL(reinterpret_cast<ncclResult_t (*)(ncclUniqueId*)>(::dlsym(other, "ncclGetUniqueId"))(&id));
  NCCL(reinterpret_cast<ncclResult_t (*)(ncclComm_t*, int, ncclUniqueId, int)>(
      ::dlsym(other, "ncclCommInitRank"))(&foreign, 1, id, 0));
  CHECK(gradient.call(foreign, stream) == ncclInvalidArgument);
  CHECK(gradient.stats().fallback_calls == 1);
  NCCL(ncclCommDestroy(comm));
}

// ---- captures ----

RANKED_CASE(DEVICE_F31_capture, 2) {
  const ncclComm_t comm = self.init();
  const cudaStream_t stream = make_stream();
  Gradient gradient(128, "captured", 0.25);
  Balance balance(128);
  const auto capture = [&] {
    simgpu_counters before, after;
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t exec = nullptr;
    CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    simgpu_get_counters(&before);
    NCCL(gradient.call(comm, stream));
    CHECK(scape_clear_masked(gradient.get(), 128, stream) != SCAPE_OK);
    simgpu_get_counters(&after);
    CHECK(after.allocations == before.allocations && after.frees == before.frees);
    CHECK(after.host_syncs == before.host_syncs);
    CUDA(cudaStreamEndCapture(stream, &graph));
    CUDA(cudaGraphInstantiate(&exec, graph, 0));
    CUDA(cudaGraphDestroy(graph));
    return exec;
  };
  // The first call ever is a dense one in a graph.
  const cudaGraphExec_t first = capture();
  CHECK(gradient.stats().step == 0);
  for (int launch = 0; launch < 2; ++launch) {
    gradient.put(std::vector<float>(128, 1));
    CUDA(cudaGraphLaunch(first, stream));
    CHECK(gradient.read(stream) == std::vector<float>(128, 2));
  }
  for (int turn = 0; turn < 3; ++turn) step(self, comm, stream, gradient, balance, turn);
  const cudaGraphExec_t later = capture();
  CHECK(gradient.stats().step == 3);
  CHECK(contains(scape_last_error(), "captured"));
  const std::vector<float> waiting = gradient.residual();
  for (int launch = 0; launch < 3; ++launch) {
    gradient.put(std::vector<float>(128, 1));
    CUDA(cudaGraphLaunch(later, stream));
    CHECK(gradient.read(stream) == std::vector<float>(128, 2));
  }
  CHECK(gradient.residual() == waiting);
  for (int turn = 3; turn < 6; ++turn) step(self, comm, stream, gradient, balance, turn);
  balance.check(comm, stream, gradient);
  CHECK(gradient.stats().fallback_calls == 2);
  CUDA(cudaGraphExecDestroy(first));
  CUDA(cudaGraphExecDestroy(later));
  NCCL(ncclCommDestroy(comm));
}

// ---- what travels, and what goes dense ----

RANKED_CASE(DEVICE_only_payload_and_masks_travel, 2) {
  const ncclComm_t comm = self.init();
  const cudaStream_t stream = make_stream();
  constexpr size_t kCount = 100'000;
  Gradient gradient(kCount, "large", 0.01);
  Balance balance(kCount);
  for (int turn = 0; turn < 2; ++turn) step(self, comm, stream, gradient, balance, turn);
  CUDA(cudaDeviceSynchronize());
  const simnccl_counters before = counters_of(nullptr, nullptr);
  const scape_stats stats_before = gradient.stats();
  for (int turn = 2; turn < 7; ++turn) step(self, comm, stream, gradient, balance, turn);
  CUDA(cudaDeviceSynchronize());
  const uint64_t bytes = counters_of(nullptr, nullptr).run_bytes - before.run_bytes;
  const scape_stats stats = gradient.stats();
  CHECK(stats.sparse_calls - stats_before.sparse_calls == 5);
  CHECK(stats.payload_bytes - stats_before.payload_bytes == 5 * (kCount / 100 + 1) * sizeof(float));
  CHECK_SAYING(bytes < 5 * kCount * sizeof(float) / 50, std::to_string(bytes));
  CHECK(counters_of(nullptr, nullptr).calls - before.calls == 10);
  balance.check(comm, stream, gradient);
  NCCL(ncclCommDestroy(comm));
}

RANKED_CASE(DEVICE_F21_what_goes_dense, 2) {
  const ncclComm_t comm = self.init();
  const cudaStream_t stream = make_stream();
  Gradient gradient(40, "odd", 0.25);
  Balance balance(40);
  for (int turn = 0; turn < 3; ++turn) step(self, comm, stream, gradient, balance, turn);
  const std::vector<float> mine = values_of(self, 50, 40);
  const std::vector<float> theirs = values_of({1 - self.rank, 2, "", 0}, 50, 40);
  const std::vector<float> waiting = gradient.residual();
  uint64_t dense = 0;
  const auto expect_dense = [&](ncclResult_t result, auto&& combine) {
    NCCL(result);
    const std::vector<float> out = gradient.read(stream);
    for (size_t i = 0; i < 40; ++i) CHECK(out[i] == combine(mine[i], theirs[i]));
    CHECK(gradient.stats().fallback_calls == ++dense);
    CHECK(gradient.residual() == waiting);
    gradient.put(mine);
  };
  gradient.put(mine);
  expect_dense(gradient.call(comm, stream, ncclMax),
               [](float a, float b) { return std::max(a, b); });
  expect_dense(gradient.call(comm, stream, ncclProd), [](float a, float b) { return a * b; });
  expect_dense(ncclBroadcast(gradient.get(), gradient.get(), 40, ncclFloat32, 1, comm, stream),
               [&](float a, float b) { return self.rank == 1 ? a : b; });
  // A factor that the host does not read.
  DeviceFloats factor(1, 2);
  ncclRedOp_t doubled = ncclSum;
  NCCL(ncclRedOpCreatePreMulSum(&doubled, factor.get(), ncclFloat32, ncclScalarDevice, comm));
  expect_dense(gradient.call(comm, stream, doubled),
               [](float a, float b) { return 2 * a + 2 * b; });
  NCCL(ncclRedOpDestroy(doubled, comm));
  CHECK(gradient.call(comm, stream, doubled) == ncclInvalidArgument);
  // Sending and receiving buffers that overlap: what comes of it is the real NCCL's matter.
  ncclComm_t doomed = nullptr;
  NCCL(ncclCommSplit(comm, self.rank, 0, &doomed, nullptr));
  NCCL(ncclAllReduce(gradient.get(), gradient.get() + 8, 16, ncclFloat32, ncclSum, doomed, stream));
  CUDA(cudaStreamSynchronize(stream));
  CHECK(gradient.stats().fallback_calls == ++dense);
  NCCL(ncclCommAbort(doomed));
  CHECK(scape_self_check(gradient.registration()) == SCAPE_OK);

  // Memory of the host is the real NCCL's to take or to refuse; what a device reaches is masked.
  std::vector<float> pageable(64, 1);
  const scape_registration on_host = add(pageable.data(), 64, "pageable", 0.5);
  CHECK(ncclAllReduce(pageable.data(), pageable.data(), 64, ncclFloat32, ncclSum, comm, stream) ==
        ncclInvalidArgument);
  CHECK(stats_of(pageable.data(), 0).fallback_calls == 1);
  SCAPE(scape_unregister(on_host));
  float* pinned = nullptr;
  CUDA(cudaMallocHost(reinterpret_cast<void**>(&pinned), 64 * sizeof(float)));
  std::fill_n(pinned, 64, 1.f);
  const scape_registration on_pinned = add(pinned, 64, "pinned", 0.5);
  for (int turn = 0; turn < 2; ++turn)
    NCCL(ncclAllReduce(pinned, pinned, 64, ncclFloat32, ncclSum, comm, stream));
  CUDA(cudaStreamSynchronize(stream));
  CHECK(stats_of(pinned, 0).sparse_calls == 1);
  SCAPE(scape_unregister(on_pinned));
  CUDA(cudaFreeHost(pinned));

  for (int turn = 3; turn < 6; ++turn) step(self, comm, stream, gradient, balance, turn);
  balance.check(comm, stream, gradient);

  // A parameter that the device does not reach.
  DeviceFloats fused(64, 1);
  scape_config config = gradient_config("fused", 0.5);
  config.role = SCAPE_ROLE_FUSED;
  scape_registration registration = nullptr;
  SCAPE(scape_register(fused.get(), 64, SCAPE_FLOAT32, &config, &registration));
  NCCL(ncclAllReduce(fused.get(), fused.get(), 64, ncclFloat32, ncclAvg, comm, stream));
  CHECK(scape_adams_step(fused.get(), 64, pageable.data(), 0.1, 0, stream) == SCAPE_ERR_ARGUMENT);
  CHECK(scape_adams_step(fused.get(), 64, nullptr, 0.1, 0, stream) == SCAPE_ERR_ARGUMENT);
  DeviceFloats param(64, 1);
  SCAPE(scape_adams_step(fused.get(), 64, param.get(), 0.1, 0, stream));
  CHECK(param.read(stream) != std::vector<float>(64, 1));
  SCAPE(scape_unregister(registration));
  NCCL(ncclCommDestroy(comm));
}

RANKED_CASE(DEVICE_options_of_a_call, 2) {
  const ncclComm_t comm = self.init();
  const cudaStream_t stream = make_stream();
  const scape_config as_registered = gradient_config("registered", 0.25);
  ncclConfigExt_t options[2] = {};
  options[0].next = &options[1];
  options[0].key = {SCAPE_VENDOR_ID, SCAPE_CALL_NAME};
  options[0].val.s = "own";
  options[1].key = {SCAPE_VENDOR_ID, SCAPE_CALL_CONFIG};
  options[1].val.raw = const_cast<scape_config*>(&as_registered);
  ncclCollConfig_t config{};
  config.size = sizeof config;
  config.magic = kApiMagic;
  config.version = kVersionCode;
  config.ext = options;
  Gradient gradient(1000, "registered", 0.25);
  const DeviceFloats places[] = {{1000, 0}, {1000, 0}};
  for (int turn = 0; turn < 6; ++turn) {
    const DeviceFloats& place = places[turn % 2];
    const std::vector<float> values = values_of(self, turn, 1000);
    gradient.put(values);
    CUDA(cudaMemcpy(place.get(), values.data(), 4000, cudaMemcpyHostToDevice));
    NCCL(gradient.call(comm, stream));
    NCCL(ncclAllReduceConfig(place.get(), place.get(), 1000, ncclFloat32, ncclSum, comm, stream,
                             &config));
    CHECK(gradient.read(stream) == place.read(stream));
  }
  CHECK(stats_of(places[1].get(), 1000).sparse_calls == 5);
  CHECK(ncclBroadcastConfig(places[0].get(), places[0].get(), 1000, ncclFloat32, 0, comm, stream,
                            &config) == ncclInvalidUsage);
  CHECK(ncclAllReduceConfig(places[0].get(), places[0].get(), 500, ncclFloat32, ncclSum, comm,
                            stream, &config) == ncclInvalidUsage);
  NCCL(ncclCommDestroy(comm));
}

// SCAPE_RESIDUAL moves the default: the outcome is the same, and in host memory more is copied.
// What cannot be in place is refused then, unless its registration names another place.
LAUNCHED_CASE(DEVICE_residual_where_the_environment_says) {
  for (const char* place : {"device", "host", "inplace"}) {
    std::vector<Run> runs = rank_runs("DEVICE_residual_where_the_environment_says", 2);
    for (Run& one : runs) {
      one.environment["SCAPE_RESIDUAL"] = place;
      one.environment["SCAPE_RESIDUAL_CHUNK"] = "8192";
    }
    expect(runs, {0, 0});
  }
}
RANK_PART(DEVICE_residual_where_the_environment_says) {
  const ncclComm_t comm = self.init();
  const cudaStream_t stream = make_stream();
  const std::string place = std::getenv("SCAPE_RESIDUAL");
  constexpr size_t kCount = 7000;
  scape_config config = gradient_config("named", 0.1);
  CHECK(config.residual == (place == "device"    ? SCAPE_RESIDUAL_INTERNAL
                            : place == "inplace" ? SCAPE_RESIDUAL_IN_PLACE
                                                 : SCAPE_RESIDUAL_HOST));
  DeviceFloats named(kCount, 0), by_default(kCount, 0);
  scape_registration registrations[2] = {};
  if (place == "inplace") {
    CHECK(scape_register(by_default.get(), kCount, SCAPE_FLOAT32, &config, &registrations[0]) ==
          SCAPE_ERR_ARGUMENT);
    CHECK_SAYING(contains(scape_last_error(), "SCAPE_RESIDUAL=inplace"), scape_last_error());
    config.role = SCAPE_ROLE_FUSED;
  }
  config.name = "default";
  SCAPE(scape_register(by_default.get(), kCount, SCAPE_FLOAT32, &config, &registrations[0]));
  config.name = "named";
  config.residual = SCAPE_RESIDUAL_INTERNAL;
  SCAPE(scape_register(named.get(), kCount, SCAPE_FLOAT32, &config, &registrations[1]));
  const DeviceFloats params[2] = {{kCount, 1}, {kCount, 1}};
  uint64_t copied[2] = {};
  for (int turn = 0; turn < 6; ++turn) {
    const std::vector<float> values = values_of(self, turn, kCount);
    for (int which = 0; which < 2; ++which) {
      DeviceFloats& data = which == 0 ? by_default : named;
      std::vector<float> gradient = values;
      if (place == "inplace" && which == 0) {
        const std::vector<float> waiting = data.read(stream);
        for (size_t i = 0; i < kCount; ++i) gradient[i] += waiting[i];
      }
      data.write(gradient);
      simgpu_counters before, after;
      simgpu_get_counters(&before);
      NCCL(ncclAllReduce(data.get(), data.get(), kCount, ncclFloat32, ncclAvg, comm, stream));
      if (place == "inplace")
        SCAPE(scape_adams_step(data.get(), kCount, params[which].get(), 1e-2, 0, stream));
      simgpu_get_counters(&after);
      copied[which] += after.copied_bytes - before.copied_bytes;
    }
    std::vector<float> residuals[2] = {std::vector<float>(kCount), std::vector<float>(kCount)};
    SCAPE(scape_read_residual(by_default.get(), kCount, residuals[0].data(), kCount));
    SCAPE(scape_read_residual(named.get(), kCount, residuals[1].data(), kCount));
    CHECK(residuals[0] == residuals[1]);
    CHECK(params[0].read(stream) == params[1].read(stream));
    if (place != "inplace") CHECK(by_default.read(stream) == named.read(stream));
  }
  // Each masked step has the residual copied to the device and back.
  CHECK_SAYING((copied[0] > copied[1] + 5 * 8 * kCount) == (place == "host"),
               std::to_string(copied[0]) + " and " + std::to_string(copied[1]));
  for (const scape_registration each : registrations) SCAPE(scape_unregister(each));
  NCCL(ncclCommDestroy(comm));
}

LAUNCHED_CASE(DEVICE_non_blocking) {
  std::vector<Run> runs = rank_runs("DEVICE_non_blocking", 2);
  for (Run& one : runs) {
    one.environment["SIMGPU_NCCL_IN_PROGRESS_MS"] = "20";
    one.environment["SIMGPU_NCCL_LAUNCH_MS"] = "5";
  }
  expect(runs, {0, 0});
}
RANK_PART(DEVICE_non_blocking) {
  ncclConfig_t config = non_blocking();
  ncclComm_t comm = nullptr;
  CHECK(ncclCommInitRankConfig(&comm, self.ranks, self.next_id(), self.rank, &config) ==
        ncclInProgress);
  const cudaStream_t stream = make_stream();
  Gradient gradient(1000, "later", 0.1);
  // It is the real NCCL that refuses, and nothing has happened to the buffer.
  CHECK(gradient.call(comm, stream) == ncclInvalidArgument);
  wait_until_ready(comm);
  Balance balance(1000);
  for (int turn = 0; turn < 3; ++turn) step(self, comm, stream, gradient, balance, turn);
  DeviceFloats plain(100, 1);
  for (int turn = 3; turn < 6; ++turn) {
    const std::vector<float> values = values_of(self, turn, 1000);
    gradient.put(values);
    balance.in(values);
    NCCL(ncclGroupStart());
    NCCL(ncclAllReduce(plain.get(), plain.get(), 100, ncclFloat32, ncclSum, comm, stream));
    NCCL(gradient.call(comm, stream));
    CHECK(ncclGroupEnd() == ncclInProgress);
    wait_until_ready(comm);
    balance.out(gradient.read(stream));
  }
  plain.expect(stream, 8);
  CHECK(gradient.stats().sparse_calls == 5);
  self.meet("over");
  NCCL(ncclCommAbort(comm));
}

// A library without its CUDA module beside it, or on a machine where that finds no device.
LAUNCHED_CASE(DEVICE_without_its_module) {
  for (const char* required : {"0", "1"}) {
    std::vector<Run> runs = rank_runs("DEVICE_without_its_module", 2);
    for (Run& one : runs) {
      const char* first = std::getenv("FIELD_CASES_PRELOAD_FIRST");
      one.environment["LD_PRELOAD"] =
          std::string(first != nullptr ? first : "") + " " + HOST_SCAPE_NCCL;
      one.environment["SCAPE_REQUIRED"] = required;
    }
    for (const Outcome& outcome : expect(runs, {0, 0})) {
      const size_t at = outcome.err.find("registered buffers go dense");
      if (std::string(required) == "1") {
        CHECK_SAYING(contains(outcome.err, "libscape_cuda.so") || contains(outcome.err, "CUDA"),
                     outcome.err);
        continue;
      }
      CHECK_SAYING(at != std::string::npos, outcome.err);
      CHECK_SAYING(!contains(outcome.err.substr(at + 30), "go dense"), outcome.err);
      CHECK_SAYING(!contains(outcome.err, "a call goes dense"), outcome.err);
    }
  }
}
RANK_PART(DEVICE_without_its_module) {
  const ncclComm_t comm = self.init(), other = self.init();
  const cudaStream_t stream = make_stream();
  Gradient gradient(100, "dense", 0.1), second(100, "dense, too", 0.1);
  const bool required = std::string(std::getenv("SCAPE_REQUIRED")) == "1";
  for (int turn = 0; turn < 3; ++turn) {
    for (const ncclComm_t each : {comm, other}) {
      for (Gradient* one : {&gradient, &second}) {
        one->put(std::vector<float>(100, 1));
        if (required) {
          CHECK(one->call(each, stream) == ncclSystemError);
          continue;
        }
        NCCL(one->call(each, stream));
        CHECK(one->read(stream) == std::vector<float>(100, 2));
      }
    }
  }
  CHECK(gradient.stats().fallback_calls == (required ? 0 : 6));
  CHECK(required || scape_self_check(gradient.registration()) == SCAPE_ERR_USAGE);
  NCCL(ncclCommDestroy(other));
  NCCL(ncclCommDestroy(comm));
}

}  // namespace
}  // namespace scape::cases
