#include "plugin/device/chunk_pipe.h"

namespace scape::plugin {

ChunkPipe::ChunkPipe(int device, size_t chunk_bytes)
    : device_(device),
      chunk_elements_(chunk_bytes / sizeof(float) / kGrain * kGrain),
      chunks_{Chunk(device), Chunk(device)} {}

ChunkPipe::~ChunkPipe() {
  const DeviceScope scope(device_);
  for (const Chunk& chunk : chunks_) (void)cudaFree(chunk.memory);
  for (cudaStream_t stream : {in_, out_}) {
    if (stream != nullptr) (void)cudaStreamDestroy(stream);
  }
}

Status ChunkPipe::open() {
  const DeviceScope scope(device_);
  for (cudaStream_t* stream : {&in_, &out_}) {
    SCAPE_RETURN_IF_ERROR(
        check_cuda(cudaStreamCreateWithFlags(stream, cudaStreamNonBlocking), "making a stream"));
  }
  for (Chunk& chunk : chunks_) {
    void* memory = nullptr;
    SCAPE_RETURN_IF_ERROR(check_cuda(cudaMalloc(&memory, chunk_elements_ * sizeof(float)),
                                     "allocating a chunk of a residual in host memory"));
    chunk.memory = static_cast<float*>(memory);
    if (!chunk.filled.valid() || !chunk.used.valid() || !chunk.free.valid())
      return error(SCAPE_ERR_INTERNAL, "CUDA: no event could be made");
  }
  return Status::Ok();
}

Status ChunkPipe::fill(Chunk& chunk, const float* from, size_t size, cudaStream_t stream) {
  SCAPE_RETURN_IF_ERROR(chunk.free.hold(in_));
  SCAPE_RETURN_IF_ERROR(check_cuda(
      cudaMemcpyAsync(chunk.memory, from, size * sizeof(float), cudaMemcpyHostToDevice, in_),
      "copying a residual to the device"));
  SCAPE_RETURN_IF_ERROR(chunk.filled.mark(in_));
  return chunk.filled.hold(stream);
}

Status ChunkPipe::empty(Chunk& chunk, float* to, size_t size, cudaStream_t stream) {
  SCAPE_RETURN_IF_ERROR(chunk.used.mark(stream));
  SCAPE_RETURN_IF_ERROR(chunk.used.hold(out_));
  SCAPE_RETURN_IF_ERROR(check_cuda(
      cudaMemcpyAsync(to, chunk.memory, size * sizeof(float), cudaMemcpyDeviceToHost, out_),
      "copying a residual from the device"));
  return chunk.free.mark(out_);
}

}  // namespace scape::plugin
