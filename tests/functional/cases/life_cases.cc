// Preloading and the life of a process: F01 to F03, F05 to F07, F35.
#include <dirent.h>
#include <dlfcn.h>
#include <linux/capability.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <sys/xattr.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <thread>

#include "tests/functional/cases/case.h"
#include "tests/support/stub_nccl.h"

namespace scape::cases {
namespace {

// ---- F01 ----

// A C program and a Python one, whose library calls NCCL and Scape from a constructor, with an
// allocator preloaded before or after this library.
LAUNCHED_CASE(F01_early_calls) {
  const std::string python_line = "import ctypes; print(6 * 7, flush=True); ctypes.CDLL('" +
                                  std::string(EARLY_LIBRARY) + "').print_early_answers()";
  const std::string answers = "early calls: 0 0 0\n";
  for (const std::string& order : {std::string(NOISY_ALLOCATOR) + ":" + preload_path(),
                                   preload_path() + ":" + std::string(NOISY_ALLOCATOR)}) {
    for (int repeat = 0; repeat < 50; ++repeat) {
      for (const bool python : {false, true}) {
        Run early;
        early.command = {EARLY_CALLER};
        if (python) early.command = {"/usr/bin/python3", "-c", python_line};
        early.preload = false;
        early.environment = {{"LD_PRELOAD", order}, {"SCAPE_MODE", "host"}};
        const Outcome outcome = run(early);
        CHECK_SAYING(outcome.status == 0, order + ": " + outcome.err);
        CHECK_SAYING(outcome.out == (python ? "42\n" : "") + answers, outcome.out);
        CHECK_SAYING(outcome.err.empty(), outcome.err);
      }
    }
  }
}

// ---- F02 ----

const char kPythonCounts[] =
    "import json, os; print(len(os.listdir('/proc/self/fd')), os.listdir('/proc/self/task') == "
    "[str(os.getpid())])";

LAUNCHED_CASE(F02_quiet_preload) {
  const std::vector<std::string> commands = {"ls -la /usr/include | sort | head -n $ROUND",
                                             "echo one; echo two >&2; exit $ROUND",
                                             "seq 1 2$ROUND | wc -c",
                                             "cat /etc/passwd | tr a-z A-Z",
                                             "env -i sh -c 'echo empty'; printf x | od -c",
                                             "ls /proc/self/fd | wc -l",
                                             "ls /proc/self/task | wc -l",
                                             "git --version"};
  std::vector<std::vector<std::string>> all;
  for (int round = 0; round < 25; ++round) {
    for (const std::string& command : commands) {
      all.push_back({"/bin/sh", "-c", "ROUND=" + std::to_string(round) + "; " + command});
    }
  }
  all.push_back({"/usr/bin/python3", "-c", kPythonCounts});
  for (const std::vector<std::string>& command : all) {
    Run with;
    with.command = command;
    Run without = with;
    without.preload = false;
    const Outcome a = run(with);
    const Outcome b = run(without);
    CHECK_SAYING(a.status == b.status && a.out == b.out && a.err == b.err,
                 command.back() + ": " + a.out + a.err);
  }
}

// Median of 50 starts, with and without in turn. In processor time: what else the machine does
// changes the other kind by more than what is measured.
LAUNCHED_CASE(F02_start_time) {
  const std::vector<std::vector<std::string>> programs = {{"/bin/ls", "/"},
                                                          {"/bin/sh", "-c", "exit 0"},
                                                          {"git", "--version"},
                                                          {"/usr/bin/python3", "-c", "0"}};
  for (const auto& program : programs) {
    std::vector<double> times[2];
    for (int i = 0; i < 100; ++i) {
      Run quick;
      quick.command = program;
      quick.preload = i % 2 == 0;
      times[i % 2].push_back(run(quick).cpu_seconds);
    }
    for (auto& list : times) std::sort(list.begin(), list.end());
    const double extra = times[0][25] - times[1][25];
    std::fprintf(stderr, "preloading adds %.2f ms to the %.2f ms of %s\n", extra * 1e3,
                 times[1][25] * 1e3, program.front().c_str());
    CHECK(extra < 0.001);
  }
}

// At its first use, and not before, the library takes itself out of LD_PRELOAD where that is asked
// for.
LAUNCHED_CASE(F02_children_without_preload) {
  for (const bool unset : {false, true}) {
    std::vector<Run> runs = rank_runs("F02_children_without_preload", 1);
    runs[0].environment["SCAPE_UNSET_PRELOAD"] = unset ? "1" : "0";
    runs[0].environment["LD_PRELOAD"] = std::string(NOISY_ALLOCATOR) + ":" + preload_path();
    runs[0].environment["FIELD_CASE_ARGUMENT"] =
        unset ? NOISY_ALLOCATOR : runs[0].environment["LD_PRELOAD"];
    expect(runs, {0});
  }
}
RANK_PART(F02_children_without_preload) {
  CHECK(std::string(std::getenv("LD_PRELOAD")) ==
        std::string(NOISY_ALLOCATOR) + ":" + preload_path());
  CHECK(scape_is_active() == 1);
  CHECK(std::string(std::getenv("LD_PRELOAD")) == argument());
  Run child;
  child.command = {"/bin/sh", "-c", "echo $LD_PRELOAD"};
  child.preload = false;
  CHECK(run(child).out == argument() + "\n");
}

// A path of LD_PRELOAD that began where the program did leads to the modules wherever it goes.
LAUNCHED_CASE(F02_relative_preload) {
  const char* const first = std::getenv("FIELD_CASES_PRELOAD_FIRST");
  const std::string before = first != nullptr && *first != '\0' ? std::string(first) + ":" : "";
  std::vector<Run> runs = rank_runs("F02_relative_preload", 2);
  for (Run& one : runs) {
    one.environment["LD_PRELOAD"] =
        before + "./" + std::filesystem::proximate(preload_path()).string();
  }
  expect(runs, {0, 0});
}
RANK_PART(F02_relative_preload) {
  CHECK(::chdir("/") == 0);
  std::vector<float> buffer(1000, 1);
  all_reduce(buffer, self.init());
  CHECK(buffer[0] == 2);
}

// ---- F03 ----

LAUNCHED_CASE(F03_preload_not_loaded) {
  for (const char* preload : {"/no/such/libscape_nccl.so", "-"}) {
    for (const bool required : {false, true}) {
      std::vector<Run> runs = rank_runs("F03_preload_not_loaded", 2);
      for (Run& one : runs) {
        one.preload = false;
        one.environment["LD_PRELOAD"] = preload;
        one.environment["SCAPE_REQUIRED"] = required ? "1" : "0";
      }
      const std::vector<Outcome> outcomes =
          expect(runs, required ? std::vector{1, 1} : std::vector{0, 0});
      if (required) CHECK_SAYING(contains(outcomes[0].err, "LD_PRELOAD"), outcomes[0].err);
    }
  }
}
RANK_PART(F03_preload_not_loaded) {
  CHECK(scape_is_active() == 0);
  CHECK(scape_version() == 0);
  std::vector<float> buffer(1024, 2.5f), result(1024);
  scape_registration registration = nullptr;
  CHECK(scape_register(buffer.data(), 1024, SCAPE_FLOAT32, nullptr, &registration) ==
        SCAPE_ERR_INACTIVE);
  CHECK(contains(scape_last_error(), "LD_PRELOAD"));
  // The program's own NCCL serves it, dense.
  ncclUniqueId id;
  ncclComm_t comm;
  NCCL(ncclGetUniqueId(&id));
  NCCL(ncclCommInitRank(&comm, 1, id, 0));
  NCCL(ncclAllReduce(buffer.data(), result.data(), 1024, ncclFloat32, ncclSum, comm, nullptr));
  CHECK(result == buffer);
}

// A program with a file capability, started by a user who has not got it: the loader ignores
// LD_PRELOAD.
LAUNCHED_CASE(F03_program_with_a_capability) {
  const auto skip = [](const char* why) {
    std::fprintf(stderr, "SKIPPED: %s\n", why);
    std::exit(77);
  };
  if (::geteuid() != 0) skip("only root can give a file a capability");
  const std::vector<std::string> as_nobody = {"setpriv", "--reuid", "65534", "--clear-groups"};
  const auto nobody_runs = [&](std::vector<std::string> command) {
    command.insert(command.begin(), as_nobody.begin(), as_nobody.end());
    return command;
  };
  Run readable;
  readable.command = nobody_runs({"test", "-r", stub_path()});
  if (run(readable).status != 0)
    skip("another user cannot read this build, or there is no setpriv");

  char folder[] = "/tmp/scape_case_XXXXXX";
  CHECK(::mkdtemp(folder) != nullptr);
  CHECK(::chmod(folder, 0755) == 0);
  const std::string copy = std::string(folder) + "/program";
  std::filesystem::copy_file(this_program(), copy);
  CHECK(::chmod(copy.c_str(), 0755) == 0);
  vfs_cap_data capability{};
  capability.magic_etc = VFS_CAP_REVISION_2 | VFS_CAP_FLAGS_EFFECTIVE;
  capability.data[0].permitted = 1u << CAP_NET_RAW;
  const bool given =
      ::setxattr(copy.c_str(), "security.capability", &capability, sizeof capability, 0) == 0;
  const auto go = [&](const char* required) {
    std::vector<Run> runs = rank_runs("F03_preload_not_loaded", 2);
    for (Run& one : runs) {
      one.command = nobody_runs({copy});
      one.environment["SCAPE_REQUIRED"] = required;
    }
    return runs;
  };
  if (given) {
    expect(go("0"), {0, 0});
    for (const Outcome& outcome : expect(go("1"), {1, 1}))
      CHECK_SAYING(contains(outcome.err, "LD_PRELOAD"), outcome.err);
  }
  std::filesystem::remove_all(folder);
  if (!given) skip("this file system takes no capabilities");
}

LAUNCHED_CASE(F03_required_registration_refused) {
  std::vector<Run> runs = rank_runs("F03_required_registration_refused", 1);
  runs[0].environment["SCAPE_REQUIRED"] = "1";
  const std::vector<Outcome> outcomes = expect(runs, {1});
  CHECK_SAYING(contains(outcomes[0].err, "count 0"), outcomes[0].err);
}
RANK_PART(F03_required_registration_refused) {
  float buffer[4];
  scape_registration registration;
  scape_register(buffer, 0, SCAPE_FLOAT32, nullptr, &registration);
}

// ---- F05 ----

// An allocator of one's own before or after this library.
LAUNCHED_CASE(F05_other_allocator) {
  for (const std::string& order : {std::string(NOISY_ALLOCATOR) + ":" + preload_path(),
                                   preload_path() + " " + std::string(NOISY_ALLOCATOR)}) {
    std::vector<Run> runs = rank_runs("F05_other_allocator", 2);
    for (Run& one : runs) one.environment["LD_PRELOAD"] = order;
    expect(runs, {0, 0});
  }
}
RANK_PART(F05_other_allocator) {
  ncclComm_t comm = self.init();
  std::vector<float> buffer(4096);
  Conservation sums(4096);
  add(buffer.data(), 4096, "allocated", 0.25);
  for (int step = 0; step < 10; ++step) {
    fill(buffer, values_of(self, step, 4096));
    sums.input(buffer);
    all_reduce(buffer, comm);
    sums.output(buffer);
    check_agreement(self, comm, buffer.data(), 4 * 4096);
  }
  sums.check(self, comm, buffer.data());
  CHECK(stats_of(buffer.data(), 4096).sparse_calls == 9);
  NCCL(ncclCommDestroy(comm));
}

// ---- F06 ----

RANKED_CASE(F06_fork, 2) {
  ncclComm_t comm = self.init();
  std::vector<float> buffer(512);
  Conservation sums(512);
  add(buffer.data(), 512, "forked", 0.25);
  const auto steps = [&](int first, int count) {
    for (int step = first; step < first + count; ++step) {
      fill(buffer, values_of(self, step, 512));
      sums.input(buffer);
      all_reduce(buffer, comm);
      sums.output(buffer);
      check_agreement(self, comm, buffer.data(), 2048);
    }
  };
  steps(0, 3);
  const size_t descriptors = entries_of("/proc/self/fd");
  std::vector<pid_t> children;
  for (int kind = 0; self.rank == 0 && kind < 3; ++kind) {
    const pid_t child = ::fork();
    CHECK(child >= 0);
    if (child == 0) {
      if (kind == 0) std::exit(5);
      if (kind == 1) {
        while (true) ::pause();
      }
      const auto start = std::chrono::steady_clock::now();
      const ncclResult_t result =
          ncclAllReduce(buffer.data(), buffer.data(), 512, ncclFloat32, ncclSum, comm, nullptr);
      const bool named = contains(ncclGetLastError(comm), "fork");
      scape_registration registration;
      const scape_status status =
          scape_register(&registration, 1, SCAPE_FLOAT32, nullptr, &registration);
      ncclComm_t fresh;
      const ncclResult_t init = ncclCommInitRank(&fresh, 1, ncclUniqueId{}, 0);
      ncclUniqueId id;
      const bool refused = result == ncclInvalidUsage && status == SCAPE_ERR_USAGE &&
                           init == ncclInvalidUsage && ncclGetUniqueId(&id) == ncclInvalidUsage &&
                           ncclCommDestroy(comm) != ncclSuccess;
      ::_exit(refused && named && since(start) < 1 ? 7 : 1);
    }
    children.push_back(child);
  }
  steps(3, 5);
  if (self.rank == 0) {
    ::kill(children[1], SIGKILL);
    int state = 0;
    CHECK(::waitpid(children[0], &state, 0) == children[0] && WIFEXITED(state) &&
          WEXITSTATUS(state) == 5);
    CHECK(::waitpid(children[1], &state, 0) == children[1] && WIFSIGNALED(state) &&
          WTERMSIG(state) == SIGKILL);
    CHECK(::waitpid(children[2], &state, 0) == children[2] && WIFEXITED(state));
    CHECK_SAYING(WEXITSTATUS(state) == 7, "the child that used the communicator ended with " +
                                              std::to_string(WEXITSTATUS(state)));
  }
  steps(8, 3);
  sums.check(self, comm, buffer.data());
  CHECK(entries_of("/proc/self/fd") == descriptors);
  NCCL(ncclCommDestroy(comm));
}

// ---- F07 ----

struct Open {
  ncclComm_t comm = nullptr;
  scape_registration registration = nullptr;
  std::vector<float> buffer = std::vector<float>(1024);

  void begin(Rank& self) {
    comm = self.init();
    registration = add(buffer.data(), 1024, "at exit", 0.1);
    for (int step = 0; step < 4; ++step) {
      fill(buffer, values_of(self, step, 1024));
      all_reduce(buffer, comm);
    }
  }
};

// Destroyed after main has returned.
struct Last {
  Open* open = nullptr;
  ~Last() {
    if (open == nullptr) return;
    NCCL(ncclCommDestroy(open->comm));
    SCAPE(scape_unregister(open->registration));
    CHECK(ncclCommDestroy(open->comm) == ncclInvalidArgument);
    ::_exit(23);
  }
};
Last last;

LAUNCHED_CASE(F07_exit) {
  for (const char* ending :
       {"return", "static destructor", "exit beside a collective", "_exit", "dlclose"}) {
    std::vector<Run> runs = rank_runs("F07_exit", 2, ending);
    for (Run& one : runs) one.limit_s = 10;
    const std::string name = ending;
    const int status = name == "return" ? 0 : name == "static destructor" ? 23 : 41;
    const std::vector<Outcome> outcomes = expect(runs, {status, status});
    std::fprintf(stderr, "%s: %.1f s\n", ending, outcomes[0].seconds);
  }
}
RANK_PART(F07_exit) {
  static Open* const open = new Open;
  open->begin(self);
  const std::string ending = argument();
  if (ending == "return") return;
  if (ending == "static destructor") {
    last.open = open;
  } else if (ending == "_exit") {
    ::_exit(41);
  } else if (ending == "dlclose") {
    void* handle = ::dlopen(preload_path().c_str(), RTLD_NOW);
    CHECK(handle != nullptr && ::dlclose(handle) == 0);
    std::exit(41);
  } else {
    // Rank 0 waits in a collective that rank 1 never joins; another thread ends the program.
    self.meet("before exit");
    std::thread([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(300));
      self.meet("now");
      std::exit(41);
    }).detach();
    if (self.rank == 0) {
      ncclAllReduce(open->buffer.data(), open->buffer.data(), 1024, ncclFloat32, ncclSum,
                    open->comm, nullptr);
    }
    while (true) ::pause();
  }
}

// ---- F35 ----

LAUNCHED_CASE(F35_settings) {
  // A bad value stops the first call with name, value and range; the program decides what then.
  for (const std::string& bad :
       {std::string("abc"), std::string(), std::string("-1"), std::string("0,01"),
        std::string("1e-400"), std::string(10000, '9')}) {
    std::vector<Run> runs = rank_runs("F35_settings", 1, "stops");
    runs[0].environment["SCAPE_SPARSITY"] = bad;
    const std::vector<Outcome> outcomes = expect(runs, {3});
    CHECK_SAYING(
        contains(outcomes[0].err, "SCAPE_SPARSITY") && contains(outcomes[0].err, "0 .. 0.999999"),
        outcomes[0].err);
    CHECK(outcomes[0].err.size() < 4000);
  }
  {
    std::vector<Run> runs = rank_runs("F35_settings", 1, "stops");
    runs[0].environment["SCAPE_TRANSPORT"] = "pigeons";
    CHECK(contains(expect(runs, {3})[0].err, "SCAPE_TRANSPORT=\"pigeons\""));
  }
  {
    // Two that exclude each other: both are named, and the program ends.
    std::vector<Run> runs = rank_runs("F35_settings", 1, "registers");
    runs[0].environment["SCAPE_ENABLE"] = "0";
    runs[0].environment["SCAPE_REQUIRED"] = "1";
    const std::string err = expect(runs, {1})[0].err;
    CHECK_SAYING(contains(err, "SCAPE_ENABLE=0") && contains(err, "SCAPE_REQUIRED=1"), err);
  }
  {
    // Every setting there is, with a valid value: no line about any.
    std::vector<Run> runs = rank_runs("F35_settings", 2, "works");
    for (Run& one : runs) {
      const auto set = [&](const char* name, const std::string& value) {
        one.environment[name] = value;
      };
#define SCAPE_SETTING_CHOICE(field, name, fallback, choices, help) set(name, fallback);
#define SCAPE_SETTING_STRING(field, name, fallback, help) set(name, fallback);
#define SCAPE_SETTING_BOOL(field, name, fallback, help) set(name, (fallback) ? "on" : "off");
#define SCAPE_SETTING_INT(field, name, fallback, min, max, help) set(name, std::to_string(min));
#define SCAPE_SETTING_REAL(field, name, fallback, min, max, help) \
  set(name, std::to_string(fallback));
#define SCAPE_SETTING_PORTS(field, name, help) set(name, "20000-30000");
#define SCAPE_SETTING_CPUS(field, name, help) set(name, "0-65535");
#include "base/settings_list.h"
#undef SCAPE_SETTING_CHOICE
#undef SCAPE_SETTING_STRING
#undef SCAPE_SETTING_BOOL
#undef SCAPE_SETTING_INT
#undef SCAPE_SETTING_REAL
#undef SCAPE_SETTING_PORTS
#undef SCAPE_SETTING_CPUS
      set("SCAPE_MODE", "host");
      set("SCAPE_LIB", preload_path());
      set("SCAPE_NCCL_LIB", stub_path());
      set("NCCL_SOCKET_IFNAME", "=lo");
      set("NCCL_SOCKET_FAMILY", "AF_INET");
      set("NCCL_HOSTID", "here");
      set("SCAPE_PAYLOAD", "bf16");
    }
    for (const Outcome& outcome : expect(runs, {0, 0}))
      CHECK_SAYING(outcome.err.empty(), outcome.err);
  }
  // One warning for an unknown name, with the nearest known one; none for known names.
  for (const bool swapped : {true, false}) {
    std::vector<Run> runs = rank_runs("F35_settings", 2, "works");
    for (Run& one : runs) {
      one.environment[swapped ? "SCAPE_SPASRITY" : "SCAPE_SPARSITY"] = "0.5";
      one.environment["SCAPE_DENSE_STEPS"] = "3";
      one.environment["SCAPE_TIMEOUT"] = "20";
    }
    const std::string err = expect(runs, {0, 0})[0].err;
    const size_t at = err.find("SCAPE_SPASRITY is not a setting");
    CHECK_SAYING((at != std::string::npos) == swapped, err);
    if (swapped) {
      CHECK_SAYING(contains(err, "the nearest is SCAPE_SPARSITY"), err);
      CHECK(err.find("SCAPE_SPASRITY is not a setting", at + 1) == std::string::npos);
    } else {
      CHECK_SAYING(err.empty(), err);
    }
  }
}
RANK_PART(F35_settings) {
  if (argument() == "stops") {
    ncclUniqueId id;
    const ncclResult_t result = ncclGetUniqueId(&id);
    CHECK(result == ncclInvalidArgument);
    CHECK(contains(ncclGetLastError(nullptr), "=\""));
    CHECK(scape_is_active() == 0);
    std::fprintf(stderr, "%s\n", ncclGetLastError(nullptr));
    ::_exit(3);
  }
  if (argument() == "registers") {
    float buffer[4];
    scape_registration registration;
    scape_register(buffer, 4, SCAPE_FLOAT32, nullptr, &registration);
    return;
  }
  std::atomic<bool> stop{false};
  std::thread changer([&] {
    for (int i = 0; !stop; ++i) ::setenv("UNRELATED", std::to_string(i).c_str(), 1);
  });
  ncclComm_t comm = self.init();
  std::vector<float> buffer(100, 1);
  for (int i = 0; i < 20; ++i) {
    buffer.assign(100, 1);
    all_reduce(buffer, comm);
    CHECK(buffer[99] == 2);
  }
  stop = true;
  changer.join();
  NCCL(ncclCommDestroy(comm));
}

// ---- modes ----

LAUNCHED_CASE(modes_that_differ_are_both_named) {
  std::vector<Run> runs = rank_runs("modes_that_differ_are_both_named", 2);
  runs[1].environment["SCAPE_MODE"] = "device";
  runs[1].environment["SCAPE_NCCL_LIB"] = stub_path();
  expect(runs, {0, 0});
  std::swap(runs[0].environment, runs[1].environment);
  std::swap(runs[0].environment["RANK"], runs[1].environment["RANK"]);
  std::filesystem::create_directory(runs[0].environment["FIELD_CASE_FOLDER"]);
  expect(runs, {0, 0});
}
RANK_PART(modes_that_differ_are_both_named) {
  const ncclUniqueId id = self.next_id();
  if (self.rank == 0) return;
  ncclComm_t comm = nullptr;
  CHECK(ncclCommInitRank(&comm, 2, id, self.rank) == ncclInvalidUsage);
  const std::string why = ncclGetLastError(nullptr);
  CHECK_SAYING(contains(why, "host mode") && contains(why, "device mode"), why);
}

// Where the real NCCL is looked for, in order, and what is said when there is none.
LAUNCHED_CASE(real_nccl_is_found) {
  char folder[] = "/tmp/scape_case_XXXXXX";
  CHECK(::mkdtemp(folder) != nullptr);
  const std::string beside = std::string(folder) + "/libnccl.so.2";
  std::filesystem::copy_file(stub_path(), beside);
  const std::string stub_answer = "0 " + std::to_string(kStubVersion) + " \n";
  const auto call = [](std::vector<std::string> command,
                       std::map<std::string, std::string> environment) {
    environment["SCAPE_MODE"] = "device";
    Run one;
    one.command = std::move(command);
    one.environment = std::move(environment);
    const Outcome outcome = run(one);
    CHECK_SAYING(outcome.status == 0, outcome.err);
    return outcome.out;
  };
  // By the setting; on the loader's path; linked by the caller, which is loaded late and locally.
  CHECK(call({BARE_CALLER}, {{"SCAPE_NCCL_LIB", stub_path()}}) == stub_answer);
  CHECK(call({BARE_CALLER}, {{"LD_LIBRARY_PATH", folder}}) == stub_answer);
  CHECK(call({BARE_CALLER, HOLDER}, {}) == stub_answer);
  // This library, under NCCL's own name or its own, is not it.
  const std::string own = std::filesystem::path(preload_path()).parent_path() / "nccl";
  for (const std::map<std::string, std::string>& environment :
       {std::map<std::string, std::string>{}, {{"LD_LIBRARY_PATH", own}}}) {
    const std::string answer = call({BARE_CALLER}, environment);
    CHECK_SAYING(contains(answer, "2 ") && contains(answer, "no real NCCL found") &&
                     contains(answer, "SCAPE_NCCL_LIB"),
                 answer);
  }
  for (const std::string& wrong : {preload_path(), std::string("/no/such/libnccl.so.2")}) {
    const std::string answer = call({BARE_CALLER}, {{"SCAPE_NCCL_LIB", wrong}});
    CHECK_SAYING(contains(answer, "2 ") && contains(answer, wrong), answer);
  }
  std::filesystem::remove_all(folder);
}

// A program that opens NCCL by name and looks functions up in what it gets: no preload reaches it,
// the folder of libnccl.so.2 in LD_LIBRARY_PATH does.
LAUNCHED_CASE(nccl_opened_by_name) {
  std::vector<Run> runs = rank_runs("nccl_opened_by_name", 2);
  for (Run& one : runs) {
    one.preload = false;
    one.environment["SCAPE_MODE"] = "host";
    one.environment["LD_LIBRARY_PATH"] =
        std::filesystem::path(preload_path()).parent_path() / "nccl";
  }
  expect(runs, {0, 0});
}
RANK_PART(nccl_opened_by_name) {
  void* nccl = ::dlopen("libnccl.so.2", RTLD_NOW | RTLD_LOCAL);
  CHECK_SAYING(nccl != nullptr, ::dlerror());
  const auto look_up = [&](auto* function, const char* name) {
    void* found = ::dlsym(nccl, name);
    CHECK_SAYING(found != nullptr, name);
    return reinterpret_cast<decltype(function)>(found);
  };
  const auto get_id = look_up(&ncclGetUniqueId, "ncclGetUniqueId");
  const auto init = look_up(&ncclCommInitRank, "ncclCommInitRank");
  const auto reduce = look_up(&ncclAllReduce, "ncclAllReduce");
  const auto destroy = look_up(&ncclCommDestroy, "ncclCommDestroy");
  const std::string path = self.folder + "/id";
  ncclUniqueId id;
  if (self.rank == 0) {
    CHECK(get_id(&id) == ncclSuccess);
    std::ofstream(path, std::ios::binary).write(id.internal, sizeof id.internal);
  }
  self.meet("with an id");
  std::ifstream(path, std::ios::binary).read(id.internal, sizeof id.internal);
  ncclComm_t comm = nullptr;
  CHECK(init(&comm, 2, id, self.rank) == ncclSuccess);
  std::vector<float> buffer(1000, static_cast<float>(self.rank + 1));
  CHECK(reduce(buffer.data(), buffer.data(), 1000, ncclFloat32, ncclSum, comm, nullptr) ==
        ncclSuccess);
  CHECK(buffer[0] == 3 && buffer[999] == 3);
  CHECK(destroy(comm) == ncclSuccess);
}

// The wheel's library: neither call needs a GPU.
LAUNCHED_CASE(real_nccl_serves_device_mode) {
  if (!std::filesystem::exists(REAL_NCCL)) {
    std::fprintf(stderr,
                 "SKIPPED: no " REAL_NCCL "; tools/setup.sh test fetches it (needs the network)\n");
    std::exit(77);
  }
  Run one;
  one.command = {BARE_CALLER};
  one.environment = {{"SCAPE_MODE", "device"}, {"SCAPE_NCCL_LIB", REAL_NCCL}};
  const Outcome outcome = run(one);
  CHECK_SAYING(outcome.status == 0 && outcome.out == "0 23203 \n", outcome.out + outcome.err);
}

RANKED_CASE(version_is_the_real_librarys_in_host_mode, 1) {
  // The stub is this program's own NCCL: it is in the process though host mode does not use it.
  int version = 0;
  NCCL(ncclGetVersion(&version));
  CHECK(version == kStubVersion);
  NCCL(ncclCommDestroy(self.init()));
  NCCL(pncclGetVersion(&version));
  CHECK(version == kStubVersion);
}

}  // namespace
}  // namespace scape::cases
