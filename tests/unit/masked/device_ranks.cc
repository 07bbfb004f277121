// First: NCCL's declarations then name the same streams.
#include <cuda_runtime_api.h>
// Then the rest.
#include <dlfcn.h>
#include <gtest/gtest.h>

#include <thread>
#include <utility>
#include <vector>

#include "device_ranks.h"
#include "interposer/mode.h"
#include "interposer/real_nccl.h"

namespace scape::plugin::test {
namespace {

const nccl::Functions* simulated_nccl() {
  static const nccl::Functions* const table = []() -> const nccl::Functions* {
    void* const handle = ::dlopen(SIMNCCL, RTLD_NOW | RTLD_LOCAL);
    if (handle == nullptr) return nullptr;
    auto* const made = new nccl::Functions(interposer::refusing_functions());
    interposer::load_functions({handle, SIMNCCL}, made);
    return made;
  }();
  return table;
}

std::shared_ptr<Engine> engine_of(DeviceChannel& channel) {
  std::shared_ptr<Engine> engine;
  const Status status = channel.make_engine(&engine);
  EXPECT_TRUE(status.ok()) << status.message();
  return engine;
}

void run_rank(const nccl::Functions& nccl, nccl::ncclUniqueId id, int rank, int ranks,
              const std::function<void(const DeviceRank&)>& body) {
  int devices = 0;
  ASSERT_EQ(cudaGetDeviceCount(&devices), cudaSuccess);
  ASSERT_EQ(cudaSetDevice(rank % devices), cudaSuccess);
  cudaStream_t stream = nullptr;
  ASSERT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
  nccl::ncclComm_t comm = nullptr;
  ASSERT_EQ(nccl.CommInitRank(&comm, ranks, id, rank), nccl::ncclSuccess)
      << nccl.GetLastError(comm);
  {
    std::shared_ptr<DeviceChannel> channel;
    const Status status = open_device_channel(nccl, comm, &channel);
    ASSERT_TRUE(status.ok()) << status.message();
    body(DeviceRank(nccl, comm, channel, {stream}));
  }
  EXPECT_EQ(nccl.CommDestroy(comm), nccl::ncclSuccess);
  (void)cudaStreamDestroy(stream);  // a test may have broken its device
}

}  // namespace

DeviceRank::DeviceRank(const nccl::Functions& f, nccl::ncclComm_t c,
                       std::shared_ptr<DeviceChannel> ch, Stream s)
    : Rank(
          ch->communicator(), ch->refresher(), [ch] { return engine_of(*ch); }, s),
      nccl(f),
      comm(c),
      channel(std::move(ch)) {}

void run_device_ranks(int ranks, const std::function<void(const DeviceRank&)>& body) {
  const nccl::Functions* const nccl = simulated_nccl();
  ASSERT_NE(nccl, nullptr) << ::dlerror();
  nccl::ncclUniqueId id;
  ASSERT_EQ(nccl->GetUniqueId(&id), nccl::ncclSuccess);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank)
    threads.emplace_back([&, rank] { run_rank(*nccl, id, rank, ranks, body); });
  for (std::thread& thread : threads) thread.join();
}

}  // namespace scape::plugin::test
