#include "base/fault.h"

#include <signal.h>

#include <atomic>

#include "base/log.h"

namespace scape::detail {

void pass_fault() {
  static std::atomic<int64_t> passed{0};
  if (passed.fetch_add(1) + 1 != settings().fault_after) return;
  SCAPE_WARN("this process kills itself: SCAPE_FAULT");
  ::raise(SIGKILL);
}

}  // namespace scape::detail
