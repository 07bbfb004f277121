// Why calls of a buffer or a registration went dense.
#pragma once

#include <algorithm>
#include <cstddef>
#include <string>
#include <vector>

namespace scape::plugin {

// Not safe for threads: its owner guards it.
class DenseReasons {
 public:
  // Whether it is to be said: for the first time, and not after too many others, since some reasons
  // name ranges.
  bool note(const std::string& why) {
    last_ = why;
    constexpr size_t kMost = 16;
    if (said_.size() >= kMost || std::find(said_.begin(), said_.end(), why) != said_.end()) {
      return false;
    }
    said_.push_back(why);
    return true;
  }
  // Empty: none went dense.
  const std::string& last() const { return last_; }

 private:
  std::string last_;
  std::vector<std::string> said_;
};

}  // namespace scape::plugin
