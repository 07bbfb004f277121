// scape_broadcast_perf: times and checks ncclBroadcast.
#include "perf/common/collective.h"

namespace scape::perf {
namespace {

class Broadcast : public Collective {
 public:
  const char* name() const override { return "broadcast"; }
  bool has_root() const override { return true; }
  Shape shape(size_t count, int, int) const override {
    Shape shape;
    shape.send_count = shape.recv_count = shape.argument = count;
    return shape;
  }
  double bus_factor(int) const override { return 1; }
  NcclResult launch(const NcclLibrary& nccl, const void* send, void* recv, size_t argument,
                    Type type, NcclRedOp, int root, NcclComm comm) const override {
    return nccl.broadcast(send, recv, argument, static_cast<int>(type), root, comm, nullptr);
  }
};

}  // namespace
}  // namespace scape::perf

int main(int argc, char** argv) {
  return scape::perf::run_program(scape::perf::Broadcast(), argc, argv);
}
