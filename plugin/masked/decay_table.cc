#include "plugin/masked/decay_table.h"

#include <algorithm>
#include <cmath>

namespace scape::plugin {

void DecayTable::push(double lr, double weight_decay) {
  const double logarithm = std::log1p(-lr * weight_decay);
  if (sums_.empty() && logarithm == 0) return;
  const double sum = sum_at(0) + logarithm;
  if (sums_.size() <= kLongest) {
    newest_ = sums_.size();
    sums_.push_back(sum);
  } else {
    newest_ = (newest_ + 1) % sums_.size();
    sums_[newest_] = sum;
  }
}

double DecayTable::sum_at(size_t back) const {
  if (back >= sums_.size()) return 0;
  return sums_[(newest_ + sums_.size() - back) % sums_.size()];
}

const std::vector<float>& DecayTable::table(size_t longest) {
  table_.clear();
  if (sums_.empty()) return table_;
  longest = std::min(longest, kLongest);
  table_.reserve(longest + 1);
  for (size_t age = 0; age <= longest; ++age) {
    table_.push_back(static_cast<float>(std::exp(sum_at(0) - sum_at(age))));
  }
  return table_;
}

std::vector<double> DecayTable::history() const {
  std::vector<double> oldest_first;
  oldest_first.reserve(sums_.size());
  for (size_t back = sums_.size(); back > 0; --back) oldest_first.push_back(sum_at(back - 1));
  return oldest_first;
}

void DecayTable::restore(const std::vector<double>& history) {
  sums_ = history;
  newest_ = sums_.empty() ? 0 : sums_.size() - 1;
}

}  // namespace scape::plugin
