#include "plugin/masked/refresher.h"

namespace scape::plugin {

void SideJob::submitted() {
  status_ = Status::Ok();
  done_.store(false, std::memory_order_relaxed);
}

void SideJob::end(const Status& status) {
  status_ = status;
  done_.store(true, std::memory_order_release);
}

}  // namespace scape::plugin
