// The making, the failures and the end of the stand-in's communicators.
#include "tests/functional/simgpu/sim_case.h"

#include <chrono>
#include <thread>

namespace scape::cases {
namespace {

using Clock = std::chrono::steady_clock;

void sum_is(ncclComm_t comm, float mine, float expected) {
  const cudaStream_t stream = make_stream();
  DeviceFloats data(100, mine);
  NCCL(ncclAllReduce(data.get(), data.get(), 100, ncclFloat32, ncclSum, comm, stream));
  data.expect(stream, expected);
  CUDA(cudaStreamDestroy(stream));
}

}  // namespace

RANKED_CASE(SIM_split_shrink_and_grow, 4) {
  const ncclComm_t world = self.init();
  const float mine = static_cast<float>(self.rank + 1);
  // A call that is under way does not mix with the making.
  const cudaStream_t stream = make_stream();
  DeviceFloats data(100'000, mine);
  NCCL(ncclAllReduce(data.get(), data.get(), data.count(), ncclFloat32, ncclSum, world, stream));
  ncclComm_t pair = nullptr;
  NCCL(ncclCommSplit(world, self.rank % 2, self.rank, &pair, nullptr));
  sum_is(pair, mine, self.rank % 2 == 0 ? 4 : 6);
  data.expect(stream, 10);

  ncclComm_t none = nullptr;
  NCCL(ncclCommSplit(world, self.rank == 3 ? 0 : kSplitNoColor, 0, &none, nullptr));
  CHECK((none != nullptr) == (self.rank == 3));
  if (none != nullptr) {
    sum_is(none, 5, 5);
    NCCL(ncclCommDestroy(none));
  }

  if (self.rank != 3) {
    int excluded = 3;
    ncclComm_t three = nullptr;
    NCCL(ncclCommShrink(world, &excluded, 1, &three, nullptr, kShrinkDefault));
    sum_is(three, mine, 6);
    NCCL(ncclCommDestroy(three));
  }
  // Two grow to three.
  if (self.rank < 2) {
    ncclComm_t both = nullptr, grown = nullptr;
    int excluded[] = {2, 3};
    NCCL(ncclCommShrink(world, excluded, 2, &both, nullptr, kShrinkDefault));
    ncclUniqueId id{};
    if (self.rank == 0) {
      NCCL(ncclCommGetUniqueId(both, &id));
      hand_over(self, id);
    }
    NCCL(ncclCommGrow(both, 3, self.rank == 0 ? &id : nullptr, -1, &grown, nullptr));
    sum_is(grown, mine, 6);
    NCCL(ncclCommDestroy(grown));
    NCCL(ncclCommDestroy(both));
  } else if (self.rank == 2) {
    ncclComm_t grown = nullptr;
    const ncclUniqueId id = handed_over(self);
    NCCL(ncclCommGrow(nullptr, 3, &id, 2, &grown, nullptr));
    int rank = -1;
    NCCL(ncclCommUserRank(grown, &rank));
    CHECK(rank == 2);
    sum_is(grown, mine, 6);
    NCCL(ncclCommDestroy(grown));
  }
  NCCL(ncclCommDestroy(pair));
  NCCL(ncclCommFinalize(world));
  CHECK(ncclAllReduce(data.get(), data.get(), 1, ncclFloat32, ncclSum, world, stream) ==
        ncclInvalidUsage);
  NCCL(ncclCommDestroy(world));
}

RANKED_CASE(SIM_init_over_several_ids, 2) {
  ncclUniqueId ids[] = {self.next_id(), self.next_id()};
  ncclComm_t comm = nullptr;
  NCCL(ncclCommInitRankScalable(&comm, self.ranks, self.rank, 2, ids, nullptr));
  sum_is(comm, 1, 2);
  NCCL(ncclCommDestroy(comm));
}

// SIMGPU_NCCL_IN_PROGRESS_MS and SIMGPU_NCCL_LAUNCH_MS are set for this one.
RANKED_CASE(SIM_non_blocking, 2) {
  ncclConfig_t config = non_blocking();
  ncclComm_t comm = nullptr, split = nullptr;
  CHECK(ncclCommInitRankConfig(&comm, self.ranks, self.next_id(), self.rank, &config) ==
        ncclInProgress);
  CHECK(comm != nullptr);
  CHECK(state_of(comm) == ncclInProgress);
  const cudaStream_t stream = make_stream();
  DeviceFloats data(100, 1);
  CHECK(ncclAllReduce(data.get(), data.get(), 100, ncclFloat32, ncclSum, comm, stream) ==
        ncclInvalidArgument);
  int ranks = 0;
  CHECK(ncclCommCount(comm, &ranks) == ncclInvalidArgument);
  CHECK(wait_until_ready(comm) > 0);
  NCCL(ncclCommCount(comm, &ranks));
  CHECK(ranks == 2);
  // A call is not on the stream yet when it returns.
  CHECK(ncclAllReduce(data.get(), data.get(), 100, ncclFloat32, ncclSum, comm, stream) ==
        ncclInProgress);
  CHECK(cudaStreamQuery(stream) == cudaSuccess);
  CHECK(wait_until_ready(comm) > 0);
  data.expect(stream, 2);

  NCCL(ncclGroupStart());
  NCCL(ncclAllReduce(data.get(), data.get(), 100, ncclFloat32, ncclSum, comm, stream));
  CHECK(ncclGroupEnd() == ncclInProgress);
  CHECK(wait_until_ready(comm) > 0);
  data.expect(stream, 4);

  CHECK(ncclCommSplit(comm, 0, 0, &split, nullptr) == ncclInProgress);
  CHECK(wait_until_ready(split) > 0);
  CHECK(ncclCommFinalize(split) == ncclInProgress);
  CHECK(wait_until_ready(split) > 0);
  NCCL(ncclCommDestroy(split));
  NCCL(ncclCommDestroy(comm));
}

RANKED_CASE(SIM_abort_while_a_rank_is_missing, 2) {
  const ncclComm_t comm = self.init();
  const cudaStream_t stream = make_stream();
  self.meet("ready");
  if (self.rank == 0) {
    DeviceFloats data(1000, 1);
    NCCL(ncclAllReduce(data.get(), data.get(), 1000, ncclFloat32, ncclSum, comm, stream));
    NCCL(ncclAllReduce(data.get(), data.get(), 1000, ncclFloat32, ncclSum, comm, stream));
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    CHECK(cudaStreamQuery(stream) == cudaErrorNotReady);
    CHECK(state_of(comm) == ncclSuccess);
    const auto start = Clock::now();
    NCCL(ncclCommAbort(comm));
    CHECK(since(start) < 5 * test::kSlowdown);
    CUDA(cudaStreamSynchronize(stream));
    CHECK(ncclCommAbort(comm) == ncclInvalidArgument);
  }
  self.meet("aborted");
  if (self.rank == 1) {
    // The other side has heard of it.
    const auto start = Clock::now();
    while (state_of(comm) == ncclSuccess && since(start) < 20 * test::kSlowdown) {
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    CHECK(state_of(comm) == ncclRemoteError);
    NCCL(ncclCommAbort(comm));
  }
}

RANKED_CASE(SIM_abort_of_a_making_under_way, 2) {
  ncclConfig_t config = non_blocking();
  const ncclUniqueId id = self.next_id();
  if (self.rank == 0) {
    ncclComm_t comm = nullptr;
    CHECK(ncclCommInitRankConfig(&comm, 2, id, 0, &config) == ncclInProgress);
    CHECK(state_of(comm) == ncclInProgress);
    const auto start = Clock::now();
    NCCL(ncclCommAbort(comm));
    CHECK(since(start) < 5 * test::kSlowdown);
  }
  self.meet("aborted");
}

RANKED_CASE(SIM_revoke_ends_calls_and_leaves_a_parent, 2) {
  const ncclComm_t comm = self.init();
  const cudaStream_t stream = make_stream();
  DeviceFloats data(1000, 1);
  if (self.rank == 0) {
    NCCL(ncclAllReduce(data.get(), data.get(), 1000, ncclFloat32, ncclSum, comm, stream));
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
  }
  self.meet("enqueued");
  NCCL(ncclCommRevoke(comm, 0));
  CUDA(cudaStreamSynchronize(stream));
  CHECK(ncclAllReduce(data.get(), data.get(), 1, ncclFloat32, ncclSum, comm, stream) ==
        ncclInvalidUsage);
  ncclComm_t again = nullptr;
  NCCL(ncclCommSplit(comm, 0, self.rank, &again, nullptr));
  sum_is(again, 1, 2);
  NCCL(ncclCommDestroy(again));
  NCCL(ncclCommDestroy(comm));
}

// SIMGPU_NCCL_FAIL=ncclAllReduce:2=3,run/ncclAllReduce:2=6 is set for this one.
RANKED_CASE(SIM_failures_on_demand, 2) {
  const ncclComm_t comm = self.init();
  const cudaStream_t stream = make_stream();
  DeviceFloats data(10, 1);
  const auto reduce = [&] {
    return ncclAllReduce(data.get(), data.get(), 10, ncclFloat32, ncclSum, comm, stream);
  };
  NCCL(reduce());
  CHECK(reduce() == ncclInternalError);
  CHECK(contains(ncclGetLastError(comm), "made to fail"));
  data.expect(stream, 2);
  NCCL(reduce());  // accepted; it fails when it runs
  CUDA(cudaStreamSynchronize(stream));
  data.expect(stream, 2);
  CHECK(state_of(comm) == ncclRemoteError);
  CHECK(reduce() == ncclRemoteError);
  NCCL(ncclCommAbort(comm));
}

}  // namespace scape::cases
