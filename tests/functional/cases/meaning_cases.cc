// What collectives mean, and how ranks agree: F15 to F21.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <numeric>
#include <thread>

#include "tests/functional/cases/case.h"

namespace scape::cases {
namespace {

// Guard words around a buffer, to see that nothing is written beside it.
class Guarded {
 public:
  explicit Guarded(size_t count) : memory_(count + 2 * kGuard, kMark), count_(count) {}
  float* data() { return memory_.data() + kGuard; }
  void fill(float value) { std::fill_n(data(), count_, value); }
  void check() const {
    for (size_t i = 0; i < kGuard; ++i)
      CHECK(memory_[i] == kMark && memory_[memory_.size() - 1 - i] == kMark);
  }

 private:
  static constexpr size_t kGuard = 64;
  static constexpr float kMark = -12345.5f;
  std::vector<float> memory_;
  size_t count_;
};

// The call has to fail on every rank, in time, with a message that names what differs; and so at
// once does the next one.
void expect_refusal(const std::function<ncclResult_t()>& call, ncclComm_t comm,
                    const std::vector<std::string>& named) {
  const auto start = std::chrono::steady_clock::now();
  const ncclResult_t result = call();
  CHECK_SAYING(result == ncclInvalidUsage || result == ncclInvalidArgument,
               ncclGetErrorString(result));
  CHECK(since(start) < 10);
  const std::string why = ncclGetLastError(comm);
  for (const std::string& part : named)
    CHECK_SAYING(why.find(part) != std::string::npos, part + " in: " + why);
  const auto again = std::chrono::steady_clock::now();
  float one = 1;
  CHECK(ncclAllReduce(&one, &one, 1, ncclFloat32, ncclSum, comm, nullptr) != ncclSuccess);
  CHECK(since(again) < 1);
}

// Steps of a healthy sparse buffer, checked for agreement.
void steps(Rank& self, ncclComm_t comm, std::vector<float>& buffer, Conservation* sums, int first,
           int count) {
  for (int step = first; step < first + count; ++step) {
    fill(buffer, values_of(self, step, buffer.size()));
    sums->input(buffer);
    all_reduce(buffer, comm);
    sums->output(buffer);
    check_agreement(self, comm, buffer.data(), buffer.size() * sizeof(float));
  }
}

RANKED_CASE(F15_zero_length, 3) {
  ncclComm_t comm = self.init();
  float some[10] = {};
  for (float* pointer : {static_cast<float*>(nullptr), some}) {
    NCCL(ncclAllReduce(pointer, pointer, 0, ncclFloat32, ncclSum, comm, nullptr));
    NCCL(ncclReduceScatter(pointer, pointer, 0, ncclFloat32, ncclSum, comm, nullptr));
    NCCL(ncclAllGather(pointer, pointer, 0, ncclFloat32, comm, nullptr));
    NCCL(ncclBroadcast(pointer, pointer, 0, ncclFloat32, 1, comm, nullptr));
    NCCL(ncclReduce(pointer, pointer, 0, ncclFloat32, ncclMax, 2, comm, nullptr));
    NCCL(ncclAlltoAll(pointer, pointer, 0, ncclFloat32, comm, nullptr));
    NCCL(ncclGather(pointer, pointer, 0, ncclFloat32, 0, comm, nullptr));
    NCCL(ncclScatter(pointer, pointer, 0, ncclFloat32, 0, comm, nullptr));
  }
  std::vector<float> ten(10, static_cast<float>(self.rank + 1));
  NCCL(ncclGroupStart());
  NCCL(ncclAllReduce(nullptr, nullptr, 0, ncclFloat32, ncclSum, comm, nullptr));
  NCCL(ncclAllReduce(ten.data(), ten.data(), 10, ncclFloat32, ncclSum, comm, nullptr));
  NCCL(ncclAllGather(nullptr, nullptr, 0, ncclInt8, comm, nullptr));
  NCCL(ncclGroupEnd());
  for (float value : ten) CHECK(value == 6);

  scape_registration none = nullptr;
  CHECK(scape_register(some, 0, SCAPE_FLOAT32, nullptr, &none) == SCAPE_ERR_ARGUMENT);
  CHECK(none == nullptr);

  // A rank that has nothing but zeros still takes part.
  std::vector<float> buffer(50);
  Conservation sums(50);
  add(buffer.data(), 50, "b", 0.1);
  for (int step = 0; step < 6; ++step) {
    fill(buffer, values_of(self, step, 50));
    if (self.rank == 1) std::fill(buffer.begin(), buffer.end(), 0.f);
    sums.input(buffer);
    all_reduce(buffer, comm);
    sums.output(buffer);
    check_agreement(self, comm, buffer.data(), 200);
  }
  sums.check(self, comm, buffer.data());
  CHECK(stats_of(buffer.data(), 50).sparse_calls == 5);
  NCCL(ncclCommDestroy(comm));
}

RANKED_CASE(F16_counts_differ, 2) {
  ncclComm_t comm = self.init();
  Guarded buffer(1000);
  buffer.fill(1);
  add(buffer.data(), 1000, "counts", 0.1);
  const size_t count = self.rank == 0 ? 1000 : 998;
  expect_refusal(
      [&] {
        return ncclAllReduce(buffer.data(), buffer.data(), count, ncclFloat32, ncclSum, comm,
                             nullptr);
      },
      comm, {"1000", "998"});
  buffer.check();
  NCCL(ncclCommAbort(comm));
}

RANKED_CASE(F16_unregistered_counts_differ, 2) {
  ncclComm_t comm = self.init();
  Guarded buffer(200);
  buffer.fill(1);
  const size_t count = self.rank == 0 ? 100 : 200;
  expect_refusal(
      [&] {
        return ncclAllReduce(buffer.data(), buffer.data(), count, ncclFloat32, ncclSum, comm,
                             nullptr);
      },
      comm, {"100", "200"});
  buffer.check();
  NCCL(ncclCommAbort(comm));
}

RANKED_CASE(F16_types_differ, 2) {
  ncclComm_t comm = self.init();
  Guarded buffer(100);
  buffer.fill(1);
  expect_refusal(
      [&] {
        return self.rank == 0 ? ncclAllReduce(buffer.data(), buffer.data(), 100, ncclFloat32,
                                              ncclSum, comm, nullptr)
                              : ncclAllReduce(buffer.data(), buffer.data(), 200, ncclBfloat16,
                                              ncclSum, comm, nullptr);
      },
      comm, {"float32", "bfloat16"});
  buffer.check();
  NCCL(ncclCommAbort(comm));
}

RANKED_CASE(F16_sparsities_differ, 2) {
  ncclComm_t comm = self.init();
  std::vector<float> buffer(1000, 1);
  const scape_registration registration =
      add(buffer.data(), 1000, "ratios", self.rank == 0 ? 0.1 : 0.2);
  // The first call starts the comparison, the second needs its result.
  const auto start = std::chrono::steady_clock::now();
  ncclResult_t result =
      ncclAllReduce(buffer.data(), buffer.data(), 1000, ncclFloat32, ncclSum, comm, nullptr);
  if (result == ncclSuccess) {
    result = ncclAllReduce(buffer.data(), buffer.data(), 1000, ncclFloat32, ncclSum, comm, nullptr);
  }
  CHECK_SAYING(result == ncclInvalidUsage || result == ncclInvalidArgument,
               ncclGetErrorString(result));
  CHECK(since(start) < 10);
  const std::string why = ncclGetLastError(comm);
  CHECK(scape_self_check(registration) != SCAPE_OK);
  CHECK_SAYING(contains(scape_last_error(), "ratios"), scape_last_error());
  CHECK_SAYING(why.find("0.9") != std::string::npos && why.find("0.8") != std::string::npos, why);
  const auto again = std::chrono::steady_clock::now();
  CHECK(ncclAllReduce(buffer.data(), buffer.data(), 1000, ncclFloat32, ncclSum, comm, nullptr) !=
        ncclSuccess);
  CHECK(since(again) < 1);
  self.meet("both have heard of it");
  NCCL(ncclCommAbort(comm));
}

RANKED_CASE(F17_registration_order, 3) {
  ncclComm_t comm = self.init();
  std::vector<float> a(100), b(300);
  if (self.rank == 2) add(b.data(), 300, "B", 0.1);
  add(a.data(), 100, "A", 0.1);
  if (self.rank != 2) add(b.data(), 300, "B", 0.1);
  Conservation sum_a(100), sum_b(300);
  for (int step = 0; step < 5; ++step) {
    steps(self, comm, a, &sum_a, step, 1);
    steps(self, comm, b, &sum_b, step, 1);
  }
  sum_a.check(self, comm, a.data());
  sum_b.check(self, comm, b.data());
  CHECK(stats_of(a.data(), 100).sparse_calls == 4);
  // Now one rank takes the other first.
  std::vector<float>& first = self.rank == 2 ? b : a;
  expect_refusal(
      [&] {
        return ncclAllReduce(first.data(), first.data(), first.size(), ncclFloat32, ncclSum, comm,
                             nullptr);
      },
      comm, {"\"A\"", "\"B\""});
  NCCL(ncclCommAbort(comm));
}

RANKED_CASE(F17_call_order_of_equal_buffers, 3) {
  ncclComm_t comm = self.init();
  std::vector<float> a(100), b(100);
  add(a.data(), 100, "A", 0.1);
  add(b.data(), 100, "B", 0.1);
  Conservation sum_a(100), sum_b(100);
  steps(self, comm, a, &sum_a, 0, 3);
  steps(self, comm, b, &sum_b, 0, 3);
  std::vector<float>& first = self.rank == 2 ? b : a;
  expect_refusal(
      [&] {
        return ncclAllReduce(first.data(), first.data(), 100, ncclFloat32, ncclSum, comm, nullptr);
      },
      comm, {"\"A\"", "\"B\""});
  NCCL(ncclCommAbort(comm));
}

RANKED_CASE(F17_one_rank_never_registers, 3) {
  ncclComm_t comm = self.init();
  std::vector<float> b(300, 1);
  if (self.rank != 2) add(b.data(), 300, "only some", 0.1);
  expect_refusal(
      [&] { return ncclAllReduce(b.data(), b.data(), 300, ncclFloat32, ncclSum, comm, nullptr); },
      comm, {"regist"});
  NCCL(ncclCommAbort(comm));
}

RANKED_CASE(F18_in_and_out_of_place, 4) {
  ncclComm_t comm = self.init();
  // All-reduce: in place, out of place with the source or the destination registered; equal values.
  std::vector<float> in_place(200), source(200), target(200), source2(200), target2(200);
  add(in_place.data(), 200, "in place", 0.2);
  add(source.data(), 200, "source", 0.2);
  add(target2.data(), 200, "target", 0.2);
  Conservation sums(200), sums_of_source(200), sums_of_target(200);
  for (int step = 0; step < 6; ++step) {
    const std::vector<float> values = values_of(self, step, 200);
    in_place = source = source2 = values;
    for (Conservation* each : {&sums, &sums_of_source, &sums_of_target}) each->input(values);
    all_reduce(in_place, comm);
    NCCL(ncclAllReduce(source.data(), target.data(), 200, ncclFloat32, ncclSum, comm, nullptr));
    NCCL(ncclAllReduce(source2.data(), target2.data(), 200, ncclFloat32, ncclSum, comm, nullptr));
    CHECK(source == values && source2 == values);
    CHECK(target == in_place && target2 == in_place);
    sums.output(in_place);
    sums_of_source.output(target);
    sums_of_target.output(target2);
    check_agreement(self, comm, in_place.data(), 800);
  }
  sums.check(self, comm, in_place.data());
  sums_of_source.check(self, comm, source.data());
  sums_of_target.check(self, comm, target2.data());

  // All-gather and reduce-scatter, 50 a rank, in and out of place.
  const std::vector<float> mine = values_of(self, 1, 50);
  std::vector<float> gathered(200), gathered_in_place(200);
  NCCL(ncclAllGather(mine.data(), gathered.data(), 50, ncclFloat32, comm, nullptr));
  float* own = gathered_in_place.data() + 50 * self.rank;
  std::copy(mine.begin(), mine.end(), own);
  NCCL(ncclAllGather(own, gathered_in_place.data(), 50, ncclFloat32, comm, nullptr));
  CHECK(gathered == gathered_in_place);
  for (int other = 0; other < 4; ++other) {
    const std::vector<float> theirs = values_of({other, 4, "", 0}, 1, 50);
    CHECK(std::equal(theirs.begin(), theirs.end(), gathered.begin() + 50 * other));
  }
  std::vector<float> whole = values_of(self, 2, 200), share(50), scattered = whole;
  NCCL(ncclReduceScatter(whole.data(), share.data(), 50, ncclFloat32, ncclSum, comm, nullptr));
  NCCL(ncclReduceScatter(scattered.data(), scattered.data() + 50 * self.rank, 50, ncclFloat32,
                         ncclSum, comm, nullptr));
  CHECK(whole == values_of(self, 2, 200));
  CHECK(std::equal(share.begin(), share.end(), scattered.begin() + 50 * self.rank));
  for (size_t i = 0; i < 50; ++i) {
    float sum = 0;
    for (int other = 0; other < 4; ++other) {
      sum += values_of({other, 4, "", 0}, 2, 200)[50 * static_cast<size_t>(self.rank) + i];
    }
    CHECK(share[i] == sum);
  }

  // Partial overlap is refused by every rank before anything is sent.
  std::vector<float> long_one(210, 1);
  CHECK(ncclAllReduce(long_one.data(), long_one.data() + 8, 200, ncclFloat32, ncclSum, comm,
                      nullptr) == ncclInvalidArgument);
  CHECK(ncclAllGather(long_one.data() + 1, long_one.data(), 50, ncclFloat32, comm, nullptr) ==
        ncclInvalidArgument);
  CHECK(ncclReduceScatter(long_one.data(), long_one.data() + 7, 50, ncclFloat32, ncclSum, comm,
                          nullptr) == ncclInvalidArgument);

  // 203 elements in a buffer padded to 204: the pad is nobody's.
  std::vector<float> padded(204);
  add(padded.data(), 204, "padded", 0.2);
  Conservation padded_sums(203);
  for (int step = 0; step < 4; ++step) {
    fill(padded, values_of(self, step, 203));
    padded_sums.input(padded);
    NCCL(ncclAllReduce(padded.data(), padded.data(), 203, ncclFloat32, ncclSum, comm, nullptr));
    padded_sums.output(padded);
    check_agreement(self, comm, padded.data(), 816);
    CHECK(padded[203] == 0);
  }
  padded_sums.check(self, comm, padded.data());
  NCCL(ncclCommDestroy(comm));
}

template <typename T>
void single_rank(ncclComm_t comm, ncclDataType_t type, scape_dtype dtype, size_t count, T one,
                 T two) {
  ncclRedOp_t twice;
  NCCL(ncclRedOpCreatePreMulSum(&twice, &two, type, ncclScalarHostImmediate, comm));
  std::vector<T> values(count), buffer(count), target(count);
  for (size_t i = 0; i < count; ++i) values[i] = i % 3 == 0 ? T{} : one;
  const scape_registration registration = add(buffer.data(), count, "alone", 0.1, dtype);
  for (int call = 0; call < 5; ++call) {
    for (ncclRedOp_t op : {ncclSum, ncclAvg}) {
      buffer = values;
      NCCL(ncclAllReduce(buffer.data(), buffer.data(), count, type, op, comm, nullptr));
      CHECK(buffer == values);
      NCCL(ncclAllReduce(buffer.data(), target.data(), count, type, op, comm, nullptr));
      CHECK(target == values && buffer == values);
    }
    NCCL(ncclAllReduce(buffer.data(), target.data(), count, type, twice, comm, nullptr));
    for (size_t i = 0; i < count; ++i) CHECK(target[i] == (i % 3 == 0 ? T{} : two));
    NCCL(ncclAllReduce(buffer.data(), buffer.data(), count, type, twice, comm, nullptr));
    CHECK(buffer == target);
  }
  SCAPE(scape_unregister(registration));
  NCCL(ncclRedOpDestroy(twice, comm));
}

RANKED_CASE(F19_single_rank, 1) {
  const size_t sockets = open_sockets();
  ncclComm_t comm = self.init();
  for (size_t count : {1, 7, 8, 9, 63, 64, 65, 1000}) {
    single_rank<float>(comm, ncclFloat32, SCAPE_FLOAT32, count, 1.f, 2.f);
    single_rank<uint16_t>(comm, ncclFloat16, SCAPE_FLOAT16, count, 0x3c00, 0x4000);
    single_rank<uint16_t>(comm, ncclBfloat16, SCAPE_BFLOAT16, count, 0x3f80, 0x4000);
  }
  CHECK(open_sockets() == sockets);
  NCCL(ncclCommDestroy(comm));
}

RANKED_CASE(F20_groups, 2) {
  ncclComm_t comm = self.init();
  ncclComm_t other = self.init();
  std::vector<float> buffer(64, 1);

  for (int level = 0; level < 3; ++level) NCCL(ncclGroupStart());
  NCCL(ncclAllReduce(buffer.data(), buffer.data(), 64, ncclFloat32, ncclSum, comm, nullptr));
  NCCL(ncclGroupEnd());
  CHECK(buffer[0] == 1);  // nothing is launched before the outermost end
  NCCL(ncclGroupEnd());
  CHECK(buffer[0] == 1);
  NCCL(ncclGroupEnd());
  CHECK(buffer[0] == 2 && buffer[63] == 2);

  NCCL(ncclGroupStart());
  NCCL(ncclGroupEnd());
  CHECK(ncclGroupEnd() == ncclInvalidUsage);

  // A bad call fails its group, and leaves nothing behind.
  buffer.assign(64, 1);
  NCCL(ncclGroupStart());
  NCCL(ncclAllReduce(buffer.data(), buffer.data(), 64, ncclFloat32, ncclSum, comm, nullptr));
  CHECK(ncclAllReduce(buffer.data(), buffer.data(), 64, static_cast<ncclDataType_t>(99), ncclSum,
                      comm, nullptr) == ncclInvalidArgument);
  CHECK(ncclGroupEnd() == ncclInvalidArgument);
  CHECK(std::string(ncclGetLastError(comm)).find("99") != std::string::npos);
  CHECK(buffer[0] == 1);
  all_reduce(buffer, comm);
  CHECK(buffer[0] == 2);

  // Registered and unregistered calls over two communicators.
  std::vector<std::vector<float>> registered(3, std::vector<float>(64)),
      plain(2, std::vector<float>(64));
  std::vector<Conservation> sums(3, Conservation(64));
  const char* names[] = {"g0", "g1", "g2"};
  for (size_t i = 0; i < 3; ++i) add(registered[i].data(), 64, names[i], 0.25);
  for (int step = 0; step < 6; ++step) {
    NCCL(ncclGroupStart());
    for (size_t i = 0; i < 3; ++i) {
      fill(registered[i], values_of(self, step * 3 + static_cast<int>(i), 64));
      sums[i].input(registered[i]);
      all_reduce(registered[i], i == 1 ? other : comm);
      if (i < 2) {
        plain[i].assign(64, 3);
        all_reduce(plain[i], i == 0 ? other : comm);
      }
    }
    NCCL(ncclGroupEnd());
    for (size_t i = 0; i < 3; ++i) {
      sums[i].output(registered[i]);
      check_agreement(self, comm, registered[i].data(), 256);
    }
    for (const auto& values : plain) CHECK(values[0] == 6 && values[63] == 6);
  }
  for (size_t i = 0; i < 3; ++i) {
    sums[i].check(self, comm, registered[i].data());
    CHECK(stats_of(registered[i].data(), 64).sparse_calls == 5);
  }

  // Many calls, more than any fixed table holds.
  std::vector<int32_t> many(2500);
  std::iota(many.begin(), many.end(), 0);
  NCCL(ncclGroupStart());
  for (int32_t& value : many)
    NCCL(ncclAllReduce(&value, &value, 1, ncclInt32, ncclSum, comm, nullptr));
  NCCL(ncclGroupEnd());
  for (size_t i = 0; i < many.size(); ++i) CHECK(many[i] == static_cast<int32_t>(2 * i));

  // The same registered buffer twice in a group: two steps, one after the other, as outside of it.
  std::vector<float>& twice = registered[0];
  fill(twice, values_of(self, 100, 64));
  const uint64_t before = stats_of(twice.data(), 64).step;
  NCCL(ncclGroupStart());
  all_reduce(twice, comm);
  all_reduce(twice, comm);
  NCCL(ncclGroupEnd());
  CHECK(stats_of(twice.data(), 64).step == before + 2);
  check_agreement(self, comm, twice.data(), 256);
  NCCL(ncclCommDestroy(other));
  NCCL(ncclCommDestroy(comm));
}

RANKED_CASE(F20_groups_of_two_threads, 2) {
  ncclComm_t comms[2] = {self.init(), self.init()};
  std::vector<std::thread> threads;
  for (int thread = 0; thread < 2; ++thread) {
    threads.emplace_back([&, thread] {
      for (int round = 0; round < 50; ++round) {
        std::vector<float> a(64, static_cast<float>(thread + 1)), b(64, static_cast<float>(round));
        NCCL(ncclGroupStart());
        all_reduce(a, comms[thread]);
        if (round % 2 == 0) std::this_thread::yield();
        all_reduce(b, comms[thread]);
        NCCL(ncclGroupEnd());
        CHECK(a[0] == static_cast<float>(2 * (thread + 1)) &&
              b[63] == static_cast<float>(2 * round));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (ncclComm_t comm : comms) NCCL(ncclCommDestroy(comm));
}

RANKED_CASE(F21_what_cannot_be_sparse, 2) {
  ncclComm_t comm = self.init();
  std::vector<float> buffer(40);
  Conservation sums(40);
  add(buffer.data(), 40, "odd", 0.25);
  steps(self, comm, buffer, &sums, 0, 3);

  const std::vector<float> mine = values_of(self, 50, 40);
  const std::vector<float> theirs = values_of({1 - self.rank, 2, "", 0}, 50, 40);
  const auto call = [&](ncclRedOp_t op, const std::function<float(float, float)>& combine) {
    fill(buffer, mine);
    all_reduce(buffer, comm, op);
    for (size_t i = 0; i < 40; ++i) CHECK(buffer[i] == combine(mine[i], theirs[i]));
  };
  call(ncclMax, [](float a, float b) { return std::max(a, b); });
  call(ncclMin, [](float a, float b) { return std::min(a, b); });
  call(ncclProd, [](float a, float b) { return a * b; });
  {
    int64_t* integers = reinterpret_cast<int64_t*>(buffer.data());
    for (int64_t i = 0; i < 20; ++i) integers[i] = i * 1000000007 + self.rank;
    NCCL(ncclAllReduce(integers, integers, 20, ncclInt64, ncclSum, comm, nullptr));
    for (int64_t i = 0; i < 20; ++i) CHECK(integers[i] == 2 * i * 1000000007 + 1);
  }
  {
    double* doubles = reinterpret_cast<double*>(buffer.data());
    for (int i = 0; i < 20; ++i) doubles[i] = i + 0.25 * self.rank;
    NCCL(ncclAllReduce(doubles, doubles, 20, ncclFloat64, ncclSum, comm, nullptr));
    for (int i = 0; i < 20; ++i) CHECK(doubles[i] == 2 * i + 0.25);
  }
  {
    uint8_t* eighths = reinterpret_cast<uint8_t*>(buffer.data());
    std::memset(eighths, 0x38, 160);  // 1.0 in e4m3
    NCCL(ncclAllReduce(eighths, eighths, 160, ncclFloat8e4m3, ncclSum, comm, nullptr));
    for (int i = 0; i < 160; ++i) CHECK(eighths[i] == 0x40);  // 2.0
  }
  fill(buffer, mine);
  NCCL(ncclBroadcast(buffer.data(), buffer.data(), 40, ncclFloat32, 0, comm, nullptr));
  CHECK(std::equal(buffer.begin(), buffer.end(), (self.rank == 0 ? mine : theirs).begin()));
  fill(buffer, mine);
  NCCL(ncclReduce(buffer.data(), buffer.data(), 40, ncclFloat32, ncclSum, 1, comm, nullptr));
  for (size_t i = 0; i < 40 && self.rank == 1; ++i) CHECK(buffer[i] == mine[i] + theirs[i]);
  fill(buffer, mine);
  if (self.rank == 0) {
    NCCL(ncclSend(buffer.data(), 40, ncclFloat32, 1, comm, nullptr));
  } else {
    NCCL(ncclRecv(buffer.data(), 40, ncclFloat32, 0, comm, nullptr));
    CHECK(std::equal(buffer.begin(), buffer.end(), theirs.begin()));
  }

  steps(self, comm, buffer, &sums, 3, 3);
  sums.check(self, comm, buffer.data());
  const scape_stats stats = stats_of(buffer.data(), 0);
  CHECK(stats.sparse_calls == 5);
  CHECK(stats.fallback_calls == 9);
  CHECK(stats.intercepted_calls == 15);
  NCCL(ncclCommDestroy(comm));
}

RANKED_CASE(F21_step_after_what_cannot_be_sparse, 2) {
  ncclComm_t comm = self.init();
  std::vector<float> buffer(40, 1), param(40, 0);
  scape_config config = gradient_config("fused", 0.5);
  config.role = SCAPE_ROLE_FUSED;
  scape_registration registration = nullptr;
  SCAPE(scape_register(buffer.data(), 40, SCAPE_FLOAT32, &config, &registration));
  const auto refused = [&](scape_status expected, const char* what) {
    all_reduce(buffer, comm, ncclMax);
    CHECK(scape_adams_step(buffer.data(), 40, param.data(), 1e-3, 0, nullptr) == expected);
    for (const char* part : {what, "went dense", "max"})
      CHECK_SAYING(contains(scape_last_error(), part), scape_last_error());
  };
  refused(SCAPE_ERR_NOT_FOUND, "was masked yet");
  for (int step = 0; step < 3; ++step) {
    all_reduce(buffer, comm, ncclAvg);
    SCAPE(scape_adams_step(buffer.data(), 40, param.data(), 1e-3, 0, nullptr));
    refused(SCAPE_ERR_USAGE, "needs a masked all-reduce of it before");
  }
  SCAPE(scape_unregister(registration));
  NCCL(ncclCommDestroy(comm));
}

}  // namespace
}  // namespace scape::cases
