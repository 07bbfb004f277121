// Kernels of every backend, beside what they are to be held against: a memory roof measured in the
// same run (`roof` is the percentage of it reached) and the obvious ways of doing the same.
//
// Names are operation/backend/elements/density in per mille. bytes_per_second counts each byte the
// operation must read or write once.
#include <benchmark/benchmark.h>

#include <algorithm>
#include <cstring>
#include <ctime>
#include <functional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "base/big_vector.h"
#include "kernels/kernels.h"

namespace scape::kernels {
namespace {

constexpr size_t kElements[] = {size_t{1} << 16, size_t{1} << 24};
constexpr int kPerMille[] = {1, 10, 100, 1000};

// Buffers as large as the largest run, made once: aligned and on large pages, as the library has
// its own.
struct Data {
  explicit Data(size_t n)
      : values(n),
        residual(n),
        m(n),
        param(n),
        out(n),
        payload(n),
        half(n),
        last(n),
        ages(n),
        mask(mask_words(n)),
        code(offset_code_bytes(n, n)),
        scratch(select_scratch_bytes() / sizeof(uint64_t)),
        powers(make_power_table(0.9)) {
    std::mt19937 random(1);
    std::normal_distribution<float> normal;
    for (size_t j = 0; j < n; ++j) {
      values[j] = normal(random);
      m[j] = 0.1f * normal(random);
      last[j] = static_cast<uint16_t>(random() % 50);
    }
    step.t = 50;
    step.powers = {powers.data(), static_cast<uint32_t>(powers.size())};
    step.beta1 = 0.9f;
    step.beta2 = 0.95f;
    step.eps = 1e-8f;
    step.lr = 1e-3f;
  }

  // A fresh random mask; returns its bits.
  size_t set_mask(size_t n, int per_mille) {
    std::mt19937 random(2);
    std::fill(mask.begin(), mask.end(), 0);
    for (size_t j = 0; j < n; ++j) {
      if (static_cast<int>(random() % 1000) < per_mille) mask[j / 64] |= uint64_t{1} << (j % 64);
    }
    return scalar_ops().count_bits(mask.data(), mask_words(n));
  }

  BigVector<float> values, residual, m, param, out, payload;
  BigVector<uint16_t> half, last, ages;
  BigVector<uint64_t> mask;
  std::vector<unsigned char> code;
  std::vector<uint64_t> scratch;
  std::vector<float> powers;
  StepParams step;
};

Data& data() {
  static Data instance(*std::max_element(std::begin(kElements), std::end(kElements)));
  return instance;
}

// Seconds this thread has run: what other programs do to a shared machine counts less than by the
// clock.
double thread_seconds() {
  timespec now;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

// Bytes a second that memcpy reads and writes over n floats: the roof.
double roof(size_t n) {
  static std::vector<std::pair<size_t, double>> known;
  for (const auto& [size, rate] : known) {
    if (size == n) return rate;
  }
  Data& d = data();
  double best = 0;
  for (int i = 0; i < 20; ++i) {
    const double begin = thread_seconds();
    std::memcpy(d.out.data(), d.values.data(), n * sizeof(float));
    benchmark::ClobberMemory();
    best =
        std::max(best, 2.0 * static_cast<double>(n * sizeof(float)) / (thread_seconds() - begin));
  }
  known.emplace_back(n, best);
  return best;
}

template <typename Body>
void measure(benchmark::State& state, size_t n, size_t bytes, Body&& body) {
  const double limit = roof(n);
  const double begin = thread_seconds();
  for ([[maybe_unused]] auto _ : state) {
    body();
    benchmark::ClobberMemory();
  }
  const double took = thread_seconds() - begin;
  const double total = static_cast<double>(bytes) * static_cast<double>(state.iterations());
  state.SetBytesProcessed(static_cast<int64_t>(total));
  state.counters["roof"] = 100 * total / took / limit;
}

using Run = void (*)(benchmark::State& state, const Ops& ops, size_t n, size_t k);

void register_all(const char* name, bool by_density, Run run) {
  for (const size_t n : kElements) {
    for (const int per_mille : kPerMille) {
      if (!by_density && per_mille != 10) continue;
      for (const Ops* ops : available_ops()) {
        const std::string label = std::string(name) + '/' + ops->name + '/' + std::to_string(n) +
                                  '/' + std::to_string(per_mille);
        benchmark::RegisterBenchmark(label.c_str(), [=](benchmark::State& state) {
          run(state, *ops, n, data().set_mask(n, per_mille));
        });
      }
    }
  }
}

// A rival or roof that no backend belongs to.
void register_plain(const char* name, Run run) {
  for (const size_t n : kElements) {
    for (const int per_mille : kPerMille) {
      const std::string label =
          std::string(name) + '/' + std::to_string(n) + '/' + std::to_string(per_mille);
      benchmark::RegisterBenchmark(label.c_str(), [=](benchmark::State& state) {
        run(state, scalar_ops(), n, data().set_mask(n, per_mille));
      });
    }
  }
}

void run_memcpy(benchmark::State& state, const Ops&, size_t n, size_t) {
  Data& d = data();
  measure(state, n, 8 * n, [&] { std::memcpy(d.out.data(), d.values.data(), n * sizeof(float)); });
}

void run_accumulate_pack(benchmark::State& state, const Ops& ops, size_t n, size_t k) {
  Data& d = data();
  std::fill_n(d.residual.data(), n, 0.0f);
  measure(state, n, 12 * n + 4 * k + n / 8, [&] {
    ops.accumulate_pack(Type::kFloat32, d.values.data(), d.residual.data(), d.mask.data(), n,
                        d.payload.data());
  });
}

void run_accumulate_pack_bf16(benchmark::State& state, const Ops& ops, size_t n, size_t k) {
  Data& d = data();
  std::fill_n(d.residual.data(), n, 0.0f);
  ops.from_float(Type::kBfloat16, d.values.data(), d.half.data(), n);
  measure(state, n, 10 * n + 4 * k + n / 8, [&] {
    ops.accumulate_pack(Type::kBfloat16, d.half.data(), d.residual.data(), d.mask.data(), n,
                        d.payload.data());
  });
}

void run_gather(benchmark::State& state, const Ops& ops, size_t n, size_t k) {
  Data& d = data();
  measure(state, n, 8 * k + n / 8,
          [&] { ops.gather(d.values.data(), d.mask.data(), n, d.payload.data()); });
}

void run_gather_ages(benchmark::State& state, const Ops& ops, size_t n, size_t k) {
  Data& d = data();
  measure(state, n, 4 * k + n / 8,
          [&] { ops.gather_ages(d.mask.data(), n, d.last.data(), d.step.t, d.ages.data()); });
}

// The loop that one writes first: every element's bit is tested.
void run_gather_rival(benchmark::State& state, const Ops&, size_t n, size_t k) {
  Data& d = data();
  measure(state, n, 8 * k + n / 8, [&] {
    float* payload = d.payload.data();
    for (size_t j = 0; j < n; ++j) {
      if (((d.mask[j / 64] >> (j % 64)) & 1) != 0) *payload++ = d.values[j];
    }
  });
}

void run_scatter(benchmark::State& state, const Ops& ops, size_t n, size_t k) {
  Data& d = data();
  measure(state, n, 8 * k + n / 8,
          [&] { ops.scatter(d.payload.data(), d.mask.data(), n, d.out.data()); });
}

void run_clear_masked(benchmark::State& state, const Ops& ops, size_t n, size_t k) {
  Data& d = data();
  measure(state, n, 4 * k + n / 8, [&] { ops.clear_masked(d.out.data(), d.mask.data(), n); });
}

void run_adams_step(benchmark::State& state, const Ops& ops, size_t n, size_t k) {
  Data& d = data();
  std::copy_n(d.values.data(), k, d.payload.data());
  StepParams step = d.step;
  measure(state, n, 24 * k + n / 8, [&] {
    ++step.t;
    ops.adams_step(d.payload.data(), d.mask.data(), n, step, d.residual.data(), d.last.data(),
                   d.param.data());
  });
}

void run_score(benchmark::State& state, const Ops& ops, size_t n, size_t) {
  Data& d = data();
  std::copy_n(d.values.data(), n, d.residual.data());
  measure(state, n, 14 * n, [&] {
    ops.score(d.m.data(), d.last.data(), d.residual.data(), n, d.step, 1.0f, d.out.data());
  });
}

void prepare_scores(size_t n) {
  Data& d = data();
  for (size_t j = 0; j < n; ++j) d.residual[j] = std::abs(d.values[j]);
}

void run_select(benchmark::State& state, const Ops& ops, size_t n, size_t k) {
  Data& d = data();
  prepare_scores(n);
  measure(state, n, 4 * n + n / 8,
          [&] { ops.select(d.residual.data(), n, k, d.mask.data(), d.scratch.data()); });
}

// What one writes first: the k-th largest of a copy, then a pass that compares.
void run_select_rival(benchmark::State& state, const Ops&, size_t n, size_t k) {
  Data& d = data();
  prepare_scores(n);
  measure(state, n, 4 * n + n / 8, [&] {
    std::copy_n(d.residual.data(), n, d.out.data());
    const auto begin = d.out.begin();
    const auto nth = begin + static_cast<std::ptrdiff_t>(k == 0 ? 0 : k - 1);
    std::nth_element(begin, nth, begin + static_cast<std::ptrdiff_t>(n), std::greater<>());
    const float threshold = *nth;
    for (size_t w = 0; w < n / 64; ++w) {
      uint64_t word = 0;
      for (size_t i = 0; i < 64; ++i) word |= uint64_t{d.residual[w * 64 + i] >= threshold} << i;
      d.mask[w] = word;
    }
  });
}

void run_encode_offsets(benchmark::State& state, const Ops& ops, size_t n, size_t k) {
  Data& d = data();
  measure(state, n, 2 * k + n / 8, [&] { ops.encode_offsets(d.mask.data(), n, d.code.data()); });
}

void run_decode_offsets(benchmark::State& state, const Ops& ops, size_t n, size_t k) {
  Data& d = data();
  const size_t bytes = ops.encode_offsets(d.mask.data(), n, d.code.data());
  measure(state, n, 2 * k + n / 8,
          [&] { ops.decode_offsets(d.code.data(), bytes, n, k, d.mask.data()); });
}

void run_count_bits(benchmark::State& state, const Ops& ops, size_t n, size_t) {
  Data& d = data();
  measure(state, n, n / 8,
          [&] { benchmark::DoNotOptimize(ops.count_bits(d.mask.data(), mask_words(n))); });
}

void run_any_nonfinite(benchmark::State& state, const Ops& ops, size_t n, size_t) {
  Data& d = data();
  measure(state, n, 4 * n,
          [&] { benchmark::DoNotOptimize(ops.any_nonfinite(d.values.data(), n)); });
}

template <Type type>
void run_to_float(benchmark::State& state, const Ops& ops, size_t n, size_t) {
  Data& d = data();
  ops.from_float(type, d.values.data(), d.half.data(), n);
  measure(state, n, 6 * n, [&] { ops.to_float(type, d.half.data(), d.out.data(), n); });
}

template <Type type>
void run_from_float(benchmark::State& state, const Ops& ops, size_t n, size_t) {
  Data& d = data();
  measure(state, n, 6 * n, [&] { ops.from_float(type, d.values.data(), d.half.data(), n); });
}

}  // namespace
}  // namespace scape::kernels

int main(int argc, char** argv) {
  using namespace scape::kernels;
  register_plain("memcpy", run_memcpy);
  register_all("accumulate_pack_fp32", true, run_accumulate_pack);
  register_all("accumulate_pack_bf16", false, run_accumulate_pack_bf16);
  register_all("gather", true, run_gather);
  register_plain("gather_by_bit_tests", run_gather_rival);
  register_all("gather_ages", true, run_gather_ages);
  register_all("scatter", true, run_scatter);
  register_all("clear_masked", true, run_clear_masked);
  register_all("adams_step", true, run_adams_step);
  register_all("score", false, run_score);
  register_all("select", true, run_select);
  register_plain("select_by_nth_element", run_select_rival);
  register_all("encode_offsets", true, run_encode_offsets);
  register_all("decode_offsets", true, run_decode_offsets);
  register_all("count_bits", false, run_count_bits);
  register_all("any_nonfinite", false, run_any_nonfinite);
  register_all("to_float_bf16", false, run_to_float<Type::kBfloat16>);
  register_all("to_float_fp16", false, run_to_float<Type::kFloat16>);
  register_all("from_float_bf16", false, run_from_float<Type::kBfloat16>);
  register_all("from_float_fp16", false, run_from_float<Type::kFloat16>);
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 1;
  benchmark::RunSpecifiedBenchmarks();
  benchmark::Shutdown();
  return 0;
}
