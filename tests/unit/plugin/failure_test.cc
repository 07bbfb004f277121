// Ranks that differ, die, fork, exit or never come, and strangers on the port.
#include <arpa/inet.h>
#include <dirent.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <thread>

#include "plugin/transport/bootstrap.h"
#include "plugin/transport/device_filter.h"
#include "plugin/transport/transport.h"
#include "tests/support/slowdown.h"
#include "tests/unit/plugin/testing.h"

namespace scape::plugin::test {
namespace {

using scape::test::all_well;
using scape::test::run_rank_threads;
using scape::test::run_ranks;
using scape::test::text_of;

size_t entries_in(const char* folder) {
  DIR* const directory = ::opendir(folder);
  size_t count = 0;
  while (::readdir(directory) != nullptr) ++count;
  ::closedir(directory);
  return count;
}

// ---- F16, F17: ranks that call different things ----

struct Mismatch {
  const char* name;
  int ranks;
  std::function<Status(Communicator&, float* buffer, WorkPtr*)> call;
  std::vector<std::string> named;  // in every rank's message
};

class Mismatches : public testing::TestWithParam<int> {};

const std::vector<Mismatch>& mismatches() {
  static const std::vector<Mismatch> cases = {
      {"counts",
       2,
       [](Communicator& c, float* buffer, WorkPtr* work) {
         return c.all_reduce(buffer, buffer, c.rank() == 0 ? 1000 : 998, DataType::kFloat32, {}, {},
                             work);
       },
       {"count 1000", "count 998", "rank 0", "rank 1"}},
      {"counts far apart",
       2,
       [](Communicator& c, float* buffer, WorkPtr* work) {
         return c.all_reduce(buffer, buffer, c.rank() == 0 ? 4 : 200000, DataType::kFloat32, {}, {},
                             work);
       },
       {"count 4", "count 200000"}},
      {"types of equal bytes",
       2,
       [](Communicator& c, float* buffer, WorkPtr* work) {
         return c.rank() == 0
                    ? c.all_reduce(buffer, buffer, 100, DataType::kFloat32, {}, {}, work)
                    : c.all_reduce(buffer, buffer, 200, DataType::kBfloat16, {}, {}, work);
       },
       {"float32", "bfloat16"}},
      {"ops",
       3,
       [](Communicator& c, float* buffer, WorkPtr* work) {
         Reduction reduction;
         reduction.op = c.rank() == 2 ? ReduceOp::kMax : ReduceOp::kSum;
         return c.all_reduce(buffer, buffer, 100, DataType::kFloat32, reduction, {}, work);
       },
       {"sum", "max", "rank 2"}},
      {"names",
       3,
       [](Communicator& c, float* buffer, WorkPtr* work) {
         return c.all_reduce(buffer, buffer, 100, DataType::kFloat32, {},
                             {true, c.rank() == 2 ? "B" : "A"}, work);
       },
       {"\"A", "\"B", "rank 2"}},
      {"registered or not",
       2,
       [](Communicator& c, float* buffer, WorkPtr* work) {
         return c.all_reduce(buffer, buffer, 100, DataType::kFloat32, {}, {c.rank() == 0, "grads"},
                             work);
       },
       {"registered as \"grads"}},
      {"roots",
       3,
       [](Communicator& c, float* buffer, WorkPtr* work) {
         return c.broadcast(buffer, buffer, 100, DataType::kFloat32, c.rank() == 1 ? 1 : 0, {},
                            work);
       },
       {"root 0", "root 1"}},
      {"collectives",
       4,
       [](Communicator& c, float* buffer, WorkPtr* work) {
         return c.rank() == 3 ? c.reduce(buffer, buffer, 100, DataType::kFloat32, {}, 0, {}, work)
                              : c.all_reduce(buffer, buffer, 100, DataType::kFloat32, {}, {}, work);
       },
       {"Reduce(", "AllReduce(", "rank 3"}},
      {"nothing against something",
       2,
       [](Communicator& c, float* buffer, WorkPtr* work) {
         return c.all_reduce(buffer, buffer, c.rank() == 0 ? 100 : 0, DataType::kFloat32, {}, {},
                             work);
       },
       {"count 100", "count 0"}},
  };
  return cases;
}

INSTANTIATE_TEST_SUITE_P(Cases, Mismatches, testing::Range(0, 9));

TEST_P(Mismatches, AreNamedOnEveryRankAndEndTheCommunicator) {
  const Mismatch& mismatch = mismatches()[static_cast<size_t>(GetParam())];
  const UniqueId id = new_id();
  const auto results = run_ranks(mismatch.ranks, [&](int rank, int size) -> std::string {
    std::shared_ptr<Communicator> communicator;
    SCAPE_RANK_OK(create_communicator(id, rank, size, &communicator));
    std::string problem = sum_ones(*communicator);
    if (!problem.empty()) return problem;
    constexpr size_t kLength = 200064;
    std::vector<float> buffer(kLength, 7);
    const auto start = Clock::now();
    WorkPtr work;
    Status status = finish(*communicator, mismatch.call(*communicator, buffer.data(), &work), work);
    // A call over nothing is over at once; its rank hears of the mismatch in the next one.
    if (status.ok())
      status = finish(*communicator, mismatch.call(*communicator, buffer.data(), &work), work);
    if (status.ok()) status = Status(SCAPE_ERR_INTERNAL, sum_ones(*communicator));
    SCAPE_RANK_EXPECT(status.code() == SCAPE_ERR_MISMATCH || contains(status.message(), "differs"));
    SCAPE_RANK_EXPECT(seconds_since(start) < 10);
    for (const std::string& name : mismatch.named) {
      if (!contains(status.message(), name)) return name + " is not in: " + status.message();
    }
    for (size_t i = kLength - 64; i < kLength; ++i) SCAPE_RANK_EXPECT(buffer[i] == 7);
    // Later calls fail fast.
    const auto again = Clock::now();
    SCAPE_RANK_EXPECT(!sum_ones(*communicator).empty());
    SCAPE_RANK_EXPECT(seconds_since(again) < 2);
    SCAPE_RANK_EXPECT(communicator->async_error().code() == SCAPE_ERR_MISMATCH);
    return "";
  });
  EXPECT_TRUE(all_well(results)) << mismatch.name << "\n" << text_of(results);
}

TEST(Mismatch, OfPointToPointCountsNamesBoth) {
  const UniqueId id = new_id();
  const auto results = run_ranks(2, [&](int rank, int size) -> std::string {
    std::shared_ptr<Communicator> communicator;
    SCAPE_RANK_OK(create_communicator(id, rank, size, &communicator));
    std::vector<float> buffer(200, 7);
    WorkPtr work;
    if (rank == 0) {
      SCAPE_RANK_OK(finish(*communicator,
                           communicator->send(buffer.data(), 100, DataType::kFloat32, 1, &work),
                           work));
      // The sender hears of it, too.
      const auto begun = Clock::now();
      while (communicator->async_error().ok() && seconds_since(begun) < 5 * scape::test::kSlowdown)
        ::usleep(1000);
      SCAPE_RANK_EXPECT(communicator->async_error().code() == SCAPE_ERR_MISMATCH);
      return "";
    }
    const Status status = finish(
        *communicator, communicator->recv(buffer.data(), 150, DataType::kFloat32, 0, &work), work);
    SCAPE_RANK_EXPECT(status.code() == SCAPE_ERR_MISMATCH);
    SCAPE_RANK_EXPECT(contains(status.message(), "600") && contains(status.message(), "400"));
    return "";
  });
  EXPECT_TRUE(all_well(results)) << text_of(results);
}

// ---- ranks that die ----

class Deaths : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, Deaths, testing::Values(2, 3, 7));

TEST_P(Deaths, OfAKilledRankIsNamedOnAllThatWait) {
  const UniqueId id = new_id();
  const auto results = run_ranks(GetParam(), [&](int rank, int size) -> std::string {
    std::shared_ptr<Communicator> communicator;
    SCAPE_RANK_OK(create_communicator(id, rank, size, &communicator));
    const int victim = size - 1;
    for (int i = 0; i < 20; ++i) {
      const std::string problem = sum_ones(*communicator, 100000);
      if (!problem.empty()) return problem;
    }
    if (rank == victim) ::raise(SIGKILL);
    const auto start = Clock::now();
    const std::string problem = sum_ones(*communicator, 5000000);
    SCAPE_RANK_EXPECT(seconds_since(start) < 10);
    const std::string name = "rank " + std::to_string(victim);
    if (!contains(problem, name)) return name + " is not in: " + problem;
    SCAPE_RANK_EXPECT(communicator->async_error().code() == SCAPE_ERR_REMOTE);
    return "";
  });
  for (size_t r = 0; r + 1 < results.size(); ++r) {
    EXPECT_TRUE(results[r].ended && results[r].text.empty()) << text_of(results);
  }
  EXPECT_EQ(results.back().signal, SIGKILL);
}

TEST(Death, IsSeenByTheAsynchronousQueryOfAnIdleRank) {
  const UniqueId id = new_id();
  const auto results = run_ranks(2, [&](int rank, int size) -> std::string {
    std::shared_ptr<Communicator> communicator;
    SCAPE_RANK_OK(create_communicator(id, rank, size, &communicator));
    if (rank == 1) ::raise(SIGKILL);
    const auto start = Clock::now();
    while (communicator->async_error().ok()) {
      SCAPE_RANK_EXPECT(seconds_since(start) < 10);
      ::usleep(10000);
    }
    SCAPE_RANK_EXPECT(contains(communicator->async_error().message(), "rank 1"));
    return "";
  });
  EXPECT_TRUE(results[0].ended && results[0].text.empty()) << text_of(results);
}

TEST(Death, DuringCreationIsNamed) {
  constexpr auto kUntilDeath = static_cast<useconds_t>(300000 * scape::test::kSlowdown);
  const UniqueId id = new_id();
  const auto results = run_ranks(3, [&](int rank, int size) -> std::string {
    // What a process pays once for its transports, before the clock starts.
    std::unique_ptr<Transport> warm;
    SCAPE_RANK_OK(make_transport({.wakeup = false, .ranks = size}, &warm));
    warm.reset();
    if (rank == 2) {
      // Comes to the meeting, and dies there.
      Invitation invitation;
      SCAPE_RANK_EXPECT(Invitation::decode(id.bytes, &invitation));
      std::thread([] {
        ::usleep(kUntilDeath);
        ::raise(SIGKILL);
      }).detach();
      std::shared_ptr<Communicator> communicator;
      SCAPE_RANK_OK(create_communicator(id, rank, size, &communicator));
      return "";
    }
    if (rank == 1) ::usleep(kUntilDeath + 700000);
    std::shared_ptr<Communicator> communicator;
    const Status status = create_communicator(id, rank, size, &communicator);
    SCAPE_RANK_EXPECT(!status.ok());
    if (!contains(status.message(), "rank 2")) return status.message();
    return "";
  });
  EXPECT_TRUE(results[0].ended && results[0].text.empty()) << text_of(results);
  EXPECT_TRUE(results[1].ended && results[1].text.empty()) << text_of(results);
}

// ---- F06, F07: fork and exit ----

TEST(Fork, ChildIsRefusedAtOnceAndHarmsNothing) {
  const UniqueId id = new_id();
  const auto results = run_ranks(2, [&](int rank, int size) -> std::string {
    std::shared_ptr<Communicator> communicator;
    SCAPE_RANK_OK(create_communicator(id, rank, size, &communicator));
    std::string problem = sum_ones(*communicator);
    if (!problem.empty()) return problem;
    std::vector<pid_t> children;
    if (rank == 0) {
      for (int kind = 0; kind < 3; ++kind) {
        const pid_t child = ::fork();
        if (child == 0) {
          if (kind == 0) {  // ends in order, destructors and all
            communicator.reset();
            std::_Exit(3);
          }
          if (kind == 1) ::raise(SIGKILL);
          const auto start = Clock::now();
          float value = 1;
          WorkPtr work;
          const Status status =
              communicator->all_reduce(&value, &value, 1, DataType::kFloat32, {}, {}, &work);
          const bool refused = status.code() == SCAPE_ERR_USAGE && !communicator->progress() &&
                               !communicator->async_error().ok() && seconds_since(start) < 5;
          std::_Exit(refused ? 4 : 5);
        }
        children.push_back(child);
      }
    }
    for (int i = 0; i < 5; ++i) {
      problem = sum_ones(*communicator, 100000);
      if (!problem.empty()) return problem;
    }
    for (size_t kind = 0; kind < children.size(); ++kind) {
      int status = 0;
      SCAPE_RANK_EXPECT(::waitpid(children[kind], &status, 0) == children[kind]);
      if (kind == 0) SCAPE_RANK_EXPECT(WIFEXITED(status) && WEXITSTATUS(status) == 3);
      if (kind == 1) SCAPE_RANK_EXPECT(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
      if (kind == 2) SCAPE_RANK_EXPECT(WIFEXITED(status) && WEXITSTATUS(status) == 4);
    }
    return sum_ones(*communicator);
  });
  EXPECT_TRUE(all_well(results)) << text_of(results);
}

TEST(Fork, OrphansDoNotHideTheirParentsDeath) {
  const UniqueId id = new_id();
  const auto results = run_ranks(2, [&](int rank, int size) -> std::string {
    std::shared_ptr<Communicator> communicator;
    SCAPE_RANK_OK(create_communicator(id, rank, size, &communicator));
    if (rank == 1) {
      if (::fork() == 0) {
        ::sleep(8);
        std::_Exit(0);
      }
      ::raise(SIGKILL);
    }
    const auto start = Clock::now();
    SCAPE_RANK_EXPECT(contains(sum_ones(*communicator), "rank 1"));
    SCAPE_RANK_EXPECT(seconds_since(start) < 7);  // the orphan is still there
    return "";
  });
  EXPECT_TRUE(results[0].ended && results[0].text.empty()) << text_of(results);
}

struct Holder {
  std::shared_ptr<Communicator> communicator;
};

TEST(Exit, WithEverythingOpenKeepsTheStatusAndWaitsForNobody) {
  const UniqueId id = new_id();
  // 0: exit() with the communicator open; 1: destroyed by a static destructor; 2: _exit; 3: exit()
  // from a second thread while the first is inside a collective.
  const auto results = run_ranks(
      4,
      [&](int rank, int size) -> std::string {
        auto* const open = new std::shared_ptr<Communicator>;
        SCAPE_RANK_OK(create_communicator(id, rank, size, open));
        const std::string problem = sum_ones(**open);
        if (!problem.empty()) return problem;
        if (rank == 0) std::exit(10);
        if (rank == 1) {
          static Holder holder;
          holder.communicator = std::move(*open);
          std::exit(11);
        }
        if (rank == 2) ::_exit(12);
        std::thread([open] { (void)sum_ones(**open); }).detach();
        ::usleep(100000);
        std::exit(13);
      },
      10);
  for (int r = 0; r < 4; ++r) {
    EXPECT_EQ(results[static_cast<size_t>(r)].exit_status, 10 + r) << text_of(results);
    EXPECT_EQ(results[static_cast<size_t>(r)].text, "");
  }
}

TEST(Exit, OfARankThatIsDoneDoesNotDisturbTheOthersLastCall) {
  const UniqueId id = new_id();
  const auto results = run_ranks(3, [&](int rank, int size) -> std::string {
    std::shared_ptr<Communicator> communicator;
    SCAPE_RANK_OK(create_communicator(id, rank, size, &communicator));
    // Rank 1 is late; rank 2's part is over long before.
    if (rank == 1) ::usleep(2500000);
    std::vector<int32_t> mine(1000, rank), all(3000);
    WorkPtr work;
    SCAPE_RANK_OK(finish(
        *communicator,
        communicator->gather(mine.data(), all.data(), 1000, DataType::kInt32, 0, {}, &work), work));
    if (rank == 0) SCAPE_RANK_EXPECT(all[0] == 0 && all[1500] == 1 && all[2999] == 2);
    return "";
  });
  EXPECT_TRUE(all_well(results)) << text_of(results);
}

// ---- the meeting ----

TEST(Bootstrap, StrangersAreDropped) {
  const UniqueId id = new_id();
  Invitation invitation;
  ASSERT_TRUE(Invitation::decode(id.bytes, &invitation));
  // Silent, rubbish, a wrong cookie, a huge length.
  std::vector<Socket> strangers;
  for (int kind = 0; kind < 40; ++kind) {
    Socket socket;
    ASSERT_TRUE(connect_to(invitation.root, seconds_from_now(2), &socket).ok());
    std::vector<uint32_t> rubbish(300, 0xdeadbeef + static_cast<uint32_t>(kind));
    if (kind % 4 == 1) {
      (void)send_all(socket, rubbish.data(), 1200, seconds_from_now(1));
    }
    if (kind % 4 == 2) {
      Socket wrong;
      ASSERT_TRUE(introduce(invitation.root, invitation.cookie + 1, {std::byte{1}},
                            seconds_from_now(2), &wrong)
                      .ok());
      strangers.push_back(std::move(wrong));
    }
    if (kind % 4 == 3) {
      // The right cookie, a body that says nothing sensible.
      Socket vague;
      ASSERT_TRUE(
          introduce(invitation.root, invitation.cookie, {std::byte{1}}, seconds_from_now(2), &vague)
              .ok());
      strangers.push_back(std::move(vague));
    }
    strangers.push_back(std::move(socket));
  }
  const auto start = Clock::now();
  const auto results = run_ranks(3, [&](int rank, int size) -> std::string {
    std::shared_ptr<Communicator> communicator;
    SCAPE_RANK_OK(create_communicator(id, rank, size, &communicator));
    return sum_ones(*communicator);
  });
  EXPECT_TRUE(all_well(results)) << text_of(results);
  EXPECT_LT(seconds_since(start), 5) << "the silent ones have 5 s to say hello in";
}

TEST(Bootstrap, TwiceTheSameRankAndOtherSizesAreToldToAll) {
  for (const bool twice : {true, false}) {
    const UniqueId id = new_id();
    const auto results = run_ranks(3, [&](int process, int) -> std::string {
      std::shared_ptr<Communicator> communicator;
      const int rank = twice && process == 2 ? 1 : process;
      const int size = !twice && process == 2 ? 4 : 3;
      const Status status = create_communicator(id, rank, size, &communicator);
      SCAPE_RANK_EXPECT(!status.ok());
      if (twice ? !contains(status.message(), "rank 1 came twice")
                : !(contains(status.message(), "gives 3 ranks") ||
                    contains(status.message(), "gives 3;"))) {
        return status.message();
      }
      if (!twice) SCAPE_RANK_EXPECT(contains(status.message(), "4"));
      return "";
    });
    EXPECT_TRUE(all_well(results)) << text_of(results);
  }
}

TEST(Bootstrap, AUsedIdIsRefused) {
  const UniqueId id = new_id();
  const auto results = run_ranks(2, [&](int rank, int size) -> std::string {
    std::shared_ptr<Communicator> communicator, again;
    SCAPE_RANK_OK(create_communicator(id, rank, size, &communicator));
    const auto start = Clock::now();
    const Status status = create_communicator(id, rank, size, &again);
    SCAPE_RANK_EXPECT(!status.ok() && contains(status.message(), "used before"));
    SCAPE_RANK_EXPECT(seconds_since(start) < 10);
    return sum_ones(*communicator);
  });
  EXPECT_TRUE(all_well(results)) << text_of(results);
}

TEST(Bootstrap, InterfacesAreChosenAsAsked) {
  const InterfaceFilter prefixes("eth,ib"), exact("=eth1,lo"), all_but("^docker,lo"), none("");
  EXPECT_TRUE(prefixes.admits("eth0") && prefixes.admits("ib1") && !prefixes.admits("docker0"));
  EXPECT_TRUE(exact.admits("eth1") && exact.admits("lo") && !exact.admits("eth10"));
  EXPECT_TRUE(all_but.admits("eth0") && !all_but.admits("docker0") && !all_but.admits("lo"));
  EXPECT_TRUE(none.admits("anything"));
  std::vector<Address> addresses;
  const Status status = choose_addresses("nonesuch", 0, &addresses);
  EXPECT_FALSE(status.ok());
  EXPECT_TRUE(contains(status.message(), "nonesuch") && contains(status.message(), "lo"))
      << status.message();
  ASSERT_TRUE(choose_addresses("=lo", 1, &addresses).ok());
  ASSERT_EQ(addresses.size(), 1u);
  EXPECT_EQ(addresses[0].text(), "127.0.0.1");
  ASSERT_TRUE(choose_addresses("", 0, &addresses).ok());
  EXPECT_FALSE(addresses.empty());
}

TEST(Bootstrap, DevicesAreAdmittedAsAsked) {
  const DeviceFilter none("", "", ""), own("", "eth0", "UCX_NET_DEVICES=\"ib0\"");
  for (const DeviceFilter* filter : {&none, &own}) {
    EXPECT_FALSE(filter->restricts());
    EXPECT_TRUE(filter->admits("ib0", true) && !filter->names("lo", true));
  }
  EXPECT_EQ(none.text(), "no filter");
  EXPECT_EQ(own.text(), "UCX_NET_DEVICES=\"ib0\"");
  // The bootstrap's list says nothing of RDMA devices.
  const DeviceFilter bootstrap("", "eth,lo", "");
  EXPECT_TRUE(bootstrap.admits("eth1", true) && bootstrap.admits("mlx5_0:1", false));
  EXPECT_TRUE(!bootstrap.admits("docker0", true) && bootstrap.names("lo", true));
  EXPECT_EQ(bootstrap.text(), "NCCL_SOCKET_IFNAME=\"eth,lo\"");
  // SCAPE_NET_IF speaks of all devices, and goes before the bootstrap's.
  const DeviceFilter exact("=mlx5_0,mlx5_1:2", "eth", "UCX_NET_DEVICES=\"mlx5_0:1\"");
  EXPECT_TRUE(exact.admits("mlx5_0:1", false) && exact.admits("mlx5_0:2", false));
  EXPECT_TRUE(exact.admits("mlx5_1:2", false) && !exact.admits("mlx5_1:1", false));
  EXPECT_TRUE(!exact.admits("mlx5_01:1", false) && !exact.admits("eth0", true));
  const DeviceFilter all_but("^=mlx5_0,docker0", "", "");
  EXPECT_TRUE(!all_but.admits("mlx5_0:1", false) && all_but.admits("mlx5_1:1", false));
  EXPECT_TRUE(all_but.admits("lo", true) && !all_but.names("lo", true));
  const Status status = exact.leaves_none("ucx", {"eth0", "lo"});
  EXPECT_EQ(status.code(), SCAPE_ERR_ARGUMENT);
  for (const char* said : {"SCAPE_NET_IF=\"=mlx5_0,mlx5_1:2\"", "mlx5_0:1", "eth0, lo"}) {
    EXPECT_TRUE(contains(status.message(), said)) << status.message();
  }
}

TEST(Bootstrap, ListensOnIPv6) {
  std::vector<Address> addresses;
  if (!choose_addresses("=lo", 2, &addresses).ok()) GTEST_SKIP() << "this host has no IPv6";
  Socket listener;
  Endpoint endpoint{addresses, 0};
  ASSERT_TRUE(listen_on(addresses, &listener, &endpoint.port).ok());
  Doorman doorman(listener, addresses, 42);
  Socket visitor;
  ASSERT_TRUE(introduce(endpoint, 42, {std::byte{7}}, seconds_from_now(2), &visitor).ok());
  std::vector<Guest> guests;
  doorman.wait(seconds_from_now(2), {}, &guests);
  ASSERT_EQ(guests.size(), 1u);
  EXPECT_EQ(guests[0].body, std::vector<std::byte>{std::byte{7}});
}

TEST(Bootstrap, ForeignIdsAreRefused) {
  UniqueId id;
  id.bytes.fill(std::byte{0x33});
  EXPECT_FALSE(is_host_unique_id(id));
  std::shared_ptr<Communicator> communicator;
  EXPECT_EQ(create_communicator(id, 0, 2, &communicator).code(), SCAPE_ERR_ARGUMENT);
  EXPECT_TRUE(is_host_unique_id(new_id()));
}

// ---- leaks ----

TEST(Leaks, FiftyRoundsKeepDescriptorsAndThreads) {
  const auto results = run_ranks(
      1,
      [](int, int) -> std::string {
        size_t descriptors = 0, threads = 0;
        for (int round = 0; round < 50; ++round) {
          UniqueId id;
          SCAPE_RANK_OK(make_unique_id(&id));
          const auto ranks = run_rank_threads(2, [&](int rank, int size) -> std::string {
            std::shared_ptr<Communicator> communicator;
            SCAPE_RANK_OK(create_communicator(id, rank, size, &communicator));
            std::shared_ptr<Communicator> side;
            WorkPtr work;
            SCAPE_RANK_OK(finish(*communicator, communicator->side_channel(&side, &work), work));
            return sum_ones(*communicator) + sum_ones(*side);
          });
          if (!all_well(ranks)) return text_of(ranks);
          if (round == 4) {
            descriptors = entries_in("/proc/self/fd");
            threads = entries_in("/proc/self/task");
          }
        }
        SCAPE_RANK_EXPECT(entries_in("/proc/self/fd") == descriptors);
        SCAPE_RANK_EXPECT(entries_in("/proc/self/task") == threads);
        return "";
      },
      60);
  EXPECT_TRUE(all_well(results)) << text_of(results);
}

TEST(SingleRank, HasNoSocketAndNoThread) {
  const auto results = run_ranks(1, [](int, int) -> std::string {
    std::thread([] {}).join();  // at the first one a sanitizer may start one of its own
    const size_t threads = entries_in("/proc/self/task");
    UniqueId id;
    SCAPE_RANK_OK(make_unique_id(&id));
    std::shared_ptr<Communicator> communicator;
    SCAPE_RANK_OK(create_communicator(id, 0, 1, &communicator));
    SCAPE_RANK_EXPECT(entries_in("/proc/self/task") == threads);
    for (int fd = 0; fd < 256; ++fd) {
      char target[256] = {};
      const std::string link = "/proc/self/fd/" + std::to_string(fd);
      if (::readlink(link.c_str(), target, sizeof target - 1) > 0) {
        SCAPE_RANK_EXPECT(std::strncmp(target, "socket:", 7) != 0);
      }
    }
    return sum_ones(*communicator);
  });
  EXPECT_TRUE(all_well(results)) << text_of(results);
}

}  // namespace
}  // namespace scape::plugin::test
