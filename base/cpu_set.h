// A set of the system's CPUs, as Linux numbers and writes them.
#pragma once

#include <sys/types.h>

#include <string>
#include <string_view>
#include <vector>

namespace scape {

class CpuSet {
 public:
  CpuSet() = default;
  explicit CpuSet(std::vector<int> cpus);

  // "0-3,8"; false, and the set as it was, where the text is no such list.
  static bool parse(std::string_view text, CpuSet* out);
  std::string text() const;

  bool empty() const { return cpus_.empty(); }
  size_t size() const { return cpus_.size(); }
  const std::vector<int>& cpus() const { return cpus_; }  // rising
  bool operator==(const CpuSet&) const = default;

  bool overlaps(const CpuSet& other) const { return !(*this & other).empty(); }
  CpuSet operator&(const CpuSet& other) const;  // in both
  CpuSet operator|(const CpuSet& other) const;  // in either
  CpuSet operator-(const CpuSet& other) const;  // in this one only

 private:
  std::vector<int> cpus_;
};

// Where a thread of this process may run (0: the calling one); empty where the system does not say.
CpuSet cpus_of_thread(pid_t thread);
// Where any thread of this process may run.
CpuSet cpus_of_process();
// Has the calling thread run there; false where the system refuses.
bool run_this_thread_on(const CpuSet& cpus);

}  // namespace scape
