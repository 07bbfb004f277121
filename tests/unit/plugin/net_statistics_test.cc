// The net plugin's counters as text, and the file they go to.
#include "plugin/net/statistics.h"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <vector>

#include "tests/support/prometheus.h"

namespace scape::net {
namespace {

using testing_support::PrometheusLabels;
using testing_support::read_prometheus;

std::string contents(const std::string& path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

class FolderTest : public testing::Test {
 protected:
  void SetUp() override {
    char name[] = "/tmp/scape-statistics-XXXXXX";
    ASSERT_NE(::mkdtemp(name), nullptr);
    folder_ = name;
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }
  std::string folder_;
};

struct ReplaceFile : FolderTest {};
struct StatisticsPath : FolderTest {};

// A different number for each counter there is.
void fill(DeviceCounters* counters) {
  uint64_t value = 100;
  for (Counter& counter : counters->retries) counter.add(++value);
  for (Counter& counter : counters->errors) counter.add(++value);
  for (size_t i = 0; i < 2; ++i) {
    counters->connections_opened[i].add(++value);
    counters->connections[i].add(++value);
    counters->registrations[i].add(++value);
    counters->registration_hits[i].add(++value);
    counters->registered[i].add(++value);
  }
  counters->groups_opened.add(++value);
  counters->groups.add(++value);
}

TEST(Statistics, BothFormsSayTheSameOfEveryCounter) {
  DeviceCounters first("mlx5_0:1", "ucx"), second("mlx5_1:1", "ucx");
  fill(&first);
  second.errors[Error::kJoin].add(7);
  const std::vector<Reading> readings = {read_counters(first), read_counters(second)};
  const Origin origin = {"node", 12, 3};
  const auto json = nlohmann::json::parse(json_of(origin, 2050, readings));
  EXPECT_EQ(json["host"], "node");
  EXPECT_EQ(json["pid"], 12);
  EXPECT_EQ(json["rank"], 3);
  EXPECT_EQ(json["time"], 2.05);
  ASSERT_EQ(json["devices"].size(), 2u);
  const auto& device = json["devices"][0];
  EXPECT_EQ(device["device"], "mlx5_0:1");
  EXPECT_EQ(device["library"], "ucx");
  EXPECT_EQ(device["retries"]["address"], first.retries[Retry::kAddress].value());
  EXPECT_EQ(device["errors"]["register"], first.errors[Error::kRegister].value());
  EXPECT_EQ(device["connections"]["receive"], first.connections[Direction::kReceive].value());
  EXPECT_EQ(device["registration_hits"]["collnet"],
            first.registration_hits[Interface::kCollNet].value());
  EXPECT_EQ(device["groups"], first.groups.value());
  EXPECT_EQ(json["devices"][1]["errors"]["join"], 7);
  // Everything in the one form is in the other.
  const auto families = read_prometheus(prometheus_of(origin, readings));
  size_t samples = 0;
  for (const auto& [name, family] : families) {
    std::string key = name.substr(std::string("scape_net_").size());
    if (family.type == "counter") key.resize(key.size() - 6);
    for (const auto& [labels, value] : family.samples) {
      ++samples;
      EXPECT_EQ(labels.at("host"), "node");
      EXPECT_EQ(labels.at("pid"), "12");
      EXPECT_EQ(labels.at("rank"), "3");
      nlohmann::json at = json["devices"][labels.at("device") == "mlx5_0:1" ? 0 : 1][key];
      for (const char* label : {"interface", "direction", "operation"}) {
        if (labels.count(label) != 0) at = at[labels.at(label)];
      }
      EXPECT_EQ(at, value) << name;
    }
  }
  size_t leaves = 0;
  for (const auto& one : json["devices"]) {
    const nlohmann::json flat = one.flatten();
    for (const auto& value : flat) leaves += value.is_number();
  }
  EXPECT_EQ(samples, leaves);
  // No two counters are one: all values of fill() are there.
  std::set<unsigned long long> values;
  for (const auto& [name, family] : families) {
    for (const auto& [labels, value] : family.samples) values.insert(value);
  }
  EXPECT_EQ(values.size(),
            size_t{Retry::kCount} + size_t{Error::kCount} + 5 * 2 + 2 + 1 /* zero */ + 1 /* 7 */);
}

TEST(Statistics, NamesAreEscapedAndAnUnknownRankIsLeftOut) {
  DeviceCounters counters("a\"b\\c\nd", "ofi");
  const std::vector<Reading> readings = {read_counters(counters)};
  const Origin origin = {"h\xc3", 1, -1};
  const auto json = nlohmann::json::parse(json_of(origin, 0, readings));
  EXPECT_EQ(json["devices"][0]["device"], "a\"b\\c?d");
  EXPECT_EQ(json["host"], "h?");
  EXPECT_TRUE(json["rank"].is_null());
  const auto families = read_prometheus(prometheus_of(origin, readings));
  const PrometheusLabels labels = families.at("scape_net_groups").samples.begin()->first;
  EXPECT_EQ(labels.at("device"), "a\\\"b\\\\c?d");
  EXPECT_EQ(labels.count("rank"), 0u);
}

// The reader that the tests rely on takes nothing else.
TEST(Statistics, WhatIsNoPrometheusTextIsRefused) {
  const std::string head = "# HELP a_total Help.\n# TYPE a_total counter\n";
  EXPECT_EQ(read_prometheus(head + "a_total{x=\"1\\\"\",y=\"\"} 7\n").size(), 1u);
  for (const std::string bad :
       {"a_total{x=\"1\"} 7", "a_total{x=\"1\"} -7\n", "a_total{x=\"1\"} 7 \n", "a_total{} 7\n",
        "a_total{x=\"1\",} 7\n", "a_total{x=\"1} 7\n", "a_total{x=\"\\q\"} 7\n", "b{x=\"1\"} 7\n",
        "a_total{x=\"1\",x=\"2\"} 7\n", "a_total{x=\"1\"} 7\na_total{x=\"1\"} 8\n", "\n", "# x\n",
        "# HELP a_total Again.\n", "# TYPE a_total counter\n", "# HELP b Help.\n# TYPE b counter\n",
        "# HELP b_total Help.\nb_total{x=\"1\"} 7\n"}) {
    EXPECT_THROW(read_prometheus(head + bad), std::runtime_error) << bad;
  }
}

TEST_F(StatisticsPath, PlaceholdersAndFolders) {
  const Origin known = {"node", 12, 3}, unknown = {"node", 12, -1};
  std::string path;
  ASSERT_TRUE(statistics_path("/a/%h.%p.%r.100%%.prom", known, &path).ok());
  EXPECT_EQ(path, "/a/node.12.3.100%.prom");
  ASSERT_TRUE(statistics_path("x%r", unknown, &path).ok());
  EXPECT_EQ(path, "xunknown");
  ASSERT_TRUE(statistics_path("/not/there/", known, &path).ok());
  EXPECT_EQ(path, "/not/there/scape_net_node_12.json");
  ASSERT_TRUE(statistics_path(folder_, known, &path).ok());
  EXPECT_EQ(path, folder_ + "/scape_net_node_12.json");
  for (const std::string bad : {"/a/%x", "/a/%", "%H"}) {
    const Status status = statistics_path(bad, known, &path);
    ASSERT_FALSE(status.ok()) << bad;
    EXPECT_NE(status.message().find("SCAPE_NET_STATS=\"" + bad + "\""), std::string::npos)
        << status.message();
  }
}

TEST_F(ReplaceFile, InOneStepAndReadableByAll) {
  const std::string path = folder_ + "/counters.prom";
  const mode_t before = ::umask(077);
  ASSERT_TRUE(replace_file(path, "first\n").ok());
  const std::ifstream reader(path);
  struct stat first = {}, second = {};
  ASSERT_EQ(::stat(path.c_str(), &first), 0);
  ASSERT_TRUE(replace_file(path, "second, and longer\n").ok());
  ::umask(before);
  ASSERT_EQ(::stat(path.c_str(), &second), 0);
  EXPECT_EQ(second.st_mode & 07777, 0644u);
  EXPECT_NE(first.st_ino, second.st_ino);  // who has it open still reads the old text
  EXPECT_EQ(contents(path), "second, and longer\n");
  EXPECT_EQ((std::string{std::istreambuf_iterator<char>(reader.rdbuf()), {}}), "first\n");
  // Nothing is left beside it.
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(folder_), {}), 1);
}

TEST_F(ReplaceFile, WhatCannotBeWrittenIsNamedAndLeftAsItIs) {
  std::ofstream(folder_ + "/plain") << "kept";
  std::filesystem::create_symlink(folder_ + "/plain", folder_ + "/link");
  std::filesystem::create_directory(folder_ + "/folder");
  for (const std::string& path :
       {folder_ + "/nowhere/x", folder_ + "/plain/x", folder_ + "/link", folder_ + "/folder",
        std::string("/dev/null"), folder_ + "/" + std::string(300, 'n')}) {
    const Status status = replace_file(path, "text");
    ASSERT_FALSE(status.ok()) << path;
    EXPECT_NE(status.message().find(path), std::string::npos) << status.message();
    EXPECT_NE(status.message().find("SCAPE_NET_STATS"), std::string::npos) << status.message();
  }
  EXPECT_EQ(contents(folder_ + "/plain"), "kept");
  EXPECT_TRUE(std::filesystem::is_character_file("/dev/null"));
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(folder_), {}), 3);
}

TEST(Statistics, TheRankIsTheInnermostLaunchers) {
  ::setenv("SLURM_PROCID", "5", 1);
  EXPECT_EQ(find_origin().rank, 5);
  ::setenv("OMPI_COMM_WORLD_RANK", "4", 1);
  EXPECT_EQ(find_origin().rank, 4);
  ::setenv("RANK", "six", 1);
  EXPECT_EQ(find_origin().rank, 4);
  ::setenv("RANK", "6", 1);
  EXPECT_EQ(find_origin().rank, 6);
  EXPECT_EQ(find_origin().process, ::getpid());
}

}  // namespace
}  // namespace scape::net
