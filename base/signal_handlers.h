// Keeping a program's signal handlers its own: network libraries, and what they bring along,
// install theirs when they are loaded or opened, and one of them makes SIGTERM an exit with
// status 1.
#pragma once

#include <csignal>
#include <mutex>
#include <vector>

namespace scape {

// While it lives others may install handlers; then those that were there before are put back.
// Several threads may have one: they take turns.
class KeepSignalHandlers {
 public:
  KeepSignalHandlers();
  ~KeepSignalHandlers();
  KeepSignalHandlers(const KeepSignalHandlers&) = delete;
  KeepSignalHandlers& operator=(const KeepSignalHandlers&) = delete;

 private:
  const std::unique_lock<std::mutex> turn_;
  std::vector<struct sigaction> before_;  // by signal number
};

}  // namespace scape
