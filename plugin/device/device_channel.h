// DeviceChannel: one communicator of the real NCCL, as masked buffers on a GPU use it.
//
// Everything is enqueued on streams by the calling thread, and nothing waits for the device: a work
// is done() once it is enqueued. The refreshes have a stream and a communicator of their own, and
// are fenced from the callers' streams by events. Payloads and masks travel over the real NCCL,
// with a second communicator that is made with ncclCommSplit() at the first masked call, or, where
// SCAPE_TRANSPORT names a transport, over a host communicator (proxied_communicator.h).
#pragma once

#include <memory>
#include <string>

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
  // Before the first masked call is launched, and done at once later: meets the other ranks where
  // that is needed, and waits for them, for SCAPE_TIMEOUT and SCAPE_BOOTSTRAP_TIMEOUT at most.
  // Where *obstacle is not empty it says why no masked call is possible here, alike on all ranks.
  virtual Status settle(std::string* obstacle) = 0;

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
