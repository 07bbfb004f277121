// The schedules of every collective: pure functions of what all ranks know.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "plugin/collectives/schedule.h"
#include "plugin/communicator.h"

namespace scape::plugin {

enum class Algorithm : int {
  kAuto = 0,
  kFlat,               // everyone gets every operand and sums it in rank order: one message time
  kRecursiveDoubling,  // log2(size) exchanges of the whole
  kRing,               // reduce-scatter round the ring, then all-gather round the ring
  kDirect,             // slices to their owners, who sum in rank order; then slices to everyone
};
const char* name_of(Algorithm algorithm);

// What a call is, as far as its schedule goes.
struct Shape {
  int rank = 0, size = 1;
  size_t count = 0;
  DataType type = DataType::kFloat32;
  ReduceOp op = ReduceOp::kSum;
  bool in_place =
      false;  // both spaces are the same memory (all-to-all: the input needs saving first)
};

// The algorithm that kAuto stands for. 8- and 16-bit floats take kFlat or kDirect, which alone
// round once; the same on all ranks.
Algorithm choose_all_reduce(int size, size_t count, DataType type, ReduceOp op);

std::shared_ptr<const Schedule> all_reduce_schedule(const Shape& shape,
                                                    Algorithm algorithm = Algorithm::kAuto);
// counts[r] elements to rank r, shape.count in all; the sending space holds all, in rank order.
std::shared_ptr<const Schedule> reduce_scatter_schedule(const Shape& shape,
                                                        std::span<const size_t> counts);
// counts[r] elements from rank r; the sending space holds this rank's only.
std::shared_ptr<const Schedule> all_gather_schedule(const Shape& shape,
                                                    std::span<const size_t> counts);
std::shared_ptr<const Schedule> all_to_all_schedule(const Shape& shape);
std::shared_ptr<const Schedule> broadcast_schedule(const Shape& shape, int root);
std::shared_ptr<const Schedule> reduce_schedule(const Shape& shape, int root);
std::shared_ptr<const Schedule> gather_schedule(const Shape& shape, int root);
std::shared_ptr<const Schedule> scatter_schedule(const Shape& shape, int root);

// How the ranks of a communicator lie on hosts, and how the memory that those of one host share is
// laid out: an operand of each, in rank order, then the result, `stride` bytes apart.
struct SharedLayout {
  std::vector<std::vector<int>> hosts;  // the ranks of each, ascending
  size_t stride = 0;
};

// All-reduce of operands that stand in shared memory, to the result there. Each slice has an owner
// on each host, who sums the operands of the host's ranks; owners of one slice exchange it between
// hosts. Two rounds of empty messages tell that operands are there, and that the result is. A
// result stays until its reader starts the next call, since its owner waits for all of the host
// then.
std::shared_ptr<const Schedule> shared_all_reduce_schedule(const Shape& shape,
                                                           const SharedLayout& layout);
// What the above can do: not on several hosts, nor with factors, where sums have to be rounded
// once.
bool shares_all_reduce(size_t hosts, DataType type, ReduceOp op);

// Slice q of `count` elements cut for `size` ranks, in whole cache lines.
struct Range {
  size_t begin = 0, end = 0;
  size_t size() const { return end - begin; }
};
Range slice_of(size_t count, size_t element_bytes, int size, int q);

}  // namespace scape::plugin
