// Score views: from whose residual a rank judges a partition.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/kernels.h"

namespace scape::plugin {

// One partition as the scoring rank sees it, after steps 4 and 5.
struct ScoreInput {
  const float* moment = nullptr;
  const uint16_t* last = nullptr;
  float* residual = nullptr;  // this rank's; non-finite values in it are set to 0
  size_t size = 0;
  float scale = 1;  // what the reduction makes of a value that all ranks have alike: 1 for a mean
};

class ScoreView {
 public:
  virtual ~ScoreView() = default;
  // Writes the scores of the partition; returns how many non-finite residuals it cleared.
  virtual size_t score(const ScoreInput& input, const kernels::StepParams& params,
                       float* scores) const = 0;
};

// Judges by this rank's residual alone.
const ScoreView& local_score_view();

}  // namespace scape::plugin
