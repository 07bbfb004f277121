// Where the progress thread of real ranks runs, and on what pages their buffers are.
#include <sched.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <future>
#include <set>
#include <sstream>
#include <thread>

#include "base/large_pages.h"
#include "tests/functional/cases/case.h"
#include "tests/support/large_pages.h"

namespace scape::cases {
namespace {

std::string cpus_line(const std::filesystem::path& status) {
  std::ifstream file(status);
  const std::string key = "Cpus_allowed_list:\t";
  std::string line;
  while (std::getline(file, line)) {
    if (line.rfind(key, 0) == 0) return line.substr(key.size());
  }
  return {};
}

std::string progress_thread_cpus() {
  for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
    std::ifstream file(task.path() / "comm");
    std::string name;
    std::getline(file, name);
    if (name == "scape-progress") return cpus_line(task.path() / "status");
  }
  return "no thread";
}

std::vector<int> own_cpus() {
  cpu_set_t set;
  CHECK(::sched_getaffinity(0, sizeof set, &set) == 0);
  std::vector<int> cpus;
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (CPU_ISSET(cpu, &set)) cpus.push_back(cpu);
  }
  return cpus;
}

constexpr size_t kCount = 20000;

// Trains a little, pinned to its first CPU where `argument` is "pinned", with one more thread that
// is not; then says where the progress thread may run.
RANK_PART(placement_progress_thread) {
  std::promise<void> over;
  std::thread other([&] { over.get_future().wait(); });
  if (argument() == "pinned") {
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(own_cpus().front(), &one);
    CHECK(::sched_setaffinity(0, sizeof one, &one) == 0);
  }
  std::vector<float> gradient(kCount);
  add(gradient.data(), kCount, "weights", 0.1);
  ncclComm_t comm = self.init();
  Conservation conservation(kCount);
  for (int step = 0; step < 4; ++step) {
    fill(gradient, values_of(self, step, kCount));
    conservation.input(gradient);
    all_reduce(gradient, comm);
    conservation.output(gradient);
  }
  conservation.check(self, comm, gradient.data());
  std::fprintf(stderr, "PROGRESS %s\n", progress_thread_cpus().c_str());
  self.meet("looked");
  NCCL(ncclCommDestroy(comm));
  over.set_value();
  other.join();
}

struct Seen {
  std::string cpus[2];  // of each rank's progress thread
  std::string err;
};

Seen look(const std::string& how, const std::string& setting,
          const std::map<std::string, std::string>& environment = {}, int only_cpu = -1) {
  std::vector<Run> runs = rank_runs("placement_progress_thread", 2, how);
  for (Run& one : runs) {
    // As a launcher does that starts one rank on each host.
    one.environment["LOCAL_WORLD_SIZE"] = "1";
    one.environment["SCAPE_PROGRESS_CPUS"] = setting;
    for (const auto& [name, value] : environment) one.environment[name] = value;
    if (only_cpu >= 0) one.command = {"taskset", "-c", std::to_string(only_cpu), this_program()};
  }
  const std::vector<Outcome> outcomes = expect(runs, {0, 0});
  Seen seen;
  for (size_t rank = 0; rank < 2; ++rank) {
    const std::string& err = outcomes[rank].err;
    const size_t at = err.find("PROGRESS ");
    CHECK_SAYING(at != std::string::npos, err);
    seen.cpus[rank] = err.substr(at + 9, err.find('\n', at) - at - 9);
    seen.err += err;
  }
  return seen;
}

void expect_cpus(const Seen& seen, const std::string& cpus) {
  for (const std::string& one : seen.cpus) CHECK_SAYING(one == cpus, one + ", not " + cpus);
}

void need_two_cpus() {
  if (own_cpus().size() >= 2) return;
  std::fprintf(stderr, "SKIPPED: two CPUs are needed\n");
  std::exit(77);
}

LAUNCHED_CASE(placement_keeps_to_the_cpus_of_the_process) {
  const int only = own_cpus().back();
  for (const char* setting : {"auto", "none", "0-65535"}) {
    for (const char* how : {"free", "pinned"}) {
      expect_cpus(look(how, setting, {}, only), std::to_string(only));
    }
  }
  // CPUs that the process may not use are no place, and that is said.
  const Seen seen = look("free", "65535", {}, only);
  expect_cpus(seen, std::to_string(only));
  CHECK_SAYING(contains(seen.err, "SCAPE_PROGRESS_CPUS=65535"), seen.err);
}

LAUNCHED_CASE(placement_off_a_pinned_callers_cpu) {
  need_two_cpus();
  const std::string first = std::to_string(own_cpus().front());
  const std::string last = std::to_string(own_cpus().back());
  expect_cpus(look("pinned", "none"), first);
  expect_cpus(look("pinned", last), last);
  std::set<std::string> cores;
  for (const int cpu : own_cpus()) {
    std::ifstream siblings("/sys/devices/system/cpu/cpu" + std::to_string(cpu) +
                           "/topology/thread_siblings_list");
    std::string line;
    std::getline(siblings, line);
    cores.insert(line);
  }
  const Seen seen = look("pinned", "auto");
  for (const std::string& one : seen.cpus) {
    if (cores.size() < 2) {
      CHECK_SAYING(one == first, one);
    } else {
      CHECK_SAYING(one != first && one.rfind(first + "-", 0) != 0 && one.rfind(first + ",", 0) != 0,
                   one);
    }
  }
}

// Without hwloc nothing is done, and nothing else is different.
LAUNCHED_CASE(placement_without_hwloc) {
  need_two_cpus();
  char folder[] = "/tmp/scape_case_XXXXXX";
  CHECK(::mkdtemp(folder) != nullptr);
  std::ofstream(std::string(folder) + "/libhwloc.so.15").close();
  const Seen seen = look("pinned", "auto", {{"SCAPE_LOG", "debug"}, {"LD_LIBRARY_PATH", folder}});
  std::filesystem::remove_all(folder);
  expect_cpus(seen, std::to_string(own_cpus().front()));
  CHECK_SAYING(contains(seen.err, "libscape_hwloc.so cannot be loaded"), seen.err);
}

LAUNCHED_CASE(placement_settings_that_are_none) {
  std::vector<Run> runs = rank_runs("placement_refused", 1);
  runs[0].environment["SCAPE_PROGRESS_CPUS"] = "0-";
  const std::string err = expect(runs, {0})[0].err;
  CHECK_SAYING(contains(err, "SCAPE_PROGRESS_CPUS=\"0-\"") && contains(err, "0-3,8"), err);
}
RANK_PART(placement_refused) {
  ncclUniqueId id;
  CHECK(ncclGetUniqueId(&id) != ncclSuccess);
  std::fprintf(stderr, "%s\n", ncclGetLastError(nullptr));
}

// A registered buffer is on large pages after its first call, where the system gives any.
RANK_PART(placement_large_pages) {
  constexpr size_t kElements = size_t{2} << 20;
  std::vector<float> gradient(kElements, 1.0f);
  add(gradient.data(), kElements, "weights", 0.1);
  ncclComm_t comm = self.init();
  all_reduce(gradient, comm);
  for (const float value : gradient) CHECK(value == static_cast<float>(self.ranks));
  std::fprintf(stderr, "LARGE %zu\n",
               testing::bytes_on_large_pages(gradient.data(), kElements * sizeof(float)));
  NCCL(ncclCommDestroy(comm));
}

LAUNCHED_CASE(placement_of_buffers_on_large_pages) {
  std::vector<char> probe(3 * kLargePage, 1);
  move_to_large_pages(probe.data(), probe.size());
  const bool given = testing::bytes_on_large_pages(probe.data(), probe.size()) > 0;
  for (const char* setting : {"0", "1"}) {
    std::vector<Run> runs = rank_runs("placement_large_pages", 2);
    for (Run& one : runs) one.environment["SCAPE_LARGE_PAGES"] = setting;
    for (const Outcome& outcome : expect(runs, {0, 0})) {
      const bool small = contains(outcome.err, "LARGE 0\n");
      CHECK_SAYING(small == (!given || std::string(setting) == "0"), outcome.err);
    }
  }
}

}  // namespace
}  // namespace scape::cases
