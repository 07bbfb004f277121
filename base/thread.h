// Threads of the library.
#pragma once

#include <pthread.h>
#include <signal.h>

#include <exception>
#include <thread>
#include <utility>

#include "base/status.h"

namespace scape {

// Starts a thread that runs `body`. The program's signals are not for it: all are blocked there, so
// that handlers run on the program's own threads. SYSTEM when the system has no thread left;
// `purpose` names it then.
template <typename Body>
Status start_thread(const char* purpose, std::thread* out, Body&& body) {
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  Status status;
  try {
    *out = std::thread(std::forward<Body>(body));
  } catch (const std::exception& failure) {
    status =
        error(SCAPE_ERR_SYSTEM, "no thread for %s: %s; raise the limit of processes (ulimit -u)",
              purpose, failure.what());
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  return status;
}

}  // namespace scape
