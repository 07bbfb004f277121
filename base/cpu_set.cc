#include "base/cpu_set.h"

#include <dirent.h>
#include <sched.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstdlib>
#include <iterator>
#include <utility>

namespace scape {
namespace {

// More than any kernel is built for.
constexpr int kMostCpus = 1 << 16;

// The whole text is one number of a CPU.
bool parse_cpu(std::string_view text, int* cpu) {
  const char* const end = text.data() + text.size();
  const auto [stop, problem] = std::from_chars(text.data(), end, *cpu);
  return problem == std::errc() && stop == end && *cpu >= 0 && *cpu < kMostCpus;
}

std::vector<cpu_set_t> room_for(int cpus) {
  return std::vector<cpu_set_t>((static_cast<size_t>(cpus) + CPU_SETSIZE - 1) / CPU_SETSIZE);
}

}  // namespace

CpuSet::CpuSet(std::vector<int> cpus) : cpus_(std::move(cpus)) {
  std::sort(cpus_.begin(), cpus_.end());
  cpus_.erase(std::unique(cpus_.begin(), cpus_.end()), cpus_.end());
}

bool CpuSet::parse(std::string_view text, CpuSet* out) {
  std::vector<int> cpus;
  for (bool more = true; more;) {
    const size_t comma = text.find(',');
    more = comma != std::string_view::npos;
    const std::string_view range = text.substr(0, comma);
    if (more) text.remove_prefix(comma + 1);
    const size_t dash = range.find('-');
    int first = 0, last = 0;
    if (!parse_cpu(range.substr(0, dash), &first)) return false;
    if (dash == std::string_view::npos) {
      last = first;
    } else if (!parse_cpu(range.substr(dash + 1), &last) || last < first) {
      return false;
    }
    for (int cpu = first; cpu <= last; ++cpu) cpus.push_back(cpu);
  }
  *out = CpuSet(std::move(cpus));
  return true;
}

std::string CpuSet::text() const {
  std::string text;
  for (size_t i = 0; i < cpus_.size();) {
    size_t last = i;
    while (last + 1 < cpus_.size() && cpus_[last + 1] == cpus_[last] + 1) ++last;
    text += (text.empty() ? "" : ",") + std::to_string(cpus_[i]);
    if (last > i) text += "-" + std::to_string(cpus_[last]);
    i = last + 1;
  }
  return text;
}

CpuSet CpuSet::operator&(const CpuSet& other) const {
  CpuSet result;
  std::set_intersection(cpus_.begin(), cpus_.end(), other.cpus_.begin(), other.cpus_.end(),
                        std::back_inserter(result.cpus_));
  return result;
}

CpuSet CpuSet::operator|(const CpuSet& other) const {
  CpuSet result;
  std::set_union(cpus_.begin(), cpus_.end(), other.cpus_.begin(), other.cpus_.end(),
                 std::back_inserter(result.cpus_));
  return result;
}

CpuSet CpuSet::operator-(const CpuSet& other) const {
  CpuSet result;
  std::set_difference(cpus_.begin(), cpus_.end(), other.cpus_.begin(), other.cpus_.end(),
                      std::back_inserter(result.cpus_));
  return result;
}

CpuSet cpus_of_thread(pid_t thread) {
  // The system takes no room that is smaller than its own sets.
  for (int most = CPU_SETSIZE; most <= kMostCpus; most *= 2) {
    std::vector<cpu_set_t> room = room_for(most);
    const size_t bytes = room.size() * sizeof(cpu_set_t);
    if (::sched_getaffinity(thread, bytes, room.data()) != 0) {
      if (errno == EINVAL) continue;
      return {};
    }
    std::vector<int> cpus;
    for (int cpu = 0; cpu < most; ++cpu) {
      if (CPU_ISSET_S(static_cast<size_t>(cpu), bytes, room.data())) cpus.push_back(cpu);
    }
    return CpuSet(std::move(cpus));
  }
  return {};
}

CpuSet cpus_of_process() {
  CpuSet all;
  DIR* const tasks = ::opendir("/proc/self/task");
  if (tasks == nullptr) return cpus_of_thread(0);
  while (const dirent* const entry = ::readdir(tasks)) {
    const pid_t thread = std::atoi(entry->d_name);  // 0 for "." and ".."
    if (thread > 0) all = all | cpus_of_thread(thread);
  }
  ::closedir(tasks);
  return all;
}

bool run_this_thread_on(const CpuSet& cpus) {
  if (cpus.empty()) return false;
  std::vector<cpu_set_t> room = room_for(cpus.cpus().back() + 1);
  const size_t bytes = room.size() * sizeof(cpu_set_t);
  for (const int cpu : cpus.cpus()) CPU_SET_S(static_cast<size_t>(cpu), bytes, room.data());
  return ::sched_setaffinity(0, bytes, room.data()) == 0;
}

}  // namespace scape
