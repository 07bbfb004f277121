// Payload codecs: how the masked values travel.
//
// A codec turns the k masked values of u, and one element that flags a non-finite value on this
// rank, into what the all-reduce sums, and its result back into the k reduced values. A narrower
// codec also leaves the rounding error of its own values, which is the sender's new residual. It
// knows the format and its sizes; the engine does the work on the elements.
//
// The flag is 0 or NaN: whatever is summed or multiplied with it, the result tells.
#pragma once

#include <memory>

#include "plugin/communicator.h"
#include "plugin/masked/engine.h"
#include "scape/scape.h"

namespace scape::plugin {

class PayloadCodec {
 public:
  virtual ~PayloadCodec() = default;

  virtual DataType wire_type() const = 0;

  // True where the values travel as they are: `wire` is `values` then.
  virtual bool plain() const = 0;

  // values: the masked values in index order, with room for one more. Leaves these and the flag, as
  // k + 1 elements of wire_type() to reduce, in `wire`.
  virtual void encode(const StepView& step, float* values, void* wire) = 0;

  // The k + 1 reduced elements in `wire` as [0 .. k) values in the scale of u and the reduced flag:
  // a plain codec's in `wire` itself, else in `values`.
  virtual const float* decode(const StepView& step, const void* wire, float* values) = 0;

  // The k rounding errors of the last encode(), in the scale of u; null for a codec that has none.
  virtual const float* error() const = 0;
};

// fp32: the values themselves, no copy.
//
// bf16: (1 - beta1^age) * u / age, rounded to nearest; summed in fp32 by the communicator and
// rounded once more to bf16. Of these two roundings the first is fed back. The second cannot be: it
// is made inside the one-phase all-reduce, and no rank sees the sum before it. It is the same on
// all ranks, unbiased, and at most 2^-9 of the value that is applied, once; the rule that the owner
// of a slice keeps it (docs/algorithm.md) belongs to two-phase codecs, whose owner does the
// rounding.
//
// The engine must outlive the codec.
std::unique_ptr<PayloadCodec> make_payload_codec(Engine& engine, scape_dtype payload);

}  // namespace scape::plugin
