#include "plugin/device/cuda_relay.h"

#include <utility>

#include "kernels/cuda/cuda_ops.h"

namespace scape::plugin {

CudaRelay::CudaRelay(std::shared_ptr<CudaDeviceImpl> device)
    : device_(std::move(device)), arrived_(device_->ordinal()), over_(device_->ordinal()) {}

Status CudaRelay::open(size_t bytes) {
  if (!arrived_.valid() || !over_.valid()) {
    return error(SCAPE_ERR_INTERNAL, "CUDA: no event could be made");
  }
  memory_ = static_cast<std::byte*>(device_->allocate(kBefore + bytes, Home::kHost));
  if (memory_ == nullptr) {
    return error(SCAPE_ERR_MEMORY,
                 "no page-locked memory for a payload of %zu bytes; register less, or free some",
                 bytes);
  }
  capacity_ = bytes;
  return Status::Ok();
}

CudaRelay::~CudaRelay() {
  if (memory_ != nullptr) device_->release(memory_, {&over_});
}

Status CudaRelay::enqueue(Stream stream, const Transfer& transfer) {
  const DeviceScope scope(device_->ordinal());
  write_word(kHostsTurn);
  const Status status = enqueue_all(cuda(stream), transfer);
  if (!status.ok()) write_word(kBad);
  return status;
}

Status CudaRelay::enqueue_all(cudaStream_t stream, const Transfer& transfer) {
  SCAPE_RETURN_IF_ERROR(check_cuda(cudaMemcpyAsync(data() + transfer.send_offset, transfer.send,
                                                   transfer.send_bytes, cudaMemcpyDefault, stream),
                                   "copying to the host"));
  SCAPE_RETURN_IF_ERROR(arrived_.mark(stream));
  SCAPE_RETURN_IF_ERROR(device_->wait_for_word(stream, word()));
  SCAPE_RETURN_IF_ERROR(check_cuda(
      cudaMemcpyAsync(transfer.recv, data(), transfer.recv_bytes, cudaMemcpyDefault, stream),
      "copying from the host"));
  // Last, since a transport that failed may still write to the memory that was just copied.
  SCAPE_RETURN_IF_ERROR(
      kernels::cuda::poison_where(stream, word(), kBad, transfer.recv, transfer.recv_bytes));
  return over_.mark(stream);
}

void CudaRelay::release(bool good) { write_word(good ? kGood : kBad); }

}  // namespace scape::plugin
