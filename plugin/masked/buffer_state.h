// What a masked buffer remembers from one step to the next, and its saved form.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/big_vector.h"
#include "base/status.h"
#include "plugin/communicator.h"
#include "plugin/masked/decay_table.h"
#include "plugin/masked/masked_buffer.h"

namespace scape::plugin {

struct BufferState {
  uint64_t step = 0;                    // t of the next step
  Reduction reduction{ReduceOp::kAvg};  // of the last call; what a flush uses
  // Residual that an all-ones mask would have cleared is left: a dense step was skipped, say.
  bool residual_dirty = false;
  // A non-finite value was met off the mask; the next payload tells.
  bool flag_pending = false;
  uint64_t restamp_at = 0;  // where the sweep over `last` goes on

  BigVector<float> moment;
  BigVector<uint16_t> last;
  BigVector<float>
      residual;  // internal; in place: loaded, and not yet added to the caller's buffer
  std::vector<uint64_t> mask;    // of the last call
  std::vector<uint64_t> before;  // hooked role: of the last call that was no skip
  std::vector<uint64_t>
      next;  // only while saved and loaded: of the next call; empty for a dense one
  DecayTable decay;
};

// Whose state it is: must be the same when it is loaded.
struct StateOwner {
  const BufferConfig& config;
  size_t count;
  int rank;
  int ranks;
};

// CRC of the part that all ranks have alike.
uint64_t replicated_checksum(const BufferState& state);

// Replaces *out. `residual`: count elements, or null for none.
void save_state(const StateOwner& owner, const BufferState& state, const float* residual,
                std::vector<std::byte>* out);

// DATA, naming what is wrong, when the bytes are damaged, cut, or not this owner's; *out is then
// untouched.
Status load_state(const StateOwner& owner, const std::byte* data, size_t size, BufferState* out);

}  // namespace scape::plugin
