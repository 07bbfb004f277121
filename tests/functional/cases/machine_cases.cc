// What a machine may lack or forbid: F33 (memory) and F34 (network). Each case makes its shortage
// in namespaces of its own, which end with its processes, however those end.
#include <fcntl.h>
#include <linux/capability.h>
#include <netinet/in.h>
#include <sched.h>
#include <signal.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <set>
#include <sstream>

#include "tests/functional/cases/case.h"
#include "tests/support/slowdown.h"

namespace scape::cases {
namespace {

[[noreturn]] void skip(const std::string& why) {
  std::fprintf(stderr, "SKIPPED: %s\n", why.c_str());
  std::exit(77);
}

bool over_ucx() {
  const char* const transport = std::getenv("SCAPE_TRANSPORT");
  return transport == nullptr || std::string(transport) == "ucx";
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
  if (::unshare(CLONE_NEWNS) != 0)
    skip(std::string("mounts of its own are not permitted here: ") + std::strerror(errno));
  mount_or_skip("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr);
  mount_or_skip("tmpfs", "/dev/shm", "tmpfs", 0, "size=1m");
  expect_results("of 1 MiB");

  const int file = ::open("/dev/shm/full", O_CREAT | O_WRONLY | O_CLOEXEC, 0600);
  const std::vector<char> block(4096, 1);
  while (::write(file, block.data(), block.size()) > 0) {
  }
  CHECK(errno == ENOSPC);
  ::close(file);
  for (const Outcome& outcome : expect_results("full"))
    CHECK_SAYING(contains(outcome.err, "0.0 MiB are free there") == over_ucx(), outcome.err);

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

// ---- F34 ----

constexpr size_t kSmall = 100;
// Sends what is meant for the first host to one that is not there.
constexpr const char* kCut =
    "ip neighbour replace 10.77.9.1 lladdr 02:00:00:00:00:77 dev wire1 nud permanent";

// The ports that this process listens on.
std::set<int> listening_ports() {
  std::set<std::string> mine;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code gone;  // the descriptor of this very listing
    mine.insert(std::filesystem::read_symlink(entry.path(), gone));
  }
  std::set<int> ports;
  for (const char* table : {"/proc/self/net/tcp", "/proc/self/net/tcp6"}) {
    std::ifstream file(table);
    std::string line;
    for (std::getline(file, line); std::getline(file, line);) {
      std::istringstream words(line);
      std::string number, local, peer, state, queues, timer, retries, user, timeout, inode;
      words >> number >> local >> peer >> state >> queues >> timer >> retries >> user >> timeout >>
          inode;
      if (state == "0A" && mine.count("socket:[" + inode + "]") != 0)
        ports.insert(std::stoi(local.substr(local.rfind(':') + 1), nullptr, 16));
    }
  }
  return ports;
}

void check_ports(const char* when) {
  if (argument() != "ports") return;
  const std::set<int> ports = listening_ports();
  std::string text = when;
  for (const int port : ports) text += " " + std::to_string(port);
  CHECK_SAYING(!ports.empty(), text);
  CHECK_SAYING(*ports.begin() >= 20000 && *ports.rbegin() <= 20009, text);
}

// Exact results, or an error in time for the launcher to judge: where the argument is "fails" in
// the communicator's creation or first call, and where it is "cut" in a later one.
RANK_PART(F34_calls) {
  auto began = std::chrono::steady_clock::now();
  bool fails = argument() == "fails";
  const auto over = [&](ncclResult_t result, ncclComm_t comm) {
    CHECK_SAYING(fails == (result != ncclSuccess), ncclGetLastError(comm));
    if (result == ncclSuccess) return false;
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - began;
    std::fprintf(stderr, "after %.1f s: %s\n", seconds.count(), ncclGetLastError(comm));
    CHECK(seconds.count() < 15 * test::kSlowdown);
    return true;
  };
  if (argument() == "no id") {
    ncclUniqueId id;
    CHECK(ncclGetUniqueId(&id) != ncclSuccess);
    std::fprintf(stderr, "%s\n", ncclGetLastError(nullptr));
    return;
  }
  std::vector<float> gradient(kSmall), dense(kSmall);
  add(gradient.data(), kSmall, "weights", 0.1);
  const ncclUniqueId id = self.next_id();
  if (self.rank == 0) check_ports("with an id");
  ncclComm_t comm = nullptr;
  ncclResult_t result = ncclCommInitRank(&comm, self.ranks, id, self.rank);
  if (fails && result == ncclSuccess) {
    result = ncclAllReduce(dense.data(), dense.data(), kSmall, ncclFloat32, ncclSum, comm, nullptr);
  }
  if (over(result, comm)) return;
  if (argument() == "cut") {
    all_reduce(dense, comm);
    self.meet("called");
    if (self.rank == 1) CHECK(std::system(kCut) == 0);
    self.meet("cut");
    began = std::chrono::steady_clock::now();
    fails = true;
    // What is on its way to the second host still arrives.
    for (int call = 0; call < 10 && result == ncclSuccess; ++call) {
      result =
          ncclAllReduce(dense.data(), dense.data(), kSmall, ncclFloat32, ncclSum, comm, nullptr);
    }
    over(result, comm);
    NCCL(ncclCommAbort(comm));
    return;
  }
  check_ports("with a communicator");
  Conservation conservation(kSmall);
  for (int step = 0; step < 3; ++step) {
    const std::vector<float> values = values_of(self, step, kSmall);
    fill(gradient, values);
    conservation.input(values);
    all_reduce(gradient, comm);
    conservation.output(gradient);
    check_agreement(self, comm, gradient.data(), kSmall * sizeof(float));
  }
  conservation.check(self, comm, gradient.data());
  CHECK(stats_of(gradient.data(), kSmall).sparse_calls == 2);
  check_ports("after calls");
  NCCL(ncclCommDestroy(comm));
}

void shell(const std::string& script) {
  Run one;
  one.command = {"sh", "-ec", script};
  one.preload = false;
  const Outcome outcome = run(one);
  CHECK_SAYING(outcome.status == 0, script + "\n" + outcome.err);
}

// /sys shows the network that it was mounted from, and UCX reads it.
bool own_network() {
  return ::unshare(CLONE_NEWNET | CLONE_NEWNS) == 0 &&
         ::mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) == 0 &&
         ::mount("sysfs", "/sys", "sysfs", 0, nullptr) == 0;
}

void own_network_or_skip() {
  if (!own_network())
    skip(std::string("a network of its own is not permitted here: ") + std::strerror(errno));
  Run one;
  one.command = {"sh", "-c", "ip -V && nsenter -V"};
  one.preload = false;
  if (run(one).status != 0) skip("there is no ip (iproute2) or no nsenter (util-linux)");
}

// A second host: a network beside this process's, joined to it by the interfaces wire0 (10.77.9.1)
// here and wire1 (10.77.9.2) there. It ends with this process.
class Neighbour {
 public:
  Neighbour() {
    int ready[2];
    CHECK(::pipe2(ready, O_CLOEXEC) == 0);
    pid_ = ::fork();
    CHECK(pid_ >= 0);
    if (pid_ == 0) {
      ::prctl(PR_SET_PDEATHSIG, SIGKILL);
      if (!own_network() || ::write(ready[1], "", 1) != 1) ::_exit(1);
      for (;;) ::pause();
    }
    char byte;
    ::close(ready[1]);
    CHECK(::read(ready[0], &byte, 1) == 1);
    ::close(ready[0]);
    shell("ip link set lo up; ip link add name wire0 type veth peer name wire1 netns " +
          std::to_string(pid_) + "; ip link set wire0 addrgenmode none; ip link set wire0 up");
    there("ip link set lo up; ip link set wire1 addrgenmode none; ip link set wire1 up");
  }
  ~Neighbour() {
    ::kill(pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
  }
  Neighbour(const Neighbour&) = delete;
  Neighbour& operator=(const Neighbour&) = delete;

  std::vector<std::string> entered(std::vector<std::string> command) const {
    command.insert(command.begin(),
                   {"nsenter", "--target", std::to_string(pid_), "--net", "--mount"});
    return command;
  }
  void there(const std::string& script) const {
    Run one;
    one.command = entered({"sh", "-ec", script});
    one.preload = false;
    const Outcome outcome = run(one);
    CHECK_SAYING(outcome.status == 0, script + "\n" + outcome.err);
  }
  // Rank 0 here and rank 1 there, with nothing but the network between them.
  std::vector<Run> runs(const std::string& argument) const {
    std::vector<Run> ranks = rank_runs("F34_calls", 2, argument);
    for (int rank = 0; rank < 2; ++rank) {
      auto& environment = ranks[static_cast<size_t>(rank)].environment;
      environment["NCCL_HOSTID"] = "host" + std::to_string(rank);
      environment["UCX_TLS"] = "tcp,self";
      environment["SCAPE_BOOTSTRAP_TIMEOUT"] = "10";
    }
    ranks[1].command = entered({this_program()});
    return ranks;
  }

 private:
  pid_t pid_ = -1;
};

LAUNCHED_CASE(F34_only_ipv6_loopback) {
  own_network_or_skip();
  shell("ip link set lo up; ip -4 address flush dev lo");
  expect(rank_runs("F34_calls", 2), {0, 0});
  if (!over_ucx()) return;
  std::vector<Run> runs = rank_runs("F34_calls", 2, "fails");
  for (Run& one : runs) one.environment["UCX_TLS"] = "tcp,self";
  for (const Outcome& outcome : expect(runs, {0, 0}))
    CHECK_SAYING(contains(outcome.err, "SCAPE_TRANSPORT=ofi"), outcome.err);
}

LAUNCHED_CASE(F34_link_local_addresses) {
  own_network_or_skip();
  // One more interface, so that the hosts number theirs differently.
  shell("ip link add name other type veth peer name other1; ip link set other addrgenmode none");
  const Neighbour neighbour;
  shell(
      "ip address add fe80::1/64 dev wire0 nodad; ip link set other up;"
      "ip address add fe80::9/64 dev other nodad");
  neighbour.there("ip address add fe80::2/64 dev wire1 nodad");
  std::fprintf(stderr, "one host\n");
  std::vector<Run> runs = rank_runs("F34_calls", 2);
  for (Run& one : runs) one.environment["NCCL_SOCKET_IFNAME"] = "=wire0";
  expect(runs, {0, 0});
  std::fprintf(stderr, "two hosts\n");
  runs = neighbour.runs(over_ucx() ? "fails" : "");
  for (Run& one : runs) one.environment["NCCL_SOCKET_IFNAME"] = "wire";
  for (const Outcome& outcome : expect(runs, {0, 0}))
    CHECK_SAYING(contains(outcome.err, "SCAPE_TRANSPORT=ofi") == over_ucx(), outcome.err);
}

LAUNCHED_CASE(F34_one_interface_of_five) {
  own_network_or_skip();
  const Neighbour neighbour;
  // Interfaces that swallow all, as bridges of containers do, with the same addresses on both
  // hosts.
  for (int i = 0; i < 4; ++i) {
    const std::string name = "void" + std::to_string(i), number = std::to_string(i);
    const std::string make = "ip link add name " + name + " type veth peer name end" + number +
                             "; ip link set end" + number + " up; ip link set " + name +
                             " up; ip address add 10.77." + number;
    shell(make + ".1/24 dev " + name);
    neighbour.there(make + ".2/24 dev " + name);
  }
  shell("ip address add 10.77.9.1/24 dev wire0");
  neighbour.there("ip address add 10.77.9.2/24 dev wire1");
  // The bootstrap's interface serves the messages, too; else each has a variable of its own. What
  // is in force is said in one line.
  const auto told = [&](const std::string& variable, const std::string& value) {
    std::vector<Run> runs = neighbour.runs("");
    for (Run& one : runs) {
      one.environment["NCCL_SOCKET_IFNAME"] = "wire";
      one.environment["SCAPE_LOG"] = "info";
      if (!variable.empty()) one.environment[variable] = value;
    }
    const std::vector<Outcome> outcomes = expect(runs, {0, 0});
    const std::string line =
        over_ucx() ? "ucx: network devices: wire" : "ofi: network device: wire";
    for (size_t rank = 0; rank < 2; ++rank) {
      const std::string& err = outcomes[rank].err;
      const std::string filter =
          variable.empty() ? "NCCL_SOCKET_IFNAME=\"wire\"" : variable + "=\"" + value + "\"";
      const size_t at = err.find(line + std::to_string(rank));
      CHECK_SAYING(at != std::string::npos, err);
      CHECK_SAYING(contains(err.substr(at, err.find('\n', at) - at), filter), err);
    }
  };
  told("", "");
  told("SCAPE_NET_IF", "^void,end,lo");
  if (over_ucx()) told("UCX_NET_DEVICES", "wire0,wire1");
}

LAUNCHED_CASE(F34_devices_by_name) {
  own_network_or_skip();
  shell("ip link set lo up");
  for (const std::string name : {"rail0", "rail1"}) {
    shell("ip link add name " + name + " type veth peer name end" + name + "; ip link set end" +
          name + " up; ip link set " + name + " up; ip address add 10.78." + name.substr(4) +
          ".1/24 dev " + name);
  }
  std::vector<Run> runs = rank_runs("F34_calls", 2);
  for (Run& one : runs) {
    one.environment["UCX_TLS"] = "tcp,self";
    one.environment["SCAPE_NET_IF"] = "=rail1";
    one.environment["SCAPE_LOG"] = "info";
  }
  for (const Outcome& outcome : expect(runs, {0, 0})) {
    CHECK_SAYING(contains(outcome.err, "rail1") && !contains(outcome.err, "rail0"), outcome.err);
  }
  // Several devices here and one there do not meet.
  runs = rank_runs("F34_calls", 2, "fails");
  for (Run& one : runs) {
    one.environment["UCX_TLS"] = "tcp,self";
    one.environment["SCAPE_NET_IF"] = &one == &runs[0] ? "=rail1" : "rail";
  }
  for (const Outcome& outcome : expect(runs, {0, 0})) {
    CHECK_SAYING(
        contains(outcome.err, "several devices of ") && contains(outcome.err, "SCAPE_NET_IF"),
        outcome.err);
  }
  // What admits nothing is an error that names it and what there is.
  runs = rank_runs("F34_calls", 2, "fails");
  for (Run& one : runs) one.environment["SCAPE_NET_IF"] = "nosuch,ra1l";
  for (const Outcome& outcome : expect(runs, {0, 0})) {
    for (const char* said : {"SCAPE_NET_IF=\"nosuch,ra1l\"", "rail0", "rail1"})
      CHECK_SAYING(contains(outcome.err, said), outcome.err);
  }
}

LAUNCHED_CASE(F34_missing_interface) {
  std::vector<Run> runs = rank_runs("F34_calls", 1, "no id");
  runs[0].environment["NCCL_SOCKET_IFNAME"] = "=nosuch0";
  const std::string err = expect(runs, {0})[0].err;
  CHECK_SAYING(contains(err, "=nosuch0") && contains(err, "this host has ") && contains(err, "lo"),
               err);
}

LAUNCHED_CASE(F34_port_range) {
  own_network_or_skip();
  shell("ip link set lo up");
  std::vector<Run> runs = rank_runs("F34_calls", 2, "ports");
  for (Run& one : runs) {
    one.environment["SCAPE_PORT_RANGE"] = "20000-20009";
    one.environment["UCX_TCP_PORT_RANGE"] = "20000-20009";
    one.environment["FI_TCP_PORT_LOW_RANGE"] = "20000";
    one.environment["FI_TCP_PORT_HIGH_RANGE"] = "20009";
  }
  expect(runs, {0, 0});

  const auto refused = [](const char* range) {
    std::vector<Run> one = rank_runs("F34_calls", 1, "no id");
    one[0].environment["SCAPE_PORT_RANGE"] = range;
    return expect(one, {0})[0].err;
  };
  int taken[2];
  for (uint16_t i = 0; i < 2; ++i) {
    taken[i] = ::socket(AF_INET6, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_in6 any{};
    any.sin6_family = AF_INET6;
    any.sin6_port = htons(static_cast<uint16_t>(20010 + i));
    CHECK(::bind(taken[i], reinterpret_cast<sockaddr*>(&any), sizeof any) == 0);
    CHECK(::listen(taken[i], 1) == 0);
  }
  std::string err = refused("20010-20011");
  CHECK_SAYING(contains(err, "SCAPE_PORT_RANGE=20010-20011 are in use"), err);
  for (const int socket : taken) ::close(socket);

  err = refused("20011-20010");
  CHECK_SAYING(contains(err, "SCAPE_PORT_RANGE=\"20011-20010\"") && contains(err, "first-last"),
               err);
}

LAUNCHED_CASE(F34_dropped_packets) {
  own_network_or_skip();
  const Neighbour neighbour;
  shell("ip address add 10.77.9.1/24 dev wire0");
  neighbour.there(std::string("ip address add 10.77.9.2/24 dev wire1;") + kCut);
  std::vector<Run> runs = neighbour.runs("fails");
  for (Run& one : runs) one.environment["SCAPE_BOOTSTRAP_TIMEOUT"] = "8";
  const std::vector<Outcome> outcomes = expect(runs, {0, 0});
  CHECK_SAYING(contains(outcomes[0].err, "rank 1") && contains(outcomes[0].err, "10.77.9.1 port "),
               outcomes[0].err);
  CHECK_SAYING(contains(outcomes[1].err, "10.77.9.1 port "), outcomes[1].err);
}

LAUNCHED_CASE(F34_packets_dropped_later) {
  own_network_or_skip();
  const Neighbour neighbour;
  shell("ip address add 10.77.9.1/24 dev wire0");
  neighbour.there("ip address add 10.77.9.2/24 dev wire1");
  std::vector<Run> runs = neighbour.runs("cut");
  for (Run& one : runs) one.environment["SCAPE_TIMEOUT"] = "8";
  const std::vector<Outcome> outcomes = expect(runs, {0, 0});
  for (size_t rank = 0; rank < 2; ++rank) {
    const std::string& err = outcomes[rank].err;
    CHECK_SAYING(contains(err, "rank " + std::to_string(1 - rank)), err);
  }
}

}  // namespace
}  // namespace scape::cases
