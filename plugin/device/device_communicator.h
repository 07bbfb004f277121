// What communicators of device memory have in common: masked buffers need all-reduces and
// all-gathers of them, ordered on the stream of the tag, and all else is refused with USAGE.
// Nothing is shared on a device, and nobody drives them.
#pragma once

#include "plugin/communicator.h"

namespace scape::plugin {

class DeviceCommunicator : public Communicator {
 public:
  // The work is done, its payload null.
  Status share_payload(size_t bytes, std::shared_ptr<SharingWork>* work) final;
  bool progress() final { return false; }
  void wait_event(int) final {}

  Status reduce_scatter(const void*, void*, size_t, DataType, Reduction, const CallTag&,
                        WorkPtr*) final {
    return refused("reduce-scatters");
  }
  Status reduce_scatter_v(const void*, void*, std::span<const size_t>, DataType, Reduction,
                          const CallTag&, WorkPtr*) final {
    return refused("reduce-scatters");
  }
  Status all_gather_v(const void*, void*, std::span<const size_t>, DataType, const CallTag&,
                      WorkPtr*) final {
    return refused("all-gathers of unequal parts");
  }
  Status all_to_all(const void*, void*, size_t, DataType, const CallTag&, WorkPtr*) final {
    return refused("all-to-alls");
  }
  Status broadcast(const void*, void*, size_t, DataType, int, const CallTag&, WorkPtr*) final {
    return refused("broadcasts");
  }
  Status reduce(const void*, void*, size_t, DataType, Reduction, int, const CallTag&,
                WorkPtr*) final {
    return refused("reduces");
  }
  Status gather(const void*, void*, size_t, DataType, int, const CallTag&, WorkPtr*) final {
    return refused("gathers");
  }
  Status scatter(const void*, void*, size_t, DataType, int, const CallTag&, WorkPtr*) final {
    return refused("scatters");
  }
  using Communicator::all_reduce;
  Status all_reduce(SharedPayload&, size_t, DataType, Reduction, const CallTag&, WorkPtr*) final {
    return refused("shared payloads");
  }
  Status send(const void*, size_t, DataType, int, WorkPtr*) final { return refused("sends"); }
  Status recv(void*, size_t, DataType, int, WorkPtr*) final { return refused("receives"); }
  Status register_memory(void*, size_t, void**) final { return refused("registered memory"); }
  void deregister_memory(void*) final {}

 protected:
  // Of a call that is enqueued: what it does is ordered on its stream.
  static WorkPtr enqueued_work();

 private:
  static Status refused(const char* what);
};

}  // namespace scape::plugin
