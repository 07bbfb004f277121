#include "plugin/masked/decay_table.h"

#include <algorithm>

namespace scape::plugin {

void DecayTable::push(double lr, double weight_decay) {
  const double factor = 1 - lr * weight_decay;
  if (factors_.empty() && factor == 1) return;
  if (factors_.size() < kLongest) {
    newest_ = factors_.size();
    factors_.push_back(factor);
  } else {
    newest_ = (newest_ + 1) % factors_.size();
    factors_[newest_] = factor;
  }
}

double DecayTable::factor_at(size_t back) const {
  if (back >= factors_.size()) return 1;
  return factors_[(newest_ + factors_.size() - back) % factors_.size()];
}

const std::vector<float>& DecayTable::table(size_t longest) {
  table_.clear();
  if (factors_.empty()) return table_;
  longest = std::min(longest, kLongest);
  table_.reserve(longest + 1);
  double product = 1;
  table_.push_back(1.0f);
  for (size_t back = 0; back < longest; ++back) {
    product *= factor_at(back);
    table_.push_back(static_cast<float>(product));
  }
  return table_;
}

std::vector<double> DecayTable::history() const {
  std::vector<double> oldest_first;
  oldest_first.reserve(factors_.size());
  for (size_t back = factors_.size(); back > 0; --back) {
    oldest_first.push_back(factor_at(back - 1));
  }
  return oldest_first;
}

void DecayTable::restore(const std::vector<double>& history) {
  factors_ = history;
  newest_ = factors_.empty() ? 0 : factors_.size() - 1;
}

}  // namespace scape::plugin
