// What can go wrong or is out of the ordinary around the steps: refusals, mismatches, buffers in
// flight together, ranks that share a thread, values that are not finite, single ranks, forks and
// the end.
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <functional>
#include <limits>
#include <mutex>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "local_group.h"
#include "plugin/masked/masked_buffer.h"
#include "plugin/masked/refresher.h"
#include "scenario.h"

namespace scape::plugin::test {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

std::vector<Rank> make_ranks(int ranks) {
  std::vector<Rank> all;
  for (const auto& communicator : make_local_group(ranks)) all.emplace_back(communicator);
  return all;
}

using Buffers = std::vector<std::unique_ptr<MaskedBuffer>>;

Buffers make_buffers(const std::vector<Rank>& ranks, const BufferConfig& config, size_t count) {
  Buffers buffers;
  for (const Rank& rank : ranks) buffers.push_back(rank.make(config, count));
  return buffers;
}

// Drives the calls of several ranks from this one thread. False when that takes too long.
bool poll_all(const Buffers& buffers) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  for (bool over = false; !over;) {
    over = true;
    for (const auto& buffer : buffers) over = buffer->poll() && over;
    if (std::chrono::steady_clock::now() > end) return false;
    std::this_thread::yield();
  }
  return true;
}

// One call of all ranks in place, from this thread; the first error.
Status call_all(const Buffers& buffers, std::vector<std::vector<float>>* data,
                Reduction reduction = {ReduceOp::kAvg}) {
  for (size_t r = 0; r < buffers.size(); ++r) {
    float* values = (*data)[r].data();
    SCAPE_RETURN_IF_ERROR(buffers[r]->begin_all_reduce(values, values, reduction));
  }
  if (!poll_all(buffers)) return error(SCAPE_ERR_TIMEOUT, "the call never ended");
  for (const auto& buffer : buffers) SCAPE_RETURN_IF_ERROR(buffer->status());
  return Status::Ok();
}

std::vector<float> residual_of(MaskedBuffer* buffer) {
  std::vector<float> residual(buffer->count());
  EXPECT_TRUE(buffer->read_residual(residual.data(), residual.size()).ok());
  return residual;
}

size_t masked_in(MaskedBuffer* buffer) {
  std::vector<uint64_t> mask(kernels::mask_words(buffer->count()));
  EXPECT_TRUE(buffer->read_mask(mask.data(), mask.size()).ok());
  return kernels::ops().count_bits(mask.data(), mask.size());
}

BufferConfig at_once(double sparsity, scape_role role) {
  BufferConfig config = short_config(sparsity, role);
  config.dense_steps = 1;
  config.ramp_steps = 1;
  return config;
}

void expect_error(const Status& status, scape_status code, const char* part) {
  EXPECT_EQ(status.code(), code) << status.message();
  EXPECT_NE(status.message().find(part), std::string::npos) << status.message();
}

// ---- refusals ----

TEST(Refusals, NameWhatIsWrongAndStartNothing) {
  const auto ranks = make_ranks(2);
  const auto buffers = make_buffers(ranks, at_once(0.9, SCAPE_ROLE_GRADIENT), 100);
  std::vector<float> values(200, 1);
  MaskedBuffer& buffer = *buffers[0];
  expect_error(buffer.begin_all_reduce(values.data(), values.data(), {ReduceOp::kMax}),
               SCAPE_ERR_USAGE, "max");
  expect_error(buffer.begin_all_reduce(values.data(), values.data() + 8, {}), SCAPE_ERR_ARGUMENT,
               "overlap");
  expect_error(buffer.begin_all_reduce(nullptr, values.data(), {}), SCAPE_ERR_ARGUMENT, "send");
  expect_error(buffer.begin_all_reduce(values.data(), nullptr, {}), SCAPE_ERR_ARGUMENT, "recv");
  expect_error(buffer.adams_step(values.data(), 0.1, 0), SCAPE_ERR_USAGE, "fused");
  expect_error(buffer.post_step(0, 1, values.data(), values.data(), 0.1, 0), SCAPE_ERR_USAGE,
               "hooked");
  uint64_t word;
  expect_error(buffer.read_mask(&word, 1), SCAPE_ERR_MEMORY, "capacity is 1");

  std::vector<std::vector<float>> data(2, std::vector<float>(100, 1));
  EXPECT_TRUE(call_all(buffers, &data).ok()) << "a proper call still works";
}

TEST(Refusals, KeepFusedCallsAndStepsInTurn) {
  const auto ranks = make_ranks(2);
  const auto buffers = make_buffers(ranks, at_once(0.9, SCAPE_ROLE_FUSED), 100);
  std::vector<std::vector<float>> data(2, std::vector<float>(100, 1));
  std::vector<float> param(100);
  expect_error(buffers[0]->adams_step(param.data(), 0.1, 0), SCAPE_ERR_USAGE, "all-reduce");
  ASSERT_TRUE(call_all(buffers, &data).ok());
  expect_error(buffers[0]->begin_all_reduce(data[0].data(), data[0].data(), {}), SCAPE_ERR_USAGE,
               "scape_adams_step");
  std::vector<std::byte> saved;
  expect_error(buffers[0]->save(&saved), SCAPE_ERR_USAGE, "saving");
  expect_error(buffers[0]->flush(data[0].data(), param.data(), 0.1, 0), SCAPE_ERR_USAGE, "flush");
  expect_error(buffers[0]->adams_step(nullptr, 0.1, 0), SCAPE_ERR_ARGUMENT, "param");
  expect_error(buffers[0]->adams_step(param.data(), kNan, 0), SCAPE_ERR_ARGUMENT, "lr");
  expect_error(buffers[0]->adams_step(param.data(), -0.1, 0), SCAPE_ERR_ARGUMENT, "lr is -0.1");
  expect_error(buffers[0]->adams_step(param.data(), 0.1, kNan), SCAPE_ERR_ARGUMENT, "weight_decay");
  expect_error(buffers[0]->adams_step(param.data(), 0.1, 10), SCAPE_ERR_ARGUMENT, "weight_decay");
  expect_error(buffers[0]->adams_step(param.data(), 2, 0.5), SCAPE_ERR_ARGUMENT, "weight_decay");
  EXPECT_TRUE(buffers[0]->adams_step(param.data(), 0.1, 0.01).ok());
  expect_error(buffers[0]->adams_step(param.data(), 0.1, 0), SCAPE_ERR_USAGE, "all-reduce");
}

TEST(Refusals, HoldAnInPlaceResidualToItsBuffer) {
  const auto ranks = make_ranks(2);
  BufferConfig config = at_once(0.9, SCAPE_ROLE_FUSED);
  config.residual = SCAPE_RESIDUAL_IN_PLACE;
  const auto buffers = make_buffers(ranks, config, 100);
  std::vector<std::vector<float>> data(2, std::vector<float>(100, 1)), others = data;
  std::vector<float> param(100);
  expect_error(buffers[0]->begin_all_reduce(data[0].data(), others[0].data(), {}), SCAPE_ERR_USAGE,
               "in place");
  ASSERT_TRUE(call_all(buffers, &data).ok());
  for (const auto& buffer : buffers) ASSERT_TRUE(buffer->adams_step(param.data(), 0.1, 0).ok());
  expect_error(buffers[0]->begin_all_reduce(others[0].data(), others[0].data(), {}),
               SCAPE_ERR_USAGE, "replace");
  expect_error(buffers[0]->clear_masked(others[0].data()), SCAPE_ERR_USAGE, "in place at");
}

// ---- agreement ----

// Two calls of each rank in a thread of its own; by rank, the error that it met.
std::vector<Status> two_calls(int ranks, const std::function<BufferConfig(int)>& config_of) {
  std::vector<Status> errors(static_cast<size_t>(ranks));
  run_local(ranks, [&](std::shared_ptr<Communicator> communicator) {
    const Rank rank(communicator);
    const int r = communicator->rank();
    const auto buffer = rank.make(config_of(r), 1000);
    std::vector<float> values(1000, 1);
    Status& status = errors[static_cast<size_t>(r)];
    for (int call = 0; call < 2 && status.ok(); ++call) {
      status = buffer->begin_all_reduce(values.data(), values.data(), {ReduceOp::kAvg});
      while (status.ok() && !buffer->poll()) std::this_thread::yield();
      if (status.ok()) status = buffer->status();
    }
    if (!status.ok()) {
      EXPECT_EQ(buffer->begin_all_reduce(values.data(), values.data(), {}).message(),
                status.message())
          << "later calls fail at once";
    }
  });
  return errors;
}

TEST(Agreement, FailsOnEveryRankInTheSameWords) {
  const auto errors =
      two_calls(3, [](int rank) { return at_once(rank == 2 ? 0.9 : 0.8, SCAPE_ROLE_GRADIENT); });
  for (const Status& status : errors) {
    expect_error(status, SCAPE_ERR_MISMATCH, "sparsity");
    expect_error(status, SCAPE_ERR_MISMATCH, "rank 2 has 0.9");
    EXPECT_EQ(status.message(), errors[0].message());
  }
}

TEST(Agreement, SeesSparsityZeroOnOneRankAtTheFirstCall) {
  const auto errors =
      two_calls(2, [](int rank) { return at_once(rank == 1 ? 0 : 0.9, SCAPE_ROLE_GRADIENT); });
  for (const Status& status : errors)
    EXPECT_EQ(status.code(), SCAPE_ERR_MISMATCH) << status.message();
}

TEST(Agreement, SeesBuffersCalledInAnotherOrder) {
  const auto errors = two_calls(3, [](int rank) {
    BufferConfig config = at_once(0.9, SCAPE_ROLE_GRADIENT);
    config.name = format("buffer.%d", rank / 2);
    return config;
  });
  for (const Status& status : errors)
    EXPECT_EQ(status.code(), SCAPE_ERR_MISMATCH) << status.message();
}

TEST(Agreement, LetsAllRanksGoOnWhenTheyAgree) {
  for (const Status& status : two_calls(4, [](int) { return at_once(0.9, SCAPE_ROLE_GRADIENT); })) {
    EXPECT_TRUE(status.ok()) << status.message();
  }
}

// Rank 0 alone loads what it saved; the others begin anew.
std::vector<Status> after_a_lone_load(uint64_t dense_steps) {
  std::vector<Status> errors(2);
  run_local(2, [&](std::shared_ptr<Communicator> communicator) {
    const Rank rank(communicator);
    const auto r = static_cast<size_t>(communicator->rank());
    BufferConfig config = at_once(0.9, SCAPE_ROLE_GRADIENT);
    config.dense_steps = dense_steps;
    auto buffer = rank.make(config, 1000);
    std::vector<float> values(1000, 1);
    const auto call = [&] {
      Status status = buffer->begin_all_reduce(values.data(), values.data(), {ReduceOp::kAvg});
      while (status.ok() && !buffer->poll()) std::this_thread::yield();
      return status.ok() ? buffer->status() : status;
    };
    for (int t = 0; t < 3; ++t) EXPECT_TRUE(call().ok());
    std::vector<std::byte> saved;
    EXPECT_TRUE(buffer->save(&saved).ok());
    buffer = rank.make(config, 1000);
    if (r == 0) {
      EXPECT_TRUE(buffer->load(saved.data(), saved.size()).ok());
    }
    for (int t = 0; t < 2 && errors[r].ok(); ++t) errors[r] = call();
  });
  return errors;
}

TEST(Agreement, SeesThatOneRankAloneWasLoaded) {
  const auto masked = after_a_lone_load(1);
  expect_error(masked[0], SCAPE_ERR_MISMATCH, "was loaded, and goes on here at step 3");
  expect_error(masked[1], SCAPE_ERR_MISMATCH, "is new, and begins here at step 0");
  for (const Status& status : after_a_lone_load(10)) {
    expect_error(status, SCAPE_ERR_MISMATCH, "step: rank 0 has 3, rank 1 has 0");
  }
}

// ---- several at once ----

TEST(Concurrency, OneThreadMayPollSeveralRanksInTurn) {
  const auto ranks = make_ranks(3);
  for (const scape_role role : {SCAPE_ROLE_FUSED, SCAPE_ROLE_GRADIENT}) {
    const auto buffers = make_buffers(ranks, at_once(0.9, role), 500);
    std::vector<std::vector<float>> params(3, std::vector<float>(500));
    for (int t = 0; t < 20; ++t) {
      std::vector<std::vector<float>> data(3);
      for (size_t r = 0; r < 3; ++r) {
        for (size_t j = 0; j < 500; ++j)
          data[r].push_back(static_cast<float>((j * 7 + r + t) % 13));
      }
      ASSERT_TRUE(call_all(buffers, &data).ok());
      if (role == SCAPE_ROLE_GRADIENT) {
        EXPECT_EQ(data[0], data[1]);
        EXPECT_EQ(data[0], data[2]);
        continue;
      }
      for (size_t r = 0; r < 3; ++r)
        ASSERT_TRUE(buffers[r]->adams_step(params[r].data(), 1e-3, 0.1).ok());
    }
    EXPECT_EQ(params[0], params[1]);
    EXPECT_EQ(params[0], params[2]);
  }
}

TEST(Concurrency, SeveralBuffersInFlightAreStartedInOneOrder) {
  // Calls that begin together and are polled in another order on each rank.
  run_local(3, [](std::shared_ptr<Communicator> communicator) {
    const Rank rank(communicator);
    std::vector<std::unique_ptr<MaskedBuffer>> buffers;
    std::vector<std::vector<float>> data;
    for (size_t b = 0; b < 6; ++b) {
      BufferConfig config =
          at_once(0.9, b % 2 == 0 ? SCAPE_ROLE_GRADIENT : SCAPE_ROLE_FIRST_MOMENT);
      config.name = format("buffer.%zu", b);
      buffers.push_back(rank.make(config, 100 + 300 * b));
      data.emplace_back(100 + 300 * b, 1.0f);
    }
    for (int t = 0; t < 30; ++t) {
      for (size_t b = 0; b < buffers.size(); ++b) {
        EXPECT_TRUE(
            buffers[b]->begin_all_reduce(data[b].data(), data[b].data(), {ReduceOp::kAvg}).ok());
      }
      for (bool over = false; !over;) {
        over = true;
        for (size_t i = 0; i < buffers.size(); ++i) {
          const size_t b = communicator->rank() == 0 ? i : buffers.size() - 1 - i;
          over = buffers[b]->poll() && over;
          EXPECT_TRUE(!over || buffers[b]->launched());
        }
        std::this_thread::yield();
      }
      for (const auto& buffer : buffers)
        EXPECT_TRUE(buffer->status().ok()) << buffer->status().message();
    }
  });
}

TEST(Concurrency, StatisticsMayBeReadAtAnyTime) {
  run_local(2, [](std::shared_ptr<Communicator> communicator) {
    const Rank rank(communicator);
    const auto buffer = rank.make(at_once(0.9, SCAPE_ROLE_GRADIENT), 1000);
    std::atomic<bool> over{false};
    std::thread reader([&] {
      uint64_t step = 0;
      while (!over) {
        const scape_stats stats = buffer->stats();
        EXPECT_GE(stats.step, step);
        step = stats.step;
        std::this_thread::yield();
      }
    });
    std::vector<float> values(1000, 1);
    for (int t = 0; t < 20; ++t) {
      EXPECT_TRUE(buffer->begin_all_reduce(values.data(), values.data(), {ReduceOp::kAvg}).ok());
      while (!buffer->poll()) std::this_thread::yield();
    }
    over = true;
    reader.join();
    const scape_stats stats = buffer->stats();
    EXPECT_EQ(stats.size, sizeof(scape_stats));
    EXPECT_EQ(stats.step, 20u);
    EXPECT_EQ(stats.intercepted_calls, 20u);
    EXPECT_EQ(stats.dense_calls, 1u);
    EXPECT_EQ(stats.sparse_calls, 19u);
    EXPECT_EQ(stats.refreshes, 20u);
    EXPECT_EQ(stats.mask_elements, masked_in(buffer.get()));
    EXPECT_EQ(stats.buffer_elements, 1000u);
    EXPECT_EQ(stats.payload_bytes, 4000 + 19 * 4 * (stats.mask_elements + 1));
    EXPECT_GT(stats.mask_bytes, 0u);
  });
}

size_t threads_here() {
  size_t count = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator("/proc/self/task"))
    ++count;
  return count;
}

TEST(Concurrency, NoThreadIsStartedWhereNothingIsMasked) {
  const size_t before = threads_here();
  for (const int size : {1, 2}) {
    const auto ranks = make_ranks(size);
    const auto buffers =
        make_buffers(ranks, at_once(size == 1 ? 0.9 : 0, SCAPE_ROLE_GRADIENT), 100);
    std::vector<std::vector<float>> data(static_cast<size_t>(size), std::vector<float>(100, 1));
    for (int t = 0; t < 3; ++t) ASSERT_TRUE(call_all(buffers, &data).ok());
    EXPECT_EQ(threads_here(), before);
  }
  const auto ranks = make_ranks(2);
  const auto buffers = make_buffers(ranks, at_once(0.9, SCAPE_ROLE_GRADIENT), 100);
  std::vector<std::vector<float>> data(2, std::vector<float>(100, 1));
  ASSERT_TRUE(call_all(buffers, &data).ok());
  EXPECT_EQ(threads_here(), before + 2) << "one a communicator otherwise";
}

// ---- failure and end ----

TEST(End, NeverWaitsForPeers) {
  const auto began = std::chrono::steady_clock::now();
  {
    auto ranks = make_ranks(2);
    auto buffers = make_buffers(ranks, at_once(0.9, SCAPE_ROLE_FUSED), 1000);
    std::vector<std::vector<float>> data(2, std::vector<float>(1000, 1));
    std::vector<float> param(1000);
    ASSERT_TRUE(call_all(buffers, &data).ok());
    // Rank 0's refresh is under way; rank 1 never takes part.
    ASSERT_TRUE(buffers[0]->adams_step(param.data(), 0.1, 0).ok());
  }
  EXPECT_LT(std::chrono::steady_clock::now() - began, std::chrono::seconds(5));
}

TEST(End, AnAbortReachesACallThatWaitsForItsMask) {
  const auto ranks = make_ranks(2);
  const auto buffers = make_buffers(ranks, at_once(0.9, SCAPE_ROLE_FUSED), 1000);
  std::vector<std::vector<float>> data(2, std::vector<float>(1000, 1));
  std::vector<float> param(1000);
  ASSERT_TRUE(call_all(buffers, &data).ok());
  ASSERT_TRUE(buffers[0]->adams_step(param.data(), 0.1, 0).ok());
  ASSERT_TRUE(buffers[0]->begin_all_reduce(data[0].data(), data[0].data(), {ReduceOp::kAvg}).ok());
  EXPECT_FALSE(buffers[0]->poll());
  ranks[1].communicator->abort(error(SCAPE_ERR_REMOTE, "rank 1 gave up"));
  EXPECT_TRUE(buffers[0]->poll());
  expect_error(buffers[0]->status(), SCAPE_ERR_REMOTE, "rank 1 gave up");
  expect_error(buffers[0]->begin_all_reduce(data[0].data(), data[0].data(), {}), SCAPE_ERR_REMOTE,
               "gave up");
}

// It reads `last` of the buffer that is gone: a sanitizer would see it.
TEST(End, ARefreshOutlivesItsBuffer) {
  const auto ranks = make_ranks(2);
  auto buffers = make_buffers(ranks, at_once(0.9, SCAPE_ROLE_FUSED), 100000);
  std::vector<std::vector<float>> data(2, std::vector<float>(100000, 1));
  std::vector<float> param(100000);
  ASSERT_TRUE(call_all(buffers, &data).ok());
  ASSERT_TRUE(buffers[0]->adams_step(param.data(), 0.1, 0).ok());
  buffers[0].reset();
  ASSERT_TRUE(buffers[1]->adams_step(param.data(), 0.1, 0).ok());
  std::vector<std::byte> saved;
  EXPECT_TRUE(buffers[1]->save(&saved).ok()) << "its mask came from both ranks";
}

TEST(End, ADroppedCallDoesNotKeepThoseBehindIt) {
  const auto ranks = make_ranks(2);
  const auto first = make_buffers(ranks, at_once(0.9, SCAPE_ROLE_FUSED), 1000);
  std::vector<std::vector<float>> data(2, std::vector<float>(1000, 1));
  std::vector<float> param(1000);
  ASSERT_TRUE(call_all(first, &data).ok());
  // Rank 0's next call waits for a mask that rank 1 never helps to make; two more stand behind it.
  ASSERT_TRUE(first[0]->adams_step(param.data(), 0.1, 0).ok());
  ASSERT_TRUE(first[0]->begin_all_reduce(data[0].data(), data[0].data(), {ReduceOp::kAvg}).ok());
  auto second = ranks[0].make(at_once(0.9, SCAPE_ROLE_GRADIENT), 100);
  const auto third = ranks[0].make(at_once(0.9, SCAPE_ROLE_GRADIENT), 100);
  std::vector<float> values(100, 1);
  ASSERT_TRUE(second->begin_all_reduce(values.data(), values.data(), {ReduceOp::kAvg}).ok());
  ASSERT_TRUE(third->begin_all_reduce(values.data(), values.data(), {ReduceOp::kAvg}).ok());
  EXPECT_FALSE(third->poll());
  second.reset();
  EXPECT_TRUE(third->poll());
  expect_error(third->status(), SCAPE_ERR_USAGE, "dropped");
  EXPECT_TRUE(first[0]->poll());
  expect_error(first[0]->status(), SCAPE_ERR_USAGE, "dropped");
}

// A sanitizer's allocator ends the program where memory is refused.
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
TEST(End, ARankWithoutMemoryTellsTheOthers) {
  // In a process of its own, whose address space is all but used up.
  const pid_t child = ::fork();
  if (child == 0) {
    const auto ranks = make_ranks(2);
    const size_t count = size_t{1} << 28;
    const auto buffers = make_buffers(ranks, at_once(0.9, SCAPE_ROLE_GRADIENT), count);
    void* address = ::mmap(nullptr, count * sizeof(float), PROT_NONE,
                           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    size_t pages = 0;
    std::ifstream("/proc/self/statm") >> pages;
    const rlim_t limit = pages * static_cast<size_t>(::getpagesize()) + (size_t{256} << 20);
    const rlimit most{limit, limit};
    if (address == MAP_FAILED || ::setrlimit(RLIMIT_AS, &most) != 0) ::_exit(1);
    const bool began =
        buffers[0]->begin_all_reduce(address, address, {ReduceOp::kAvg}).ok() && buffers[0]->poll();
    const bool told = buffers[0]->status().code() == SCAPE_ERR_MEMORY &&
                      ranks[1].communicator->async_error().code() == SCAPE_ERR_MEMORY;
    ::_exit(began && told ? 7 : 1);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 7) << status;
}
#endif

TEST(End, AForkedChildIsRefusedAndEndsFreely) {
  auto ranks = make_ranks(2);
  auto buffers = make_buffers(ranks, at_once(0.9, SCAPE_ROLE_GRADIENT), 100);
  std::vector<std::vector<float>> data(2, std::vector<float>(100, 1));
  ASSERT_TRUE(call_all(buffers, &data).ok());
  const pid_t child = ::fork();
  if (child == 0) {
    const Status status = buffers[0]->begin_all_reduce(data[0].data(), data[0].data(), {});
    buffers.clear();
    ranks.clear();
    ::_exit(status.code() == SCAPE_ERR_USAGE ? 7 : 1);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 7) << status;
  for (int t = 0; t < 3; ++t) EXPECT_TRUE(call_all(buffers, &data).ok()) << "the parent goes on";
}

// ---- numbers ----

TEST(SingleRank, GetsItsOwnValuesTimesTheScale) {
  for (const size_t n : {1, 7, 8, 9, 63, 64, 65, 1000}) {
    for (const scape_role role :
         {SCAPE_ROLE_FIRST_MOMENT, SCAPE_ROLE_GRADIENT_HOOKED, SCAPE_ROLE_GRADIENT}) {
      const auto ranks = make_ranks(1);
      const auto buffer = ranks[0].make(at_once(0.9, role), n);
      for (int t = 0; t < 5; ++t) {
        for (const Reduction& reduction : {Reduction{ReduceOp::kSum}, Reduction{ReduceOp::kAvg},
                                           Reduction{.op = ReduceOp::kPremulSum, .factor = 2}}) {
          std::vector<float> send(n), recv(n);
          std::iota(send.begin(), send.end(), -3.0f);
          ASSERT_TRUE(buffer->begin_all_reduce(send.data(), recv.data(), reduction).ok());
          ASSERT_TRUE(buffer->poll());
          const float scale = reduction.op == ReduceOp::kPremulSum ? 2.0f : 1.0f;
          for (size_t j = 0; j < n; ++j) EXPECT_EQ(recv[j], scale * send[j]);
        }
      }
    }
  }
}

TEST(Numbers, NothingIsLostBetweenInputsOutputsAndResiduals) {
  // Integers, summed: all inputs so far are all outputs so far and what the ranks hold back.
  const auto ranks = make_ranks(3);
  const auto buffers = make_buffers(ranks, at_once(0.8, SCAPE_ROLE_GRADIENT), 200);
  std::vector<float> in(200), out(200);
  for (int t = 0; t < 30; ++t) {
    std::vector<std::vector<float>> data(3, std::vector<float>(200));
    for (size_t r = 0; r < 3; ++r) {
      for (size_t j = 0; j < 200; ++j) {
        data[r][j] = static_cast<float>((j * 31 + r * 17 + static_cast<size_t>(t) * 7) % 9) - 4;
        in[j] += data[r][j];
      }
    }
    ASSERT_TRUE(call_all(buffers, &data, {ReduceOp::kSum}).ok());
    for (size_t j = 0; j < 200; ++j) out[j] += data[0][j];
  }
  std::vector<float> held(200);
  for (const auto& buffer : buffers) {
    const std::vector<float> residual = residual_of(buffer.get());
    for (size_t j = 0; j < 200; ++j) held[j] += residual[j];
  }
  for (size_t j = 0; j < 200; ++j) EXPECT_EQ(in[j], out[j] + held[j]) << j;

  // A flush sends all of it, whatever is in the caller's buffer.
  std::vector<std::thread> threads;
  std::vector<std::vector<float>> flushed(3, std::vector<float>(200, 55));
  for (size_t r = 0; r < 3; ++r) {
    threads.emplace_back(
        [&, r] { EXPECT_TRUE(buffers[r]->flush(flushed[r].data(), nullptr, 0, 0).ok()); });
  }
  for (std::thread& thread : threads) thread.join();
  for (size_t j = 0; j < 200; ++j) EXPECT_EQ(in[j], out[j] + flushed[1][j]) << j;
  for (const auto& buffer : buffers) EXPECT_EQ(buffer->residual_l1(), 0);
}

TEST(Numbers, ScalesExactlyOnce) {
  // Rank r sends 3 (r + 1) once, then zeros until all has gone out.
  for (const Reduction& reduction :
       {Reduction{ReduceOp::kAvg}, Reduction{.op = ReduceOp::kPremulSum, .factor = 0.5}}) {
    const auto ranks = make_ranks(3);
    const auto buffers = make_buffers(ranks, at_once(0.8, SCAPE_ROLE_GRADIENT), 60);
    std::vector<float> sum(60);
    for (int t = 0; t < 40; ++t) {
      std::vector<std::vector<float>> data(3, std::vector<float>(60));
      for (size_t r = 0; r < 3; ++r) {
        if (t == 1) std::fill(data[r].begin(), data[r].end(), 3.0f * static_cast<float>(r + 1));
      }
      ASSERT_TRUE(call_all(buffers, &data, reduction).ok());
      for (size_t j = 0; j < 60; ++j) sum[j] += data[2][j];
    }
    for (const float value : sum) EXPECT_EQ(value, reduction.op == ReduceOp::kAvg ? 6 : 9);
  }
}

TEST(Numbers, WhatTheCallerDoesWithTheOutputHasNoEffect) {
  const auto ranks = make_ranks(2);
  const auto plain = make_buffers(ranks, at_once(0.8, SCAPE_ROLE_GRADIENT), 100);
  const auto scaled = make_buffers(make_ranks(2), at_once(0.8, SCAPE_ROLE_GRADIENT), 100);
  for (int t = 0; t < 10; ++t) {
    std::vector<std::vector<float>> a(2, std::vector<float>(100));
    for (size_t r = 0; r < 2; ++r) {
      for (size_t j = 0; j < 100; ++j)
        a[r][j] = static_cast<float>((j * 13 + r * 5 + static_cast<size_t>(t)) % 11);
    }
    std::vector<std::vector<float>> b = a;
    ASSERT_TRUE(call_all(plain, &a).ok());
    ASSERT_TRUE(call_all(scaled, &b).ok());
    EXPECT_EQ(a, b);
    for (auto& values : b) {
      for (float& value : values) value *= 0.01f;
    }
  }
}

TEST(Numbers, HalfPrecisionResidualsAccumulateInFp32) {
  // One element is always 1e-4 and never among the largest; 5000 of them must not get stuck at
  // 0.25.
  const auto ranks = make_ranks(2);
  BufferConfig config = at_once(0.99, SCAPE_ROLE_GRADIENT);
  config.dtype = SCAPE_FLOAT16;
  config.rule = SCAPE_RULE_PLAIN;
  const size_t n = 64;
  const auto buffers = make_buffers(ranks, config, n);
  std::vector<uint16_t> values(n);
  const uint16_t small = 0x068e, large = 0x4900;  // 1e-4 and 10
  for (int t = 0; t < 5001; ++t) {
    std::vector<std::vector<uint16_t>> data(2, std::vector<uint16_t>(n, large));
    for (auto& each : data) each[5] = small;
    for (size_t r = 0; r < 2; ++r) {
      ASSERT_TRUE(
          buffers[r]->begin_all_reduce(data[r].data(), data[r].data(), {ReduceOp::kAvg}).ok());
    }
    ASSERT_TRUE(poll_all(buffers));
  }
  EXPECT_NEAR(residual_of(buffers[0].get())[5], 0.5, 0.005);
}

TEST(Numbers, ANonFiniteValueIsHeardByAllWithinPStepsAndNeverReachesTheState) {
  for (const float bad : {kNan, -kNan, kInfinity, -kInfinity}) {
    const auto ranks = make_ranks(3);
    const auto buffers = make_buffers(ranks, at_once(0.95, SCAPE_ROLE_FUSED), 600);
    std::vector<std::vector<float>> params(3, std::vector<float>(600, 1));
    int heard = -1;
    for (int t = 0; t < 12; ++t) {
      std::vector<std::vector<float>> data(3, std::vector<float>(600));
      for (size_t r = 0; r < 3; ++r) {
        for (size_t j = 0; j < 600; ++j)
          data[r][j] = static_cast<float>((j * 7 + r * 3 + static_cast<size_t>(t)) % 17);
      }
      if (t == 5) data[1][77] = data[1][300] = data[1][555] = bad;
      ASSERT_TRUE(call_all(buffers, &data).ok());
      for (size_t r = 0; r < 3; ++r)
        ASSERT_TRUE(buffers[r]->adams_step(params[r].data(), 1e-2, 0.1).ok());
      const uint64_t skips = buffers[0]->stats().skipped_steps;
      if (heard < 0 && skips > 0) heard = t;
      for (const auto& buffer : buffers)
        EXPECT_EQ(buffer->stats().skipped_steps, skips) << "no rank skips alone";
    }
    EXPECT_GE(heard, 5);
    EXPECT_LE(heard, 8);
    EXPECT_LE(buffers[1]->stats().nonfinite_values, 3u);
    EXPECT_EQ(buffers[0]->stats().nonfinite_values, 0u);
    for (size_t r = 0; r < 3; ++r) {
      EXPECT_EQ(params[r], params[0]);
      std::vector<float> moment(600);
      ASSERT_TRUE(buffers[r]->read_moment(moment.data(), 600).ok());
      for (size_t j = 0; j < 600; ++j) {
        ASSERT_TRUE(std::isfinite(params[r][j]) && std::isfinite(moment[j]));
        ASSERT_TRUE(std::isfinite(residual_of(buffers[r].get())[j]));
      }
    }
  }
}

TEST(Numbers, TiesGoToTheLowerIndexAndZerosAreChosenLikeAnything) {
  for (const float value : {3.0f, 0.0f}) {
    const auto ranks = make_ranks(2);
    const auto buffers = make_buffers(ranks, at_once(0.75, SCAPE_ROLE_GRADIENT), 128);
    std::vector<std::vector<float>> data(2, std::vector<float>(128, value));
    for (int t = 0; t < 2; ++t) {
      data.assign(2, std::vector<float>(128, value));
      ASSERT_TRUE(call_all(buffers, &data).ok());
    }
    std::vector<uint64_t> mask(2);
    ASSERT_TRUE(buffers[0]->read_mask(mask.data(), 2).ok());
    EXPECT_EQ(mask[0], 0xffffu);
    EXPECT_EQ(mask[1], 0xffffu);
  }
}

TEST(Numbers, AnEmptyBufferGoesThrough) {
  const auto ranks = make_ranks(3);
  const auto buffers = make_buffers(ranks, at_once(0.9, SCAPE_ROLE_GRADIENT), 0);
  for (int t = 0; t < 3; ++t) {
    for (const auto& buffer : buffers)
      ASSERT_TRUE(buffer->begin_all_reduce(nullptr, nullptr, {}).ok());
    ASSERT_TRUE(poll_all(buffers));
    for (const auto& buffer : buffers)
      EXPECT_TRUE(buffer->status().ok()) << buffer->status().message();
  }
}

TEST(HookedRole, PostStepScalesTheChangeOfMaskedParametersByTheirAgeAndHoldsTheOthers) {
  const size_t n = 333;
  const auto ranks = make_ranks(2);
  const auto buffers = make_buffers(ranks, at_once(0.9, SCAPE_ROLE_GRADIENT_HOOKED), n);
  for (int t = 0; t < 15; ++t) {
    std::vector<std::vector<float>> data(2, std::vector<float>(n));
    for (size_t r = 0; r < 2; ++r) {
      for (size_t j = 0; j < n; ++j)
        data[r][j] = static_cast<float>((j * 13 + r * 5 + static_cast<size_t>(t)) % 11);
    }
    ASSERT_TRUE(call_all(buffers, &data).ok());
  }
  std::vector<uint64_t> mask(kernels::mask_words(n));
  std::vector<uint16_t> ages(n);
  ASSERT_TRUE(buffers[0]->read_mask(mask.data(), mask.size()).ok());
  ASSERT_TRUE(buffers[0]->read_ages(ages.data(), n).ok());
  std::vector<float> before(n), after(n), whole(n);
  for (size_t j = 0; j < n; ++j) {
    before[j] = 1 + static_cast<float>(j) / 100;
    after[j] = before[j] - 0.25f;
  }
  whole = after;
  ASSERT_TRUE(buffers[0]->post_step(0, n, before.data(), whole.data(), 0.5, 0.5).ok());
  size_t scaled = 0;
  for (size_t j = 0; j < n; ++j) {
    const bool masked = (mask[j / 64] >> (j % 64)) & 1;
    const float decayed = before[j] * 0.75f;
    const float scaled_step = decayed + static_cast<float>(ages[j]) * (after[j] - decayed);
    const float expected = !masked ? decayed : ages[j] == 1 ? after[j] : scaled_step;
    EXPECT_EQ(whole[j], expected) << j;
    scaled += masked && ages[j] > 1;
  }
  EXPECT_GT(scaled, 0u);

  // In parts that begin anywhere it is the same.
  std::vector<float> parts = after;
  for (size_t begin = 0; begin < n;) {
    const size_t length = std::min(n - begin, 1 + begin % 97);
    ASSERT_TRUE(buffers[0]->post_step(begin, length, &before[begin], &parts[begin], 0.5, 0.5).ok());
    begin += length;
  }
  EXPECT_EQ(parts, whole);
  expect_error(buffers[0]->post_step(0, 1, before.data(), parts.data(), -0.5, 0),
               SCAPE_ERR_ARGUMENT, "lr is -0.5");
  expect_error(buffers[0]->post_step(300, 34, before.data(), parts.data(), 0.5, 0),
               SCAPE_ERR_ARGUMENT, "333");
}

TEST(Ages, NeverWrap) {
  // An element whose score is always 0, in a partition with enough others, waits for ever.
  const auto ranks = make_ranks(2);
  const auto buffers = make_buffers(ranks, at_once(0.9, SCAPE_ROLE_GRADIENT), 64);
  const int steps = 70000;
  std::vector<std::vector<float>> data(2, std::vector<float>(64));
  for (int t = 0; t < steps; ++t) {
    for (auto& values : data) {
      for (size_t j = 0; j < 64; ++j) values[j] = j < 16 ? 1.0f : 0.0f;
    }
    ASSERT_TRUE(call_all(buffers, &data).ok());
  }
  std::vector<uint16_t> ages(64);
  ASSERT_TRUE(buffers[0]->read_ages(ages.data(), 64).ok());
  EXPECT_GE(ages[63], 1u << 15);
  EXPECT_LE(ages[63], (1u << 15) + 64);
}

}  // namespace
}  // namespace scape::plugin::test
