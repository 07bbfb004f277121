// DeviceChannel: one communicator of the real NCCL, as masked buffers on a GPU use it.
//
// Everything is enqueued on streams by the calling thread, and nothing waits for the device: a work
// is done() once it is enqueued. The refreshes have a stream and a communicator of their own, made
// with ncclCommSplit() at the first masked call, and are fenced from the callers' streams by
// events.
#pragma once

#include <memory>

#include "base/status.h"
#include "nccl/functions.h"
#include "plugin/communicator.h"
#include "plugin/masked/engine.h"
#include "plugin/masked/refresher.h"
#include "plugin/stream.h"

namespace scape::plugin {

// One thread at a time, as NCCL demands it of the communicator; the buffers on it share it.
class DeviceChannel {
 public:
  virtual ~DeviceChannel() = default;

  virtual const std::shared_ptr<Communicator>& communicator() const = 0;
  virtual const std::shared_ptr<Refresher>& refresher() const = 0;
  // For one masked buffer. Its memory is of the communicator's device.
  virtual Status make_engine(std::shared_ptr<Engine>* out) = 0;

  // Whether the stream is being captured into a graph, during which nothing may be allocated or
  // waited for.
  virtual Status is_capturing(Stream stream, bool* out) = 0;
  // Whether `data` is memory that the communicator's device can reach: no masked call takes other.
  virtual Status reaches(const void* data, bool* out) = 0;
};

// `real`: the functions of the library that made `comm`; it outlives the channel, the communicator
// too, which stays the caller's. SYSTEM, with a reason, where libscape_cuda.so cannot be loaded or
// finds no usable device.
Status open_device_channel(const nccl::Functions& real, nccl::ncclComm_t comm,
                           std::shared_ptr<DeviceChannel>* out);

}  // namespace scape::plugin
