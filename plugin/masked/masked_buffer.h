// MaskedBuffer: the step state machine of one registered buffer on one communicator.
//
// Steps 1-6 of docs/algorithm.md, written once over the Engine, the Communicator and the Refresher.
// It knows nothing of hooks, groups or addresses: the caller hands it each call's buffers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "kernels/kernels.h"
#include "plugin/communicator.h"
#include "plugin/stream.h"
#include "scape/scape.h"

namespace scape::plugin {

// A registration's options, checked and with every default filled in.
struct BufferConfig {
  std::string name;
  uint64_t offset = 0;  // elements from the registration's start; part of the buffer's identity
  scape_dtype dtype = SCAPE_FLOAT32;
  scape_role role = SCAPE_ROLE_FUSED;
  scape_dtype payload = SCAPE_FLOAT32;
  scape_residual residual = SCAPE_RESIDUAL_INTERNAL;
  scape_rule rule = SCAPE_RULE_LAZY;
  double sparsity = 0.99;
  double beta1 = 0.9, beta2 = 0.95, eps = 1e-8, age_cap = 100;
  uint64_t dense_steps = 20, ramp_steps = 200;
  double ramp_sparsity = 0.9;

  bool operator==(const BufferConfig&) const = default;
};

// A registration's element type, as collectives name it.
DataType data_type_of(scape_dtype type);

// As messages name them; a number that is none, as itself.
std::string role_text(int role);
std::string rule_text(int rule);
std::string residual_text(int residual);
std::string type_text(int type);

// The options of a registration that names none, SCAPE_* variables included; what
// scape_config_init() gives.
void default_config(scape_config* out);

// A buffer's name: 1 to 63 bytes without control characters; else ARGUMENT, which calls it `what`.
Status check_name(const char* what, std::string_view name);

// Copies a caller's scape_config, whatever version of the header it was built with, over the
// defaults in *out. ARGUMENT where its size was never set.
Status read_config(const scape_config& config, scape_config* out);

// Checks a scape_config and fills the defaults in. ARGUMENT names the field, the value and its
// range.
Status resolve_config(const scape_config* config, scape_dtype dtype, BufferConfig* out);

// s(t), the sparsity of step t, and k_q(t): bits of a partition of `size` elements at step t.
double sparsity_at(const BufferConfig& config, uint64_t t);
size_t bits_at(const BufferConfig& config, uint64_t t, size_t partition_size);

// Pi_q = [begin, end) of n elements over `ranks` ranks, in whole groups of 64 elements.
struct Partition {
  size_t begin = 0, end = 0;
  size_t size() const { return end - begin; }
};
Partition partition_of(size_t n, int ranks, int q);

class Engine;     // plugin/masked/engine.h: memory and kernels of one place
class Refresher;  // plugin/masked/refresher.h: turns and background work of one communicator

// Not thread-safe, but for stats(), note_dense(), failure() and dense_reason(): one call at a time.
// What travels in which step, and what a skip, a flush and a load do exactly, is in
// docs/masked-collective.md.
//
// The streams order what calls and steps do to device memory; in host memory all is done when they
// return. Successive calls may name different streams where the caller orders these. What has no
// stream is ordered after the last one that was given.
class MaskedBuffer {
 public:
  // Waits for nothing: a refresh in flight goes on without the buffer. A call under way is aborted,
  // and the communicator with it.
  virtual ~MaskedBuffer() = default;

  // Starts the all-reduce of this buffer. Collective: ranks begin their buffers' calls in the same
  // order. Afterwards poll() until it returns true. send and recv: count() elements, the caller's
  // until then; equal or apart. recv is ignored in the fused role, whose result stays inside.
  // Refusals (USAGE: an adams step is owed, in place asked for with send != recv; ARGUMENT: null or
  // overlapping) start nothing. An error that ended a call ends every later one at once.
  virtual Status begin_all_reduce(const void* send, void* recv, Reduction reduction,
                                  Stream stream = {}) = 0;
  // Moves the call on without blocking (the caller also drives the communicator); true when it is
  // over.
  virtual bool poll() = 0;
  // True once the call has started all its works on the communicator. Calls of masked buffers keep
  // their order among themselves; who starts other works on the communicator waits for this first,
  // so that all ranks start them in the same order.
  virtual bool launched() const = 0;
  // Of the call that is over.
  virtual Status status() const = 0;

  // Local steps after the call; blocking but brief. See scape.h for their meaning. After a skipped
  // call adams_step() moves neither param nor the state; a refresh is started all the same.
  virtual Status adams_step(float* param, double lr, double weight_decay, Stream stream = {}) = 0;
  virtual Status post_step(size_t offset, size_t length, const float* before, float* param,
                           double lr, double weight_decay, Stream stream = {}) = 0;
  // Leaves in the buffer what belongs to the residual there (the rounding errors of a narrow
  // payload included) and clears the rest. All of it where no residual is kept in place.
  virtual Status clear_masked(void* buffer, Stream stream = {}) = 0;

  // Collective, blocking: drives the communicator itself, so one rank a thread. A step like any
  // other, of which the mask is all ones and the gradient 0, whatever `buffer` holds: u is the
  // residual. In place, where `buffer` is the residual, u is `buffer`, and so includes what was
  // added since. t advances, and in the fused role m decays and param moves as with a zero
  // gradient. Uses the reduction of the last call. Does nothing before the first call and for a
  // buffer that is always dense.
  virtual Status flush(void* buffer, float* param, double lr, double weight_decay,
                       Stream stream = {}) = 0;

  // A dense call on this range that the masked path did not serve (max, int64, ...): counted, said
  // once.
  virtual void note_dense(const char* why) = 0;
  // Why the last call that was noted was dense; empty where there was none.
  virtual std::string dense_reason() const = 0;
  // What has ended it for good.
  virtual Status failure() const = 0;

  // Between calls, into host memory. Of an always dense buffer: all ones (zeros before the first
  // call), ages 1, residual 0; its first moment is kept in the fused role only (USAGE otherwise).
  // MEMORY when `capacity` is too small.
  virtual Status read_mask(uint64_t* words, size_t capacity) = 0;
  virtual Status read_ages(uint16_t* ages, size_t capacity) = 0;
  virtual Status read_residual(float* out, size_t capacity) = 0;
  virtual Status read_moment(float* out, size_t capacity) = 0;
  // wire_bytes_* stay 0: transports count those. On a device, what the data decided (skips, values
  // cleared, overlap) is counted as far as it is known.
  virtual scape_stats stats() const = 0;

  virtual const BufferConfig& config() const = 0;
  virtual size_t count() const = 0;

  // Saved state of this buffer, from which it goes on bit for bit. save() waits for a refresh in
  // flight. load() must come before the first call or between calls, on all ranks alike (else they
  // fail with MISMATCH at one of their next two calls). A residual in place is added to the buffer
  // of the next call, which holds nothing but new gradient then. DATA when the bytes are damaged or
  // of another buffer, rank or world; nothing is changed then.
  virtual Status save(std::vector<std::byte>* out) = 0;
  virtual Status load(const std::byte* data, size_t size) = 0;
  // Sum of |residual|, for the line that tells what an unregistration drops.
  virtual double residual_l1() = 0;
};

// Host memory and the kernels of kernels::ops(). One for each buffer.
std::shared_ptr<Engine> make_host_engine();

// `engine` is of the place of the buffer's elements and serves no other; `refresher` serves this
// communicator's buffers and outlives them.
std::unique_ptr<MaskedBuffer> make_masked_buffer(std::shared_ptr<Engine> engine,
                                                 std::shared_ptr<Communicator> communicator,
                                                 std::shared_ptr<Refresher> refresher,
                                                 BufferConfig config, size_t count);

// The progress thread of one communicator's refreshes; its side channel is made at the first
// registered call.
std::shared_ptr<Refresher> make_refresher(std::shared_ptr<Communicator> communicator);

}  // namespace scape::plugin
