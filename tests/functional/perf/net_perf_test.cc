// scape_net_perf as a user runs it: every figure over both network libraries, and exit codes that
// tell when something is wrong.
#include <gtest/gtest.h>
#include <stdlib.h>
#include <unistd.h>

#include <fstream>
#include <nlohmann/json.hpp>
#include <string>

#include "tests/functional/perf/run.h"

namespace {

const std::string kProgram = std::string(PERF_BIN) + "/scape_net_perf ";

struct Library {
  const char* name;
  const char* environment;
  const char* rival;
};
void PrintTo(const Library& library, std::ostream* out) { *out << library.name; }

class LibraryTest : public testing::TestWithParam<Library> {
 protected:
  Outcome measure(const std::string& options) {
    return run(std::string(GetParam().environment) + " " + kProgram + options);
  }
};
INSTANTIATE_TEST_SUITE_P(
    Libraries, LibraryTest,
    testing::Values(Library{"ucx_tcp", "SCAPE_NET=ucx UCX_TLS=tcp,self", "ucp"},
                    Library{"ucx_shm", "SCAPE_NET=ucx UCX_TLS=shm,self", "ucp"},
                    Library{"ofi_tcp", "SCAPE_NET=ofi FI_PROVIDER=tcp", "ofi"},
                    Library{"ofi_shm", "SCAPE_NET=ofi FI_PROVIDER=shm", "ofi"}),
    [](const auto& instance) { return instance.param.name; });

TEST_P(LibraryTest, AllCarriersAreRight) {
  // Sizes 1, 100, 10000 and 1000000.
  expect_all_right(measure(std::string("-b 1 -e 1M -f 100 --connections 1,3 -n 20 --rounds 2 ") +
                           "--rival " + GetParam().rival),
                   4 * 2 * 2);
  expect_all_right(measure("-b 0 -e 5000 -i 5000 --connections 2 -n 20 --rounds 1"), 2);
}

TEST_P(LibraryTest, GroupsOfReceivesAreRight) {
  expect_all_right(measure("-b 100 -e 100K -f 1000 --connections 2 -n 40 --rounds 1 --group 8"), 2);
  // Fewer places than messages: what comes last counts.
  expect_all_right(
      measure("-b 100 -e 100K -f 1000 --connections 1 -n 40 --rounds 1 --group 3 --slots 1"), 2);
}

TEST_P(LibraryTest, EveryVersionOfTheInterfaceIsRight) {
  for (int version = 6; version <= 12; ++version) {
    const Outcome result =
        measure("-b 4K --connections 1 -n 20 --rounds 1 --abi " + std::to_string(version));
    expect_all_right(result, 1);
    EXPECT_NE(result.output.find("version " + std::to_string(version) + ","), std::string::npos)
        << result.output;
  }
}

std::string with_fault(const std::string& fault, int call) {
  return "SCAPE_NET=ucx FAULTY_NET_PLUGIN=" NET_PLUGIN " FAULT=" + fault +
         " FAULT_CALL=" + std::to_string(call) + " " + kProgram + "--plugin " FAULTY_NET " ";
}

TEST(NetPerfTest, WrongDataFails) {
  const std::string options = "-b 4K --connections 1 -n 20 --rounds 1";
  // The fifth send is of the checking pass, the 55th of the timed loop for bandwidth.
  for (const int call : {5, 55}) {
    for (const char* fault : {"corrupt", "shorten"}) {
      const Outcome result = run(with_fault(fault, call) + options);
      EXPECT_EQ(result.code, 1) << fault << " " << call << "\n" << result.output;
      EXPECT_NE(result.output.find("FAILED"), std::string::npos) << result.output;
    }
  }
  // A size is looked at even where nothing else is checked.
  const Outcome unchecked = run(with_fault("shorten", 10) + options + " -c 0");
  EXPECT_EQ(unchecked.code, 1) << unchecked.output;
}

TEST(NetPerfTest, ACallThatFailsOrARankThatDiesEndsBoth) {
  const std::string options = "-b 4K --connections 1 -n 20 --rounds 1";
  const Outcome refused = run(with_fault("refuse", 5) + options);
  EXPECT_EQ(refused.code, 3) << refused.output;
  EXPECT_NE(refused.output.find("isend gives 3"), std::string::npos) << refused.output;
  const Outcome died = run(with_fault("die", 5) + options);
  EXPECT_NE(died.code, 0) << died.output;
  for (const Outcome* result : {&refused, &died}) EXPECT_LT(result->seconds, 30) << result->output;
}

TEST(NetPerfTest, OptionsThatCannotBeServedAreRefused) {
  for (const char* options :
       {"-b nonsense", "-b 8 -e 4", "--connections 0", "--connections 1,x", "--window 33",
        "--group 9", "--slots -1", "--rounds 0", "--rival mpi", "--abi 5", "--abi 13", "-g 3",
        "-n 0", "--seconds 0", "--no-such-option", "--device 999"}) {
    const Outcome result = run(kProgram + options);
    EXPECT_EQ(result.code, 2) << options << "\n" << result.output;
    EXPECT_FALSE(result.output.empty()) << options;
  }
  EXPECT_EQ(run("RANK=0 WORLD_SIZE=3 MASTER_ADDR=localhost MASTER_PORT=1 " + kProgram).code, 2);
  EXPECT_EQ(run(kProgram + "--help").code, 0);
  const Outcome no_plugin = run(kProgram + "--plugin /nonexistent.so");
  EXPECT_EQ(no_plugin.code, 3) << no_plugin.output;
  const Outcome no_table = run(with_fault("none", 0) + "--abi 8");
  EXPECT_EQ(no_table.code, 3) << no_table.output;
  EXPECT_NE(no_table.output.find("ncclNetPlugin_v8"), std::string::npos) << no_table.output;
}

TEST(NetPerfTest, JsonHoldsTheTable) {
  char folder[] = "/tmp/scape-perf-test-XXXXXX";
  ASSERT_NE(mkdtemp(folder), nullptr);
  const std::string path = std::string(folder) + "/results.json";
  expect_all_right(run("SCAPE_NET=ucx " + kProgram +
                       "-b 1K -e 4K -f 2 --connections 2 -n 20 --rounds 4 -J " + path),
                   3);
  std::ifstream file(path);
  const nlohmann::json json = nlohmann::json::parse(file);
  EXPECT_EQ(json["out_of_bounds"], 0);
  ASSERT_EQ(json["results"].size(), 3u);
  for (const auto& row : json["results"]) {
    EXPECT_EQ(row["carrier"], "plugin");
    EXPECT_EQ(row["connections"], 2);
    for (const char* figure : {"latency_us", "latency_p99_us", "algbw_gbps", "rate_mmsgps"}) {
      ASSERT_EQ(row[figure].size(), 4u) << figure;
      for (const double sample : row[figure]) EXPECT_GT(sample, 0) << figure;
    }
    for (size_t round = 0; round < 4; ++round) {
      EXPECT_LE(row["latency_us"][round], row["latency_p99_us"][round]);
      EXPECT_NEAR(row["algbw_gbps"][round].get<double>(),
                  row["rate_mmsgps"][round].get<double>() * row["size"].get<double>() / 1e3, 1e-9);
    }
  }
  unlink(path.c_str());
  rmdir(folder);
}

TEST(NetPerfTest, ALaunchersProcessesAreTheRanks) {
  const std::string meet = "SCAPE_NET=ucx MASTER_ADDR=localhost WORLD_SIZE=2 MASTER_PORT=" +
                           std::to_string(20000 + getpid() % 10000) + " ";
  const std::string command = kProgram + "-b 1K --connections 1 -n 20 --rounds 1";
  expect_all_right(run(meet + "RANK=1 " + command + " & " + meet + "RANK=0 " + command +
                       " || code=$?; wait $! || code=$?; exit ${code:-0}"),
                   1);
}

}  // namespace
