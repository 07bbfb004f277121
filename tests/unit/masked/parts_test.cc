// The small parts of the masked collective: mask and payload codes, the decay table, the
// agreement's comparison, saved state.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "base/crc.h"
#include "plugin/masked/agreement.h"
#include "plugin/masked/buffer_state.h"
#include "plugin/masked/decay_table.h"
#include "plugin/masked/dense_reasons.h"
#include "plugin/masked/engine.h"
#include "plugin/masked/mask_code.h"
#include "plugin/masked/payload_codec.h"

namespace scape::plugin {
namespace {

// ---- mask codes ----

std::vector<uint64_t> random_mask(size_t n, size_t k, uint32_t seed) {
  std::vector<size_t> order(n);
  for (size_t j = 0; j < n; ++j) order[j] = j;
  std::shuffle(order.begin(), order.end(), std::mt19937(seed));
  std::vector<uint64_t> mask(kernels::mask_words(n));
  for (size_t i = 0; i < k; ++i) mask[order[i] / 64] |= uint64_t{1} << (order[i] % 64);
  return mask;
}

TEST(MaskCode, ComesBackAsItWasAtEveryDensity) {
  for (const size_t n : {1, 63, 64, 65, 1000, 65536, 200001}) {
    for (const double share : {0.0, 0.001, 0.01, 0.06, 0.07, 0.5, 1.0}) {
      const auto k = std::max<size_t>(1, static_cast<size_t>(share * static_cast<double>(n)));
      const std::vector<uint64_t> mask = random_mask(n, k, 7);
      std::vector<std::byte> code(mask_code_bytes(n, k));
      encode_mask(mask.data(), n, k, code.data());
      std::vector<uint64_t> back(mask.size(), ~uint64_t{0});
      EXPECT_TRUE(decode_mask(code.data(), n, k, back.data())) << n << ", " << k;
      EXPECT_EQ(back, mask) << n << ", " << k;
    }
  }
}

TEST(MaskCode, IsNeverLongerThanTheBitsAndShortWhereFewAreSet) {
  EXPECT_EQ(mask_code_for(1 << 20, 1 << 18), MaskCode::kBitmask);
  EXPECT_EQ(mask_code_for(1 << 20, 1 << 13), MaskCode::kOffsets);
  for (const size_t k : {size_t{1}, size_t{1000}, size_t{70000}, size_t{1} << 20}) {
    EXPECT_LE(mask_code_bytes(1 << 20, k), size_t{1} << 17);
  }
  EXPECT_EQ(mask_code_bytes(0, 0), 0u);
}

TEST(MaskCode, RefusesAnotherNumberOfBitsAndBitsBeyondTheEnd) {
  const size_t n = 100;
  std::vector<uint64_t> mask = random_mask(n, 50, 3), back(2);
  std::vector<std::byte> code(mask_code_bytes(n, 50));
  ASSERT_EQ(mask_code_for(n, 50), MaskCode::kBitmask);
  encode_mask(mask.data(), n, 50, code.data());
  code[0] ^= std::byte{1};
  EXPECT_FALSE(decode_mask(code.data(), n, 50, back.data()));
  std::fill(mask.begin(), mask.end(), 0);
  mask[1] = uint64_t{1} << 63;  // element 127
  for (uint64_t j = 0; j < 49; ++j) mask[0] |= uint64_t{1} << j;
  encode_mask(mask.data(), n, 50, code.data());
  EXPECT_FALSE(decode_mask(code.data(), n, 50, back.data()));
}

// ---- payload codecs ----

struct Powers {
  std::vector<float> table = kernels::make_power_table(0.9);
  StepView step(std::vector<uint16_t>* ages) const {
    StepView view;
    view.params.powers = {table.data(), static_cast<uint32_t>(table.size())};
    view.masked = ages->size();
    view.ages = ages->data();
    return view;
  }
};

TEST(PayloadCodec, Fp32SendsTheValuesWhereTheyAre) {
  const Powers powers;
  const auto engine = make_host_engine();
  const auto codec = make_payload_codec(*engine, SCAPE_FLOAT32);
  std::vector<float> values = {1.5f, -2, 3, 99};
  std::vector<uint16_t> ages = {1, 2, 3};
  const StepView step = powers.step(&ages);
  EXPECT_TRUE(codec->plain());
  codec->encode(step, values.data(), values.data());
  EXPECT_EQ(values, (std::vector<float>{1.5f, -2, 3, 0}));
  EXPECT_EQ(codec->error(), nullptr);
  EXPECT_EQ(codec->decode(step, values.data(), nullptr), values.data());
  engine->restore({}, true);
  codec->encode(step, values.data(), values.data());
  EXPECT_TRUE(std::isnan(values[3]));
  EXPECT_EQ(values[1], -2);
  codec->encode(step, values.data(), values.data());
  EXPECT_EQ(values[3], 0) << "a flag travels once";
}

TEST(PayloadCodec, Bf16SendsTheUnknownPartOfTheMomentAndKeepsTheError) {
  const Powers powers;
  const auto engine = make_host_engine();
  const auto codec = make_payload_codec(*engine, SCAPE_BFLOAT16);
  std::vector<float> values = {1.2345f, -77.7f, 1e-3f, 0};
  const std::vector<float> u = values;
  std::vector<uint16_t> ages = {1, 10, 40};
  const StepView step = powers.step(&ages);
  EXPECT_FALSE(codec->plain());
  std::vector<uint16_t> wire(4, 7);
  codec->encode(step, values.data(), wire.data());
  for (size_t i = 0; i < 3; ++i) {
    const double weight = (1 - std::pow(0.9, ages[i])) / ages[i];
    const uint32_t bits = uint32_t{wire[i]} << 16;
    float sent;
    std::memcpy(&sent, &bits, sizeof(sent));
    EXPECT_NEAR(sent, weight * u[i], std::fabs(weight * u[i]) / 256);
    EXPECT_NEAR(sent / weight + codec->error()[i], u[i], std::fabs(u[i]) * 1e-5)
        << "nothing is lost";
  }
  EXPECT_EQ(wire[3], 0);
  EXPECT_EQ(codec->decode(step, wire.data(), values.data()), values.data());
  for (size_t i = 0; i < 3; ++i) EXPECT_NEAR(values[i], u[i], std::fabs(u[i]) / 128);
  EXPECT_EQ(values[3], 0);

  engine->restore({}, true);
  codec->encode(step, values.data(), wire.data());
  codec->decode(step, wire.data(), values.data());
  EXPECT_TRUE(std::isnan(values[3]));
}

// ---- decay ----

TEST(DecayTable, IsEmptyUntilThereIsDecay) {
  DecayTable decay;
  decay.push(0.1, 0);
  EXPECT_TRUE(decay.table(5).empty());
  decay.push(0.1, 0.5);
  EXPECT_EQ(decay.table(3).size(), 4u);
  EXPECT_EQ(decay.table(3)[0], 1.0f);
  EXPECT_FLOAT_EQ(decay.table(3)[1], 0.95f);
  EXPECT_FLOAT_EQ(decay.table(3)[3], 0.95f) << "steps without decay count as 1";
}

TEST(DecayTable, HoldsTheProductOverEachAgeForAsLongAsAgesGo) {
  DecayTable decay;
  std::vector<double> factors;
  for (int step = 0; step < 40000; ++step) {
    const double lr = 1e-4 * (1 + step % 7);
    decay.push(lr, 0.1);
    factors.push_back(1 - lr * 0.1);
  }
  const std::vector<float> table = decay.table(100000);
  ASSERT_EQ(table.size(), DecayTable::kLongest + 1);
  double product = 1;
  for (size_t age = 1; age <= DecayTable::kLongest; ++age) {
    product *= factors[factors.size() - age];
    ASSERT_NEAR(table[age], product, product * 1e-6) << age;
  }
}

TEST(DecayTable, HoldsProductsThatNoLibraryFunctionRounds) {
  DecayTable decay;
  double product = 1;
  for (int step = 0; step < 1000; ++step) decay.push(1e-3, 0.1);
  const std::vector<float> table = decay.table(1000);
  for (size_t age = 0; age <= 1000; ++age, product *= 1 - 1e-3 * 0.1) {
    ASSERT_EQ(table[age], static_cast<float>(product)) << age;
  }
}

TEST(DecayTable, GoesOnFromItsHistory) {
  DecayTable decay, again;
  for (int step = 0; step < 33000; ++step) decay.push(1e-3, 0.1);
  again.restore(decay.history());
  for (DecayTable* each : {&decay, &again}) each->push(2e-3, 0.1);
  EXPECT_EQ(decay.table(40000), again.table(40000));
  EXPECT_EQ(decay.history(), again.history());
}

// ---- agreement ----

AgreementRecord record_of(const BufferConfig& config) {
  return make_agreement_record(config, 1000, 0, 0);
}

TEST(Agreement, NamesTheFirstDifferenceWithBothRanksAndValues) {
  BufferConfig config;
  config.name = "layer.7";
  const AgreementRecord same = record_of(config);
  EXPECT_TRUE(compare_records({same, same, same}).ok());
  config.sparsity = 0.9;
  const Status status = compare_records({same, same, record_of(config)});
  EXPECT_EQ(status.code(), SCAPE_ERR_MISMATCH);
  for (const char* part : {"'layer.7'", "sparsity", "rank 0 has 0.99,", "rank 2 has 0.9;"}) {
    EXPECT_NE(status.message().find(part), std::string::npos) << status.message();
  }
}

TEST(Agreement, SeesEveryOption) {
  const AgreementRecord base = record_of(BufferConfig{});
  const auto differs = [&](const char* field, auto change) {
    BufferConfig config;
    change(&config);
    const Status status = compare_records({base, record_of(config)});
    EXPECT_NE(status.message().find(field), std::string::npos) << field << ": " << status.message();
  };
  differs("name", [](BufferConfig* c) { c->name = "other"; });
  differs("offset", [](BufferConfig* c) { c->offset = 64; });
  differs("element type", [](BufferConfig* c) { c->dtype = SCAPE_FLOAT16; });
  differs("role", [](BufferConfig* c) { c->role = SCAPE_ROLE_GRADIENT; });
  differs("payload", [](BufferConfig* c) { c->payload = SCAPE_BFLOAT16; });
  differs("residual", [](BufferConfig* c) { c->residual = SCAPE_RESIDUAL_IN_PLACE; });
  differs("rule", [](BufferConfig* c) { c->rule = SCAPE_RULE_PLAIN; });
  differs("dense_steps", [](BufferConfig* c) { c->dense_steps = 21; });
  differs("ramp_steps", [](BufferConfig* c) { c->ramp_steps = 201; });
  differs("ramp_sparsity", [](BufferConfig* c) { c->ramp_sparsity = 0.8; });
  differs("beta1", [](BufferConfig* c) { c->beta1 = 0.91; });
  differs("beta2", [](BufferConfig* c) { c->beta2 = 0.951; });
  differs("eps", [](BufferConfig* c) { c->eps = 1e-7; });
  differs("age_cap", [](BufferConfig* c) { c->age_cap = 99; });
  AgreementRecord other = base;
  other.step = 5;
  EXPECT_NE(compare_records({base, other}).message().find("step"), std::string::npos);
  other = base;
  other.checksum = 1;
  EXPECT_NE(compare_records({base, other}).message().find("checksum"), std::string::npos);
  other = base;
  other.count = 998;
  EXPECT_NE(compare_records({base, other}).message().find("998"), std::string::npos);
}

// ---- saved state ----

TEST(Crc, IsTheUsualOneAndCanBeContinued) {
  EXPECT_EQ(crc32(0, "123456789", 9), 0xcbf43926u);
  const std::string text = "a longer text, taken in two parts";
  const uint32_t first = crc32(0, text.data(), 13);
  EXPECT_EQ(crc32(first, text.data() + 13, text.size() - 13), crc32(0, text.data(), text.size()));
}

class SavedState : public testing::Test {
 protected:
  SavedState() {
    config_.name = "layer.7";
    config_.sparsity = 0.5;
    config_.dense_steps = 1;
    config_.ramp_steps = 1;
    state_.step = 12;
    state_.residual_dirty = true;
    state_.flag_pending = true;
    state_.restamp_at = 3;
    state_.reduction = {.op = ReduceOp::kPremulSum, .factor = 0.125};
    std::vector<float> moment;
    std::vector<uint16_t> last;
    for (size_t j = 0; j < kCount; ++j) {
      moment.push_back(static_cast<float>(j) / 7);
      last.push_back(static_cast<uint16_t>(j));
      residual_.push_back(-static_cast<float>(j));
    }
    put(moment, &state_.moment);
    put(last, state_.last.get());
    put(random_mask(kCount, 30, 1), &state_.mask);
    std::vector<uint64_t> next = random_mask(64, 32, 2);
    const std::vector<uint64_t> rest = random_mask(kCount - 64, 18, 2);
    next.insert(next.end(), rest.begin(), rest.end());
    put(next, &state_.next);
    state_.decay.push(0.1, 0.1);
    save_state(owner(), state_, residual_.data(), {}, &saved_);
  }

  template <typename T>
  static void put(const std::vector<T>& values, Array<T>* array) {
    array->assign(values.data(), values.size(), {});
  }

  StateOwner owner() const { return {config_, kCount, 0, 2}; }

  // Expects a refusal that mentions `what`, and that nothing was loaded.
  void expect_refused(const StateOwner& who, const std::vector<std::byte>& bytes,
                      const char* what) {
    BufferState out(*engine_);
    out.step = 99;
    const Status status = load_state(who, bytes.data(), bytes.size(), &out);
    EXPECT_EQ(status.code(), SCAPE_ERR_DATA) << what;
    EXPECT_NE(status.message().find(what), std::string::npos) << status.message();
    EXPECT_EQ(out.step, 99u);
    EXPECT_TRUE(out.moment.empty());
  }

  static constexpr size_t kCount = 100;
  BufferConfig config_;
  const std::shared_ptr<Engine> engine_ = make_host_engine();
  BufferState state_{*engine_};
  std::vector<float> residual_;
  std::vector<std::byte> saved_;
};

TEST_F(SavedState, ComesBackWhole) {
  BufferState out(*engine_);
  ASSERT_TRUE(load_state(owner(), saved_.data(), saved_.size(), &out).ok());
  EXPECT_EQ(out.step, 12u);
  EXPECT_TRUE(out.residual_dirty);
  EXPECT_TRUE(out.flag_pending);
  EXPECT_EQ(out.restamp_at, 3u);
  EXPECT_EQ(out.reduction.op, ReduceOp::kPremulSum);
  EXPECT_EQ(out.reduction.factor, 0.125);
  EXPECT_EQ(out.moment.to_host({}), state_.moment.to_host({}));
  EXPECT_EQ(out.last->to_host({}), state_.last->to_host({}));
  EXPECT_EQ(out.residual.to_host({}), residual_);
  EXPECT_EQ(out.mask.to_host({}), state_.mask.to_host({}));
  EXPECT_EQ(out.next.to_host({}), state_.next.to_host({}));
  EXPECT_EQ(out.decay.history(), state_.decay.history());
  EXPECT_EQ(replicated_checksum(out, {}), replicated_checksum(state_, {}));
}

TEST_F(SavedState, IsRefusedWholeWhenAnyByteIsDamagedOrMissing) {
  for (size_t i = 0; i < saved_.size(); ++i) {
    std::vector<std::byte> bytes = saved_;
    bytes[i] ^= std::byte{0x20};
    BufferState out(*engine_);
    EXPECT_EQ(load_state(owner(), bytes.data(), bytes.size(), &out).code(), SCAPE_ERR_DATA) << i;
    EXPECT_TRUE(out.moment.empty());
  }
  for (size_t size = 0; size < saved_.size(); size += 13) {
    const std::vector<std::byte> cut(saved_.begin(),
                                     saved_.begin() + static_cast<std::ptrdiff_t>(size));
    expect_refused(owner(), cut, "damaged");
  }
}

TEST_F(SavedState, IsRefusedWhereNoCallCouldHaveLeftIt) {
  const auto refused = [&](const char* what, const std::function<void(BufferState*)>& change) {
    BufferState changed(*engine_);
    ASSERT_TRUE(load_state(owner(), saved_.data(), saved_.size(), &changed).ok()) << what;
    change(&changed);
    std::vector<std::byte> bytes;
    save_state(owner(), changed, residual_.data(), {}, &bytes);
    expect_refused(owner(), bytes, what);
  };
  const uint64_t beyond = uint64_t{1} << (kCount % 64);
  refused("bits beyond its end", [&](BufferState* state) { state->mask.data()[1] |= beyond; });
  refused("bits beyond its end", [&](BufferState* state) {
    // Still of the right number.
    uint64_t& back = state->next.data()[1];
    back &= back - 1;
    back |= beyond;
  });
  refused("impossible size", [](BufferState* state) { state->last->clear(); });
  refused("its reduction", [](BufferState* state) { state->reduction.op = ReduceOp::kMax; });
  refused("its reduction",
          [](BufferState* state) { state->reduction.op = static_cast<ReduceOp>(99); });
  refused("a decay", [](BufferState* state) { state->decay.restore({0.5, 1.5}); });
  refused("a decay", [](BufferState* state) {
    state->decay.restore({std::numeric_limits<double>::quiet_NaN()});
  });
}

TEST_F(SavedState, IsRefusedElsewhereThanWhereItWasSaved) {
  expect_refused({config_, kCount, 1, 2}, saved_, "rank 0, but here it is 1");
  expect_refused({config_, kCount, 0, 3}, saved_, "world size 2, but here it is 3");
  expect_refused({config_, 101, 0, 2}, saved_, "count 100, but here it is 101");
  BufferConfig other = config_;
  other.name = "layer.8";
  expect_refused({other, kCount, 0, 2}, saved_, "'layer.7', but here it is 'layer.8'");
  other = config_;
  other.role = SCAPE_ROLE_GRADIENT;
  expect_refused({other, kCount, 0, 2}, saved_, "role");
  other = config_;
  other.sparsity = 0.9;
  expect_refused({other, kCount, 0, 2}, saved_,
                 "with 32 masked elements in rank 0's part, but its options here want 6");
}

TEST_F(SavedState, IsRefusedWhereTheScheduleSendsItsNextStepOtherwise) {
  BufferConfig longer = config_;
  longer.dense_steps = 20;
  expect_refused({longer, kCount, 0, 2}, saved_, "with a mask, but its options here want none");

  state_.next.clear();
  std::vector<std::byte> dense;
  save_state({longer, kCount, 0, 2}, state_, residual_.data(), {}, &dense);
  BufferState out(*engine_);
  EXPECT_TRUE(load_state({longer, kCount, 0, 2}, dense.data(), dense.size(), &out).ok());
  expect_refused(owner(), dense, "with no mask, but its options here want one");
}

// ---- why calls went dense ----

TEST(DenseReasons, SayEachOnceAndKnowTheLast) {
  DenseReasons reasons;
  EXPECT_EQ(reasons.last(), "");
  EXPECT_TRUE(reasons.note("a"));
  EXPECT_TRUE(reasons.note("b"));
  EXPECT_FALSE(reasons.note("a"));
  EXPECT_EQ(reasons.last(), "a");
  int said = 2;
  for (int i = 0; i < 1000; ++i) said += reasons.note("elements " + std::to_string(i));
  EXPECT_EQ(said, 16);
  EXPECT_EQ(reasons.last(), "elements 999");
}

}  // namespace
}  // namespace scape::plugin
