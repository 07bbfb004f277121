// Score views: from whose residual a rank judges a partition.
#pragma once

#include "plugin/masked/engine.h"

namespace scape::plugin {

class ScoreView {
 public:
  virtual ~ScoreView() = default;
  // Writes the scores of a partition, after steps 4 and 5. scale: what the reduction makes of a
  // value that all ranks have alike; 1 for a mean.
  virtual void score(Engine& engine, const StepView& step, const Partition& part, float scale,
                     float* scores) const = 0;
};

// Judges by this rank's residual alone.
const ScoreView& local_score_view();

}  // namespace scape::plugin
