// docs/algorithm.md once more, as plainly as it can be said: P ranks in one process, scalar loops,
// nothing of the product but the order in which the communicator sums.
#pragma once

#include <cstdint>
#include <vector>

#include "plugin/collectives/schedules.h"
#include "plugin/communicator.h"
#include "plugin/masked/masked_buffer.h"

namespace scape::plugin::test {

// Elements of a type as bytes, and back; scalar.
float narrowed(scape_dtype type, float value);
std::vector<std::byte> to_bytes(scape_dtype type, const std::vector<float>& values);
std::vector<float> from_bytes(scape_dtype type, const std::vector<std::byte>& bytes);

class Simulation {
 public:
  // shared: at full sparsity, payloads are summed in memory that the ranks of one host share.
  // blind: nothing tells the host whether a step was a skip.
  Simulation(BufferConfig config, size_t count, int ranks, bool shared, bool blind);

  // Steps 1 to 6. inputs[r]: what rank r hands to the all-reduce, exactly representable in the
  // buffer's type. reductions: by rank. param, lr and weight_decay are for the fused role (param
  // may be empty otherwise).
  void step(const std::vector<std::vector<float>>& inputs, const std::vector<Reduction>& reductions,
            std::vector<float>* param, double lr, double weight_decay, bool flush = false);

  // Of the step before. What the caller's recv buffer holds (roles other than fused), in the
  // buffer's type.
  std::vector<std::byte> output;
  std::vector<bool> mask;
  std::vector<uint16_t> ages;
  bool skipped = false;

  std::vector<float> m;
  std::vector<std::vector<float>> r;  // by rank
  std::vector<uint64_t> nonfinite;    // by rank: values cleared off the mask
  uint64_t t = 0;

 private:
  float power(uint64_t age) const;
  uint64_t age_at(size_t j, uint64_t now) const;
  double sparsity() const;
  void choose_next(const std::vector<Reduction>& reductions);
  std::vector<float> reduce(const std::vector<std::vector<float>>& values, scape_dtype type,
                            const std::vector<Reduction>& reductions, Algorithm algorithm) const;

  const BufferConfig config_;
  const size_t n_;
  const int ranks_;
  const bool plain_dense_;
  const bool shared_;
  const bool blind_;
  std::vector<float> powers_;
  std::vector<int64_t> last_;
  std::vector<bool> next_;
  std::vector<bool> applied_;  // mask of the last step that was no skip
  std::vector<bool> flag_;     // by rank
  std::vector<double> decay_;  // 1 - lr * weight decay of each step
  size_t sweep_ = 0;
  bool clean_ = true;  // no residual can be left from a skipped dense step
};

}  // namespace scape::plugin::test
