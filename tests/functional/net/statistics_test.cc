// The counters that the net plugin writes, beside what its callers did: real processes over both
// network libraries.
#include <gtest/gtest.h>
#include <stdlib.h>
#include <sys/stat.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <vector>

#include "tests/functional/perf/run.h"
#include "tests/support/prometheus.h"

namespace {

using nlohmann::json;
using scape::testing_support::read_prometheus;

struct Library {
  const char* name;
  const char* library;
  const char* environment;
};
void PrintTo(const Library& library, std::ostream* out) { *out << library.name; }

class StatisticsTest : public testing::TestWithParam<Library> {
 protected:
  void SetUp() override {
    char name[] = "/tmp/scape-statistics-XXXXXX";
    ASSERT_NE(mkdtemp(name), nullptr);
    folder_ = name;
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  Outcome harness(const std::string& setting, const std::string& arguments) {
    return run("unset RANK; " + std::string(GetParam().environment) + " SCAPE_NET_STATS='" +
               setting + "' " + more_ + " " NET_HARNESS " " NET_PLUGIN " " + arguments);
  }

  // By process: what the file says of the one device that was used.
  std::map<int, json> read_files() {
    std::map<int, json> files;
    for (const auto& entry : std::filesystem::directory_iterator(folder_)) {
      struct stat found = {};
      EXPECT_EQ(::stat(entry.path().c_str(), &found), 0);
      EXPECT_EQ(found.st_mode & 07777, 0644u);
      std::ifstream file(entry.path());
      const json all = json::parse(file);
      EXPECT_EQ(entry.path().filename(), "scape_net_" + all["host"].get<std::string>() + "_" +
                                             std::to_string(all["pid"].get<int>()) + ".json");
      const json& device = all["devices"][0];
      EXPECT_EQ(device["library"], GetParam().library);
      files[all["pid"]] = device;
    }
    return files;
  }

  std::string folder_, more_;
};
INSTANTIATE_TEST_SUITE_P(Libraries, StatisticsTest,
                         testing::Values(Library{"ucx", "ucx", "SCAPE_NET=ucx UCX_TLS=tcp,self"},
                                         Library{"ofi", "ofi", "SCAPE_NET=ofi FI_PROVIDER=tcp"}),
                         [](const auto& instance) { return instance.param.name; });

// What the processes said they did.
std::vector<json> deeds(const std::string& output) {
  std::vector<json> all;
  std::istringstream lines(output);
  std::string line;
  while (std::getline(lines, line)) {
    if (line.rfind("DID ", 0) == 0) all.push_back(json::parse(line.substr(4)));
  }
  return all;
}

// How many connections of each direction the file says are open.
void expect_equal(const json& device, const json& did, int open) {
  EXPECT_EQ(device["bytes"]["net"]["send"], did["sent_bytes"]);
  EXPECT_EQ(device["bytes"]["net"]["receive"], did["received_bytes"]);
  EXPECT_EQ(device["messages"]["net"]["send"], did["sent_messages"]);
  EXPECT_EQ(device["messages"]["net"]["receive"], did["received_messages"]);
  EXPECT_EQ(device["retries"]["send"], did["send_nulls"]);
  EXPECT_EQ(device["retries"]["receive"], did["receive_nulls"]);
  EXPECT_EQ(device["retries"]["connect"], did["connect_nulls"]);
  EXPECT_EQ(device["retries"]["accept"], did["accept_nulls"]);
  EXPECT_EQ(device["registrations"]["net"], did["registrations"]);
  EXPECT_EQ(device["registration_hits"]["net"], did["hits"]);
  EXPECT_EQ(device["registered"]["net"], 0);
  for (const char* direction : {"send", "receive"}) {
    EXPECT_EQ(device["connections_opened"][direction], did["links"]);
    EXPECT_EQ(device["connections"][direction], open);
  }
  for (const auto& [operation, errors] : device["errors"].items()) EXPECT_EQ(errors, 0);
  EXPECT_EQ(device["messages"]["collnet"]["send"], 0);
  EXPECT_EQ(device["groups_opened"], 0);
}

// With the oldest interface nothing but the last connection's end says that all is over.
TEST_P(StatisticsTest, TheNumbersAreWhatWasDone) {
  for (const char* version : {"6", "12"}) {
    SCOPED_TRACE(version);
    const Outcome result = harness(
        folder_, std::string("statistics_close ranks=2 links=2 count=500 version=") + version);
    ASSERT_EQ(result.code, 0) << result.output;
    const std::vector<json> done = deeds(result.output);
    std::map<int, json> files = read_files();
    ASSERT_EQ(done.size(), 2u) << result.output;
    ASSERT_EQ(files.size(), 2u);
    for (const json& did : done) {
      ASSERT_EQ(files.count(did["pid"]), 1u);
      expect_equal(files[did["pid"]], did, 0);
      EXPECT_EQ(did["sent_messages"], 1000);
      EXPECT_GT(did["send_nulls"], 0);
      EXPECT_GT(did["accept_nulls"].get<int>() + did["connect_nulls"].get<int>(), 0);
      EXPECT_EQ(did["warnings"], 0) << result.output;
    }
    std::filesystem::remove_all(folder_);
    std::filesystem::create_directory(folder_);
  }
}

TEST_P(StatisticsTest, AProgramThatJustEndsHasItsNumbersToo) {
  const Outcome result = harness(folder_ + "/", "statistics_exit ranks=3 links=2 count=200");
  ASSERT_EQ(result.code, 0) << result.output;
  std::map<int, json> files = read_files();
  ASSERT_EQ(files.size(), 3u);
  for (const json& did : deeds(result.output)) expect_equal(files[did["pid"]], did, 2);
}

TEST_P(StatisticsTest, TheFileIsWrittenInBetweenWhereAskedFor) {
  more_ = "SCAPE_NET_STATS_INTERVAL=0.02";
  const Outcome result = harness(folder_, "statistics_interval ranks=2 count=20");
  ASSERT_EQ(result.code, 0) << result.output;
  std::map<int, json> files = read_files();
  ASSERT_EQ(files.size(), 2u);
  for (const json& did : deeds(result.output)) {  // 41 of 50 rounds
    const json& device = files[did["pid"]];
    EXPECT_GE(device["messages"]["net"]["send"], did["sent_messages"]);
    EXPECT_GE(device["bytes"]["net"]["receive"], did["received_bytes"]);
    EXPECT_LE(device["messages"]["net"]["send"], 50 * 20);
    EXPECT_EQ(device["connections"]["send"], 1);
  }
}

TEST_P(StatisticsTest, WithoutAnIntervalThereIsOnlyTheStart) {
  const Outcome result = harness(folder_, "statistics_interval ranks=2 count=20");
  ASSERT_EQ(result.code, 0) << result.output;
  for (const auto& [process, device] : read_files()) {
    EXPECT_EQ(device["messages"]["net"]["send"], 0);
  }
}

TEST_P(StatisticsTest, PrometheusTakesTheText) {
  more_ = "RANK=7";
  const Outcome result =
      harness(folder_ + "/scape-%h-%p.prom", "statistics_close ranks=2 count=100");
  ASSERT_EQ(result.code, 0) << result.output;
  const std::vector<json> done = deeds(result.output);
  ASSERT_EQ(done.size(), 2u);
  size_t files = 0;
  for (const auto& entry : std::filesystem::directory_iterator(folder_)) {
    ++files;
    EXPECT_EQ(entry.path().extension(), ".prom");
    std::ifstream file(entry.path());
    const auto families = read_prometheus({std::istreambuf_iterator<char>(file), {}});
    std::map<std::string, unsigned long long> bytes;
    std::string process;
    for (const auto& [labels, value] : families.at("scape_net_bytes_total").samples) {
      EXPECT_EQ(labels.at("library"), GetParam().library);
      EXPECT_EQ(labels.at("rank"), "7");
      process = labels.at("pid");
      bytes[labels.at("interface") + labels.at("direction")] += value;
    }
    for (const json& did : done) {
      if (std::to_string(did["pid"].get<int>()) != process) continue;
      EXPECT_EQ(bytes["netsend"], did["sent_bytes"]);
      EXPECT_EQ(bytes["netreceive"], did["received_bytes"]);
      EXPECT_EQ(bytes["collnetsend"], 0u);
    }
  }
  EXPECT_EQ(files, 2u);
}

TEST_P(StatisticsTest, GroupsAreCounted) {
  const Outcome result = harness(folder_, "coll_requests ranks=3 links=3 count=400");
  ASSERT_EQ(result.code, 0) << result.output;
  std::map<std::string, uint64_t> sums;
  const std::map<int, json> files = read_files();
  ASSERT_EQ(files.size(), 3u);
  for (const auto& [process, device] : files) {
    EXPECT_EQ(device["groups_opened"], 3);
    EXPECT_EQ(device["groups"], 0);
    EXPECT_GT(device["retries"]["collective"], 0);
    EXPECT_EQ(device["errors"]["collective"], 0);
    EXPECT_EQ(device["messages"]["net"]["send"], 0);
    for (const char* direction : {"send", "receive"}) {
      sums[std::string("bytes ") + direction] +=
          device["bytes"]["collnet"][direction].get<uint64_t>();
      sums[std::string("messages ") + direction] +=
          device["messages"]["collnet"][direction].get<uint64_t>();
    }
  }
  EXPECT_GT(sums["bytes send"], 0u);
  EXPECT_EQ(sums["bytes send"], sums["bytes receive"]);
  EXPECT_EQ(sums["messages send"], sums["messages receive"]);
}

TEST_P(StatisticsTest, ErrorsAreCounted) {
  // A connect to a listener that has closed, and a peer that dies.
  const Outcome closed = harness(folder_, "close");
  ASSERT_EQ(closed.code, 0) << closed.output;
  std::map<int, json> files = read_files();
  ASSERT_EQ(files.size(), 2u);
  for (const auto& [process, device] : files) {
    EXPECT_EQ(device["errors"]["connect"], 1);
    EXPECT_EQ(device["connections"]["send"], 0);
    EXPECT_EQ(device["connections"]["receive"], 0);
  }
  std::filesystem::remove_all(folder_);
  std::filesystem::create_directory(folder_);
  const Outcome killed = harness(folder_, "kill_large_sends");
  ASSERT_EQ(killed.code, 0) << killed.output;
  int sends = 0;
  for (const auto& [process, device] : read_files()) sends += device["errors"]["send"].get<int>();
  EXPECT_EQ(sends, 1);
}

TEST_P(StatisticsTest, APathThatCannotBeWrittenIsSaidOnceAndFailsNothing) {
  std::ofstream(folder_ + "/plain") << "kept";
  more_ = "SCAPE_NET_STATS_INTERVAL=0.001";
  for (const std::string& path : {folder_ + "/nowhere/counters.json", folder_ + "/plain/x.prom",
                                  std::string("/dev/null"), folder_ + "/%q.json"}) {
    const Outcome result = harness(path, "statistics_close ranks=2 count=200");
    EXPECT_EQ(result.code, 0) << result.output;
    const std::vector<json> done = deeds(result.output);
    ASSERT_EQ(done.size(), 2u) << result.output;
    EXPECT_NE(result.output.find("SCAPE_NET_STATS"), std::string::npos) << result.output;
    size_t lines = 0;
    constexpr std::string_view kLine = "SCAPE WARN net: ";
    for (size_t at = result.output.find(kLine); at != std::string::npos;
         at = result.output.find(kLine, at + 1)) {
      ++lines;
    }
    EXPECT_EQ(lines, done.size()) << result.output;
    EXPECT_NE(result.output.find(path), std::string::npos) << result.output;
  }
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(folder_), {}), 1);
}

}  // namespace
