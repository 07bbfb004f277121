#include "base/exit_guard.h"

#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <thread>

namespace scape {
namespace {

constinit std::atomic<bool> exit_begun{false};
constinit std::atomic<int> inside{0};
constinit std::atomic<pid_t> owner{0};
constinit thread_local bool exits_here = false;

void wait_for_those_inside() {
  // A forked child has none of the threads that are counted.
  if (::getpid() != owner.load()) return;
  exits_here = true;
  exit_begun.store(true);
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(1);
  while (inside.load() != 0 && std::chrono::steady_clock::now() < deadline) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

}  // namespace

ExitGuard::ExitGuard() {
  static const bool registered = [] {
    owner.store(::getpid());
    return std::atexit(wait_for_those_inside) == 0;
  }();
  (void)registered;
  inside.fetch_add(1);
}

ExitGuard::~ExitGuard() { inside.fetch_sub(1); }

bool ExitGuard::exiting() { return exit_begun.load(std::memory_order_relaxed) && !exits_here; }

void ExitGuard::stop_if_exiting() {
  if (!exiting()) return;
  inside.fetch_sub(1);
  while (true) ::pause();
}

}  // namespace scape
