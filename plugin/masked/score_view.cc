#include "plugin/masked/score_view.h"

namespace scape::plugin {
namespace {

class LocalScoreView final : public ScoreView {
 public:
  size_t score(const ScoreInput& input, const kernels::StepParams& params,
               float* scores) const override {
    return kernels::ops().score(input.moment, input.last, input.residual, input.size, params,
                                input.scale, scores);
  }
};

}  // namespace

const ScoreView& local_score_view() {
  static const LocalScoreView view;
  return view;
}

}  // namespace scape::plugin
