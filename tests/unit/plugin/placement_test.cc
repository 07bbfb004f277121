// Where background threads go, over machines that hwloc makes up.
#include "plugin/placement/placement.h"

#include <gtest/gtest.h>

#include <random>
#include <string>
#include <vector>

namespace scape::plugin {
namespace {

CpuSet cpus(const std::string& text) {
  CpuSet set;
  EXPECT_TRUE(text.empty() || CpuSet::parse(text, &set)) << text;
  return set;
}

const TopologyModule& module() {
  const TopologyModule* loaded = nullptr;
  const Status status = load_topology_module(&loaded);
  EXPECT_TRUE(status.ok()) << status.message();
  return *loaded;
}

Topology machine(const char* synthetic) {
  Topology topology;
  CpuSet near;
  const Status status = module().read(synthetic, nullptr, 0, &topology, &near);
  EXPECT_TRUE(status.ok()) << status.message();
  EXPECT_TRUE(near.empty());
  return topology;
}

// Two sockets of four cores, each with two CPUs beside each other: cores 0-1, 2-3, ...
constexpr const char* kTwoSockets = "pack:2 [numa] core:4 pu:2";
// The same, numbered as Linux does: the second CPU of core 0 is 8.
constexpr const char* kLinuxNumbers =
    "pack:2 [numa] core:4 pu:2(indexes=0,8,1,9,2,10,3,11,4,12,5,13,6,14,7,15)";
constexpr const char* kTwoCores = "core:2 pu:1";

std::string choice(const char* synthetic, const char* allowed, const char* caller, const char* near,
                   int ranks) {
  return choose_cpus({machine(synthetic), cpus(allowed), cpus(caller), cpus(near), ranks}).text();
}

TEST(Placement, SyntheticMachinesAreRead) {
  const Topology two = machine(kTwoSockets);
  ASSERT_EQ(two.cores.size(), 8u);
  EXPECT_EQ(two.cores[1].text(), "2-3");
  ASSERT_EQ(two.nodes.size(), 2u);
  EXPECT_EQ(two.nodes[1].text(), "8-15");
  EXPECT_EQ(machine(kLinuxNumbers).cores[1].text(), "1,9");
  EXPECT_EQ(machine(kTwoCores).nodes.size(), 1u);
}

TEST(Placement, ACallerThatMayRunAnywhereHasNothingToBeKeptOff) {
  EXPECT_EQ(choice(kTwoSockets, "0-15", "0-15", "", 1), "");
  EXPECT_EQ(choice(kTwoCores, "0-1", "0-1", "0-1", 1), "");
  EXPECT_EQ(choice(kTwoSockets, "4-7", "4-7", "", 1), "");
}

TEST(Placement, APinnedCallersCoreIsItsOwn) {
  EXPECT_EQ(choice(kTwoSockets, "0-15", "0", "", 1), "2-15");
  EXPECT_EQ(choice(kTwoSockets, "0-15", "0-1", "", 1), "2-15");
  EXPECT_EQ(choice(kLinuxNumbers, "0-15", "1", "", 1), "0,2-8,10-15");
  EXPECT_EQ(choice(kTwoCores, "0-1", "1", "", 1), "0");
  // Where each core has a CPU of the caller's, the siblings are what is left.
  EXPECT_EQ(choice(kTwoSockets, "0-3", "0,2", "", 1), "1,3");
  // Within what the process may use.
  EXPECT_EQ(choice(kTwoSockets, "0-5", "0", "", 1), "2-5");
}

TEST(Placement, NextToTheMemory) {
  EXPECT_EQ(choice(kTwoSockets, "0-15", "0-15", "8-15", 1), "8-15");
  EXPECT_EQ(choice(kTwoSockets, "0-15", "0", "0-7", 1), "2-7");
  EXPECT_EQ(choice(kTwoSockets, "0-15", "0", "8-15", 4), "8-15");
  // Memory of both nodes, or of one that the process may not use.
  EXPECT_EQ(choice(kTwoSockets, "0-15", "0-15", "0-15", 1), "");
  EXPECT_EQ(choice(kTwoSockets, "0-7", "0-7", "8-15", 1), "");
  EXPECT_EQ(choice(kTwoSockets, "0-7", "2", "8-15", 1), "0-1,4-7");
}

TEST(Placement, WithFewerCoresThanThreadsNothingIsDone) {
  EXPECT_EQ(choice(kTwoCores, "0-1", "0", "", 2), "");
  EXPECT_EQ(choice(kTwoSockets, "0-1", "0", "", 1), "");  // two CPUs, but one core
  EXPECT_EQ(choice(kTwoSockets, "0-15", "0-15", "8-15", 5), "");
  EXPECT_EQ(choice(kTwoSockets, "0-3", "0-3", "0-3", 2), "");
  // One node's cores have to do for the threads of all ranks.
  EXPECT_EQ(choice("[numa] pack:2 [numa] core:4 pu:1", "0-7", "0-7", "0-1", 3), "");
  EXPECT_EQ(choice(kTwoCores, "", "", "", 1), "");
}

TEST(Placement, WhateverTheMachineTheChoiceIsWithinWhatIsAllowed) {
  std::mt19937 random(1);
  for (const char* synthetic : {kTwoSockets, kLinuxNumbers, kTwoCores, "pack:4 [numa] core:3 pu:1",
                                "pack:2 die:2 [numa] l3:2 core:2 pu:4", "core:1 pu:8"}) {
    const Topology topology = machine(synthetic);
    CpuSet all;
    for (const CpuSet& core : topology.cores) all = all | core;
    const auto some = [&](const CpuSet& of) {
      std::vector<int> picked;
      const uint32_t odds = random() % 4;
      for (const int cpu : of.cpus()) {
        if (random() % 4 <= odds) picked.push_back(cpu);
      }
      return CpuSet(picked);
    };
    for (int i = 0; i < 2000; ++i) {
      PlacementQuestion question;
      question.topology = topology;
      question.allowed = some(all);
      question.caller = random() % 3 == 0 ? question.allowed : some(question.allowed);
      question.near = some(all);
      question.ranks = static_cast<int>(random() % 5);
      const CpuSet chosen = choose_cpus(question);
      const std::string asked = question.allowed.text() + " | " + question.caller.text() + " | " +
                                question.near.text() + " | " + std::to_string(question.ranks);
      ASSERT_EQ((chosen - question.allowed).text(), "") << asked;
      if (chosen.empty()) continue;
      ASSERT_NE(chosen, question.caller) << asked;
      // A caller that is kept from anything shares no CPU with it.
      if (question.caller != question.allowed) {
        ASSERT_FALSE(chosen.overlaps(question.caller)) << asked;
      }
    }
  }
}

TEST(Placement, ThisMachineIsReadWithoutMovingTheReader) {
  const CpuSet before = cpus_of_thread(0);
  Topology topology;
  CpuSet near, all;
  std::vector<char> memory(1 << 20, 1);
  const Status status = module().read(nullptr, memory.data(), memory.size(), &topology, &near);
  ASSERT_TRUE(status.ok()) << status.message();
  for (const CpuSet& core : topology.cores) {
    EXPECT_FALSE(core.overlaps(all));
    all = all | core;
  }
  EXPECT_FALSE(before.empty());
  EXPECT_EQ((before - all).text(), "");
  EXPECT_EQ((near - all).text(), "");
  EXPECT_EQ(cpus_of_thread(0), before);
  // Memory that is not there is memory nobody knows of.
  EXPECT_TRUE(module().read(nullptr, reinterpret_cast<void*>(4096), 4096, &topology, &near).ok());
  EXPECT_TRUE(near.empty() || near == all) << near.text();
}

TEST(Placement, WrongDescriptionsAreErrors) {
  Topology topology;
  CpuSet near;
  EXPECT_FALSE(module().read("no such machine", nullptr, 0, &topology, &near).ok());
}

}  // namespace
}  // namespace scape::plugin
