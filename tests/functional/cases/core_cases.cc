// Host mode as a program meets it: communicators, every collective, operations, errors.
#include <algorithm>
#include <cstring>
#include <numeric>
#include <thread>

#include "tests/functional/cases/case.h"

namespace scape::cases {
namespace {

template <typename T>
void every_collective(Rank& self, ncclComm_t comm, ncclDataType_t type, size_t count) {
  const size_t ranks = static_cast<size_t>(self.ranks);
  const size_t me = static_cast<size_t>(self.rank);
  const auto value = [&](size_t rank, size_t i) {
    return static_cast<T>((rank + 1) * (i % 7 + 1) % 11);
  };
  const auto make = [&](size_t rank, size_t length) {
    std::vector<T> values(length);
    for (size_t i = 0; i < length; ++i) values[i] = value(rank, i);
    return values;
  };
  const std::vector<T> mine = make(me, count);
  const std::vector<T> wide = make(me, count * ranks);
  std::vector<T> out(count), all(count * ranks);

  NCCL(ncclAllReduce(mine.data(), out.data(), count, type, ncclSum, comm, nullptr));
  for (size_t i = 0; i < count; ++i) {
    T sum{};
    for (size_t rank = 0; rank < ranks; ++rank) sum = static_cast<T>(sum + value(rank, i));
    CHECK(out[i] == sum);
  }
  NCCL(ncclAllReduce(mine.data(), out.data(), count, type, ncclMax, comm, nullptr));
  for (size_t i = 0; i < count; ++i) {
    T most{};
    for (size_t rank = 0; rank < ranks; ++rank) most = std::max(most, value(rank, i));
    CHECK(out[i] == most);
  }
  NCCL(ncclReduceScatter(wide.data(), out.data(), count, type, ncclSum, comm, nullptr));
  for (size_t i = 0; i < count; ++i) {
    T sum{};
    for (size_t rank = 0; rank < ranks; ++rank)
      sum = static_cast<T>(sum + value(rank, me * count + i));
    CHECK(out[i] == sum);
  }
  NCCL(ncclAllGather(mine.data(), all.data(), count, type, comm, nullptr));
  for (size_t i = 0; i < all.size(); ++i) CHECK(all[i] == value(i / count, i % count));
  NCCL(ncclAlltoAll(wide.data(), all.data(), count, type, comm, nullptr));
  for (size_t i = 0; i < all.size(); ++i) CHECK(all[i] == value(i / count, me * count + i % count));
  for (int root = 0; root < self.ranks; ++root) {
    const size_t from = static_cast<size_t>(root);
    out = mine;
    NCCL(ncclBcast(out.data(), count, type, root, comm, nullptr));
    CHECK(out == make(from, count));
    std::fill(out.begin(), out.end(), T{});
    NCCL(ncclBroadcast(self.rank == root ? mine.data() : nullptr, out.data(), count, type, root,
                       comm, nullptr));
    CHECK(out == make(from, count));
    NCCL(ncclReduce(mine.data(), self.rank == root ? out.data() : nullptr, count, type, ncclMin,
                    root, comm, nullptr));
    for (size_t i = 0; i < count && self.rank == root; ++i) {
      T least = value(0, i);
      for (size_t rank = 0; rank < ranks; ++rank) least = std::min(least, value(rank, i));
      CHECK(out[i] == least);
    }
    NCCL(ncclGather(mine.data(), self.rank == root ? all.data() : nullptr, count, type, root, comm,
                    nullptr));
    for (size_t i = 0; i < all.size() && self.rank == root; ++i)
      CHECK(all[i] == value(i / count, i % count));
    NCCL(ncclScatter(self.rank == root ? wide.data() : nullptr, out.data(), count, type, root, comm,
                     nullptr));
    for (size_t i = 0; i < count; ++i) CHECK(out[i] == value(from, me * count + i));
  }
  // Point to point: round the ring, and to oneself.
  NCCL(ncclGroupStart());
  NCCL(ncclSend(mine.data(), count, type, (self.rank + 1) % self.ranks, comm, nullptr));
  NCCL(ncclRecv(out.data(), count, type, (self.rank + self.ranks - 1) % self.ranks, comm, nullptr));
  NCCL(ncclGroupEnd());
  CHECK(out == make((me + ranks - 1) % ranks, count));
  std::fill(out.begin(), out.end(), T{});
  NCCL(ncclGroupStart());
  NCCL(ncclSend(mine.data(), count, type, self.rank, comm, nullptr));
  NCCL(ncclRecv(out.data(), count, type, self.rank, comm, nullptr));
  NCCL(ncclGroupEnd());
  CHECK(out == mine);
}

void every_collective_of_some_types(Rank& self) {
  ncclComm_t comm = self.init();
  for (size_t count : {1, 5, 64, 1000, 70000}) {
    every_collective<float>(self, comm, ncclFloat32, count);
    every_collective<int64_t>(self, comm, ncclInt64, count);
  }
  every_collective<uint8_t>(self, comm, ncclUint8, 333);
  every_collective<double>(self, comm, ncclFloat64, 333);
  every_collective<int32_t>(self, comm, ncclInt32, 333);
  NCCL(ncclCommFinalize(comm));
  float one = 1;
  CHECK(ncclAllReduce(&one, &one, 1, ncclFloat32, ncclSum, comm, nullptr) == ncclInvalidUsage);
  NCCL(ncclCommDestroy(comm));
}
RANKED_CASE(collectives_1_rank, 1) { every_collective_of_some_types(self); }
RANKED_CASE(collectives_2_ranks, 2) { every_collective_of_some_types(self); }
RANKED_CASE(collectives_3_ranks, 3) { every_collective_of_some_types(self); }

RANKED_CASE(collectives_with_configs, 2) {
  ncclComm_t comm = self.init();
  ncclCollConfig_t config{};
  config.size = sizeof config;
  config.magic = kApiMagic;
  config.version = kVersionCode;
  std::vector<float> buffer(100, 1);
  const auto call = [&](const ncclCollConfig_t* with) {
    return ncclAllReduceConfig(buffer.data(), buffer.data(), 100, ncclFloat32, ncclSum, comm,
                               nullptr, with);
  };
  NCCL(call(&config));
  NCCL(call(nullptr));
  CHECK(buffer[99] == 4);
  ncclConfigExt_t extension{};
  extension.key.vendorId = 4711;
  config.ext = &extension;
  NCCL(call(&config));
  config.magic = 1;
  CHECK(call(&config) == ncclInvalidArgument);
  config.magic = kApiMagic;
  config.size = 4;
  CHECK(call(&config) == ncclInvalidArgument);
  NCCL(ncclCommDestroy(comm));
}

RANKED_CASE(init_with_every_size_of_config, 2) {
  // 24: 2.14; 48: 2.17 to 2.23; 56: 2.26; then whole structures up to today's, and one from the
  // future.
  for (const size_t size : {24, 48, 56, 80, 88, 120, 160}) {
    std::vector<unsigned char> bytes(size, 0xff);  // beyond the caller's size nothing may be read
    ncclConfig_t config{};
    config.size = size;
    config.magic = kApiMagic;
    config.version = size < 100 ? 22809 : kVersionCode;
    config.blocking = size == 80 ? 0 : 1;
    std::memcpy(bytes.data(), &config, std::min<size_t>(size, 20));
    ncclComm_t comm = nullptr;
    NCCL(ncclCommInitRankConfig(&comm, 2, self.next_id(), self.rank,
                                reinterpret_cast<ncclConfig_t*>(bytes.data())));
    ncclResult_t state = ncclInProgress;
    NCCL(ncclCommGetAsyncError(comm, &state));
    CHECK(state == ncclSuccess);
    std::vector<float> buffer(10, 1);
    all_reduce(buffer, comm);
    CHECK(buffer[9] == 2);
    NCCL(ncclCommDestroy(comm));
  }
  ncclConfig_t bad{};
  bad.size = sizeof bad;
  ncclComm_t comm = nullptr;
  CHECK(ncclCommInitRankConfig(&comm, 2, self.next_id(), self.rank, &bad) == ncclInvalidArgument);
  CHECK(comm == nullptr);
}

RANKED_CASE(init_scalable_and_all, 2) {
  const size_t sockets = open_sockets();
  ncclUniqueId ids[2] = {self.next_id(), self.next_id()};
  ncclComm_t comm = nullptr;
  NCCL(ncclCommInitRankScalable(&comm, 2, self.rank, 2, ids, nullptr));
  int count = 0, rank = -1, device = -1;
  NCCL(ncclCommCount(comm, &count));
  NCCL(ncclCommUserRank(comm, &rank));
  NCCL(ncclCommCuDevice(comm, &device));
  CHECK(count == 2 && rank == self.rank && device == 0);
  NCCL(ncclCommDestroy(comm));
  CHECK(open_sockets() == sockets);  // those of the ids that were not needed, too

  // Three ranks in one process and one thread.
  ncclComm_t comms[3] = {};
  const int devices[] = {4, 2, 7};
  NCCL(ncclCommInitAll(comms, 3, devices));
  std::vector<std::vector<float>> buffers(3, std::vector<float>(50));
  for (size_t i = 0; i < 3; ++i) {
    NCCL(ncclCommCuDevice(comms[i], &device));
    CHECK(device == devices[i]);
    buffers[i].assign(50, static_cast<float>(i + 1));
  }
  NCCL(ncclGroupStart());
  for (size_t i = 0; i < 3; ++i) all_reduce(buffers[i], comms[i]);
  NCCL(ncclGroupEnd());
  for (const auto& buffer : buffers) CHECK(buffer[0] == 6 && buffer[49] == 6);
  for (ncclComm_t each : comms) NCCL(ncclCommDestroy(each));

  // The same with grouped inits.
  ncclUniqueId id;
  NCCL(ncclGetUniqueId(&id));
  NCCL(ncclGroupStart());
  for (int i = 0; i < 3; ++i) NCCL(ncclCommInitRank(&comms[i], 3, id, i));
  NCCL(ncclGroupEnd());
  for (int i = 0; i < 3; ++i) {
    NCCL(ncclCommUserRank(comms[i], &rank));
    CHECK(rank == i);
    NCCL(ncclCommDestroy(comms[i]));
  }
}

RANKED_CASE(split_shrink_grow, 4) {
  ncclComm_t world = self.init();
  // Colours 0, 0, 1, none; ordered by a falling key.
  const int colour = self.rank < 2 ? 0 : self.rank == 2 ? 1 : kSplitNoColor;
  ncclComm_t part = nullptr;
  NCCL(ncclCommSplit(world, colour, -self.rank, &part, nullptr));
  CHECK((part == nullptr) == (self.rank == 3));
  std::vector<float> buffer(64, 1);
  all_reduce(buffer, world);
  CHECK(buffer[0] == 4);
  if (part != nullptr) {
    int count = 0, rank = -1;
    NCCL(ncclCommCount(part, &count));
    NCCL(ncclCommUserRank(part, &rank));
    CHECK(count == (self.rank < 2 ? 2 : 1));
    CHECK(rank == (self.rank == 0 ? 1 : 0));
  }

  // Shrink to ranks 0, 1, 3.
  ncclComm_t three = nullptr;
  int excluded[] = {2};
  if (self.rank != 2) {
    NCCL(ncclCommShrink(world, excluded, 1, &three, nullptr, kShrinkDefault));
    int rank = -1;
    NCCL(ncclCommUserRank(three, &rank));
    CHECK(rank == (self.rank == 3 ? 2 : self.rank));
    buffer.assign(64, 1);
    all_reduce(buffer, three);
    CHECK(buffer[63] == 3);
    int self_excluded[] = {self.rank};
    ncclComm_t none = nullptr;
    CHECK(ncclCommShrink(world, self_excluded, 1, &none, nullptr, kShrinkDefault) ==
          ncclInvalidArgument);
  }

  // And grow those three to four again, rank 2 as the new last.
  ncclComm_t grown = nullptr;
  const std::string path = "grow";
  ncclUniqueId id;
  if (self.rank == 0) {
    NCCL(ncclCommGetUniqueId(three, &id));
    ncclUniqueId second;
    CHECK(ncclCommGetUniqueId(three, &second) == ncclInvalidUsage);
    // Rank 2 gets it over the old communicator.
    NCCL(ncclSend(&id, sizeof id, ncclInt8, 2, world, nullptr));
    NCCL(ncclCommGrow(three, 4, &id, -1, &grown, nullptr));
  } else if (self.rank == 2) {
    NCCL(ncclRecv(&id, sizeof id, ncclInt8, 0, world, nullptr));
    NCCL(ncclCommGrow(nullptr, 4, &id, 3, &grown, nullptr));
  } else {
    NCCL(ncclCommGrow(three, 4, nullptr, -1, &grown, nullptr));
  }
  buffer.assign(64, 1);
  all_reduce(buffer, grown);
  CHECK(buffer[5] == 4);

  // The children outlive the parent.
  NCCL(ncclCommDestroy(world));
  for (int step = 0; part != nullptr && step < 5; ++step) {
    buffer.assign(64, 1);
    all_reduce(buffer, part);
    CHECK(buffer[0] == (self.rank < 2 ? 2 : 1));
  }
  for (ncclComm_t comm : {part, three, grown}) NCCL(ncclCommDestroy(comm));
}

RANKED_CASE(revoke_then_split, 2) {
  ncclComm_t comm = self.init();
  self.meet("made");
  NCCL(ncclCommRevoke(comm, 0));
  float one = 1;
  CHECK(ncclAllReduce(&one, &one, 1, ncclFloat32, ncclSum, comm, nullptr) == ncclInvalidUsage);
  CHECK(ncclCommFinalize(comm) == ncclInvalidUsage);
  ncclResult_t state = ncclInternalError;
  NCCL(ncclCommGetAsyncError(comm, &state));
  CHECK(state == ncclSuccess);
  ncclComm_t fresh = nullptr;
  NCCL(ncclCommSplit(comm, 0, self.rank, &fresh, nullptr));
  NCCL(ncclAllReduce(&one, &one, 1, ncclFloat32, ncclSum, fresh, nullptr));
  CHECK(one == 2);
  NCCL(ncclCommDestroy(fresh));
  NCCL(ncclCommDestroy(comm));
}

RANKED_CASE(handles_that_are_gone, 2) {
  ncclComm_t comm = self.init();
  ncclComm_t keep = self.init();
  NCCL(ncclCommDestroy(comm));
  CHECK(ncclCommDestroy(comm) == ncclInvalidArgument);
  CHECK(ncclCommAbort(comm) == ncclInvalidArgument);
  float one = 1;
  int number = 0;
  ncclResult_t state;
  CHECK(ncclAllReduce(&one, &one, 1, ncclFloat32, ncclSum, comm, nullptr) == ncclInvalidArgument);
  CHECK(ncclCommCount(comm, &number) == ncclInvalidArgument);
  CHECK(ncclCommGetAsyncError(comm, &state) == ncclInvalidArgument);
  CHECK(ncclCommSplit(comm, 0, 0, &comm, nullptr) == ncclInvalidArgument);
  CHECK(ncclAllReduce(&one, &one, 1, ncclFloat32, ncclSum, nullptr, nullptr) ==
        ncclInvalidArgument);
  CHECK(ncclCommCount(reinterpret_cast<ncclComm_t>(&one), &number) == ncclInvalidArgument);
  NCCL(ncclCommDestroy(nullptr));
  // Another one, made later, is not taken for it.
  NCCL(ncclAllReduce(&one, &one, 1, ncclFloat32, ncclSum, keep, nullptr));
  CHECK(one == 2);
  NCCL(ncclCommDestroy(keep));
}

RANKED_CASE(arguments_are_checked, 2) {
  ncclComm_t comm = self.init();
  float a[8] = {}, b[8] = {};
  const auto bad = [](ncclResult_t result, const char* named) {
    CHECK(result == ncclInvalidArgument || result == ncclInvalidUsage);
    const std::string why = ncclGetLastError(nullptr);
    CHECK_SAYING(why.find(named) != std::string::npos, why);
  };
  bad(ncclAllReduce(nullptr, b, 8, ncclFloat32, ncclSum, comm, nullptr), "sendbuff");
  bad(ncclAllReduce(a, nullptr, 8, ncclFloat32, ncclSum, comm, nullptr), "recvbuff");
  bad(ncclAllReduce(a, b, 8, ncclNumTypes, ncclSum, comm, nullptr), "datatype 12");
  bad(ncclAllReduce(a, b, 8, ncclFloat32, static_cast<ncclRedOp_t>(5), comm, nullptr),
      "operation 5");
  bad(ncclAllReduce(a, b, 8, ncclFloat32, static_cast<ncclRedOp_t>(-1), comm, nullptr),
      "operation -1");
  bad(ncclAllReduce(a, b, SIZE_MAX / 2, ncclFloat32, ncclSum, comm, nullptr), "more than memory");
  bad(ncclAllGather(a, b, size_t{1} << 62, ncclInt8, comm, nullptr), "more than memory");
  bad(ncclBroadcast(a, b, 8, ncclFloat32, 2, comm, nullptr), "root 2");
  bad(ncclReduce(a, b, 8, ncclFloat32, ncclSum, -1, comm, nullptr), "root -1");
  bad(ncclSend(a, 8, ncclFloat32, 7, comm, nullptr), "peer 7");
  bad(ncclRecv(b, 8, ncclFloat32, self.rank, comm, nullptr), "this rank");
  bad(ncclCommCount(comm, nullptr), "count is null");
  bad(ncclAlltoAll(a, a, 4, ncclFloat32, comm, nullptr), "in-place");
  bad(ncclCommInitRank(nullptr, 2, ncclUniqueId{}, 0), "comm is null");
  ncclComm_t none = nullptr;
  bad(ncclCommInitRank(&none, 2, ncclUniqueId{}, 2), "rank 2");
  bad(ncclCommInitRank(&none, 0, ncclUniqueId{}, 0), "nranks 0");
  bad(ncclCommInitRank(&none, 2, ncclUniqueId{}, 0), "unique id is all zeros");
  ncclUniqueId foreign{};
  foreign.internal[5] = 1;
  bad(ncclCommInitRank(&none, 2, foreign, 0), "device mode");
  bad(ncclCommWindowRegister(comm, a, 32, nullptr, 0), "needs a GPU");
  bad(ncclPutSignal(a, 1, ncclFloat32, 0, nullptr, 0, 0, 0, 0, comm, nullptr), "needs a GPU");
  bad(ncclGroupSimulateEnd(nullptr), "no group");
  CHECK(ncclTeamWorld(comm).nRanks == 0);
  // The thread that failed knows why; others do not.
  std::thread([] { CHECK(std::string(ncclGetLastError(nullptr)).empty()); }).join();
  // And nothing of all that is left behind.
  a[0] = 1;
  NCCL(ncclAllReduce(a, b, 8, ncclFloat32, ncclSum, comm, nullptr));
  CHECK(b[0] == 2);
  NCCL(ncclCommDestroy(comm));
}

RANKED_CASE(premultiplied_sums, 3) {
  ncclComm_t comm = self.init();
  // Each rank has its own factor; one in memory is read when the collective runs.
  float factor = static_cast<float>(self.rank + 1);
  ncclRedOp_t now, later;
  NCCL(ncclRedOpCreatePreMulSum(&now, &factor, ncclFloat32, ncclScalarHostImmediate, comm));
  NCCL(ncclRedOpCreatePreMulSum(&later, &factor, ncclFloat32, ncclScalarDevice, comm));
  CHECK(now >= ncclNumOps && later >= ncclNumOps && now != later);
  factor = 10;
  std::vector<float> buffer(33, 1);
  all_reduce(buffer, comm, now);
  CHECK(buffer[32] == 6);
  buffer.assign(33, 1);
  all_reduce(buffer, comm, later);
  CHECK(buffer[32] == 30);
  std::vector<int32_t> integers(5, 1);
  CHECK(ncclAllReduce(integers.data(), integers.data(), 5, ncclInt32, ncclSum, comm, nullptr) ==
        ncclSuccess);
  CHECK(ncclAllReduce(integers.data(), integers.data(), 5, ncclInt32, now, comm, nullptr) ==
        ncclInvalidArgument);
  int32_t three = 3;
  ncclRedOp_t integer;
  NCCL(ncclRedOpCreatePreMulSum(&integer, &three, ncclInt32, ncclScalarHostImmediate, comm));
  NCCL(ncclAllReduce(integers.data(), integers.data(), 5, ncclInt32, integer, comm, nullptr));
  CHECK(integers[4] == 27);
  NCCL(ncclRedOpDestroy(now, comm));
  CHECK(ncclRedOpDestroy(now, comm) == ncclInvalidArgument);
  CHECK(ncclRedOpDestroy(ncclSum, comm) == ncclInvalidArgument);
  CHECK(ncclAllReduce(buffer.data(), buffer.data(), 33, ncclFloat32, now, comm, nullptr) ==
        ncclInvalidArgument);
  NCCL(ncclCommDestroy(comm));
}

RANKED_CASE(memory_and_registration, 1) {
  ncclComm_t comm = self.init();
  void* memory = nullptr;
  NCCL(ncclMemAlloc(&memory, 10000));
  CHECK(reinterpret_cast<uintptr_t>(memory) % 4096 == 0);
  std::memset(memory, 1, 10000);
  void* handle = nullptr;
  NCCL(ncclCommRegister(comm, memory, 10000, &handle));
  CHECK(handle != nullptr);
  NCCL(ncclCommDeregister(comm, handle));
  CHECK(ncclCommDeregister(comm, handle) == ncclInvalidArgument);
  NCCL(ncclMemFree(memory));
  NCCL(ncclMemAlloc(&memory, 0));
  NCCL(ncclMemFree(memory));
  NCCL(ncclCommDestroy(comm));
}

// Aborting from one thread ends a call that another is stuck in, and the peers hear of it.
RANKED_CASE(abort_ends_a_stuck_call, 2) {
  ncclComm_t comm = self.init();
  float one = 1;
  if (self.rank == 0) {
    std::thread stuck([&] {
      CHECK(ncclAllReduce(&one, &one, 1, ncclFloat32, ncclSum, comm, nullptr) != ncclSuccess);
    });
    std::this_thread::sleep_for(std::chrono::milliseconds(200));
    NCCL(ncclCommAbort(comm));
    stuck.join();
    return;
  }
  ncclResult_t state = ncclSuccess;
  for (int i = 0; i < 500 && state == ncclSuccess; ++i) {
    NCCL(ncclCommGetAsyncError(comm, &state));
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  CHECK(state == ncclRemoteError);
  CHECK_SAYING(std::string(ncclGetLastError(comm)).find("rank 0") != std::string::npos,
               ncclGetLastError(comm));
  CHECK(ncclAllReduce(&one, &one, 1, ncclFloat32, ncclSum, comm, nullptr) == ncclRemoteError);
  NCCL(ncclCommAbort(comm));
}

}  // namespace
}  // namespace scape::cases
