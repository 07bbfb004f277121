// The steps, what the caller gets back, and the score, against the scalar reference; and what each
// of them leaves alone after a skipped exchange.
#include "tests/unit/kernels/cuda_testing.h"

namespace scape::kernels::cuda::testing {
namespace {

class CudaStep : public CudaKernels {
 protected:
  void expect_adams(const Step& step, size_t n, size_t offset, const IndexedMask& mask) {
    Guarded<float> payload(mask.bits(), offset), m(n, offset), param(n, offset);
    Guarded<float> expected_m(n), expected_param(n);
    Guarded<uint16_t> last(n, offset), expected_last(n);
    fill(payload, random_);
    fill(m, random_);
    fill(param, random_);
    fill_last(last, step.params.t, random_);
    expected_m.assign(m);
    expected_param.assign(param);
    expected_last.assign(last);
    for (const uint32_t skipped : {1u, 0u}) {
      const Verdict verdict{skipped};
      if (skipped == 0) {
        reference().adams_step(payload.data(), mask.words().data(), n, step.params,
                               expected_m.data(), expected_last.data(), expected_param.data());
      }
      ASSERT_RUNS(adams_step(kStream, payload.data(), mask.view(), step.params, m.data(),
                             last.data(), param.data(), &verdict));
      expect_same(expected_m, m, "m");
      expect_same(expected_last, last, "last");
      expect_same(expected_param, param, "param");
    }
    m.check_guards();
    last.check_guards();
    param.check_guards();
  }

  // What a skipped step returns where gradients are returned.
  Guarded<uint16_t> skipped_output(Type type, size_t n, const IndexedMask& mask) {
    Guarded<float> nans(mask.bits());
    std::fill_n(nans.data(), nans.size(), std::numeric_limits<float>::quiet_NaN());
    Guarded<uint16_t> out(n * size_of(type) / 2);
    reference().expand(type, nans.data(), mask.words().data(), n, out.data());
    return out;
  }

  // Parameters of one kind or another, by turns.
  const Step& step() const { return steps_[turn_ / 4 % 4]; }

 private:
  const Step steps_[4] = {Step(0.9, 3), Step(0.999, 3, false, false), Step(0.9, 3, true),
                          Step(0.0, 3)};
};

SCAPE_CUDA_TESTS(CudaStep);

TEST_P(CudaStep, StepsAsAdamS) {
  over_shapes(
      [&](size_t n, size_t offset, const auto& mask) { expect_adams(step(), n, offset, mask); });
}

TEST_P(CudaStep, StepsTenMillionElements) {
  constexpr size_t kN = kTenMillion;
  const Step step(0.9, 3);
  expect_adams(step, kN, 3, IndexedMask(random_mask(kN, 0.1, random_), kN));
}

TEST_P(CudaStep, FollowsTheMoment) {
  over_shapes([&](size_t n, size_t offset, const auto& mask) {
    for (const Type type : kTypes) {
      Guarded<float> values(mask.bits()), wide(mask.bits()), m(n, offset), expected_m(n);
      Guarded<uint16_t> last(n, offset), expected_last(n);
      fill(values, random_);
      fill(m, random_);
      fill_last(last, step().params.t, random_);
      const auto payload = as_type(type, values, offset);
      reference().to_float(type, payload.data(), wide.data(), wide.size());
      expected_m.assign(m);
      expected_last.assign(last);
      const size_t units = n * size_of(type) / 2;
      Guarded<uint16_t> out(units, offset * size_of(type) / 2), expected(units);
      for (const uint32_t skipped : {1u, 0u}) {
        const Verdict verdict{skipped};
        Guarded<float> shown(n);
        if (skipped == 0) {
          reference().moment_step(wide.data(), mask.words().data(), n, step().params,
                                  expected_m.data(), expected_last.data());
        }
        shown.assign(expected_m);
        if (skipped != 0) {
          Guarded<float> nans(mask.bits());
          std::fill_n(nans.data(), nans.size(), std::numeric_limits<float>::quiet_NaN());
          reference().scatter(nans.data(), mask.words().data(), n, shown.data());
        }
        reference().from_float(type, shown.data(), expected.data(), n);
        ASSERT_ENQUEUED(moment_step(kStream, type, payload.data(), mask.view(), step().params,
                                    m.data(), last.data(), &verdict));
        ASSERT_RUNS(moment_output(kStream, type, m.data(), mask.view(), out.data(), &verdict));
        expect_same(expected_m, m, "m");
        expect_same(expected_last, last, "last");
        expect_same(expected, out, "out");
      }
      m.check_guards();
      last.check_guards();
      out.check_guards();
    }
  });
}

TEST_P(CudaStep, StepsHooked) {
  const Step step(0.9, 65535);
  over_shapes([&](size_t n, size_t offset, const auto& mask) {
    const Guarded<uint64_t> before = random_mask(n, 0.3, random_);
    for (const Type type : kTypes) {
      const size_t units = n * size_of(type) / 2;
      Guarded<float> payload(mask.bits(), offset), m(n, offset), expected_m(n);
      Guarded<uint16_t> last(n, offset), expected_last(n);
      Guarded<uint16_t> out(units, offset * size_of(type) / 2), expected(units);
      fill(payload, random_);
      fill(m, random_);
      fill_last(last, step.params.t, random_);
      expected_m.assign(m);
      expected_last.assign(last);
      for (const uint32_t skipped : {1u, 0u}) {
        const Verdict verdict{skipped};
        if (skipped == 0) {
          reference().hooked_step(payload.data(), mask.words().data(), before.data(), n,
                                  step.params, type, expected.data(), expected_m.data(),
                                  expected_last.data());
        }
        ASSERT_RUNS(hooked_step(kStream, payload.data(), mask.view(), before.data(), step.params,
                                type, out.data(), m.data(), last.data(), &verdict));
        expect_same(skipped != 0 ? skipped_output(type, n, mask) : expected, out, "out");
        expect_same(expected_m, m, "m");
        expect_same(expected_last, last, "last");
      }
      out.check_guards();
      m.check_guards();
      last.check_guards();
    }
  });
}

TEST_P(CudaStep, Expands) {
  over_shapes([&](size_t n, size_t offset, const auto& mask) {
    Guarded<float> payload(mask.bits(), offset);
    fill(payload, random_, Data::kSpecial);
    for (const Type type : kTypes) {
      const size_t units = n * size_of(type) / 2;
      Guarded<uint16_t> out(units, offset * size_of(type) / 2), expected(units);
      fill(out, random_);
      reference().expand(type, payload.data(), mask.words().data(), n, expected.data());
      for (const uint32_t skipped : {1u, 0u}) {
        const Verdict verdict{skipped};
        ASSERT_RUNS(expand(kStream, type, payload.data(), mask.view(), out.data(), &verdict));
        expect_same(skipped != 0 ? skipped_output(type, n, mask) : expected, out, "out");
      }
      out.check_guards();
    }
  });
}

// Any part of a buffer: its parameters, against the mask and the ages of the whole.
TEST_P(CudaStep, StepsAfterwards) {
  over_shapes([&](size_t n, size_t offset, const auto& mask) {
    Guarded<uint16_t> ages(mask.bits(), offset);
    fill(ages, random_);
    for (size_t i = 0; i < ages.size(); i += 3) ages[i] = 1;
    const size_t some = n == 0 ? 0 : random_() % n;
    for (const auto& [begin, length] :
         {std::pair{size_t{0}, n}, {some, (n - some) / 2}, {n / 3, n - n / 3}}) {
      Guarded<float> before(length, offset), param(length, offset), expected(length);
      fill(before, random_);
      fill(param, random_);
      expected.assign(param);
      for (const uint32_t skipped : {1u, 0u}) {
        const Verdict verdict{skipped};
        if (skipped == 0) {
          // The mask of the part, from its first element on.
          Guarded<uint64_t> part(mask_words(length));
          size_t first_age = 0;
          for (size_t j = 0; j < begin; ++j) first_age += is_set(mask.words(), j);
          for (size_t j = 0; j < length; ++j) {
            part[j / 64] |= uint64_t{is_set(mask.words(), begin + j)} << (j % 64);
          }
          reference().post_step(before.data(), part.data(), ages.data() + first_age, length, 0.99f,
                                100, expected.data());
        }
        ASSERT_RUNS(post_step(kStream, before.data(), mask.view(), ages.data(), begin, length,
                              0.99f, 100, param.data(), &verdict));
        expect_same(expected, param, "param");
      }
      param.check_guards();
    }
  });
}

TEST_P(CudaStep, Scores) {
  const Step lazy(0.9, 65535), plain(0.9999, 65535, true);
  over_shapes([&](size_t n, size_t offset, const auto&) {
    const StepParams& params = turn_ / 4 % 2 == 0 ? lazy.params : plain.params;
    Guarded<float> m(n, offset), residual(n, offset), expected_residual(n);
    Guarded<float> out(n, offset), expected(n);
    Guarded<uint16_t> last(n, offset);
    fill(m, random_);
    fill(residual, random_, random_() % 2 == 0 ? Data::kSpecial : Data::kFinite);
    fill(last, random_);
    expected_residual.assign(residual);
    // The residual itself, or a copy of it, which stays as it is.
    const bool apart = turn_ / 8 % 2 == 1;
    Guarded<float> copy(n, offset), expected_copy(n);
    copy.assign(residual);
    expected_copy.assign(residual);
    const size_t cleared = reference().score(m.data(), last.data(), expected_residual.data(), n,
                                             params, 4.0f, expected.data());
    NonfiniteFlag flag{.cleared = 2, .raised = 0};
    ASSERT_RUNS(score(kStream, m.data(), last.data(), apart ? copy.data() : residual.data(),
                      residual.data(), n, params, 4.0f, out.data(), &flag));
    ASSERT_EQ(flag.cleared, 2 + cleared);
    ASSERT_EQ(flag.raised != 0, cleared > 0);
    expect_same(expected_residual, residual, "residual");
    expect_same(expected_copy, copy, "copy");
    expect_same(expected, out, "scores");
    residual.check_guards();
    out.check_guards();
  });
}

}  // namespace
}  // namespace scape::kernels::cuda::testing
