// Threads and the end of the process.
//
// exit() runs the destructors of the libraries below (a network library's, say) while other threads
// may be inside them. Who drives a transport holds an ExitGuard meanwhile, and leaves once
// exiting() says so; exit() waits a moment for them before those destructors run.
#pragma once

namespace scape {

class ExitGuard {
 public:
  ExitGuard();
  ~ExitGuard();
  ExitGuard(const ExitGuard&) = delete;
  ExitGuard& operator=(const ExitGuard&) = delete;

  // True once another thread of this process has called exit().
  static bool exiting();

  // Does not return once exiting(): stands still, no longer inside, until the process is gone. For
  // threads that have nowhere to go back to but the program's code.
  void stop_if_exiting();
};

}  // namespace scape
