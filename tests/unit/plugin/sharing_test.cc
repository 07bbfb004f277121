// Memory that ranks of one host share: the memory itself, and payloads in it.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "plugin/transport/shared_memory.h"
#include "tests/unit/plugin/testing.h"

namespace scape::plugin::test {
namespace {

using scape::test::all_well;
using scape::test::run_rank_threads;
using scape::test::run_ranks;
using scape::test::text_of;

// ---- the memory ----

TEST(SharedMemory, IsOneForMakerAndOpener) {
  std::unique_ptr<SharedMemory> made, opened;
  ASSERT_TRUE(SharedMemory::create(100000, &made).ok());
  ASSERT_TRUE(made->reserve(100000).ok());
  ASSERT_TRUE(SharedMemory::open(made->ticket(), 100000, &opened).ok());
  EXPECT_NE(made->data(), opened->data());
  EXPECT_EQ(reinterpret_cast<uintptr_t>(opened->data()) % 64, 0u);
  made->data()[99999] = std::byte{7};
  EXPECT_EQ(opened->data()[99999], std::byte{7});
  EXPECT_EQ(opened->data()[0], std::byte{0});
  made->retire();
  std::unique_ptr<SharedMemory> late;
  EXPECT_FALSE(SharedMemory::open(made->ticket(), 100000, &late).ok());
  made.reset();
  EXPECT_EQ(opened->data()[99999], std::byte{7}) << "as long as anybody has it";
}

TEST(SharedMemory, IsNotSomethingElse) {
  std::unique_ptr<SharedMemory> made, other, opened;
  ASSERT_TRUE(SharedMemory::create(100000, &made).ok());
  ASSERT_TRUE(SharedMemory::create(100000, &other).ok());
  MemoryTicket ticket = made->ticket();
  ticket.descriptor = other->ticket().descriptor;
  EXPECT_EQ(SharedMemory::open(ticket, 100000, &opened).code(), SCAPE_ERR_SYSTEM);
  EXPECT_EQ(SharedMemory::open(made->ticket(), 200000, &opened).code(), SCAPE_ERR_SYSTEM)
      << "shorter than said";
  ticket = made->ticket();
  ticket.process = 0;
  EXPECT_EQ(SharedMemory::open(ticket, 100000, &opened).code(), SCAPE_ERR_SYSTEM);
  int pipe[2];
  ASSERT_EQ(::pipe(pipe), 0);
  ticket = made->ticket();
  ticket.descriptor = pipe[0];
  EXPECT_EQ(SharedMemory::open(ticket, 100000, &opened).code(), SCAPE_ERR_SYSTEM);
  ::close(pipe[0]);
  ::close(pipe[1]);
  EXPECT_EQ(opened, nullptr);
}

TEST(SharedMemory, ThatCannotBeHadIsNamedInBytes) {
  std::unique_ptr<SharedMemory> made;
  const size_t bytes = size_t{1} << 60;
  ASSERT_TRUE(SharedMemory::create(4096, &made).ok());
  const Status status = made->reserve(bytes);
  EXPECT_EQ(status.code(), SCAPE_ERR_MEMORY);
  EXPECT_TRUE(contains(status.message(), std::to_string(bytes))) << status.message();
  EXPECT_TRUE(contains(status.message(), "SCAPE_SHARED_MEMORY=0")) << status.message();
}

TEST(SharedMemory, BeyondTheLimitOfFilesIsRefused) {
  const auto results = run_ranks(1, [](int, int) -> std::string {
    const rlimit small{1 << 20, 1 << 20};
    SCAPE_RANK_EXPECT(::setrlimit(RLIMIT_FSIZE, &small) == 0);
    std::unique_ptr<SharedMemory> made;
    SCAPE_RANK_OK(SharedMemory::create(1000, &made));
    const Status status = SharedMemory::create(2 << 20, &made);
    SCAPE_RANK_EXPECT(contains(status.message(), "ulimit -f"));
    return {};
  });
  EXPECT_TRUE(all_well(results)) << text_of(results);
}

// ---- payloads ----

std::string share(Communicator& c, size_t bytes, std::shared_ptr<SharedPayload>* payload) {
  std::shared_ptr<SharingWork> work;
  SCAPE_RANK_OK(c.share_payload(bytes, &work));
  SCAPE_RANK_OK(wait(c, *work));
  *payload = work->payload();
  return {};
}

// `calls` all-reduces of integers, whose sums are exact, each read by all at once.
std::string reduce_in(Communicator& c, SharedPayload& payload, int calls) {
  const auto ranks = static_cast<int64_t>(c.size());
  const size_t most = payload.capacity() / sizeof(int64_t);
  for (int call = 0; call < calls; ++call) {
    const size_t count = call % 3 == 0 ? most : call % 3 == 1 ? most / 2 : 1;
    auto* const operand = static_cast<int64_t*>(payload.operand());
    for (size_t i = 0; i < count; ++i)
      operand[i] = static_cast<int64_t>(i) + call + 1000 * c.rank();
    WorkPtr work;
    SCAPE_RANK_OK(
        finish(c, c.all_reduce(payload, count, DataType::kInt64, {}, {true, "x"}, &work), work));
    const auto* const result = static_cast<const int64_t*>(payload.result());
    for (size_t i = 0; i < count; ++i) {
      const int64_t expected =
          (static_cast<int64_t>(i) + call) * ranks + 1000 * (ranks * (ranks - 1) / 2);
      if (result[i] != expected)
        return "call " + std::to_string(call) + ", element " + std::to_string(i);
    }
  }
  return {};
}

// Ranks on hosts of these names; `shares`: whether a payload must come out.
std::vector<scape::test::RankResult> on_hosts(const std::vector<const char*>& hosts, bool shares,
                                              bool as_threads = false) {
  const UniqueId id = new_id();
  const auto body = [&](int rank, int size) -> std::string {
    if (!as_threads) ::setenv("NCCL_HOSTID", hosts[static_cast<size_t>(rank)], 1);
    std::shared_ptr<Communicator> c;
    SCAPE_RANK_OK(create_communicator(id, rank, size, &c));
    std::shared_ptr<SharedPayload> first, second;
    for (auto* payload : {&first, &second}) {
      if (std::string text = share(*c, 70000 * sizeof(int64_t), payload); !text.empty())
        return text;
      SCAPE_RANK_EXPECT((*payload != nullptr) == shares);
    }
    for (int round = 0; shares && round < 3; ++round) {
      for (auto* payload : {&first, &second}) {
        if (std::string text = reduce_in(*c, **payload, 20); !text.empty()) return text;
      }
    }
    return sum_ones(*c);
  };
  const int ranks = static_cast<int>(hosts.size());
  return as_threads ? run_rank_threads(ranks, body) : run_ranks(ranks, body);
}

TEST(SharedPayloads, ReduceOnOneHost) {
  for (const int ranks : {2, 3, 5}) {
    const auto results = on_hosts(std::vector<const char*>(static_cast<size_t>(ranks), "a"), true);
    EXPECT_TRUE(all_well(results)) << text_of(results);
  }
}

TEST(SharedPayloads, ReduceBetweenThreads) {
  // In a child: the settings of this process must stay unread.
  const auto results = run_ranks(1, [](int, int) -> std::string {
    const auto threads = on_hosts({"", "", ""}, true, true);
    return all_well(threads) ? "" : text_of(threads);
  });
  EXPECT_TRUE(all_well(results)) << text_of(results);
}

TEST(SharedPayloads, ReduceOnHostsAndBetweenThem) {
  const std::vector<std::vector<const char*>> groups = {
      {"a", "a", "b", "b"}, {"a", "b", "a", "b"}, {"a", "b", "b"}, {"a", "a", "b", "b", "c"}};
  for (const auto& hosts : groups) {
    const auto results = on_hosts(hosts, true);
    EXPECT_TRUE(all_well(results)) << text_of(results);
  }
}

TEST(SharedPayloads, AreNotWhereNoHostHasTwo) {
  for (const auto& hosts :
       {std::vector<const char*>{"a"}, std::vector<const char*>{"a", "b", "c"}}) {
    const auto results = on_hosts(hosts, false);
    EXPECT_TRUE(all_well(results)) << text_of(results);
  }
}

TEST(SharedPayloads, AreNotWhereOneRankDoesNotWant) {
  const UniqueId id = new_id();
  const auto results = run_ranks(3, [&](int rank, int size) -> std::string {
    if (rank == 2) ::setenv("SCAPE_SHARED_MEMORY", "0", 1);
    const std::string log = ::testing::TempDir() + "/sharing" + std::to_string(::getpid());
    ::setenv("SCAPE_LOG_FILE", log.c_str(), 1);
    std::shared_ptr<Communicator> c;
    SCAPE_RANK_OK(create_communicator(id, rank, size, &c));
    std::shared_ptr<SharedPayload> payload;
    if (std::string text = share(*c, 1000, &payload); !text.empty()) return text;
    SCAPE_RANK_EXPECT(payload == nullptr);
    std::string line;
    std::getline(std::ifstream(log), line);
    std::filesystem::remove(log);
    SCAPE_RANK_EXPECT(contains(line, "rank 2 shares no memory") == (rank != 2));
    return sum_ones(*c);
  });
  EXPECT_TRUE(all_well(results)) << text_of(results);
}

TEST(SharedPayloads, RefuseWhatTheyCannotTake) {
  const UniqueId id = new_id();
  const auto results = run_ranks(2, [&](int rank, int size) -> std::string {
    std::shared_ptr<Communicator> c;
    SCAPE_RANK_OK(create_communicator(id, rank, size, &c));
    std::shared_ptr<SharedPayload> payload;
    if (std::string text = share(*c, 1000, &payload); !text.empty()) return text;
    SCAPE_RANK_EXPECT(payload != nullptr && payload->capacity() == 1000);
    WorkPtr work;
    Status status = c->all_reduce(*payload, 251, DataType::kFloat32, {}, {}, &work);
    SCAPE_RANK_EXPECT(status.code() == SCAPE_ERR_USAGE && contains(status.message(), "1000 bytes"));
    Reduction scaled;
    scaled.op = ReduceOp::kPremulSum;
    status = c->all_reduce(*payload, 10, DataType::kBfloat16, scaled, {}, &work);
    SCAPE_RANK_EXPECT(status.code() == SCAPE_ERR_USAGE && contains(status.message(), "bfloat16"));
    return sum_ones(*c);
  });
  EXPECT_TRUE(all_well(results)) << text_of(results);
}

// ---- failures ----

TEST(SharedPayloads, MismatchWithADenseCallNamesBoth) {
  const UniqueId id = new_id();
  const auto results = run_ranks(3, [&](int rank, int size) -> std::string {
    std::shared_ptr<Communicator> c;
    SCAPE_RANK_OK(create_communicator(id, rank, size, &c));
    std::shared_ptr<SharedPayload> payload;
    if (std::string text = share(*c, 4000, &payload); !text.empty()) return text;
    std::vector<float> values(1000);
    WorkPtr work;
    const Status started =
        rank == 1
            ? c->all_reduce(values.data(), values.data(), 1000, DataType::kFloat32, {}, {}, &work)
            : c->all_reduce(*payload, 1000, DataType::kFloat32, {}, {}, &work);
    const Status status = finish(*c, started, work);
    SCAPE_RANK_EXPECT(status.code() == SCAPE_ERR_MISMATCH);
    SCAPE_RANK_EXPECT(contains(status.message(), "in shared memory") &&
                      contains(status.message(), "AllReduce(count"));
    return {};
  });
  EXPECT_TRUE(all_well(results)) << text_of(results);
}

TEST(SharedPayloads, DeathOfARankIsNoticedAndLeavesNothing) {
  const auto segments = [] {
    size_t count = 0;
    for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator("/dev/shm"))
      count += entry.path().filename().string().find("scape") != std::string::npos;
    return count;
  };
  const size_t before = segments();
  const UniqueId id = new_id();
  const auto results = run_ranks(3, [&](int rank, int size) -> std::string {
    std::shared_ptr<Communicator> c;
    SCAPE_RANK_OK(create_communicator(id, rank, size, &c));
    std::shared_ptr<SharedPayload> payload;
    if (std::string text = share(*c, 1 << 20, &payload); !text.empty()) return text;
    if (std::string text = reduce_in(*c, *payload, 4); !text.empty()) return text;
    if (rank == 0) ::kill(::getpid(), SIGKILL);
    const auto start = Clock::now();
    WorkPtr work;
    const Status status =
        finish(*c, c->all_reduce(*payload, 1000, DataType::kFloat32, {}, {}, &work), work);
    SCAPE_RANK_EXPECT(!status.ok() && contains(status.message(), "rank 0"));
    SCAPE_RANK_EXPECT(seconds_since(start) < 5);
    return {};
  });
  EXPECT_EQ(results[0].signal, SIGKILL);
  EXPECT_EQ(results[1].text + results[2].text, "");
  EXPECT_EQ(segments(), before);
}

}  // namespace
}  // namespace scape::plugin::test
