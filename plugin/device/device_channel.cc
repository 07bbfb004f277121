#include "plugin/device/device_channel.h"

#include <dlfcn.h>

#include <mutex>
#include <utility>

#include "base/module.h"
#include "base/settings.h"
#include "plugin/device/cuda_module.h"
#include "plugin/device/nccl_communicator.h"
#include "plugin/device/proxied_communicator.h"
#include "plugin/device/stream_refresher.h"
#include "plugin/transport/transport.h"

namespace scape::plugin {
namespace {

class DeviceChannelImpl final : public DeviceChannel {
 public:
  // `proxied` is the communicator, or null.
  DeviceChannelImpl(std::shared_ptr<CudaDevice> device, std::shared_ptr<Communicator> communicator,
                    std::shared_ptr<ProxiedCommunicator> proxied)
      : device_(std::move(device)),
        communicator_(std::move(communicator)),
        proxied_(std::move(proxied)),
        refresher_(std::make_shared<StreamRefresher>(device_, communicator_)) {}

  const std::shared_ptr<Communicator>& communicator() const override { return communicator_; }
  const std::shared_ptr<Refresher>& refresher() const override { return refresher_; }
  Status settle(std::string* obstacle) override {
    return proxied_ != nullptr ? proxied_->settle(obstacle) : Status::Ok();
  }
  Status make_engine(std::shared_ptr<Engine>* out) override { return device_->make_engine(out); }
  Status is_capturing(Stream stream, bool* out) override {
    return device_->is_capturing(stream, out);
  }
  Status reaches(const void* data, bool* out) override { return device_->reaches(data, out); }

 private:
  const std::shared_ptr<CudaDevice> device_;
  const std::shared_ptr<Communicator> communicator_;
  const std::shared_ptr<ProxiedCommunicator> proxied_;
  const std::shared_ptr<Refresher> refresher_;
};

}  // namespace

Status load_cuda_module(const CudaModule** out) {
  static std::mutex* const mutex = new std::mutex;  // never destroyed: used until the last moment
  static const CudaModule* loaded = nullptr;
  const std::lock_guard lock(*mutex);
  if (loaded == nullptr) {
    void* handle = nullptr;
    SCAPE_RETURN_IF_ERROR(open_module("cuda", &handle));
    const auto* module = static_cast<const CudaModule*>(dlsym(handle, kCudaModuleSymbol));
    if (module == nullptr || module->abi != kCudaModuleAbi) {
      return error(SCAPE_ERR_SYSTEM, "libscape_cuda.so is of another build of scape; reinstall it");
    }
    loaded = module;
  }
  *out = loaded;
  return Status::Ok();
}

Status open_device_channel(const nccl::Functions& real, nccl::ncclComm_t comm,
                           std::shared_ptr<DeviceChannel>* out) {
  const CudaModule* module = nullptr;
  SCAPE_RETURN_IF_ERROR(load_cuda_module(&module));
  int ordinal = -1;
  if (const nccl::ncclResult_t result = real.CommCuDevice(comm, &ordinal);
      result != nccl::ncclSuccess) {
    return error(SCAPE_ERR_SYSTEM, "NCCL does not tell the communicator's device: %s",
                 real.GetErrorString(result));
  }
  std::shared_ptr<CudaDevice> device;
  SCAPE_RETURN_IF_ERROR(
      module->open_device(ordinal, static_cast<size_t>(settings().residual_chunk), &device));
  std::shared_ptr<NcclCommunicator> communicator;
  SCAPE_RETURN_IF_ERROR(NcclCommunicator::wrap(real, comm, &communicator));
  if (transport_is_named()) {
    auto proxied = std::make_shared<ProxiedCommunicator>(device, std::move(communicator));
    *out = std::make_shared<DeviceChannelImpl>(std::move(device), proxied, proxied);
  } else {
    *out = std::make_shared<DeviceChannelImpl>(std::move(device), std::move(communicator), nullptr);
  }
  return Status::Ok();
}

}  // namespace scape::plugin
