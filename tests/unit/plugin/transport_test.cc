// The transport by itself: what it does when its peer is gone.
#include "plugin/transport/transport.h"

#include <gtest/gtest.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "plugin/transport/peer_address.h"
#include "plugin/transport/rails.h"
#include "tests/support/run_ranks.h"
#include "tests/unit/plugin/testing.h"

namespace scape::plugin {
namespace {

using scape::test::all_well;
using scape::test::run_ranks;
using scape::test::text_of;

// What two processes tell each other beside the transport.
struct Board {
  std::atomic<size_t> bytes[2];
  std::byte address[2][8192];
  std::atomic<bool> posted;
  std::atomic<pid_t> sender;
};

Board* make_board() {
  void* memory =
      ::mmap(nullptr, sizeof(Board), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  return memory == MAP_FAILED ? nullptr : new (memory) Board{};
}

std::string connect(Board& board, int rank, std::unique_ptr<Transport>* out) {
  SCAPE_RANK_OK(make_transport({.wakeup = false, .ranks = 2}, out));
  std::vector<std::byte> own;
  SCAPE_RANK_OK((*out)->address(&own));
  SCAPE_RANK_EXPECT(own.size() <= sizeof board.address[0]);
  std::copy(own.begin(), own.end(), board.address[rank]);
  board.bytes[rank] = own.size();
  while (board.bytes[1 - rank] == 0) ::poll(nullptr, 0, 1);
  std::vector<std::vector<std::byte>> addresses(2);
  for (int r = 0; r < 2; ++r) {
    addresses[static_cast<size_t>(r)].assign(board.address[r], board.address[r] + board.bytes[r]);
  }
  SCAPE_RANK_OK((*out)->connect(addresses));
  return "";
}

// Drives the transport until the operation is over, for at most five seconds.
void finish(Transport& transport, const Operation& operation) {
  const auto limit = std::chrono::steady_clock::now() + std::chrono::seconds(5);
  bool moved = false;
  while (operation.outcome == Outcome::kPending && std::chrono::steady_clock::now() < limit) {
    transport.progress(&moved);
  }
}

bool over_libfabric() {
  const char* const name = std::getenv("SCAPE_TRANSPORT");
  return name != nullptr && name == std::string_view("ofi");
}

// UCX aborts the process whose peer dies while it waits for connect() (plugin/transport/ucx).
// Whether it waits is a setting of its TCP, whose name differs between versions and which it takes
// in silence if unknown: it says at the level debug what it has applied.
TEST(Transport, UcxDoesNotWaitForTcpConnections) {
  if (over_libfabric()) {
    GTEST_SKIP() << "about UCX";
  }
  const std::string log = ::testing::TempDir() + "ucx_log_" + std::to_string(::getpid());
  const auto results = run_ranks(1, [&](int, int) -> std::string {
    ::setenv("UCX_LOG_LEVEL", "debug", 1);  // read when UCX is loaded, which is in this process
    ::setenv("UCX_LOG_FILE", log.c_str(), 1);
    ::setenv("UCX_TLS", "tcp", 1);
    std::unique_ptr<Transport> transport;
    SCAPE_RANK_OK(make_transport({.wakeup = false, .ranks = 2}, &transport));
    return "";
  });
  EXPECT_TRUE(all_well(results)) << text_of(results);
  std::ifstream file(log);
  const std::string said{std::istreambuf_iterator<char>(file), {}};
  std::filesystem::remove(log);
  EXPECT_NE(said.find("CONN_NB=y"), std::string::npos) << said.size() << " bytes said";
}

// Large messages stay in the sender's memory until they are received. Where the sender is dead by
// then the receives fail; the receiver lives on, and can end its transport.
TEST(Transport, AMessageOfADeadPeerFailsAndHarmsNothing) {
  if (over_libfabric()) {
    GTEST_SKIP() << "libfabric 1.17's rxm keeps messages that nobody took beyond their connection, "
                    "whose memory a receive then uses (address sanitizer)";
  }
  constexpr size_t kBytes = size_t{8} << 20;
  Board* const board = make_board();
  ASSERT_NE(board, nullptr);
  const auto results = run_ranks(2, [&](int rank, int) -> std::string {
    std::unique_ptr<Transport> transport;
    if (std::string problem = connect(*board, rank, &transport); !problem.empty()) return problem;
    std::vector<char> data(kBytes);
    std::vector<Operation> operations(3);
    // Large ones to and fro first, so that the two know each other's ways.
    for (const int sender : {0, 1}) {
      operations[0] = {};
      if (rank == sender) {
        transport->send(1 - rank, 1, data.data(), kBytes, &operations[0]);
      } else {
        transport->recv(1 - rank, 1, data.data(), kBytes, &operations[0]);
      }
      finish(*transport, operations[0]);
      SCAPE_RANK_EXPECT(operations[0].outcome == Outcome::kDone);
    }
    if (rank == 1) {
      board->sender = ::getpid();
      transport->send(0, 2, data.data(), kBytes, &operations[1]);
      transport->send(0, 3, data.data(), kBytes, &operations[2]);
      bool moved = false;
      for (int i = 0; i < 1000; ++i) transport->progress(&moved);
      board->posted = true;
      while (true) ::pause();
    }
    while (!board->posted) ::poll(nullptr, 0, 1);
    ::kill(board->sender, SIGKILL);
    // Until the parent has waited for it, it is a zombie, whose memory is gone as well.
    ::poll(nullptr, 0, 100);
    for (const size_t i : {1, 2}) {
      transport->recv(1, 1 + i, data.data(), kBytes, &operations[i]);
      finish(*transport, operations[i]);
      SCAPE_RANK_EXPECT(operations[i].outcome == Outcome::kFailed);
    }
    transport->abandon();
    transport.reset();
    return "";
  });
  EXPECT_TRUE(results[0].ended && results[0].text.empty() && results[0].signal == 0 &&
              results[0].exit_status == 0)
      << text_of(results);
  EXPECT_EQ(results[1].signal, SIGKILL);
  ::munmap(board, sizeof *board);
}

// Containers often have little room in /dev/shm.
TEST(Transport, DoesWithoutDevShm) {
  if (std::getenv("UCX_TLS") != nullptr) GTEST_SKIP() << "UCX_TLS is set: no choice is left";
  const char* const provider = std::getenv("FI_PROVIDER");
  if (provider != nullptr && provider == std::string_view("shm")) {
    GTEST_SKIP() << "FI_PROVIDER=shm is set: no choice is left";
  }
  constexpr size_t kBytes = size_t{1} << 20;
  Board* const board = make_board();
  ASSERT_NE(board, nullptr);
  const auto results = run_ranks(2, [&](int rank, int) -> std::string {
    // Each rank in a mount namespace of its own, with a small /dev/shm.
    if (::unshare(CLONE_NEWNS) != 0 ||
        ::mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0 ||
        ::mount("tmpfs", "/dev/shm", "tmpfs", 0, "size=64k") != 0) {
      return "not permitted";
    }
    std::unique_ptr<Transport> transport;
    if (std::string problem = connect(*board, rank, &transport); !problem.empty()) return problem;
    std::vector<char> data(kBytes, rank == 0 ? 'x' : '-');
    Operation operation;
    if (rank == 0) {
      transport->send(1, 1, data.data(), kBytes, &operation);
    } else {
      transport->recv(0, 1, data.data(), kBytes, &operation);
    }
    finish(*transport, operation);
    SCAPE_RANK_EXPECT(operation.outcome == Outcome::kDone);
    SCAPE_RANK_EXPECT(data == std::vector<char>(kBytes, 'x'));
    transport->flush(1000);
    return "";
  });
  ::munmap(board, sizeof *board);
  if (results[0].text == "not permitted") GTEST_SKIP() << "mounting needs privileges";
  EXPECT_TRUE(all_well(results)) << text_of(results);
}

// Over UCX's TCP, messages to another host go without waiting for their receivers, from a worker of
// their own, up to a size.
TEST(Transport, BringsMessagesOfAllSizesToAnotherHost) {
  const std::vector<size_t> sizes = {
      0, 1, 1000, 8192, 100000, (1 << 20) - 1, 1 << 20, (1 << 20) + 1, 3 << 20};
  Board* const board = make_board();
  ASSERT_NE(board, nullptr);
  const auto results = run_ranks(2, [&](int rank, int) -> std::string {
    ::setenv("NCCL_HOSTID", rank == 0 ? "here" : "there", 1);
    std::unique_ptr<Transport> transport;
    if (std::string problem = connect(*board, rank, &transport); !problem.empty()) return problem;
    const auto content = [&](int sender, size_t i) {
      return std::vector<char>(sizes[i],
                               static_cast<char>('a' + sender * 13 + static_cast<int>(i)));
    };
    std::vector<std::vector<char>> sent, received;
    std::vector<Operation> sends(sizes.size()), receives(sizes.size());
    for (size_t i = 0; i < sizes.size(); ++i) {
      sent.push_back(content(rank, i));
      received.emplace_back(sizes[i]);
      transport->send(1 - rank, i, sent[i].data(), sizes[i], &sends[i]);
    }
    // Some have come before they are asked for; and asked for in another order.
    bool moved = false;
    for (int turn = 0; turn < 1000; ++turn) transport->progress(&moved);
    for (size_t i = sizes.size(); i-- > 0;) {
      transport->recv(1 - rank, i, received[i].data(), sizes[i], &receives[i]);
    }
    for (size_t i = 0; i < sizes.size(); ++i) {
      finish(*transport, receives[i]);
      finish(*transport, sends[i]);
      SCAPE_RANK_EXPECT(receives[i].outcome == Outcome::kDone);
      SCAPE_RANK_EXPECT(receives[i].received == sizes[i]);
      SCAPE_RANK_EXPECT(sends[i].outcome == Outcome::kDone);
      SCAPE_RANK_EXPECT(received[i] == content(1 - rank, i));
    }
    transport->flush(1000);
    return "";
  });
  ::munmap(board, sizeof *board);
  EXPECT_TRUE(all_well(results)) << text_of(results);
}

// libfabric's shm names its memory in /dev/shm after the process: a later process of the same
// number meets what a killed one left there.
TEST(Transport, TakesNoOffenceAtWhatAnEarlierProcessOfItsNumberLeft) {
  const char* const provider = std::getenv("FI_PROVIDER");
  if (provider == nullptr || provider != std::string_view("shm")) {
    GTEST_SKIP() << "of FI_PROVIDER=shm";
  }
  const auto results = run_ranks(1, [&](int, int) -> std::string {
    namespace fs = std::filesystem;
    const fs::path folder = "/dev/shm";
    const std::string pid = std::to_string(::getpid());
    std::unique_ptr<Transport> first, second;
    SCAPE_RANK_OK(make_transport({.wakeup = false, .ranks = 1}, &first));
    std::string own;
    for (const auto& entry : fs::directory_iterator(folder)) {
      const std::string name = entry.path().filename();
      if (name.find(pid + ":") != std::string::npos) own = name;
    }
    const size_t end = own.rfind(':');  // the number of the endpoint comes last
    SCAPE_RANK_EXPECT(end != std::string::npos);
    const int next = std::stoi(own.substr(end + 1)) + 1;
    std::vector<fs::path> left;
    for (int i = 0; i < 3; ++i) {
      left.push_back(folder / (own.substr(0, end + 1) + std::to_string(next + i)));
      std::ofstream(left.back()) << std::string(4096, '\0');
    }
    const Status status = make_transport({.wakeup = false, .ranks = 1}, &second);
    second.reset();
    for (const fs::path& path : left) fs::remove(path);
    SCAPE_RANK_OK(status);
    return "";
  });
  EXPECT_TRUE(all_well(results)) << text_of(results);
}

TEST(PeerAddress, ComesBackWholeOrNotAtAll) {
  const PeerAddress address{"tcp;ofi_rxm", "host/boot", {std::byte{1}, std::byte{0}, std::byte{2}}};
  const std::vector<std::byte> sealed = seal_address(address);
  PeerAddress back;
  ASSERT_TRUE(unseal_address(sealed, "rank 3", &back).ok());
  EXPECT_EQ(back.provider, address.provider);
  EXPECT_EQ(back.host, address.host);
  EXPECT_EQ(back.bytes, address.bytes);
  for (size_t i = 0; i < sealed.size(); ++i) {
    std::vector<std::byte> damaged = sealed;
    damaged[i] ^= std::byte{0x10};
    const Status status = unseal_address(damaged, "rank 3", &back);
    EXPECT_EQ(status.code(), SCAPE_ERR_MISMATCH) << i;
    EXPECT_NE(status.message().find("rank 3"), std::string::npos);
    EXPECT_FALSE(unseal_address(std::span(sealed).first(i), "rank 3", &back).ok()) << i;
  }
  EXPECT_FALSE(unseal_address(seal_address({"ucx", "", {}}), "rank 3", &back).ok());
}

TEST(Rails, PartsMakeUpTheMessage) {
  for (const size_t bytes : {kCutFrom + 1, size_t{1} << 20, (size_t{1} << 30) - 1, size_t{4095}}) {
    for (size_t count = 1; count <= kMaxTransportRails; ++count) {
      size_t end = 0;
      for (size_t i = 0; i < count; ++i) {
        const MessagePart part = message_part(bytes, i, count);
        EXPECT_EQ(part.begin, end);
        EXPECT_TRUE(part.begin % 4096 == 0 || part.bytes == 0) << part.begin;
        EXPECT_NEAR(static_cast<double>(part.bytes), static_cast<double>(bytes / count), 8192);
        end += part.bytes;
      }
      EXPECT_EQ(end, bytes);
    }
  }
}

// Over several devices, over one, or whatever SCAPE_NET_IF says. Each length comes whole; a length
// that the receiver does not expect comes to its end as one that is not as it has to be.
TEST(Rails, CarryLongAndShortMessages) {
  Board* const board = make_board();
  ASSERT_NE(board, nullptr);
  const auto results = run_ranks(2, [&](int rank, int) -> std::string {
    std::unique_ptr<Transport> transport;
    if (std::string problem = connect(*board, rank, &transport); !problem.empty()) return problem;
    uint64_t tag = 0;
    for (const size_t bytes : {size_t{0}, size_t{1}, kCutFrom, kCutFrom + 1, size_t{5} << 20}) {
      std::vector<unsigned char> data(bytes + 1, 0xee);
      Operation operation;
      ++tag;
      if (rank == 0) {
        for (size_t i = 0; i < bytes; ++i) data[i] = static_cast<unsigned char>(i * 7 + (i >> 10));
        transport->send(1, tag, data.data(), bytes, &operation);
      } else {
        transport->recv(0, tag, data.data(), bytes, &operation);
      }
      finish(*transport, operation);
      SCAPE_RANK_EXPECT(operation.outcome == Outcome::kDone);
      if (rank == 0) continue;
      SCAPE_RANK_EXPECT(operation.received == bytes && data[bytes] == 0xee);
      for (size_t i = 0; i < bytes; ++i) {
        SCAPE_RANK_EXPECT(data[i] == static_cast<unsigned char>(i * 7 + (i >> 10)));
      }
    }
    for (const auto& [sent, room] : std::vector<std::pair<size_t, size_t>>{
             {100, size_t{1} << 20}, {kCutFrom + 5000, size_t{1} << 20}}) {
      std::vector<unsigned char> data(size_t{1} << 20);
      Operation operation;
      ++tag;
      if (rank == 0) {
        transport->send(1, tag, data.data(), sent, &operation);
      } else {
        transport->recv(0, tag, data.data(), room, &operation);
        finish(*transport, operation);
        SCAPE_RANK_EXPECT(operation.outcome != Outcome::kPending);
        SCAPE_RANK_EXPECT(operation.received != room);
      }
      if (rank == 0) finish(*transport, operation);
    }
    transport->abandon();
    return "";
  });
  EXPECT_TRUE(all_well(results)) << text_of(results);
}

// A network library would read beyond their ends, or what is not there.
TEST(Transport, RefusesAddressesThatAreNotOfItsForm) {
  const auto results = run_ranks(1, [&](int, int) -> std::string {
    std::unique_ptr<Transport> transport;
    SCAPE_RANK_OK(make_transport({.ranks = 2}, &transport));
    std::vector<std::byte> mine;
    SCAPE_RANK_OK(transport->address(&mine));
    PeerAddress own;
    SCAPE_RANK_OK(unseal_address(mine, "this rank", &own));
    int peer = -1;
    const auto refused = [&](const std::vector<std::byte>& address) {
      const Status status = transport->add_peer(address, "rank 1", &peer);
      return status.code() == SCAPE_ERR_MISMATCH &&
             status.message().find("rank 1") != std::string::npos;
    };
    SCAPE_RANK_EXPECT(refused({}));
    SCAPE_RANK_EXPECT(refused({mine.begin(), mine.end() - 1}));
    SCAPE_RANK_EXPECT(refused(own.bytes));
    SCAPE_RANK_EXPECT(refused(seal_address({"another", own.host, own.bytes})));
    if (transport->name() == "ofi") {
      SCAPE_RANK_EXPECT(refused(
          seal_address({own.provider, own.host, {own.bytes.begin(), own.bytes.end() - 1}})));
    }
    const std::vector<std::vector<std::byte>> addresses = {mine, {}};
    const Status status = transport->connect(addresses);
    SCAPE_RANK_EXPECT(status.code() == SCAPE_ERR_MISMATCH);
    SCAPE_RANK_EXPECT(status.message().find("rank 1") != std::string::npos);
    return "";
  });
  EXPECT_TRUE(all_well(results)) << text_of(results);
}

// UCX itself would abort.
TEST(Transport, IsRefusedWhereDescriptorsAreShort) {
  const auto results = run_ranks(1, [&](int, int) -> std::string {
    rlimit limit{};
    ::getrlimit(RLIMIT_NOFILE, &limit);
    limit.rlim_cur = 12;
    SCAPE_RANK_EXPECT(::setrlimit(RLIMIT_NOFILE, &limit) == 0);
    std::unique_ptr<Transport> transport;
    const Status status = make_transport({.wakeup = true, .ranks = 2}, &transport);
    SCAPE_RANK_EXPECT(status.code() == SCAPE_ERR_SYSTEM);
    SCAPE_RANK_EXPECT(status.message().find("ulimit -n") != std::string::npos);
    return "";
  });
  EXPECT_TRUE(all_well(results)) << text_of(results);
}

}  // namespace
}  // namespace scape::plugin
