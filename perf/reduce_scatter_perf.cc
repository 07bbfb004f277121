// scape_reduce_scatter_perf: times and checks ncclReduceScatter.
#include "perf/common/collective.h"

namespace scape::perf {
namespace {

class ReduceScatter : public Collective {
 public:
  const char* name() const override { return "reduce_scatter"; }
  bool reduces() const override { return true; }
  Shape shape(size_t count, int rank, int ranks) const override {
    Shape shape;
    shape.argument = shape.recv_count = count / static_cast<size_t>(ranks);
    shape.send_count = shape.argument * static_cast<size_t>(ranks);
    shape.in_place_recv_offset = shape.recv_first = shape.argument * static_cast<size_t>(rank);
    return shape;
  }
  double bus_factor(int ranks) const override { return 1.0 * (ranks - 1) / ranks; }
  NcclResult launch(const NcclLibrary& nccl, const void* send, void* recv, size_t argument,
                    Type type, NcclRedOp op, int, NcclComm comm) const override {
    return nccl.reduce_scatter(send, recv, argument, static_cast<int>(type), op, comm, nullptr);
  }
};

}  // namespace
}  // namespace scape::perf

int main(int argc, char** argv) {
  return scape::perf::run_program(scape::perf::ReduceScatter(), argc, argv);
}
