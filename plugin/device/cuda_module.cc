// The entry of libscape_cuda.so.
#include <new>

#include "plugin/device/cuda_device_impl.h"

namespace scape::plugin {
namespace {

Status open_device(int device, size_t residual_chunk, std::shared_ptr<CudaDevice>* out) {
  int count = 0;
  if (const cudaError_t result = cudaGetDeviceCount(&count);
      result != cudaSuccess || device < 0 || device >= count) {
    (void)cudaGetLastError();
    return error(SCAPE_ERR_SYSTEM, "CUDA device %d cannot be used: there are %d here (%s)", device,
                 count, cudaGetErrorString(result));
  }
  try {
    auto opened = std::make_shared<CudaDeviceImpl>(device, residual_chunk);
    if (const Status status = opened->open(); !status.ok()) {
      return error(SCAPE_ERR_SYSTEM, "CUDA device %d cannot be used: %s", device,
                   status.message().c_str());
    }
    *out = std::move(opened);
    return Status::Ok();
  } catch (const std::bad_alloc&) {
    return error(SCAPE_ERR_MEMORY, "no memory for a device");
  }
}

}  // namespace
}  // namespace scape::plugin

extern "C" __attribute__((visibility("default")))
const scape::plugin::CudaModule scape_cuda_module = {scape::plugin::kCudaModuleAbi,
                                                     &scape::plugin::open_device};
