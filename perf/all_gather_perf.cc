// scape_all_gather_perf: times and checks ncclAllGather.
#include "perf/common/collective.h"

namespace scape::perf {
namespace {

class AllGather : public Collective {
 public:
  const char* name() const override { return "all_gather"; }
  Shape shape(size_t count, int rank, int ranks) const override {
    Shape shape;
    shape.argument = shape.send_count = count / static_cast<size_t>(ranks);
    shape.recv_count = shape.argument * static_cast<size_t>(ranks);
    shape.in_place_send_offset = shape.send_first = shape.argument * static_cast<size_t>(rank);
    return shape;
  }
  double bus_factor(int ranks) const override { return 1.0 * (ranks - 1) / ranks; }
  NcclResult launch(const NcclLibrary& nccl, const void* send, void* recv, size_t argument,
                    Type type, NcclRedOp, int, NcclComm comm) const override {
    return nccl.all_gather(send, recv, argument, static_cast<int>(type), comm, nullptr);
  }
};

}  // namespace
}  // namespace scape::perf

int main(int argc, char** argv) {
  return scape::perf::run_program(scape::perf::AllGather(), argc, argv);
}
