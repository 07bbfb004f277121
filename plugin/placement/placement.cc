#include "plugin/placement/placement.h"

#include <dlfcn.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <mutex>
#include <string>

#include "base/log.h"
#include "base/module.h"
#include "base/settings.h"

namespace scape::plugin {
namespace {

// Where memory lies is asked of so much of it: each page costs the system a look.
constexpr size_t kLookedAt = size_t{4} << 20;

size_t cores_in(const Topology& topology, const CpuSet& cpus) {
  return static_cast<size_t>(
      std::count_if(topology.cores.begin(), topology.cores.end(),
                    [&](const CpuSet& core) { return core.overlaps(cpus); }));
}

// All CPUs of the cores that these are of.
CpuSet whole_cores(const Topology& topology, const CpuSet& cpus) {
  CpuSet whole;
  for (const CpuSet& core : topology.cores) {
    if (core.overlaps(cpus)) whole = whole | core;
  }
  return whole;
}

bool has_one_node() {
  std::ifstream file("/sys/devices/system/node/online");
  std::string nodes;
  return !(file >> nodes) || nodes.find_first_of(",-") == std::string::npos;
}

// The ranks of this communicator that are on this host, at most. Launchers say how many there are;
// their word is taken from the environment that the process was started with, which stays as it is.
int ranks_here(int ranks) {
  for (const char* name :
       {"LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"}) {
    const int here = std::atoi(variable_at_start(name).c_str());
    if (here > 0) return std::min(ranks, here);
  }
  return ranks;
}

CpuSet choose_by_topology(const char* purpose, PlacementQuestion question, const void* data,
                          size_t bytes) {
  // Nothing to choose from.
  if (question.allowed == question.caller && has_one_node()) return {};
  const TopologyModule* module = nullptr;
  Status status = load_topology_module(&module);
  if (status.ok()) {
    status =
        module->read(nullptr, data, std::min(bytes, kLookedAt), &question.topology, &question.near);
  }
  if (!status.ok()) {
    SCAPE_DEBUG("the thread for %s runs where the system puts it: %s", purpose,
                status.message().c_str());
    return {};
  }
  return choose_cpus(question);
}

}  // namespace

Status load_topology_module(const TopologyModule** out) {
  static std::mutex* const mutex = new std::mutex;  // never destroyed: used until the last moment
  static const TopologyModule* loaded = nullptr;
  std::lock_guard<std::mutex> lock(*mutex);
  if (loaded == nullptr) {
    void* handle = nullptr;
    SCAPE_RETURN_IF_ERROR(open_module("hwloc", &handle));
    const auto* module = static_cast<const TopologyModule*>(dlsym(handle, kTopologyModuleSymbol));
    if (module == nullptr || module->abi != kTopologyAbi) {
      return error(SCAPE_ERR_SYSTEM,
                   "libscape_hwloc.so is of another build of scape; reinstall it");
    }
    loaded = module;
  }
  *out = loaded;
  return Status::Ok();
}

CpuSet choose_cpus(const PlacementQuestion& question) {
  const Topology& topology = question.topology;
  const auto ranks = static_cast<size_t>(std::max(question.ranks, 1));
  if (cores_in(topology, question.allowed) < 2 * ranks) return {};
  CpuSet chosen = question.allowed;
  if (question.caller != question.allowed) {
    chosen = question.allowed - whole_cores(topology, question.caller);
    if (chosen.empty()) chosen = question.allowed - question.caller;
  }
  const CpuSet near = chosen & question.near;
  if (cores_in(topology, near) >= ranks) chosen = near;
  return chosen == question.caller ? CpuSet() : chosen;
}

void place_this_thread(const char* purpose, const void* data, size_t bytes, int ranks) {
  const CpuChoice& setting = settings().progress_cpus;
  PlacementQuestion question;
  question.allowed = cpus_of_process();
  question.caller = cpus_of_thread(0);
  CpuSet chosen;
  if (!setting.cpus.empty()) {
    chosen = setting.cpus & question.allowed;
    if (chosen.empty()) {
      SCAPE_WARN(
          "SCAPE_PROGRESS_CPUS=%s: none of these is among the CPUs that this process may use, %s; "
          "the thread for %s runs where the system puts it",
          setting.cpus.text().c_str(), question.allowed.text().c_str(), purpose);
      return;
    }
  } else if (setting.automatic) {
    question.ranks = ranks_here(ranks);
    chosen = choose_by_topology(purpose, std::move(question), data, bytes);
  }
  if (chosen.empty()) return;
  if (run_this_thread_on(chosen)) {
    SCAPE_DEBUG("the thread for %s runs on CPUs %s", purpose, chosen.text().c_str());
  } else {
    SCAPE_DEBUG("the thread for %s cannot be put on CPUs %s", purpose, chosen.text().c_str());
  }
}

}  // namespace scape::plugin
