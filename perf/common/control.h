// Control: how the ranks of one run find each other and agree, apart from the library under test.
//
// A star of sockets around rank 0. It carries the unique id, barriers, times and verdicts; its
// connections also tell when a rank has died.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "base/status.h"

namespace scape::perf {

// Which rank this process is, and how it meets the others.
struct Launch {
  int rank = 0;
  int ranks = 1;
  // Sockets already connected (a rank that -g started): to ranks 1 .. ranks - 1 on rank 0, to rank
  // 0 elsewhere. When empty, `address` or `file` says where to meet.
  std::vector<int> sockets;
  std::string address;  // host:port that rank 0 listens on
  std::string file;     // file that rank 0 writes its address to
  // How messages name the way in: "-g", "torchrun's environment".
  std::string origin;
};

// Which rank this process is: as `worker` says where it is not empty (the hidden "--worker" option
// of a rank that -g started), else as the launcher's environment does: RANK and WORLD_SIZE
// (torchrun), Open MPI's, PMIx's or PMI's; rank 0 of 1 without any. `id_file` is the --id-file
// option. A half-set or contradictory environment is an error that names the variables, and so is
// one beside a -g of several ranks, which run_local_ranks() starts.
Status find_launch(const std::string& worker, const std::string& id_file, int local_ranks,
                   Launch* out);

// Starts `ranks` copies of this program on this host, each with a "--worker" option added, waits
// for them and returns the exit status of the run: the first failing rank's, or 0. When one fails,
// the others get `grace_s` seconds to report and are then ended. Call before any thread is started.
int run_local_ranks(int ranks, int argc, char** argv, double grace_s);

class Control {
 public:
  // Meets the other ranks; blocking, at most `timeout_s` seconds. From here to finish() a rank that
  // dies ends this process with kExitFailed, at most `grace_s` seconds after it was noticed.
  static Status connect(const Launch& launch, double timeout_s, double grace_s,
                        std::unique_ptr<Control>* out);
  ~Control();

  int rank() const { return rank_; }
  int ranks() const { return ranks_; }

  // Collective: each rank's `size` bytes, in rank order, on all ranks.
  Status all_gather(const void* data, size_t size, std::vector<std::byte>* all);
  template <typename T>
  Status all_gather(const T& mine, std::vector<T>* all) {
    std::vector<std::byte> bytes;
    SCAPE_RETURN_IF_ERROR(all_gather(&mine, sizeof mine, &bytes));
    all->resize(static_cast<size_t>(ranks_));
    std::memcpy(all->data(), bytes.data(), bytes.size());
    return Status::Ok();
  }
  Status barrier();

  // Ends this process when `seconds` pass before the next call; 0 sets no limit. `what` is named
  // then.
  void set_deadline(double seconds, const std::string& what);

  // Collective: from here on a rank may leave.
  Status finish();

 private:
  Control(int rank, int ranks, std::vector<int> sockets, double grace_s);
  void watch();

  const int rank_;
  const int ranks_;
  const std::vector<int> sockets_;
  const double grace_s_;
  int wake_[2] = {-1, -1};  // a pipe: ends the watcher's sleep
  std::mutex mutex_;
  std::string deadline_what_;
  double deadline_ = 0;
  std::atomic<bool> finished_{false};
  std::thread watcher_;
};

// Exit codes of the perf programs.
inline constexpr int kExitOk = 0;
inline constexpr int kExitWrong = 1;   // a wrong element, or compression not in force
inline constexpr int kExitUsage = 2;   // an option that cannot be served
inline constexpr int kExitFailed = 3;  // a call failed, a rank died or time ran out

}  // namespace scape::perf
