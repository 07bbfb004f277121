// Field cases: what real processes see under LD_PRELOAD. One program is both the launcher and the
// rank:
//
//   field_cases F16_mismatch       starts the case's ranks, each a process with the library
//   preloaded, and
//                                  demands that all end with status 0 in time
//
// A case is a function that each rank runs (RANKED_CASE), or one that the launcher runs and that
// starts processes as it likes (LAUNCHED_CASE).
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "scape/scape.h"
#include "tests/support/nccl_prototypes.h"

namespace scape::cases {

using namespace scape::nccl;  // NOLINT: a case reads like a program that includes nccl.h

// Ends the process with a message when the condition does not hold.
#define CHECK(condition) \
  ((condition) ? void() : ::scape::cases::failed(__FILE__, __LINE__, #condition, ""))
#define CHECK_SAYING(condition, text) \
  ((condition) ? void() : ::scape::cases::failed(__FILE__, __LINE__, #condition, (text)))
// The same for calls, with the library's own explanation.
#define NCCL(call) (::scape::cases::check_nccl(__FILE__, __LINE__, #call, (call)))
#define SCAPE(call) (::scape::cases::check_scape(__FILE__, __LINE__, #call, (call)))
[[noreturn]] void failed(const char* file, int line, const char* what, const std::string& detail);
void check_nccl(const char* file, int line, const char* what, ncclResult_t result);
void check_scape(const char* file, int line, const char* what, scape_status status);

// One rank of a case.
struct Rank {
  int rank = 0;
  int ranks = 1;
  std::string folder;  // shared by the ranks, empty at the start
  int ids = 0;         // how many ids this rank has made or read

  // A communicator over all ranks; the id goes from rank 0 to the others through the folder.
  ncclComm_t init();
  ncclUniqueId next_id();
  // All ranks get here before any goes on; through files, not through the library.
  void meet(const std::string& name);
};

// How a process is started and what came of it.
struct Run {
  std::vector<std::string> command;  // this program with "--rank NAME", where empty
  std::map<std::string, std::string>
      environment;  // over this process's; "-" as value takes a name out
  double limit_s = 30;
  bool preload = true;  // LD_PRELOAD with the library, SCAPE_MODE=host
};
struct Outcome {
  int status = -1;  // of exit; 128 + n for signal n; -1 when the limit ended it
  std::string out, err;
  double seconds = 0;
  double cpu_seconds = 0;  // its own and those of its children
};
std::vector<Outcome> run(const std::vector<Run>& runs);
Outcome run(const Run& one);
// Runs of a case's ranks that have to end with these statuses, and write nothing to stdout.
std::vector<Outcome> expect(const std::vector<Run>& runs, const std::vector<int>& statuses);
// The runs of `ranks` ranks of the case `name`; its rank function reads `argument` from argument().
std::vector<Run> rank_runs(const std::string& name, int ranks, const std::string& argument = "");
std::string argument();
std::string preload_path();
std::string this_program();
std::string stub_path();

struct Case {
  const char* name;
  int ranks;  // 0: launched by `launcher`
  std::function<void(Rank&)> rank;
  std::function<void()> launcher;
};
std::vector<Case>& all_cases();
struct AddCase {
  explicit AddCase(Case added) { all_cases().push_back(std::move(added)); }
};

#define RANKED_CASE(name, ranks)                                                  \
  static void name(::scape::cases::Rank& self);                                   \
  static const ::scape::cases::AddCase add_##name({#name, ranks, name, nullptr}); \
  static void name([[maybe_unused]] ::scape::cases::Rank& self)
#define LAUNCHED_CASE(name)                                                   \
  static void name();                                                         \
  static const ::scape::cases::AddCase add_##name({#name, 0, nullptr, name}); \
  static void name()
// The part of a launched case that its ranks run.
#define RANK_PART(name)                                                                    \
  static void rank_##name(::scape::cases::Rank& self);                                     \
  static const ::scape::cases::AddCase add_rank_##name({#name, -1, rank_##name, nullptr}); \
  static void rank_##name([[maybe_unused]] ::scape::cases::Rank& self)

// ---- what many cases need ----

// Registers with one dense step, then at once the full sparsity: 1 - `kept`. Role: gradient,
// unmodified optimizer, so that the output is the reduction on the mask and 0 off it.
scape_config gradient_config(const char* name, double kept);
scape_registration add(void* buffer, size_t count, const char* name, double kept,
                       scape_dtype dtype = SCAPE_FLOAT32);
scape_stats stats_of(const void* buffer, size_t count);

// Copies the values to where the buffer is: its address is what is registered.
void fill(std::vector<float>& buffer, const std::vector<float>& values);

void all_reduce(std::vector<float>& buffer, ncclComm_t comm, ncclRedOp_t op = ncclSum);

// Checks that all ranks hold the same bytes.
void check_agreement(Rank& self, ncclComm_t comm, const void* data, size_t bytes);

// Adds inputs and outputs up over the steps of one buffer and checks that nothing is lost: all
// inputs of all ranks are in the outputs or in some rank's residual.
class Conservation {
 public:
  explicit Conservation(size_t count) : in_(count), out_(count) {}
  void input(const std::vector<float>& values);
  void output(const std::vector<float>& values);
  // Values of the buffer at `address`, whose collectives ran over `comm`; exact.
  void check(Rank& self, ncclComm_t comm, const void* address, double tolerance = 0) const;

 private:
  std::vector<double> in_, out_;
};

double since(std::chrono::steady_clock::time_point start);

// Entries of a folder: descriptors in /proc/self/fd, say, or threads in /proc/self/task.
size_t entries_of(const char* folder);

// Sockets that this process has open.
size_t open_sockets();

bool contains(const std::string& text, const std::string& part);

// Small integers that differ by rank, step and element, so that sums are exact.
std::vector<float> values_of(const Rank& self, int step, size_t count);

}  // namespace scape::cases
