#include "plugin/device/device_communicator.h"

namespace scape::plugin {
namespace {

class Enqueued final : public Work {
 public:
  bool done() const override { return true; }
  Status status() const override { return {}; }
};

class NothingShared final : public SharingWork {
 public:
  bool done() const override { return true; }
  Status status() const override { return {}; }
  std::shared_ptr<SharedPayload> payload() const override { return nullptr; }
};

}  // namespace

WorkPtr DeviceCommunicator::enqueued_work() {
  static const auto* const work = new WorkPtr(std::make_shared<Enqueued>());
  return *work;
}

Status DeviceCommunicator::refused(const char* what) {
  return error(SCAPE_ERR_USAGE, "masked buffers on a device need no %s", what);
}

Status DeviceCommunicator::share_payload(size_t, std::shared_ptr<SharingWork>* work) {
  *work = std::make_shared<NothingShared>();
  return Status::Ok();
}

}  // namespace scape::plugin
