// Weight decay of elements that waited: the product of (1 - lr * lambda) over the steps since an
// element was last exchanged. Products are made one by one, from the newest step back, instead of
// with exp() and log(): every C library rounds a product alike, and what comes of it is replicated.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace scape::plugin {

class DecayTable {
 public:
  // Ages are capped at 2^15 (docs/algorithm.md, "State"); so is what is remembered.
  static constexpr size_t kLongest = size_t{1} << 15;

  // One step's factor 1 - lr * weight_decay, which must be in (0, 1].
  void push(double lr, double weight_decay);

  // table[a]: the product over the last a steps, for a = 0 .. longest (at most kLongest), in double
  // and rounded once. Empty while there has never been any decay: every product is 1. Valid until
  // the next call.
  const std::vector<float>& table(size_t longest);

  // For saved state: the factors, oldest first, and the reverse.
  std::vector<double> history() const;
  void restore(const std::vector<double>& history);

 private:
  // The factor of the step `back` steps ago; 1 before there was any decay.
  double factor_at(size_t back) const;

  std::vector<double> factors_;  // a ring once it holds kLongest entries
  size_t newest_ = 0;
  std::vector<float> table_;
};

}  // namespace scape::plugin
