// The perf programs as a user runs them: results of every type and operator, and exit codes that
// tell when something is wrong.
#include <gtest/gtest.h>
#include <signal.h>
#include <stdlib.h>
#include <unistd.h>

#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tests/functional/perf/run.h"

namespace {

std::string program(const std::string& collective) {
  return std::string(PERF_BIN) + "/scape_" + collective + "_perf ";
}

std::string preload(const std::string& fault, int call) {
  // The order matters only to a sanitizer's own check of it.
  return "ASAN_OPTIONS=$ASAN_OPTIONS:verify_asan_link_order=0 LD_PRELOAD='" FAULTY_NCCL
         " " SCAPE_NCCL "' FAULT=" +
         fault + " FAULT_CALL=" + std::to_string(call) + " ";
}

class RanksTest : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, RanksTest, testing::Values(1, 2, 3, 4, 7));

TEST_P(RanksTest, EveryTypeAndOperatorIsRight) {
  const std::string options =
      "-g " + std::to_string(GetParam()) + " -b 1 -e 70000 -f 41 -d all -n 1 -w 0";
  // Sizes 1, 41, 1681, 68921; 12 types, 6 operators.
  expect_all_right(run(program("all_reduce") + options + " -o all"), 4 * 12 * 6);
  expect_all_right(run(program("reduce_scatter") + options + " -o all"), 4 * 12 * 6);
  expect_all_right(run(program("all_gather") + options), 4 * 12);
  expect_all_right(run(program("broadcast") + options + " -r all"),
                   4 * 12 * static_cast<size_t>(GetParam()));
}

TEST(PerfTest, GroupsOfCallsAreRight) {
  expect_all_right(run(program("all_reduce") + "-g 2 -b 8 -e 100K -f 10 -m 5 -n 2"), 5);
}

TEST(PerfTest, MaskedCallsKeepWhatTheAlgorithmPromises) {
  for (const char* sparsity : {"0", "0.5", "0.9", "0.999"}) {
    for (const char* ranks : {"2", "3"}) {
      expect_all_right(
          run(program("all_reduce") + "-n 3 -b 4 -e 250000 -f 37 -s " + sparsity + " -g " + ranks),
          4);
    }
  }
  expect_all_right(run(program("all_reduce") + "-g 2 -n 3 -b 40000 -s 0.9 -d bfloat16 -o avg"), 1);
  expect_all_right(run(program("all_reduce") + "-g 2 -n 3 -b 40000 -s 0.9 -d half"), 1);
  expect_all_right(run(program("all_reduce") + "-g 2 -n 3 -b 40000 -s 0.9 --role fused -o avg"), 1);
  expect_all_right(run(program("all_reduce") + "-g 2 -n 3 -b 40000 -s 0.9 --payload bf16"), 1);
  expect_all_right(
      run(program("all_reduce") + "-g 2 -n 3 -b 40000 -s 0.9 --role fused --residual in-place"), 1);
}

TEST(PerfTest, CompressionThatIsNotInForceFails) {
  const Outcome result = run("SCAPE_ENABLE=0 " + program("all_reduce") + "-g 2 -n 2 -b 4K -s 0.9");
  EXPECT_NE(result.code, 0) << result.output;
  const Outcome alone = run(program("all_reduce") + "-b 4K -s 0.9");
  EXPECT_EQ(alone.code, 2) << alone.output;
}

TEST(PerfTest, AWrongElementFails) {
  for (const char* fault : {"corrupt", "overrun"}) {
    const Outcome result = run(preload(fault, 1) + program("all_reduce") + "-g 2 -n 2 -b 4K");
    EXPECT_EQ(result.code, 1) << result.output;
    EXPECT_NE(result.output.find("FAILED"), std::string::npos) << result.output;
  }
  // Masked calls are checked as strictly.
  const Outcome masked =
      run(preload("corrupt", 1) + program("all_reduce") + "-g 2 -n 2 -b 4K -s 0.9");
  EXPECT_EQ(masked.code, 1) << masked.output;
}

TEST(PerfTest, ACallThatFailsOnOneRankEndsAll) {
  const Outcome result = run(preload("refuse", 3) + program("all_reduce") + "-g 3 -n 5 -b 4K");
  EXPECT_EQ(result.code, 3) << result.output;
  EXPECT_NE(result.output.find("rank 1: all_reduce"), std::string::npos) << result.output;
  EXPECT_LT(result.seconds, 30);
}

TEST(PerfTest, ARankThatDiesEndsAll) {
  const Outcome result = run(preload("die", 3) + program("all_reduce") + "-g 3 -n 5 -b 4K");
  EXPECT_NE(result.code, 0) << result.output;
  EXPECT_LT(result.seconds, 30);
}

TEST(PerfTest, ARankThatHangsEndsAll) {
  const Outcome result = run(preload("hang", 3) + program("all_reduce") + "-g 2 -n 5 -b 4K -T 3");
  EXPECT_EQ(result.code, 3) << result.output;
  EXPECT_NE(result.output.find("took too long"), std::string::npos) << result.output;
  EXPECT_LT(result.seconds, 30);
}

TEST(PerfTest, OptionsThatCannotBeServedAreRefused) {
  for (const char* options : {"-b nonsense", "-b 8 -e 4", "-d float9", "-o average", "-G 1",
                              "-s 1.5", "-s 0.9 -d int32", "-s 0.9 -o max", "-s 0.9 -m 2 -g 2",
                              "--role fused", "--residual in-place", "--no-such-option"}) {
    const Outcome result = run(program("all_reduce") + options);
    EXPECT_EQ(result.code, 2) << options << "\n" << result.output;
    EXPECT_FALSE(result.output.empty()) << options;
  }
  EXPECT_EQ(run(program("all_gather") + "-s 0.9 -g 2").code, 2);
  EXPECT_EQ(run(program("broadcast") + "-b 4K -r 3 -g 2").code, 2);
  EXPECT_EQ(run(program("all_reduce") + "--help").code, 0);
  EXPECT_EQ(run(program("all_reduce") + "--nccl-lib /nonexistent.so").code, 3);
}

TEST(PerfTest, JsonHoldsTheTable) {
  char folder[] = "/tmp/scape-perf-test-XXXXXX";
  ASSERT_NE(mkdtemp(folder), nullptr);
  const std::string path = std::string(folder) + "/results.json";
  expect_all_right(run(program("all_reduce") + "-g 2 -b 1K -e 4K -f 2 -n 3 -J " + path), 3);
  std::ifstream file(path);
  const nlohmann::json json = nlohmann::json::parse(file);
  ASSERT_EQ(json["results"].size(), 3u);
  EXPECT_EQ(json["ranks"], 2);
  EXPECT_EQ(json["out_of_bounds"], 0);
  for (const auto& row : json["results"]) {
    for (const char* place : {"out_of_place", "in_place"}) {
      const auto& half = row[place];
      EXPECT_EQ(half["wrong"], 0);
      EXPECT_GT(half["median_us"].get<double>(), 0);
      EXPECT_LE(half["min_us"].get<double>(), half["median_us"].get<double>());
      EXPECT_LE(half["median_us"].get<double>(), half["max_us"].get<double>());
      EXPECT_NEAR(half["algbw_gbps"].get<double>(),
                  row["size"].get<double>() / half["time_us"].get<double>() / 1e3, 1e-6);
    }
  }
  unlink(path.c_str());
  rmdir(folder);
}

// One process per rank, as a launcher starts them.
Outcome run_under_launcher(const std::vector<std::string>& environments,
                           const std::string& options) {
  std::string command;
  for (const std::string& environment : environments) {
    command += environment + " " + program("all_reduce") + options + " & ids=\"$ids $!\"; ";
  }
  return run(command + "code=0; for id in $ids; do wait $id || code=$?; done; exit $code");
}

TEST(PerfTest, TorchrunsEnvironmentGivesTheRanks) {
  const std::string meet =
      "MASTER_ADDR=localhost MASTER_PORT=" + std::to_string(20000 + getpid() % 10000) +
      " WORLD_SIZE=3 ";
  const std::string options = "-b 1K -e 4K -f 2 -n 3";
  expect_all_right(run_under_launcher({meet + "RANK=2", meet + "RANK=0", meet + "RANK=1"}, options),
                   3);
  const Outcome both =
      run_under_launcher({meet + "RANK=0", meet + "RANK=1", meet + "RANK=2"}, options + " -g 2");
  EXPECT_EQ(both.code, 2) << both.output;
  const Outcome half = run("RANK=1 " + program("all_reduce") + options);
  EXPECT_EQ(half.code, 2) << half.output;
}

TEST(PerfTest, RanksFindEachOtherByAFile) {
  char folder[] = "/tmp/scape-perf-test-XXXXXX";
  ASSERT_NE(mkdtemp(folder), nullptr);
  const std::string path = std::string(folder) + "/meet";
  // A file that an earlier run left must not lead astray.
  std::ofstream(path) << "0123456789abcdef 127.0.0.1:9\n";
  const std::string options = "-b 1K -e 4K -f 2 -n 3 --id-file " + path;
  expect_all_right(run_under_launcher({"WORLD_SIZE=2 RANK=1", "WORLD_SIZE=2 RANK=0"}, options), 3);
  EXPECT_NE(access(path.c_str(), F_OK), 0);
  rmdir(folder);
}

#ifdef MPIRUN
TEST(PerfTest, MpirunGivesTheRanks) {
  const std::string as_root = getuid() == 0 ? "--allow-run-as-root " : "";
  expect_all_right(run(MPIRUN " " + as_root + "--oversubscribe -n 3 " + program("all_reduce") +
                       "-b 1K -e 4K -f 2 -n 3"),
                   3);
}
#endif

}  // namespace
