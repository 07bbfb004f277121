// Every operation of kernels/cuda/cuda_ops.h on the device at hand, against the scalar reference,
// bit for bit: all types, lengths from 0 on, addresses at every offset, masks with no bit, some and
// all, values that are not finite, ties. Arrays are the device's own memory between guards.
//
//   device_kernels_check [longest array]        default: 10000019
//
// A line for each operation; exit status: 0 all right, 1 a difference, 2 no usable device, 3 a call
// failed.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "kernels/cuda/cuda_ops.h"
#include "kernels/kernels.h"

namespace scape::kernels::cuda {
namespace {

constexpr Type kTypes[] = {Type::kFloat32, Type::kBfloat16, Type::kFloat16};
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInf = std::numeric_limits<float>::infinity();

void require(cudaError_t result, const char* what) {
  if (result == cudaSuccess) return;
  std::fprintf(stderr, "device_kernels_check: %s: %s\n", what, cudaGetErrorString(result));
  std::exit(3);
}
// All that was enqueued is done, and went well.
void runs(const Status& status) {
  if (!status.ok()) {
    std::fprintf(stderr, "device_kernels_check: %s\n", status.message().c_str());
    std::exit(3);
  }
  require(cudaDeviceSynchronize(), "a kernel");
}

std::string first_difference;
size_t comparisons = 0;

void differs(const char* format, ...) __attribute__((format(printf, 1, 2)));
void differs(const char* format, ...) {
  if (!first_difference.empty()) return;
  char text[512];
  va_list args;
  va_start(args, format);
  std::vsnprintf(text, sizeof(text), format, args);
  va_end(args);
  first_difference = text;
}

struct Shape {
  size_t n, offset;
  double density;
};
Shape shape;  // of the comparison under way

template <typename T>
bool same(T a, T b) {
  if constexpr (std::is_floating_point_v<T>) {
    if (std::isnan(a) && std::isnan(b)) return true;
  }
  return std::memcmp(&a, &b, sizeof(T)) == 0;
}

template <typename T>
void expect(const char* what, const std::vector<T>& expected, const std::vector<T>& got) {
  ++comparisons;
  for (size_t j = 0; j < expected.size(); ++j) {
    if (same(expected[j], got[j])) continue;
    return differs("%s[%zu] is %.9g instead of %.9g (n = %zu, offset %zu, density %g)", what, j,
                   static_cast<double>(got[j]), static_cast<double>(expected[j]), shape.n,
                   shape.offset, shape.density);
  }
}
template <typename T>
void expect_one(const char* what, T expected, T got) {
  expect(what, std::vector<T>{expected}, std::vector<T>{got});
}

// n elements on the device, `offset` of them behind an aligned address, with guards on both sides.
template <typename T>
class Array {
 public:
  explicit Array(size_t n, size_t offset = 0)
      : n_(n), bytes_((n + offset) * sizeof(T) + 2 * kGuard) {
    require(cudaMalloc(&memory_, bytes_), "cudaMalloc");
    require(cudaMemset(memory_, kPattern, bytes_), "cudaMemset");
    data_ = reinterpret_cast<T*>(static_cast<uint8_t*>(memory_) + kGuard) + offset;
    if (n > 0) require(cudaMemset(data_, 0, n * sizeof(T)), "cudaMemset");
  }
  explicit Array(const std::vector<T>& values, size_t offset = 0) : Array(values.size(), offset) {
    put(values);
  }
  Array(const Array&) = delete;
  ~Array() { (void)cudaFree(memory_); }

  T* data() const { return data_; }
  void put(const std::vector<T>& values) const {
    require(cudaMemcpy(data_, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice),
            "cudaMemcpy");
  }
  std::vector<T> get() const {
    std::vector<uint8_t> all(bytes_);
    require(cudaMemcpy(all.data(), memory_, bytes_, cudaMemcpyDeviceToHost), "cudaMemcpy");
    const auto before = reinterpret_cast<uint8_t*>(data_) - static_cast<uint8_t*>(memory_);
    const auto begin = all.begin() + before;
    const auto end = begin + static_cast<std::ptrdiff_t>(n_ * sizeof(T));
    const auto touched = [](uint8_t byte) { return byte != kPattern; };
    if (std::any_of(all.begin(), begin, touched) || std::any_of(end, all.end(), touched)) {
      differs("something was written outside an array of %zu bytes (n = %zu, offset %zu)",
              n_ * sizeof(T), shape.n, shape.offset);
    }
    std::vector<T> values(n_);
    if (n_ > 0) std::memcpy(values.data(), &*begin, n_ * sizeof(T));
    return values;
  }

 private:
  static constexpr size_t kGuard = 256;
  static constexpr int kPattern = 0xa5;
  size_t n_, bytes_;
  void* memory_ = nullptr;
  T* data_ = nullptr;
};

// ---- data ----

std::mt19937_64 random_bits(20260731);

float random_float(bool special) {
  constexpr float kSpecials[] = {0.0f,  -0.0f,  kInf,     -kInf,          kNan,     1e-42f,
                                 3e38f, -3e38f, 65520.0f, 1.1754944e-38f, 65504.0f, -2.9e-8f};
  const uint64_t bits = random_bits();
  if (special && bits >> 60 == 0) return kSpecials[(bits >> 32) % std::size(kSpecials)];
  const auto exponent = static_cast<uint32_t>(110 + (bits >> 40) % 24);
  return std::bit_cast<float>((static_cast<uint32_t>(bits) & 0x807fffffu) | exponent << 23);
}
std::vector<float> floats(size_t n, bool special = false) {
  std::vector<float> values(n);
  for (float& value : values) value = random_float(special);
  return values;
}
std::vector<uint16_t> halves(size_t n) {
  std::vector<uint16_t> values(n);
  for (uint16_t& value : values) value = static_cast<uint16_t>(random_bits());
  return values;
}
// Steps of the last exchange, as they are when it is step t: ages from 1 on.
std::vector<uint16_t> stamps(size_t n, uint16_t t) {
  std::vector<uint16_t> values(n);
  for (uint16_t& value : values) {
    const uint64_t bits = random_bits();
    value = static_cast<uint16_t>(t - 1 - bits % 8 - (bits % 64 == 0 ? (bits >> 32) % 0x7fff : 0));
  }
  return values;
}

const Ops& reference() { return scalar_ops(); }

// The values in the type, as 16-bit units.
std::vector<uint16_t> narrowed(Type type, const std::vector<float>& values) {
  std::vector<uint16_t> units(values.size() * size_of(type) / 2);
  reference().from_float(type, values.data(), units.data(), values.size());
  return units;
}
std::vector<float> widened(Type type, const std::vector<uint16_t>& units) {
  std::vector<float> values(units.size() * 2 / size_of(type));
  reference().to_float(type, units.data(), values.data(), values.size());
  return values;
}
size_t units_offset(Type type) { return shape.offset * size_of(type) / 2; }

std::vector<uint64_t> random_mask(size_t n, double density) {
  std::vector<uint64_t> words(mask_words(n));
  const auto threshold = static_cast<uint64_t>(density * 0x1p53);
  for (size_t j = 0; j < n; ++j)
    words[j / 64] |= uint64_t{density >= 1 || random_bits() >> 11 < threshold} << (j % 64);
  return words;
}

// A mask here and, with its index, there.
struct Mask {
  Mask()
      : words(random_mask(shape.n, shape.density)),
        device(words),
        index(mask_index_bytes(shape.n) / 8) {
    for (const uint64_t word : words) bits += static_cast<size_t>(std::popcount(word));
    runs(index_mask(nullptr, device.data(), shape.n, index.data()));
    const std::vector<uint64_t> got = index.get();
    std::vector<uint64_t> expected(mask_index_runs(shape.n) + 1);
    for (size_t w = 0, sum = 0; w < words.size(); ++w) {
      if (w % 32 == 0) expected[w / 32] = sum;
      sum += static_cast<size_t>(std::popcount(words[w]));
    }
    expected.back() = bits;
    expect("index", expected,
           std::vector<uint64_t>(got.begin(),
                                 got.begin() + static_cast<std::ptrdiff_t>(expected.size())));
  }
  MaskView view() const { return {device.data(), index.data(), shape.n}; }

  std::vector<uint64_t> words;
  Array<uint64_t> device, index;
  size_t bits = 0;
};

// Parameters of a step; the tables are here for the reference, and there.
class Parameters {
 public:
  Parameters(double beta1, bool plain)
      : powers_(make_power_table(beta1)), decay_(40), device_powers_(powers_), device_decay_(40) {
    for (size_t a = 0; a < decay_.size(); ++a) decay_[a] = std::pow(0.999f, static_cast<float>(a));
    device_decay_.put(decay_);
    host_.t = 7;
    host_.powers = {powers_.data(), static_cast<uint32_t>(powers_.size())};
    host_.beta1 = static_cast<float>(beta1);
    host_.beta2 = 0.95f;
    host_.eps = 1e-8f;
    host_.lr = 3e-3f;
    host_.plain = plain;
    host_.decay = decay_.data();
    host_.decay_size = static_cast<uint32_t>(decay_.size());
    device_ = host_;
    device_.powers.pow = device_powers_.data();
    device_.decay = device_decay_.data();
  }
  const StepParams& host() const { return host_; }
  const StepParams& device() const { return device_; }

 private:
  std::vector<float> powers_, decay_;
  Array<float> device_powers_, device_decay_;
  StepParams host_, device_;
};

// ---- the checks, each for the shape at hand ----

void conversions() {
  const size_t n = shape.n;
  for (const Type type : kTypes) {
    const std::vector<float> in = floats(n, true);
    const Array<float> wide(in, shape.offset), back(n, shape.offset);
    const Array<uint16_t> narrow(n * size_of(type) / 2, units_offset(type));
    runs(from_float(nullptr, type, wide.data(), narrow.data(), n));
    const std::vector<uint16_t> units = narrowed(type, in);
    expect("from_float", widened(type, units), widened(type, narrow.get()));
    narrow.put(units);
    runs(to_float(nullptr, type, narrow.data(), back.data(), n));
    expect("to_float", widened(type, units), back.get());
  }
}

void sums_and_restamps() {
  const size_t n = shape.n;
  std::vector<float> a = floats(n), b = floats(n);
  const Array<float> in(a, shape.offset), out(b, shape.offset);
  runs(add(nullptr, in.data(), out.data(), n));
  for (size_t j = 0; j < n; ++j) b[j] = a[j] + b[j];
  expect("add", b, out.get());
  std::vector<uint16_t> last = halves(n);
  const Array<uint16_t> device(last, shape.offset);
  runs(restamp(nullptr, device.data(), n, 1234));
  reference().restamp(last.data(), n, 1234);
  expect("restamp", last, device.get());
}

void pack() {
  const size_t n = shape.n;
  const Mask mask;
  for (const bool moment : {false, true}) {
    for (const Type type : kTypes) {
      const std::vector<uint16_t> in = narrowed(type, floats(n, true));
      std::vector<float> residual = floats(n, !moment);
      const std::vector<float> m = floats(n);
      const Array<uint16_t> device_in(in, units_offset(type));
      const Array<float> device_residual(residual, shape.offset), device_m(m, shape.offset);
      const Array<float> payload(mask.bits + 1, shape.offset);
      const bool raised = type != Type::kFloat16;
      const Array<NonfiniteFlag> flag(1);
      flag.put({{.cleared = 7, .raised = raised}});
      std::vector<float> expected(mask.bits);
      if (moment) {
        const std::vector<float> returned = widened(type, narrowed(type, m));
        reference().accumulate_pack_moment(type, in.data(), returned.data(), 0.9f, residual.data(),
                                           mask.words.data(), n, expected.data());
        runs(accumulate_pack_moment(nullptr, type, device_in.data(), device_m.data(), 0.9f,
                                    device_residual.data(), mask.view(), payload.data(),
                                    flag.data()));
      } else {
        reference().accumulate_pack(type, in.data(), residual.data(), mask.words.data(), n,
                                    expected.data());
        runs(accumulate_pack(nullptr, type, device_in.data(), device_residual.data(), mask.view(),
                             payload.data(), flag.data()));
      }
      expected.push_back(raised ? kNan : 0.0f);
      expect("residual", residual, device_residual.get());
      expect("payload", expected, payload.get());
      expect_one("flag", 0u, flag.get()[0].raised);
      runs(cuda::gather(nullptr, device_residual.data(), mask.view(), payload.data(), flag.data()));
      expected.back() = 0;
      expect("gathered", expected, payload.get());
    }
  }
}

void unpack() {
  const size_t n = shape.n;
  const Mask mask;
  std::vector<float> values = floats(n, true), payload = floats(mask.bits);
  const Array<float> device(values, shape.offset), device_payload(payload, shape.offset);
  const Array<Verdict> verdict(1);
  for (const uint32_t skipped : {1u, 0u}) {
    verdict.put({{skipped}});
    if (skipped != 0) {
      reference().clear_masked_nonfinite(values.data(), mask.words.data(), n);
    } else {
      reference().scatter(payload.data(), mask.words.data(), n, values.data());
    }
    runs(scatter(nullptr, device_payload.data(), mask.view(), device.data(), verdict.data()));
    expect("scatter", values, device.get());
  }
  runs(clear_masked(nullptr, device.data(), mask.view(), verdict.data()));
  reference().clear_masked(values.data(), mask.words.data(), n);
  expect("clear_masked", values, device.get());
  values = floats(n, true);
  device.put(values);
  const Array<unsigned long long> cleared(1);
  runs(clear_masked_nonfinite(nullptr, device.data(), mask.view(), cleared.data()));
  expect_one("cleared",
             static_cast<unsigned long long>(
                 reference().clear_masked_nonfinite(values.data(), mask.words.data(), n)),
             cleared.get()[0]);
  expect("clear_masked_nonfinite", values, device.get());
  for (const Type type : kTypes) {
    const Array<uint16_t> out(n * size_of(type) / 2, units_offset(type));
    std::vector<uint16_t> expected(n * size_of(type) / 2);
    for (const uint32_t skipped : {1u, 0u}) {
      verdict.put({{skipped}});
      const std::vector<float> given = skipped != 0 ? std::vector<float>(mask.bits, kNan) : payload;
      reference().expand(type, given.data(), mask.words.data(), n, expected.data());
      runs(expand(nullptr, type, device_payload.data(), mask.view(), out.data(), verdict.data()));
      expect("expand", widened(type, expected), widened(type, out.get()));
    }
  }
}

void codec() {
  const size_t k = shape.n;
  for (const bool plain : {false, true}) {
    const Parameters params(0.9, plain);
    const std::vector<float> u = floats(k, true);
    std::vector<uint16_t> ages(k);
    for (uint16_t& age : ages) age = static_cast<uint16_t>(1 + random_bits() % 200);
    const Array<float> device_u(u, shape.offset), error(k, shape.offset), back(k, shape.offset);
    const Array<uint16_t> device_ages(ages, shape.offset), encoded(k + 1, shape.offset);
    const Array<NonfiniteFlag> flag(1);
    std::vector<float> expected_error(k), expected_back(k);
    std::vector<uint16_t> expected(k);
    reference().encode_bf16(u.data(), ages.data(), k, params.host(), expected.data(),
                            expected_error.data());
    runs(encode_bf16(nullptr, device_u.data(), device_ages.data(), k, params.device(),
                     encoded.data(), error.data(), flag.data()));
    expected.push_back(0);
    expect("encoded", widened(Type::kBfloat16, expected), widened(Type::kBfloat16, encoded.get()));
    expect("error", expected_error, error.get());
    reference().decode_bf16(expected.data(), ages.data(), k, params.host(), expected_back.data());
    const Array<Verdict> verdict(1);
    runs(decode_bf16(nullptr, encoded.data(), device_ages.data(), k, params.device(), back.data(),
                     verdict.data()));
    expect("decoded", expected_back, back.get());
    expect_one("verdict", reference().any_nonfinite(expected_back.data(), k) ? 1u : 0u,
               verdict.get()[0].skipped);
  }
}

void verdicts() {
  const size_t n = shape.n;
  for (const Type type : kTypes) {
    std::vector<float> values(n, 1.0f);
    for (const float bad : {1.0f, kNan, kInf}) {
      if (n > 0) values[random_bits() % n] = bad;
      const Array<uint16_t> device(narrowed(type, values), units_offset(type));
      const Array<Verdict> verdict(1);
      runs(any_nonfinite(nullptr, type, device.data(), n, verdict.data()));
      expect_one("any_nonfinite", n > 0 && !std::isfinite(bad) ? 1u : 0u, verdict.get()[0].skipped);
      if (n > 0) std::fill(values.begin(), values.end(), 1.0f);
    }
  }
}

void steps() {
  const size_t n = shape.n;
  const Mask mask;
  for (const bool plain : {false, true}) {
    const Parameters params(plain ? 0.999 : 0.9, plain);
    const std::vector<float> payload = floats(mask.bits);
    std::vector<float> m = floats(n), param = floats(n);
    std::vector<uint16_t> last = stamps(n, params.host().t);
    const Array<float> device_payload(payload, shape.offset), device_m(m, shape.offset),
        device_param(param, shape.offset);
    const Array<uint16_t> device_last(last, shape.offset);
    const Array<Verdict> verdict(1);
    for (const uint32_t skipped : {1u, 0u}) {
      verdict.put({{skipped}});
      runs(adams_step(nullptr, device_payload.data(), mask.view(), params.device(), device_m.data(),
                      device_last.data(), device_param.data(), verdict.data()));
      if (skipped == 0) {
        reference().adams_step(payload.data(), mask.words.data(), n, params.host(), m.data(),
                               last.data(), param.data());
      }
      expect("adams_step m", m, device_m.get());
      expect("adams_step param", param, device_param.get());
      expect("adams_step last", last, device_last.get());
    }
    last = stamps(n, params.host().t);
    device_last.put(last);
    for (const Type type : kTypes) {
      const Array<uint16_t> narrow(narrowed(type, payload), units_offset(type));
      const std::vector<float> given = widened(type, narrowed(type, payload));
      runs(moment_step(nullptr, type, narrow.data(), mask.view(), params.device(), device_m.data(),
                       device_last.data(), nullptr));
      reference().moment_step(given.data(), mask.words.data(), n, params.host(), m.data(),
                              last.data());
      expect("moment_step m", m, device_m.get());
      const Array<uint16_t> out(n * size_of(type) / 2, units_offset(type));
      runs(moment_output(nullptr, type, device_m.data(), mask.view(), out.data(), nullptr));
      expect("moment_output", widened(type, narrowed(type, m)), widened(type, out.get()));

      const std::vector<uint64_t> before = random_mask(n, 0.3);
      const Array<uint64_t> device_before(before);
      std::vector<uint16_t> expected(n * size_of(type) / 2);
      runs(hooked_step(nullptr, device_payload.data(), mask.view(), device_before.data(),
                       params.device(), type, out.data(), device_m.data(), device_last.data(),
                       nullptr));
      reference().hooked_step(payload.data(), mask.words.data(), before.data(), n, params.host(),
                              type, expected.data(), m.data(), last.data());
      expect("hooked_step", widened(type, expected), widened(type, out.get()));
      expect("hooked_step m", m, device_m.get());
      last = stamps(n, params.host().t);
      device_last.put(last);
    }
    std::vector<uint16_t> ages(mask.bits);
    reference().gather_ages(mask.words.data(), n, last.data(), params.host().t, ages.data());
    const Array<uint16_t> device_ages(mask.bits, shape.offset);
    runs(
        gather_ages(nullptr, mask.view(), device_last.data(), params.host().t, device_ages.data()));
    expect("gather_ages", ages, device_ages.get());
    const std::vector<float> old = floats(n);
    const Array<float> device_old(old, shape.offset);
    runs(post_step(nullptr, device_old.data(), mask.view(), device_ages.data(), 0, n, 0.99f, 5,
                   device_param.data(), nullptr));
    reference().post_step(old.data(), mask.words.data(), ages.data(), n, 0.99f, 5, param.data());
    expect("post_step", param, device_param.get());
  }
}

void scores() {
  const size_t n = shape.n;
  const Parameters params(0.9, false);
  const std::vector<float> m = floats(n, true);
  std::vector<float> residual = floats(n, true), expected(n);
  const std::vector<uint16_t> last = stamps(n, params.host().t);
  const Array<float> device_m(m, shape.offset), device_residual(residual, shape.offset),
      out(n, shape.offset);
  const Array<uint16_t> device_last(last, shape.offset);
  const Array<NonfiniteFlag> flag(1);
  runs(score(nullptr, device_m.data(), device_last.data(), device_residual.data(),
             device_residual.data(), n, params.device(), 2, out.data(), flag.data()));
  const size_t cleared = reference().score(m.data(), last.data(), residual.data(), n, params.host(),
                                           2, expected.data());
  expect("score", expected, out.get());
  expect("score residual", residual, device_residual.get());
  expect_one("cleared", static_cast<unsigned long long>(cleared), flag.get()[0].cleared);
  expect_one("raised", cleared > 0 ? 1u : 0u, flag.get()[0].raised);
}

void selection() {
  const size_t n = shape.n;
  const Array<uint64_t> words(mask_words(n)), scratch(cuda::select_scratch_bytes(n) / 8);
  const Array<float> threshold(1);
  std::vector<uint8_t> own(kernels::select_scratch_bytes());
  // Distinct values, so that none, some or all of the selection is decided by ties; 0: as they
  // come.
  for (const uint64_t distinct : {uint64_t{0}, uint64_t{1}, uint64_t{2}, uint64_t{300}}) {
    std::vector<float> values = floats(n);
    for (float& value : values)
      value = distinct == 0 ? std::fabs(value) : static_cast<float>(random_bits() % distinct);
    const Array<float> device(values, shape.offset);
    size_t previous = n + 1;
    for (const size_t k : {size_t{0}, size_t{1}, n / 100, n / 10, n / 2, n}) {
      if (k == previous || k > n) continue;
      previous = k;
      std::vector<uint64_t> expected(mask_words(n));
      const float right = reference().select(values.data(), n, k, expected.data(), own.data());
      for (const float guess : {0.0f, right, right * 1.3f, kNan}) {
        threshold.put({guess});
        runs(cuda::select(nullptr, device.data(), n, k, words.data(), threshold.data(),
                          scratch.data()));
        expect("selected", expected, words.get());
        expect_one("threshold", right, threshold.get()[0]);
        if (n > 100'000) break;
      }
    }
  }
}

void mask_codes() {
  const size_t n = shape.n;
  const Mask mask;
  const size_t k = mask.bits, bytes = offset_code_bytes(n, k);
  std::vector<uint16_t> expected(bytes / 2);
  reference().encode_offsets(mask.words.data(), n, expected.data());
  const Array<uint16_t> code(bytes / 2, shape.offset), raw(mask_words(n) * 4, shape.offset);
  runs(encode_offsets(nullptr, mask.view(), code.data()));
  expect("encode_offsets", expected, code.get());
  runs(encode_words(nullptr, mask.device.data(), n, raw.data()));
  const Array<uint64_t> scratch(decode_scratch_bytes(n) / 8);
  for (const bool offsets : {true, false}) {
    for (const size_t agreed : {k, k + 1}) {
      const Array<uint64_t> decoded(mask_words(n));
      const Array<uint32_t> refused(1);
      runs((offsets ? decode_offsets : decode_words)(nullptr, (offsets ? code : raw).data(), n,
                                                     agreed, decoded.data(), scratch.data(),
                                                     {refused.data(), 7}));
      expect_one("refused", agreed == k ? 0u : 7u, refused.get()[0]);
      if (agreed == k) expect("decoded mask", mask.words, decoded.get());
    }
  }
  const std::vector<uint64_t> other = random_mask(n, 0.4);
  const Array<uint64_t> device_other(other), copied(mask_words(n));
  const Array<unsigned long long> common(1);
  runs(count_common_bits(nullptr, mask.device.data(), device_other.data(), mask_words(n),
                         common.data()));
  expect_one("common bits",
             static_cast<unsigned long long>(
                 reference().count_common_bits(mask.words.data(), other.data(), mask_words(n))),
             common.get()[0]);
  runs(copy_mask(nullptr, mask.device.data(), n, copied.data(), nullptr));
  expect("copy_mask", mask.words, copied.get());
}

// ---- all of it ----

bool check(const char* name, void (*body)(), size_t longest) {
  std::vector<size_t> sizes;
  for (size_t n = 0; n <= 130; n += longest < 1'000'000 ? 13 : 1) sizes.push_back(n);
  for (const size_t n : {1023, 2047, 2048, 2049, 4097, 16385, 65535, 65537, 200003, 1'000'003})
    if (n < longest) sizes.push_back(n);
  constexpr double kDensities[] = {0.1, 0, 0.01, 1, 0.5};
  first_difference.clear();
  comparisons = 0;
  size_t turn = 0;
  const auto go = [&](size_t n, double density) {
    shape = {n, turn++ % 4, density};
    body();
  };
  for (const size_t n : sizes) go(n, kDensities[turn % std::size(kDensities)]);
  // Every density and offset at one length that takes several blocks, then the longest.
  for (const double density : kDensities) go(std::min<size_t>(longest, 70'001), density);
  go(longest, 0.01);
  const bool well = first_difference.empty();
  std::printf(
      "%s %-20s %s\n", well ? "ok    " : "FAILED", name,
      well ? (std::to_string(comparisons) + " comparisons").c_str() : first_difference.c_str());
  std::fflush(stdout);
  return well;
}

}  // namespace
}  // namespace scape::kernels::cuda

int main(int argc, char** argv) {
  using namespace scape::kernels::cuda;
  const size_t longest = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 10'000'019;
  if (argc > 2 || longest == 0) {
    std::fprintf(stderr, "usage: device_kernels_check [longest array]\n");
    return 2;
  }
  int devices = 0;
  const cudaError_t found = cudaGetDeviceCount(&devices);
  if (found != cudaSuccess || devices == 0) {
    std::fprintf(stderr, "device_kernels_check: no usable device: %s\n",
                 found != cudaSuccess ? cudaGetErrorString(found) : "there is none");
    return 2;
  }
  bool well = true;
  const auto one = [&](const char* name, void (*body)()) { well &= check(name, body, longest); };
  one("conversions", conversions);
  one("sums, restamps", sums_and_restamps);
  one("pack", pack);
  one("unpack", unpack);
  one("codec", codec);
  one("verdicts", verdicts);
  one("steps", steps);
  one("scores", scores);
  one("selection", selection);
  one("mask codes", mask_codes);
  return well ? 0 : 1;
}
