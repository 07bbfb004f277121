#include "tests/functional/cases/case.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <thread>

#include "tests/support/slowdown.h"

extern "C" char** environ;

namespace scape::cases {
namespace {

using Clock = std::chrono::steady_clock;

std::string value_of(const char* name) {
  const char* value = std::getenv(name);
  return value != nullptr ? value : "";
}

void wait_for_file(const std::string& path) {
  const auto start = Clock::now();
  while (::access(path.c_str(), F_OK) != 0) {
    CHECK_SAYING(since(start) < 30 * test::kSlowdown, "waited for " + path);
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

void write_whole(const std::string& path, const void* data, size_t size) {
  const std::string temporary = path + ".part";
  std::ofstream(temporary, std::ios::binary)
      .write(static_cast<const char*>(data), static_cast<std::streamsize>(size));
  CHECK(std::rename(temporary.c_str(), path.c_str()) == 0);
}

struct Child {
  pid_t pid = -1;
  int out = -1;
  int err = -1;
  bool over = false;
  Outcome outcome;
};

Child start(const Run& run) {
  std::vector<std::string> command = run.command;
  if (command.empty()) command = {this_program()};
  std::map<std::string, std::string> environment;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string text = *entry;
    const size_t equals = text.find('=');
    if (equals != std::string::npos) environment[text.substr(0, equals)] = text.substr(equals + 1);
  }
  if (run.preload && value_of("FIELD_CASES_PRELOAD") != "no") {
    const std::string first = value_of("FIELD_CASES_PRELOAD_FIRST");  // a sanitizer's runtime
    environment["LD_PRELOAD"] = first.empty() ? preload_path() : first + ":" + preload_path();
    environment.try_emplace("SCAPE_MODE", "host");
  }
  for (const auto& [name, value] : run.environment) {
    if (value == "-") {
      environment.erase(name);
    } else {
      environment[name] = value;
    }
  }
  std::vector<std::string> pairs;
  for (const auto& [name, value] : environment) pairs.push_back(name + "=" + value);
  std::vector<char*> argv, envp;
  for (std::string& word : command) argv.push_back(word.data());
  for (std::string& pair : pairs) envp.push_back(pair.data());
  argv.push_back(nullptr);
  envp.push_back(nullptr);

  int out[2], err[2];
  CHECK(::pipe2(out, O_CLOEXEC) == 0 && ::pipe2(err, O_CLOEXEC) == 0);
  Child child;
  child.pid = ::fork();
  CHECK(child.pid >= 0);
  if (child.pid == 0) {
    ::setpgid(0, 0);
    ::dup2(out[1], STDOUT_FILENO);
    ::dup2(err[1], STDERR_FILENO);
    ::execvpe(argv[0], argv.data(), envp.data());
    ::_exit(127);
  }
  ::close(out[1]);
  ::close(err[1]);
  child.out = out[0];
  child.err = err[0];
  return child;
}

// Reads what is there; false at the end of the stream.
bool drain(int descriptor, std::string* text) {
  char buffer[4096];
  const ssize_t got = ::read(descriptor, buffer, sizeof buffer);
  if (got > 0) text->append(buffer, static_cast<size_t>(got));
  return got > 0;
}

}  // namespace

void failed(const char* file, int line, const char* what, const std::string& detail) {
  std::fprintf(stderr, "[rank %s] %s:%d: %s does not hold%s%s\n", value_of("RANK").c_str(), file,
               line, what, detail.empty() ? "" : ": ", detail.c_str());
  std::fflush(nullptr);
  ::_exit(1);
}

void check_nccl(const char* file, int line, const char* what, ncclResult_t result) {
  if (result == ncclSuccess) return;
  failed(file, line, what,
         std::string(ncclGetErrorString(result)) + ", " + ncclGetLastError(nullptr));
}

void check_scape(const char* file, int line, const char* what, scape_status status) {
  if (status == SCAPE_OK) return;
  failed(file, line, what, std::string(scape_status_string(status)) + ", " + scape_last_error());
}

ncclUniqueId Rank::next_id() {
  const std::string path = folder + "/id." + std::to_string(ids++);
  ncclUniqueId id;
  if (rank == 0) {
    NCCL(ncclGetUniqueId(&id));
    write_whole(path, &id, sizeof id);
  } else {
    wait_for_file(path);
    std::ifstream(path, std::ios::binary).read(reinterpret_cast<char*>(&id), sizeof id);
  }
  return id;
}

ncclComm_t Rank::init() {
  ncclComm_t comm = nullptr;
  NCCL(ncclCommInitRank(&comm, ranks, next_id(), rank));
  return comm;
}

void Rank::meet(const std::string& name) {
  write_whole(folder + "/" + name + "." + std::to_string(rank), "", 0);
  for (int other = 0; other < ranks; ++other)
    wait_for_file(folder + "/" + name + "." + std::to_string(other));
}

std::vector<Outcome> run(const std::vector<Run>& runs) {
  std::vector<Child> children;
  const auto begin = Clock::now();
  for (const Run& one : runs) children.push_back(start(one));
  size_t open = children.size();
  while (open > 0) {
    std::vector<pollfd> ready;
    for (const Child& child : children) {
      ready.push_back({child.out, POLLIN, 0});
      ready.push_back({child.err, POLLIN, 0});
    }
    // Where all have closed their ends only their exit is left to wait for.
    const bool silent =
        std::all_of(ready.begin(), ready.end(), [](const pollfd& entry) { return entry.fd < 0; });
    if (silent) {
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    } else {
      ::poll(ready.data(), ready.size(), 20);
    }
    for (size_t i = 0; i < children.size(); ++i) {
      Child& child = children[i];
      if (child.over) continue;
      if (ready[2 * i].revents != 0 && !drain(child.out, &child.outcome.out))
        child.out = (::close(child.out), -1);
      if (ready[2 * i + 1].revents != 0 && !drain(child.err, &child.outcome.err))
        child.err = (::close(child.err), -1);
      int state = 0;
      bool killed = false;
      rusage used{};
      pid_t ended = ::wait4(child.pid, &state, WNOHANG, &used);
      if (ended == 0 && since(begin) > runs[i].limit_s * test::kSlowdown) {
        ::kill(-child.pid, SIGKILL);
        ended = ::wait4(child.pid, &state, 0, &used);
        killed = true;
      }
      if (ended == 0) continue;
      child.over = true;
      --open;
      // A grandchild may hold the pipe open: what has been written by now is all that counts.
      for (auto [descriptor, text] :
           {std::pair{child.out, &child.outcome.out}, {child.err, &child.outcome.err}}) {
        if (descriptor < 0) continue;
        ::fcntl(descriptor, F_SETFL, O_NONBLOCK);
        while (drain(descriptor, text)) {
        }
        ::close(descriptor);
      }
      child.out = child.err = -1;
      child.outcome.seconds = since(begin);
      for (const timeval& part : {used.ru_utime, used.ru_stime}) {
        child.outcome.cpu_seconds +=
            static_cast<double>(part.tv_sec) + static_cast<double>(part.tv_usec) * 1e-6;
      }
      child.outcome.status = killed             ? -1
                             : WIFEXITED(state) ? WEXITSTATUS(state)
                                                : 128 + WTERMSIG(state);
    }
  }
  std::vector<Outcome> outcomes;
  for (Child& child : children) outcomes.push_back(std::move(child.outcome));
  return outcomes;
}

Outcome run(const Run& one) { return run(std::vector<Run>{one}).front(); }

std::vector<Outcome> expect(const std::vector<Run>& runs, const std::vector<int>& statuses) {
  const std::vector<Outcome> outcomes = run(runs);
  for (size_t i = 0; i < runs.size(); ++i) {
    CHECK_SAYING(outcomes[i].status == statuses[i], "rank " + std::to_string(i) + " ended with " +
                                                        std::to_string(outcomes[i].status) + ":\n" +
                                                        outcomes[i].err);
    CHECK_SAYING(outcomes[i].out.empty(), outcomes[i].out);
  }
  std::filesystem::remove_all(runs.front().environment.at("FIELD_CASE_FOLDER"));
  return outcomes;
}

std::vector<Run> rank_runs(const std::string& name, int ranks, const std::string& with) {
  char folder[] = "/tmp/scape_case_XXXXXX";
  CHECK(::mkdtemp(folder) != nullptr);
  std::vector<Run> runs(static_cast<size_t>(ranks));
  for (int rank = 0; rank < ranks; ++rank) {
    runs[static_cast<size_t>(rank)].environment = {{"FIELD_CASE", name},
                                                   {"FIELD_CASE_FOLDER", folder},
                                                   {"FIELD_CASE_ARGUMENT", with},
                                                   {"RANK", std::to_string(rank)},
                                                   {"WORLD_SIZE", std::to_string(ranks)}};
  }
  return runs;
}

std::string argument() { return value_of("FIELD_CASE_ARGUMENT"); }
std::string preload_path() { return SCAPE_NCCL; }
std::string stub_path() { return STUB_NCCL; }
// Looked up once, by main(): under a changed root, mounts of its own change what the link reads.
std::string this_program() {
  static const std::string path = std::filesystem::read_symlink("/proc/self/exe");
  return path;
}

std::vector<Case>& all_cases() {
  static std::vector<Case> cases;
  return cases;
}

scape_config gradient_config(const char* name, double kept) {
  scape_config config;
  SCAPE(scape_config_init(&config, sizeof config));
  config.name = name;
  config.role = SCAPE_ROLE_GRADIENT;
  config.sparsity = 1 - kept;
  config.dense_steps = 1;
  config.ramp_steps = 1;
  return config;
}

scape_registration add(void* buffer, size_t count, const char* name, double kept,
                       scape_dtype dtype) {
  const scape_config config = gradient_config(name, kept);
  scape_registration registration = nullptr;
  SCAPE(scape_register(buffer, count, dtype, &config, &registration));
  return registration;
}

scape_stats stats_of(const void* buffer, size_t count) {
  scape_stats stats;
  stats.size = sizeof stats;
  SCAPE(scape_get_stats(buffer, count, &stats));
  return stats;
}

void fill(std::vector<float>& buffer, const std::vector<float>& values) {
  CHECK(values.size() <= buffer.size());
  std::copy(values.begin(), values.end(), buffer.begin());
}

void all_reduce(std::vector<float>& buffer, ncclComm_t comm, ncclRedOp_t op) {
  NCCL(ncclAllReduce(buffer.data(), buffer.data(), buffer.size(), ncclFloat32, op, comm, nullptr));
}

void check_agreement(Rank& self, ncclComm_t comm, const void* data, size_t bytes) {
  // From a copy: the data's own address may be registered, and this call is not what the case is
  // about.
  const std::vector<char> copy(static_cast<const char*>(data),
                               static_cast<const char*>(data) + bytes);
  std::vector<char> all(bytes * static_cast<size_t>(self.ranks));
  NCCL(ncclAllGather(copy.data(), all.data(), bytes, ncclInt8, comm, nullptr));
  for (int other = 0; other < self.ranks; ++other) {
    CHECK_SAYING(std::memcmp(all.data() + bytes * static_cast<size_t>(other), data, bytes) == 0,
                 "rank " + std::to_string(other) + " holds other bytes");
  }
}

void Conservation::input(const std::vector<float>& values) {
  for (size_t i = 0; i < in_.size(); ++i) in_[i] += values[i];
}

void Conservation::output(const std::vector<float>& values) {
  for (size_t i = 0; i < out_.size(); ++i) out_[i] += values[i];
}

void Conservation::check(Rank&, ncclComm_t comm, const void* address, double tolerance) const {
  const size_t count = in_.size();
  std::vector<float> residual(count);
  SCAPE(scape_read_residual(address, count, residual.data(), count));
  std::vector<double> kept(residual.begin(), residual.end());
  std::vector<double> given = in_;
  NCCL(ncclAllReduce(kept.data(), kept.data(), count, ncclFloat64, ncclSum, comm, nullptr));
  NCCL(ncclAllReduce(given.data(), given.data(), count, ncclFloat64, ncclSum, comm, nullptr));
  for (size_t i = 0; i < count; ++i) {
    CHECK_SAYING(std::abs(given[i] - out_[i] - kept[i]) <= tolerance,
                 "element " + std::to_string(i) + ": given " + std::to_string(given[i]) +
                     ", returned " + std::to_string(out_[i]) + ", kept " + std::to_string(kept[i]));
  }
}

double since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

size_t entries_of(const char* folder) {
  size_t count = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator(folder)) ++count;
  return count;
}

size_t open_sockets() {
  size_t count = 0;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code gone;  // the descriptor of this very listing
    const std::string target = std::filesystem::read_symlink(entry.path(), gone);
    count += target.rfind("socket:", 0) == 0;
  }
  return count;
}

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

std::vector<float> values_of(const Rank& self, int step, size_t count) {
  std::vector<float> values(count);
  for (size_t i = 0; i < count; ++i) {
    const uint32_t mixed = (static_cast<uint32_t>(i) * 2654435761u) ^
                           (static_cast<uint32_t>(step + 1) * 40503u) ^
                           (static_cast<uint32_t>(self.rank + 1) * 9176u);
    values[i] = static_cast<float>(static_cast<int>(mixed >> 9 & 63) - 32);
  }
  return values;
}

}  // namespace scape::cases

int main(int argc, char** argv) {
  using namespace scape::cases;
  this_program();
  const char* rank_of = std::getenv("FIELD_CASE");
  const std::string name = rank_of != nullptr ? rank_of : argc > 1 ? argv[1] : "";
  for (const Case& found : all_cases()) {
    if (name != found.name || (rank_of != nullptr ? found.rank == nullptr : found.ranks < 0))
      continue;
    if (rank_of != nullptr) {
      Rank self{std::atoi(std::getenv("RANK")), std::atoi(std::getenv("WORLD_SIZE")),
                std::getenv("FIELD_CASE_FOLDER")};
      found.rank(self);
      return 0;
    }
    if (found.ranks == 0) {
      found.launcher();
      return 0;
    }
    const std::vector<Run> runs = rank_runs(name, found.ranks);
    const std::vector<Outcome> outcomes = run(runs);
    std::filesystem::remove_all(runs.front().environment.at("FIELD_CASE_FOLDER"));
    int status = 0;
    for (size_t rank = 0; rank < outcomes.size(); ++rank) {
      const Outcome& outcome = outcomes[rank];
      std::fprintf(stderr, "%s", outcome.err.c_str());
      if (outcome.status != 0 || !outcome.out.empty()) {
        std::fprintf(stderr, "rank %zu ended with %d after %.1f s and wrote %zu bytes to stdout\n",
                     rank, outcome.status, outcome.seconds, outcome.out.size());
        status = 1;
      }
    }
    return status;
  }
  std::fprintf(stderr, "usage: %s CASE, one of:\n", argv[0]);
  for (const Case& known : all_cases()) {
    if (known.ranks >= 0) std::fprintf(stderr, "  %s\n", known.name);
  }
  return 2;
}
