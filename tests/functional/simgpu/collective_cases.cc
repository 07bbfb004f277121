// Collectives of device buffers through the stand-in NCCL, by several processes with a device each.
#include "tests/functional/simgpu/sim_case.h"

#include <atomic>
#include <chrono>
#include <memory>
#include <thread>

namespace scape::cases {
namespace {

// Holds a stream back until it is opened.
struct Gate {
  explicit Gate(cudaStream_t stream) {
    CUDA(cudaLaunchHostFunc(
        stream,
        [](void* self) {
          while (!static_cast<Gate*>(self)->open.load()) {
            std::this_thread::sleep_for(std::chrono::microseconds(200));
          }
        },
        this));
  }
  std::atomic<bool> open{false};
};

void every_collective(Rank& self) {
  const ncclComm_t comm = self.init();
  const cudaStream_t stream = make_stream();
  const size_t ranks = static_cast<size_t>(self.ranks);
  const float mine = static_cast<float>(self.rank + 1);
  const float sum = static_cast<float>(ranks * (ranks + 1) / 2);
  constexpr size_t kCount = 10'000;

  DeviceFloats one(kCount, mine), whole(kCount * ranks, mine), result(kCount, 0);
  NCCL(ncclAllReduce(one.get(), result.get(), kCount, ncclFloat32, ncclSum, comm, stream));
  result.expect(stream, sum);
  NCCL(ncclReduceScatter(whole.get(), result.get(), kCount, ncclFloat32, ncclMax, comm, stream));
  result.expect(stream, static_cast<float>(ranks));
  NCCL(ncclAllGather(one.get(), whole.get(), kCount, ncclFloat32, comm, stream));
  const std::vector<float> gathered = whole.read(stream);
  for (size_t rank = 0; rank < ranks; ++rank) {
    CHECK(gathered[rank * kCount] == static_cast<float>(rank + 1));
    CHECK(gathered[(rank + 1) * kCount - 1] == static_cast<float>(rank + 1));
  }
  NCCL(ncclBroadcast(one.get(), result.get(), kCount, ncclFloat32, self.ranks - 1, comm, stream));
  result.expect(stream, static_cast<float>(ranks));
  NCCL(ncclReduce(one.get(), result.get(), kCount, ncclFloat32, ncclAvg, 0, comm, stream));
  if (self.rank == 0) result.expect(stream, sum / static_cast<float>(ranks));

  const int next = (self.rank + 1) % self.ranks, last = (self.rank + self.ranks - 1) % self.ranks;
  NCCL(ncclGroupStart());
  NCCL(ncclSend(one.get(), kCount, ncclFloat32, next, comm, stream));
  NCCL(ncclRecv(result.get(), kCount, ncclFloat32, last, comm, stream));
  NCCL(ncclGroupEnd());
  result.expect(stream, static_cast<float>(last + 1));

  // A factor that lies on the device is read when the call runs; the operation may be gone then.
  DeviceFloats factor(1, 0);
  ncclRedOp_t scaled = ncclSum;
  NCCL(ncclRedOpCreatePreMulSum(&scaled, factor.get(), ncclFloat32, ncclScalarDevice, comm));
  const float two = 2;
  CUDA(cudaMemcpyAsync(factor.get(), &two, sizeof two, cudaMemcpyHostToDevice, stream));
  NCCL(ncclAllReduce(one.get(), result.get(), kCount, ncclFloat32, scaled, comm, stream));
  NCCL(ncclRedOpDestroy(scaled, comm));
  result.expect(stream, 2 * sum);
  CHECK(ncclAllReduce(one.get(), result.get(), kCount, ncclFloat32, scaled, comm, stream) ==
        ncclInvalidArgument);

  CHECK(counters_of("ncclAllReduce", comm).calls == 2);
  CHECK(counters_of("ncclAllReduce", comm).bytes == 2 * kCount * sizeof(float));
  CHECK(counters_of("ncclAllReduce", comm).runs == 2);
  CHECK(counters_of(nullptr, comm).calls == 8);
  CHECK(counters_of(nullptr, nullptr).run_bytes == 8 * kCount * sizeof(float));
  CHECK(simnccl_calls("ncclAllReduce") == 3);
  NCCL(ncclCommDestroy(comm));
}

}  // namespace

RANKED_CASE(SIM_collectives_of_two, 2) { every_collective(self); }
RANKED_CASE(SIM_collectives_of_four, 4) { every_collective(self); }

RANKED_CASE(SIM_calls_return_before_they_run, 2) {
  const ncclComm_t comm = self.init();
  const cudaStream_t stream = make_stream(), other = make_stream();
  DeviceFloats data(1000, 1), more(1000, 1);
  Gate gate(stream);
  NCCL(ncclAllReduce(data.get(), data.get(), 1000, ncclFloat32, ncclSum, comm, stream));
  CHECK(cudaStreamQuery(stream) == cudaErrorNotReady);
  // Another stream's call of this communicator comes after that.
  NCCL(ncclAllReduce(more.get(), more.get(), 1000, ncclFloat32, ncclSum, comm, other));
  CHECK(cudaStreamQuery(other) == cudaErrorNotReady);
  CHECK(counters_of("ncclAllReduce", comm).calls == 2);
  CHECK(counters_of("ncclAllReduce", comm).runs == 0);
  gate.open = true;
  data.expect(stream, 2);
  more.expect(other, 2);
  NCCL(ncclCommDestroy(comm));
}

RANKED_CASE(SIM_group_of_communicators_and_streams, 2) {
  const ncclComm_t first = self.init(), second = self.init();
  const cudaStream_t a = make_stream(), b = make_stream();
  DeviceFloats one(100, 1), two(100, 2), three(100, 3);
  NCCL(ncclGroupStart());
  NCCL(ncclAllReduce(one.get(), one.get(), 100, ncclFloat32, ncclSum, first, a));
  NCCL(ncclAllReduce(two.get(), two.get(), 100, ncclFloat32, ncclSum, second, b));
  NCCL(ncclGroupStart());
  NCCL(ncclAllReduce(three.get(), three.get(), 100, ncclFloat32, ncclSum, first, b));
  NCCL(ncclGroupEnd());
  CHECK(counters_of(nullptr, nullptr).runs == 0);
  NCCL(ncclGroupEnd());
  // What follows on either stream comes after all of the group's calls of a communicator.
  one.expect(b, 2);
  two.expect(b, 4);
  three.expect(a, 6);
  CHECK(ncclGroupEnd() == ncclInvalidUsage);
  // One refused call drops the group.
  NCCL(ncclGroupStart());
  NCCL(ncclAllReduce(one.get(), one.get(), 100, ncclFloat32, ncclSum, first, a));
  CHECK(ncclAllReduce(&self, one.get(), 1, ncclFloat32, ncclSum, first, a) == ncclInvalidArgument);
  CHECK(ncclGroupEnd() == ncclInvalidArgument);
  one.expect(a, 2);
  NCCL(ncclCommDestroy(first));
  NCCL(ncclCommDestroy(second));
}

RANKED_CASE(SIM_two_devices_in_one_process, 1) {
  ncclComm_t comms[2];
  NCCL(ncclCommInitAll(comms, 2, nullptr));
  cudaStream_t streams[2];
  std::vector<std::unique_ptr<DeviceFloats>> data;
  for (int device = 0; device < 2; ++device) {
    CUDA(cudaSetDevice(device));
    streams[device] = make_stream();
    data.push_back(std::make_unique<DeviceFloats>(5000, static_cast<float>(device + 1)));
    int of = -1;
    NCCL(ncclCommCuDevice(comms[device], &of));
    CHECK(of == device);
  }
  for (int round = 0; round < 3; ++round) {
    NCCL(ncclGroupStart());
    for (int device = 0; device < 2; ++device) {
      float* buffer = data[static_cast<size_t>(device)]->get();
      NCCL(ncclAllReduce(buffer, buffer, 5000, ncclFloat32, ncclSum, comms[device],
                         streams[device]));
    }
    NCCL(ncclGroupEnd());
  }
  for (int device = 0; device < 2; ++device) {
    data[static_cast<size_t>(device)]->expect(streams[device], 12);
  }
  // Streams and buffers are of the communicator's device.
  float* buffer = data[0]->get();
  CHECK(ncclAllReduce(buffer, buffer, 1, ncclFloat32, ncclSum, comms[0], streams[1]) ==
        ncclInvalidArgument);
  CHECK(ncclAllReduce(buffer, buffer, 1, ncclFloat32, ncclSum, comms[1], streams[1]) ==
        ncclInvalidArgument);
  for (const ncclComm_t comm : comms) NCCL(ncclCommDestroy(comm));
}

RANKED_CASE(SIM_graphs_replay_collectives, 2) {
  const ncclComm_t comm = self.init();
  const cudaStream_t stream = make_stream(), side = make_stream();
  cudaEvent_t fork = nullptr, join = nullptr;
  CUDA(cudaEventCreateWithFlags(&fork, cudaEventDisableTiming));
  CUDA(cudaEventCreateWithFlags(&join, cudaEventDisableTiming));
  DeviceFloats data(1000, 1), more(1000, 1);
  cudaGraph_t graph = nullptr;
  CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  NCCL(ncclAllReduce(data.get(), data.get(), 1000, ncclFloat32, ncclSum, comm, stream));
  CUDA(cudaEventRecord(fork, stream));
  CUDA(cudaStreamWaitEvent(side, fork, 0));
  NCCL(ncclAllReduce(more.get(), more.get(), 1000, ncclFloat32, ncclSum, comm, side));
  CUDA(cudaEventRecord(join, side));
  NCCL(ncclAllReduce(data.get(), data.get(), 1000, ncclFloat32, ncclSum, comm, stream));
  CUDA(cudaStreamWaitEvent(stream, join, 0));
  CUDA(cudaStreamEndCapture(stream, &graph));
  CHECK(counters_of("ncclAllReduce", comm).calls == 3);
  CHECK(counters_of("ncclAllReduce", comm).runs == 0);
  cudaGraphExec_t exec = nullptr;
  CUDA(cudaGraphInstantiate(&exec, graph, 0));
  for (int launch = 0; launch < 3; ++launch) {
    CUDA(cudaGraphLaunch(exec, stream));
    NCCL(ncclAllReduce(more.get(), more.get(), 1000, ncclFloat32, ncclMin, comm, stream));
  }
  data.expect(stream, 64);
  more.expect(stream, 8);
  CHECK(counters_of("ncclAllReduce", comm).calls == 6);
  CHECK(counters_of("ncclAllReduce", comm).runs == 12);
  CUDA(cudaGraphExecDestroy(exec));
  CUDA(cudaGraphDestroy(graph));
  NCCL(ncclCommDestroy(comm));
}

RANKED_CASE(SIM_registered_buffers_reach_the_real_nccl, 2) {
  const ncclComm_t comm = self.init();
  const cudaStream_t stream = make_stream();
  DeviceFloats data(4096, 1);
  scape_registration registration = nullptr;
  SCAPE(scape_register(data.get(), data.count(), SCAPE_FLOAT32, nullptr, &registration));
  NCCL(ncclAllReduce(data.get(), data.get(), data.count(), ncclFloat32, ncclSum, comm, stream));
  data.expect(stream, 2);
  CHECK(stats_of(data.get(), 0).intercepted_calls == 1);
  CHECK(counters_of("ncclAllReduce", comm).runs == 1);
  SCAPE(scape_unregister(registration));
  NCCL(ncclCommDestroy(comm));
}

// A program that links no NCCL: the library looks for the real one by its name.
LAUNCHED_CASE(SIM_the_real_nccl_is_found_by_name) {
  Run caller;
  caller.command = {BARE_CALLER};
  caller.environment = {{"LD_LIBRARY_PATH", SIMNCCL_FOLDER}};
  const Outcome found = run(caller);
  CHECK_SAYING(found.status == 0 && found.out == "0 23203 \n", found.out + found.err);
}

RANKED_CASE(SIM_memory_and_windows, 2) {
  const ncclComm_t comm = self.init();
  void* memory = nullptr;
  NCCL(ncclMemAlloc(&memory, 4096));
  cudaPointerAttributes attributes;
  CUDA(cudaPointerGetAttributes(&attributes, memory));
  CHECK(attributes.type == cudaMemoryTypeDevice);
  void* handle = nullptr;
  NCCL(ncclCommRegister(comm, memory, 4096, &handle));
  NCCL(ncclCommDeregister(comm, handle));
  CHECK(ncclCommRegister(comm, &self, 8, &handle) == ncclInvalidArgument);
  ncclWindow_t window = nullptr;
  NCCL(ncclCommWindowRegister(comm, memory, 4096, &window, 0));
  void* address = nullptr;
  NCCL(ncclWinGetUserPtr(comm, window, &address));
  CHECK(address == memory);
  NCCL(ncclCommWindowDeregister(comm, window));
  CHECK(ncclCommWindowDeregister(comm, window) == ncclInvalidArgument);
  NCCL(ncclMemFree(memory));
  int version = 0;
  NCCL(ncclGetVersion(&version));
  CHECK(version == kVersionCode);
  NCCL(ncclCommDestroy(comm));
}

}  // namespace scape::cases
