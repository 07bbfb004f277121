// What a machine may lack or forbid: F33 (memory) and F34 (network). Each case makes its shortage
// in namespaces of its own, which end with its processes, however those end.
#include <fcntl.h>
#include <sched.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <linux/capability.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>

#include "tests/functional/cases/case.h"

namespace scape::cases {
namespace {

[[noreturn]] void skip(const std::string& why) {
  std::fprintf(stderr, "SKIPPED: %s\n", why.c_str());
  std::exit(77);
}

// Parts this process, and what it starts, from the machine's mounts or network.
void unshare_or_skip(int namespaces, const char* what) {
  if (::unshare(namespaces) != 0)
    skip(std::string(what) + " of its own is not permitted here: " + std::strerror(errno));
}

// ---- F33 ----

constexpr size_t kCount = 1000000;

// Both kinds of call, with exact results; or, where the shortage is what the user demands, an error
// that names it.
RANK_PART(F33_little_memory) {
  std::vector<float> gradient(kCount), dense(kCount);
  add(gradient.data(), kCount, "weights", 0.1);
  ncclComm_t comm = nullptr;
  const ncclResult_t made = ncclCommInitRank(&comm, self.ranks, self.next_id(), self.rank);
  if (made != ncclSuccess && argument() == "demanded") {
    const std::string why = ncclGetLastError(nullptr);
    CHECK_SAYING(contains(why, "HUGETLB_MODE") && contains(why, "0 are free"), why);
    return;
  }
  CHECK_SAYING(made == ncclSuccess, ncclGetLastError(nullptr));
  Conservation conservation(kCount);
  for (int step = 0; step < 3; ++step) {
    const std::vector<float> values = values_of(self, step, kCount);
    fill(gradient, values);
    conservation.input(values);
    all_reduce(gradient, comm);
    conservation.output(gradient);
    check_agreement(self, comm, gradient.data(), kCount * sizeof(float));

    std::vector<float> sum(kCount);
    for (int rank = 0; rank < self.ranks; ++rank) {
      Rank other = self;
      other.rank = rank;
      const std::vector<float> theirs = values_of(other, step, kCount);
      for (size_t i = 0; i < kCount; ++i) sum[i] += theirs[i];
    }
    fill(dense, values);
    all_reduce(dense, comm);
    CHECK(dense == sum);
  }
  conservation.check(self, comm, gradient.data());
  CHECK(stats_of(gradient.data(), kCount).sparse_calls == 2);
  NCCL(ncclCommDestroy(comm));
}

std::vector<Outcome> expect_results(const std::string& argument,
                                    const std::map<std::string, std::string>& environment = {}) {
  std::fprintf(stderr, "%s\n", argument.c_str());
  std::vector<Run> runs = rank_runs("F33_little_memory", 2, argument);
  for (Run& one : runs)
    for (const auto& [name, value] : environment) one.environment[name] = value;
  return expect(runs, {0, 0});
}

void mount_or_skip(const char* source, const char* target, const char* type, unsigned long flags,
                   const char* options) {
  if (::mount(source, target, type, flags, options) != 0)
    skip(std::string("mounting over ") + target +
         " is not permitted here: " + std::strerror(errno));
}

LAUNCHED_CASE(F33_little_shared_memory) {
  unshare_or_skip(CLONE_NEWNS, "a set of mounts");
  mount_or_skip("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr);
  mount_or_skip("tmpfs", "/dev/shm", "tmpfs", 0, "size=1m");
  expect_results("of 1 MiB");

  const int file = ::open("/dev/shm/full", O_CREAT | O_WRONLY | O_CLOEXEC, 0600);
  const std::vector<char> block(4096, 1);
  while (::write(file, block.data(), block.size()) > 0) {
  }
  CHECK(errno == ENOSPC);
  ::close(file);
  const char* const transport = std::getenv("SCAPE_TRANSPORT");
  const bool ucx = transport == nullptr || std::string(transport) == "ucx";
  for (const Outcome& outcome : expect_results("full"))
    CHECK_SAYING(contains(outcome.err, "0.0 MiB are free there") == ucx, outcome.err);

  // A /dev that has only what programs cannot do without.
  char folder[] = "/tmp/scape_case_XXXXXX";
  CHECK(::mkdtemp(folder) != nullptr);
  mount_or_skip("tmpfs", folder, "tmpfs", 0, "size=1m");
  for (const std::string name : {"null", "zero", "random", "urandom"}) {
    const std::string place = std::string(folder) + "/" + name;
    std::ofstream(place).close();
    mount_or_skip(("/dev/" + name).c_str(), place.c_str(), nullptr, MS_BIND, nullptr);
  }
  mount_or_skip(folder, "/dev", nullptr, MS_MOVE, nullptr);
  std::filesystem::remove(folder);
  CHECK(!std::filesystem::exists("/dev/shm"));
  expect_results("absent");
}

LAUNCHED_CASE(F33_little_locked_memory) {
  const rlimit limit{65536, 65536};
  CHECK(::setrlimit(RLIMIT_MEMLOCK, &limit) == 0);
  // Else the limit does not hold for root.
  CHECK(::prctl(PR_CAPBSET_DROP, CAP_IPC_LOCK) == 0 || ::geteuid() != 0);
  expect_results("locked");
}

LAUNCHED_CASE(F33_no_huge_pages) {
  std::ifstream reserved("/proc/sys/vm/nr_hugepages");
  int pages = 0;
  if (reserved >> pages && pages != 0) skip("this machine has huge pages reserved");
  expect_results("wished for", {{"UCX_ALLOC_PRIO", "huge,thp,md:sysv,md:posix,mmap,heap"},
                                {"UCX_SYSV_HUGETLB_MODE", "try"},
                                {"UCX_POSIX_HUGETLB_MODE", "try"}});
  expect_results("demanded", {{"UCX_SYSV_HUGETLB_MODE", "y"}, {"UCX_POSIX_HUGETLB_MODE", "y"}});
}

}  // namespace
}  // namespace scape::cases
