// Masked calls on communicators of every making, and what has no elements.
#include "tests/functional/simgpu/gradient.h"

#include <algorithm>
#include <cstdio>

namespace scape::cases {
namespace {

// Some masked steps, after which all that went in came out or waits: a new communicator begins with
// a state of its own.
void masked_steps(Rank& self, ncclComm_t comm, Gradient& gradient, int steps) {
  const cudaStream_t stream = make_stream();
  const uint64_t before = gradient.stats().sparse_calls;
  Balance balance(gradient.count());
  for (int turn = 0; turn < steps; ++turn) step(self, comm, stream, gradient, balance, turn);
  balance.check(comm, stream, gradient);
  CHECK(gradient.stats().sparse_calls == before + static_cast<uint64_t>(steps) - 1);
  CUDA(cudaStreamDestroy(stream));
}

RANKED_CASE(DEVICE_shrunk_and_grown, 4) {
  const ncclUniqueId ids[] = {self.next_id(), self.next_id()};
  ncclComm_t world = nullptr;
  NCCL(ncclCommInitRankScalable(&world, self.ranks, self.rank, 2, const_cast<ncclUniqueId*>(ids),
                                nullptr));
  Gradient gradient(300, "elastic", 0.1);
  masked_steps(self, world, gradient, 4);

  if (self.rank != 3) {
    int excluded = 3;
    ncclComm_t three = nullptr;
    NCCL(ncclCommShrink(world, &excluded, 1, &three, nullptr, kShrinkDefault));
    masked_steps(self, three, gradient, 4);
    NCCL(ncclCommDestroy(three));
  }
  // Two grow to three; the third, who has another rank in it than before, comes anew.
  ncclComm_t grown = nullptr;
  if (self.rank < 2) {
    ncclComm_t both = nullptr;
    int excluded[] = {2, 3};
    NCCL(ncclCommShrink(world, excluded, 2, &both, nullptr, kShrinkDefault));
    masked_steps(self, both, gradient, 3);
    ncclUniqueId id{};
    if (self.rank == 0) {
      NCCL(ncclCommGetUniqueId(both, &id));
      hand_over(self, id);
    }
    NCCL(ncclCommGrow(both, 3, self.rank == 0 ? &id : nullptr, -1, &grown, nullptr));
    NCCL(ncclCommDestroy(both));
  } else if (self.rank == 3) {
    const ncclUniqueId id = handed_over(self);
    NCCL(ncclCommGrow(nullptr, 3, &id, 2, &grown, nullptr));
  }
  if (grown != nullptr) {
    masked_steps(self, grown, gradient, 4);
    NCCL(ncclCommDestroy(grown));
  }
  NCCL(ncclCommDestroy(world));
}

// The last rank goes without a word, and the others go on without it.
RANKED_CASE(DEVICE_shrunk_past_a_lost_rank, 3) {
  const ncclComm_t world = self.init();
  const cudaStream_t stream = make_stream();
  Gradient gradient(300, "elastic", 0.1);
  masked_steps(self, world, gradient, 3);
  self.meet("trained");
  if (self.rank == 2) {
    std::fflush(nullptr);
    std::_Exit(0);
  }
  // On its stream the call waits for the rank that is gone, or has failed for it already.
  (void)gradient.call(world, stream);
  int excluded = 2;
  ncclComm_t both = nullptr;
  NCCL(ncclCommShrink(world, &excluded, 1, &both, nullptr, kShrinkAbort));
  CUDA(cudaStreamSynchronize(stream));
  CHECK(gradient.call(world, stream) != ncclSuccess);
  masked_steps(self, both, gradient, 4);
  NCCL(ncclCommAbort(world));
  NCCL(ncclCommDestroy(both));
}

RANKED_CASE(DEVICE_F15_zero_length, 3) {
  const ncclComm_t comm = self.init();
  const cudaStream_t stream = make_stream();
  Gradient gradient(50, "some", 0.1);
  const DeviceFloats ten(10, static_cast<float>(self.rank + 1));
  for (float* pointer : {static_cast<float*>(nullptr), ten.get(), gradient.get()}) {
    NCCL(ncclAllReduce(pointer, pointer, 0, ncclFloat32, ncclSum, comm, stream));
    NCCL(ncclReduceScatter(pointer, pointer, 0, ncclFloat32, ncclSum, comm, stream));
    NCCL(ncclAllGather(pointer, pointer, 0, ncclFloat32, comm, stream));
  }
  NCCL(ncclGroupStart());
  NCCL(ncclAllReduce(nullptr, nullptr, 0, ncclFloat32, ncclSum, comm, stream));
  NCCL(ncclAllReduce(ten.get(), ten.get(), 10, ncclFloat32, ncclSum, comm, stream));
  NCCL(ncclAllReduce(gradient.get(), gradient.get(), 0, ncclFloat32, ncclSum, comm, stream));
  NCCL(ncclGroupEnd());
  ten.expect(stream, 6);
  CHECK(gradient.stats().step == 0);

  // A rank that has nothing but zeros still takes part.
  Balance balance(50);
  for (int turn = 0; turn < 6; ++turn) {
    std::vector<float> values = values_of(self, turn, 50);
    if (self.rank == 1) std::fill(values.begin(), values.end(), 0.f);
    gradient.put(values);
    balance.in(values);
    NCCL(gradient.call(comm, stream));
    balance.out(gradient.read(stream));
  }
  balance.check(comm, stream, gradient);
  CHECK(gradient.stats().sparse_calls == 5);
  NCCL(ncclCommDestroy(comm));
}

}  // namespace
}  // namespace scape::cases
