// Element-wise reduction of every NCCL type, the same bits on every CPU.
//
// Integers wrap. 8- and 16-bit floats are widened to fp32, combined there, and rounded once, to
// nearest even, when stored; beyond the range e5m2, fp16 and bf16 become infinite and e4m3, which
// has no infinity, NaN. min and max prefer a number over a NaN and, between equals (+0 and -0), the
// operand of the lower rank. avg divides the sum once: floats in the type of the sum, integers
// towards zero.
#pragma once

#include <cstddef>
#include <cstdint>

#include "plugin/communicator.h"

namespace scape::plugin {

// The type that partial results of `type` are kept in: fp32 for 8- and 16-bit floats, else itself.
DataType accumulation_type(DataType type);

// What a reduction does to `operands` arrays of n elements each.
struct ReduceCall {
  DataType result = DataType::kFloat32;
  DataType operand = DataType::kFloat32;  // result, or accumulation_type(result)
  ReduceOp op = ReduceOp::kSum;           // kAvg and kPremulSum combine as kSum
  int divisor = 0;                        // > 0: divide at the end
  void* out = nullptr;                    // may be one of the operands
  const void* const* in = nullptr;
  int operands = 0;
  size_t n = 0;
};
// out = ((in[0] op in[1]) op in[2]) ...
void reduce(const ReduceCall& call);

// out = in * this rank's factor, as accumulation_type(type). `out` may equal `in` where the types
// do.
void scale(DataType type, const Reduction& reduction, void* out, const void* in, size_t n);

namespace detail {
struct ReduceOps {
  void (*reduce)(const ReduceCall& call);
  void (*scale)(DataType type, const Reduction& reduction, void* out, const void* in, size_t n);
};
const ReduceOps& reduce_baseline();
const ReduceOps& reduce_avx2();
const ReduceOps& reduce_avx512();
}  // namespace detail

}  // namespace scape::plugin
