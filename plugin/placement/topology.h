// What the machine's CPUs share, as placement needs it. hwloc knows it; the module
// libscape_hwloc.so alone links that, so that nothing needs it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/cpu_set.h"
#include "base/status.h"

namespace scape::plugin {

struct Topology {
  std::vector<CpuSet> cores;  // the CPUs of each: one, or those that share it
  std::vector<CpuSet> nodes;  // the CPUs of each NUMA node that has any
};

// What a module exports as `scape_topology_module`. The number changes with any type above.
inline constexpr uint32_t kTopologyAbi = 1;
struct TopologyModule {
  uint32_t abi;
  // Of this machine, or of the one that hwloc's `synthetic` description is of. Where there are
  // bytes, *near gets the CPUs of the NUMA nodes that they lie on: none where nobody knows.
  Status (*read)(const char* synthetic, const void* data, size_t bytes, Topology* out,
                 CpuSet* near);
};
inline constexpr char kTopologyModuleSymbol[] = "scape_topology_module";

// Loads the module at the first call. Thread-safe.
Status load_topology_module(const TopologyModule** out);

}  // namespace scape::plugin
