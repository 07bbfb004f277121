// scape_all_reduce_perf: times and checks ncclAllReduce, dense or masked (-s).
#include "perf/common/collective.h"

namespace scape::perf {
namespace {

class AllReduce : public Collective {
 public:
  const char* name() const override { return "all_reduce"; }
  bool reduces() const override { return true; }
  bool can_be_sparse() const override { return true; }
  Shape shape(size_t count, int, int) const override {
    Shape shape;
    shape.send_count = shape.recv_count = shape.argument = count;
    return shape;
  }
  double bus_factor(int ranks) const override { return 2.0 * (ranks - 1) / ranks; }
  NcclResult launch(const NcclLibrary& nccl, const void* send, void* recv, size_t argument,
                    Type type, NcclRedOp op, int, NcclComm comm) const override {
    return nccl.all_reduce(send, recv, argument, static_cast<int>(type), op, comm, nullptr);
  }
};

}  // namespace
}  // namespace scape::perf

int main(int argc, char** argv) {
  return scape::perf::run_program(scape::perf::AllReduce(), argc, argv);
}
