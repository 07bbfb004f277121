// MaskedBuffer: the step state machine of one registered buffer on one communicator.
//
// Steps 1-6 of docs/algorithm.md, written once over the kernel table and the Communicator. It knows
// nothing of hooks, groups or addresses: the caller hands it each call's buffers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/status.h"
#include "kernels/kernels.h"
#include "plugin/communicator.h"
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
};

// The options of a registration that names none, SCAPE_* variables included; what
// scape_config_init() gives.
void default_config(scape_config* out);

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

class Refresher;  // plugin/masked/refresher.h: the progress thread of one communicator

class MaskedBuffer {
 public:
  virtual ~MaskedBuffer() = default;

  // Starts the all-reduce of this buffer. Collective. Afterwards poll() until it returns true.
  // Refusals (USAGE: an adams step is owed; in place asked for with send != recv; ...) start
  // nothing.
  virtual Status begin_all_reduce(const void* send, void* recv, Reduction reduction) = 0;
  // Moves the call on without blocking (the caller also drives the communicator); true when it is
  // over.
  virtual bool poll() = 0;
  // True once the call has started all its works on the communicator. Calls of masked buffers keep
  // their order among themselves; who starts other works on the communicator waits for this first,
  // so that all ranks start them in the same order.
  virtual bool launched() const = 0;
  // Of the call that is over.
  virtual Status status() const = 0;

  // Local steps after the call; blocking but brief. See scape.h for their meaning.
  virtual Status adams_step(float* param, double lr, double weight_decay) = 0;
  virtual Status post_step(size_t offset, size_t length, const float* before, float* param,
                           double lr, double weight_decay) = 0;
  virtual Status clear_masked(void* buffer) = 0;
  // Collective, blocking.
  virtual Status flush(void* buffer, float* param, double lr, double weight_decay) = 0;

  // A dense call on this range that the masked path did not serve (max, int64, ...): counted, said
  // once.
  virtual void note_dense(const char* why) = 0;

  virtual Status read_mask(uint64_t* words, size_t capacity) = 0;
  virtual Status read_ages(uint16_t* ages, size_t capacity) = 0;
  virtual Status read_residual(float* out, size_t capacity) = 0;
  virtual Status read_moment(float* out, size_t capacity) = 0;
  virtual scape_stats stats() const = 0;

  virtual const BufferConfig& config() const = 0;
  virtual size_t count() const = 0;

  // Saved state of this buffer; load() must come before the first call or between calls on all
  // ranks alike.
  virtual Status save(std::vector<std::byte>* out) = 0;
  virtual Status load(const std::byte* data, size_t size) = 0;
  // Sum of |residual|, for the line that tells what an unregistration drops.
  virtual double residual_l1() = 0;
};

// `refresher` serves this communicator's buffers and outlives them.
std::unique_ptr<MaskedBuffer> make_masked_buffer(std::shared_ptr<Communicator> communicator,
                                                 std::shared_ptr<Refresher> refresher,
                                                 BufferConfig config, size_t count);

// The progress thread of one communicator's refreshes; its side channel is made at the first
// registered call.
std::shared_ptr<Refresher> make_refresher(std::shared_ptr<Communicator> communicator);

}  // namespace scape::plugin
