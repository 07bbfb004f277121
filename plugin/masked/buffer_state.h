// What a masked buffer remembers from one step to the next, and its saved form.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "base/status.h"
#include "plugin/communicator.h"
#include "plugin/masked/array.h"
#include "plugin/masked/decay_table.h"
#include "plugin/masked/masked_buffer.h"

namespace scape::plugin {

struct BufferState {
  explicit BufferState(MemorySpace& where, Home home_of_residual = Home::kPlace)
      : memory(&where), residual(where, home_of_residual) {}

  MemorySpace* memory;                  // of the arrays
  uint64_t step = 0;                    // t of the next step
  Reduction reduction{ReduceOp::kAvg};  // of the last call; what a flush uses
  // Residual that an all-ones mask would have cleared may be left: a dense step was skipped, say.
  bool residual_dirty = false;
  // Only while saved and loaded: a non-finite value was met off the mask; the next payload tells.
  bool flag_pending = false;
  uint64_t restamp_at = 0;  // where the sweep over `last` goes on

  Array<float> moment{*memory};
  // Shared with a refresh under way, which may outlive the buffer; never null.
  std::shared_ptr<Array<uint16_t>> last = std::make_shared<Array<uint16_t>>(*memory);
  // Internal; in place: loaded, and not yet added to the caller's buffer.
  Array<float> residual;
  Array<uint64_t> mask{*memory};    // of the last call
  Array<uint64_t> before{*memory};  // hooked role: of the last call that was no skip
  // Only while saved and loaded: of the next call; empty for a dense one.
  Array<uint64_t> next{*memory};
  DecayTable decay;
};

// Whose state it is: must be the same when it is loaded.
struct StateOwner {
  const BufferConfig& config;
  size_t count;
  int rank;
  int ranks;
};

// Of these three, the first two wait for `stream`.

// CRC of the part that all ranks have alike.
uint64_t replicated_checksum(const BufferState& state, Stream stream);

// Replaces *out. `residual`: count elements of the state's place, or null for none.
void save_state(const StateOwner& owner, const BufferState& state, const float* residual,
                Stream stream, std::vector<std::byte>* out);

// DATA, naming what is wrong, when the bytes are damaged, cut, or not this owner's; *out is then
// untouched.
Status load_state(const StateOwner& owner, const std::byte* data, size_t size, BufferState* out);

}  // namespace scape::plugin
