#include "plugin/masked/score_view.h"

namespace scape::plugin {
namespace {

class LocalScoreView final : public ScoreView {
 public:
  void score(Engine& engine, const StepView& step, const Partition& part, float scale,
             float* scores) const override {
    engine.score(step, part, scale, scores);
  }
};

}  // namespace

const ScoreView& local_score_view() {
  static const LocalScoreView view;
  return view;
}

}  // namespace scape::plugin
