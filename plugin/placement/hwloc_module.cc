// The topology by hwloc.
#include <hwloc.h>

#include <cerrno>
#include <cstring>
#include <memory>

#include "plugin/placement/topology.h"

namespace scape::plugin {
namespace {

struct Destroy {
  void operator()(hwloc_topology* topology) const { hwloc_topology_destroy(topology); }
  void operator()(hwloc_bitmap_s* bitmap) const { hwloc_bitmap_free(bitmap); }
};
using TopologyPtr = std::unique_ptr<hwloc_topology, Destroy>;
using BitmapPtr = std::unique_ptr<hwloc_bitmap_s, Destroy>;

CpuSet cpus_of(hwloc_const_bitmap_t bitmap) {
  std::vector<int> cpus;
  for (int cpu = hwloc_bitmap_first(bitmap); cpu >= 0; cpu = hwloc_bitmap_next(bitmap, cpu)) {
    cpus.push_back(cpu);
  }
  return CpuSet(std::move(cpus));
}

std::vector<CpuSet> sets_of(hwloc_topology_t topology, hwloc_obj_type_t type) {
  std::vector<CpuSet> sets;
  for (hwloc_obj_t object = hwloc_get_next_obj_by_type(topology, type, nullptr); object != nullptr;
       object = hwloc_get_next_obj_by_type(topology, type, object)) {
    CpuSet cpus = cpus_of(object->cpuset);
    if (!cpus.empty()) sets.push_back(std::move(cpus));
  }
  return sets;
}

Status failed(const char* what) {
  return error(SCAPE_ERR_SYSTEM, "hwloc: %s: %s", what, std::strerror(errno));
}

Status read(const char* synthetic, const void* data, size_t bytes, Topology* out, CpuSet* near) {
  hwloc_topology_t made = nullptr;
  if (hwloc_topology_init(&made) != 0) return failed("init");
  const TopologyPtr topology(made);
  if (synthetic != nullptr && hwloc_topology_set_synthetic(made, synthetic) != 0) {
    return failed(synthetic);
  }
  // Its x86 component binds the calling thread to each CPU in turn, to look at it from there.
  hwloc_topology_set_components(made, HWLOC_TOPOLOGY_COMPONENTS_FLAG_BLACKLIST, "x86");
  if (hwloc_topology_load(made) != 0) return failed("load");
  out->cores = sets_of(made, HWLOC_OBJ_CORE);
  // Some systems do not say which CPUs make a core.
  if (out->cores.empty()) out->cores = sets_of(made, HWLOC_OBJ_PU);
  out->nodes = sets_of(made, HWLOC_OBJ_NUMANODE);
  *near = {};
  if (bytes == 0) return Status::Ok();
  const BitmapPtr nodes(hwloc_bitmap_alloc()), cpus(hwloc_bitmap_alloc());
  if (nodes == nullptr || cpus == nullptr) return error(SCAPE_ERR_MEMORY, "hwloc: no memory");
  if (hwloc_get_area_memlocation(made, data, bytes, nodes.get(), HWLOC_MEMBIND_BYNODESET) == 0) {
    hwloc_cpuset_from_nodeset(made, cpus.get(), nodes.get());
    *near = cpus_of(cpus.get());
  }
  return Status::Ok();
}

}  // namespace
}  // namespace scape::plugin

extern "C" __attribute__((visibility("default")))
const scape::plugin::TopologyModule scape_topology_module = {scape::plugin::kTopologyAbi,
                                                             &scape::plugin::read};
