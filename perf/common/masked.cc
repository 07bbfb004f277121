// The masked all-reduce: registers the buffer, times the calls, and checks what the algorithm
// promises (docs/algorithm.md): after every call, exactly k bits a partition, masks alike on all
// ranks, the exact sum on the mask and 0 off it, the exact residual, and a payload of k elements.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <numeric>
#include <thread>

#include "perf/common/engine.h"
#include "perf/common/pattern.h"

namespace scape::perf {
namespace {

// Checked calls of one buffer: the dense first one, and as many masked ones as show a residual that
// is sent later.
constexpr int kCheckedCalls = 8;

// No element's input, summed over ranks and checked calls, is larger: all sums are exact.
constexpr double kMostPending = 4096;

scape_dtype scape_type(Type type) {
  return type == Type::kFloat  ? SCAPE_FLOAT32
         : type == Type::kHalf ? SCAPE_FLOAT16
                               : SCAPE_BFLOAT16;
}

Status scape_error(const NcclLibrary& nccl, const char* call) {
  return error(SCAPE_ERR_SYSTEM, "%s: %s", call, nccl.last_error());
}

// A registration that ends with its scope.
class Registration {
 public:
  explicit Registration(const NcclLibrary& nccl) : nccl_(nccl) {}
  ~Registration() {
    if (handle_ != nullptr) nccl_.unregister_buffer(handle_);
  }
  Registration(const Registration&) = delete;
  Registration& operator=(const Registration&) = delete;

  Status open(const Options& options, void* buffer, size_t count, Type type) {
    scape_config config;
    if (nccl_.config_init(&config, sizeof config) != SCAPE_OK) {
      return scape_error(nccl_, "scape_config_init");
    }
    config.name = "perf";
    config.role = options.role;
    config.payload = options.payload;
    config.residual = options.residual;
    config.sparsity = options.sparsity;
    config.dense_steps = 1;
    config.ramp_steps = 1;
    config.ramp_sparsity = options.sparsity;
    if (nccl_.register_buffer(buffer, count, scape_type(type), &config, &handle_) != SCAPE_OK) {
      return scape_error(nccl_, "scape_register");
    }
    return Status::Ok();
  }

 private:
  const NcclLibrary& nccl_;
  scape_registration handle_ = nullptr;
};

// k of the whole buffer once the sparsity holds, and k of each partition.
std::vector<size_t> partition_bits(size_t n, int ranks, double sparsity,
                                   std::vector<size_t>* begins) {
  const size_t words = (n + 63) / 64;
  const size_t share = (words + static_cast<size_t>(ranks) - 1) / static_cast<size_t>(ranks);
  std::vector<size_t> bits;
  for (size_t q = 0; q < static_cast<size_t>(ranks); ++q) {
    const size_t begin = std::min(n, 64 * share * q), end = std::min(n, 64 * share * (q + 1));
    const double kept = std::nearbyint((1 - sparsity) * static_cast<double>(end - begin));
    bits.push_back(begin == end ? 0 : std::max<size_t>(1, static_cast<size_t>(kept)));
    begins->push_back(begin);
  }
  begins->push_back(n);
  return bits;
}

bool masked_bit(const std::vector<uint64_t>& mask, size_t i) {
  return (mask[i / 64] >> (i % 64) & 1) != 0;
}

uint64_t digest(const void* data, size_t size) {
  uint64_t result = size;
  for (size_t at = 0; at + 8 <= size; at += 8) result = hash(result, load(data, at / 8, 8));
  for (size_t at = size / 8 * 8; at < size; ++at) result = hash(result, load(data, at, 1));
  return result;
}

// Arithmetic for so long: a core that was let go of comes back slower (clock, caches, the
// hypervisor), which is not how training calls.
void compute(int64_t microseconds) {
  using Clock = std::chrono::steady_clock;
  const Clock::time_point end = Clock::now() + std::chrono::microseconds(microseconds);
  volatile double value = 1;
  while (Clock::now() < end) value = value * 1.0000001;
}

class MaskedRun {
 public:
  MaskedRun(Session& session, size_t count, Type type, Op op, bool in_place)
      : session_(session), nccl_(session.nccl), count_(count), type_(type), op_(op) {
    at_.send = in_place ? session.recv.data() : session.send.data();
    at_.recv = session.recv.data();
    for (const size_t each :
         partition_bits(count, session.control.ranks(), session.options.sparsity, &begins_)) {
      bits_.push_back(each);
      total_bits_ += each;
    }
  }

  Status time(Figures* figures, bool* in_force) {
    fill_gradient();
    if (fused()) parameters_.assign(count_, 1.0f);
    Registration registration(nccl_);
    SCAPE_RETURN_IF_ERROR(registration.open(session_.options, at_.send, count_, type_));
    // The dense first call, and the one that waits for the ranks' agreement.
    for (int i = 0; i < 2; ++i) {
      if (const NcclResult result = call(); result != 0) return failure(result);
      SCAPE_RETURN_IF_ERROR(after_call());
    }
    scape_stats before{}, after{};
    SCAPE_RETURN_IF_ERROR(read_stats(&before));
    scape_stats now = before;
    std::vector<double> exchanges;  // of each timed call
    const int warmup = session_.options.warmup;
    int calls = 0;
    // In place, what the next step adds to the residual.
    const std::vector<std::byte> gradient(at_.send, at_.send + (keeps_in_place() ? count_ * 4 : 0));
    Stream stream(session_);
    if (fused()) SCAPE_RETURN_IF_ERROR(stream.open(count_ * size_of(type_)));
    const auto between = [&]() -> Status {
      const uint64_t exchanged = now.exchange_ns;
      SCAPE_RETURN_IF_ERROR(read_stats(&now));
      if (calls >= warmup) exchanges.push_back(static_cast<double>(now.exchange_ns - exchanged));
      SCAPE_RETURN_IF_ERROR(after_call());
      if (keeps_in_place()) add_to_buffer(gradient);
      compute(session_.options.compute_us);
      std::this_thread::sleep_for(std::chrono::microseconds(session_.options.idle_us));
      if (fused()) SCAPE_RETURN_IF_ERROR(stream.pass());
      return ++calls == warmup ? read_stats(&before) : Status::Ok();
    };
    SCAPE_RETURN_IF_ERROR(time_calls(
        session_, [this] { return call(); }, between, figures));
    SCAPE_RETURN_IF_ERROR(read_stats(&after));
    SCAPE_RETURN_IF_ERROR(flush());
    const double timed = static_cast<double>(after.intercepted_calls - before.intercepted_calls);
    MaskedFigures masked;
    auto mean = [&](uint64_t scape_stats::*field) {
      return timed > 0 ? static_cast<double>(after.*field - before.*field) / timed : 0;
    };
    masked.density = static_cast<double>(after.mask_elements) / static_cast<double>(count_);
    masked.payload_bytes = mean(&scape_stats::payload_bytes);
    masked.mask_bytes = mean(&scape_stats::mask_bytes);
    masked.pack_us = mean(&scape_stats::pack_ns) / 1e3;
    masked.exchange_us = mean(&scape_stats::exchange_ns) / 1e3;
    SCAPE_RETURN_IF_ERROR(mean_of_least(exchanges, &masked.exchange_alone_us));
    masked.exchange_alone_us /= 1e3;
    masked.unpack_us = mean(&scape_stats::unpack_ns) / 1e3;
    masked.score_us = mean(&scape_stats::score_ns) / 1e3;
    masked.refresh_us = mean(&scape_stats::refresh_ns) / 1e3;
    masked.wait_us = mean(&scape_stats::refresh_wait_ns) / 1e3;
    masked.step_us = mean(&scape_stats::step_ns) / 1e3;
    if (fused()) {
      double rate = 0;
      SCAPE_RETURN_IF_ERROR(stream.rate(&rate));
      masked.memory_us = bytes_of_memory(masked.density) / rate / 1e3;
    }
    figures->masked = masked;
    const uint64_t met = after.intercepted_calls - before.intercepted_calls;
    const uint64_t compressed = after.sparse_calls - before.sparse_calls;
    if (session_.options.sparsity > 0 &&
        (compressed != met || met < static_cast<uint64_t>(figures->calls))) {
      std::fprintf(stderr, "rank %d: of %d timed calls on %zu elements %llu were compressed\n",
                   session_.control.rank(), figures->calls, count_,
                   static_cast<unsigned long long>(compressed));
      *in_force = false;
    }
    const double payload = static_cast<double>(total_bits_ * size_of_payload());
    figures->algorithm_bandwidth = payload / figures->time_us / 1e3;
    figures->bus_bandwidth =
        figures->algorithm_bandwidth * session_.collective.bus_factor(session_.control.ranks());
    double roof = 0;
    SCAPE_RETURN_IF_ERROR(measure_roof(session_, static_cast<size_t>(payload), &roof));
    figures->roof_percent = roof > 0 ? 100 * figures->bus_bandwidth / roof : 0;
    return Status::Ok();
  }

  // The least of all ranks each call: of the rank that came last, which waited for nobody.
  Status mean_of_least(const std::vector<double>& calls, double* out) {
    double sum = 0;
    for (const double mine : calls) {
      std::vector<double> all;
      SCAPE_RETURN_IF_ERROR(session_.control.all_gather(mine, &all));
      sum += *std::min_element(all.begin(), all.end());
    }
    *out = calls.empty() ? 0 : sum / static_cast<double>(calls.size());
    return Status::Ok();
  }

  // What a fused call with an internal residual has to read and write (docs/performance.md, "The
  // bytes of a masked call").
  double bytes_of_memory(double density) const {
    const double n = static_cast<double>(count_), k = density * n;
    const double element = static_cast<double>(size_of(type_));
    // Cache lines, of so many elements, that hold a masked one.
    const auto touched = [&](double elements) { return 1 - std::pow(1 - density, elements); };
    const double pass = keeps_in_place() ? 4 * n * touched(16) : (element + 8) * n;
    return pass + n / 8 + 4 * k * (3 + 1.0 / session_.control.ranks());
  }

  // Sparsity 0 must give the bits of the dense call, here on numbers whose sum depends on its
  // order.
  Status check_dense_equality(uint64_t* wrong) {
    if (fused()) return Status::Ok();
    fill_gradient();
    if (const NcclResult result = call(); result != 0) return failure(result);
    const std::vector<std::byte> dense(at_.recv, at_.recv + count_ * size_of(type_));
    Registration registration(nccl_);
    SCAPE_RETURN_IF_ERROR(registration.open(session_.options, at_.send, count_, type_));
    for (int i = 0; i < 3; ++i) {
      fill_gradient();
      if (const NcclResult result = call(); result != 0) return failure(result);
      for (size_t at = 0; at < count_; ++at) {
        *wrong += load(dense.data(), at, size_of(type_)) != load(at_.recv, at, size_of(type_));
      }
    }
    return Status::Ok();
  }

  Status check(uint64_t* wrong) {
    Registration registration(nccl_);
    parameters_.assign(fused() ? count_ : 0, 1.0f);
    SCAPE_RETURN_IF_ERROR(registration.open(session_.options, at_.send, count_, type_));
    pending_.assign(count_, 0);
    residual_.assign(count_, 0);
    mask_.assign((count_ + 63) / 64, 0);
    scape_stats before{};
    for (int step = 0; step < kCheckedCalls; ++step) {
      SCAPE_RETURN_IF_ERROR(checked_call(step, &before, wrong));
    }
    return checked_flush(wrong);
  }

 private:
  bool fused() const { return session_.options.role == SCAPE_ROLE_FUSED; }
  bool keeps_in_place() const { return session_.options.residual == SCAPE_RESIDUAL_IN_PLACE; }
  bool exact() const { return session_.options.payload == SCAPE_FLOAT32; }
  size_t size_of_payload() const { return exact() ? 4 : 2; }

  NcclResult call() {
    return nccl_.all_reduce(at_.send, at_.recv, count_, static_cast<int>(type_),
                            static_cast<NcclRedOp>(op_), session_.comm, nullptr);
  }

  void add_to_buffer(const std::vector<std::byte>& values) {
    auto* const buffer = reinterpret_cast<float*>(at_.send);
    const auto* const added = reinterpret_cast<const float*>(values.data());
    for (size_t i = 0; i < count_; ++i) buffer[i] += added[i];
  }

  // The fused role owes a step after each call.
  Status after_call() {
    if (!fused()) return Status::Ok();
    if (nccl_.adams_step(at_.send, count_, parameters_.data(), 1e-3, 0, nullptr) != SCAPE_OK) {
      return scape_error(nccl_, "scape_adams_step");
    }
    return Status::Ok();
  }

  // One dense call that sends what is pending, so that nothing is dropped with the registration.
  Status flush() {
    float* parameters = fused() ? parameters_.data() : nullptr;
    if (nccl_.flush(at_.send, count_, parameters, 1e-3, 0, nullptr) != SCAPE_OK) {
      return scape_error(nccl_, "scape_flush");
    }
    return Status::Ok();
  }

  Status failure(NcclResult result) const {
    return nccl_error(nccl_, result, "masked all_reduce", session_.comm);
  }

  Status read_stats(scape_stats* stats) const {
    stats->size = sizeof *stats;
    if (nccl_.get_stats(at_.send, count_, stats) != SCAPE_OK)
      return scape_error(nccl_, "scape_get_stats");
    return Status::Ok();
  }

  // Values that no two elements share, as gradients are, so that selection is not all ties.
  void fill_gradient() {
    std::vector<uint64_t> elements(Pattern::kTable);
    for (size_t i = 0; i < elements.size(); ++i) {
      const uint64_t random =
          hash(session_.seed + static_cast<uint64_t>(session_.control.rank()) * 977, i);
      // A sign, a magnitude in [0.5, 2) and the type's mantissa.
      const uint64_t sign_exponent_mantissa =
          type_ == Type::kFloat      ? (random & 0x80ffffffu) | 0x3f000000u
          : type_ == Type::kBfloat16 ? (random & 0x80ffu) | 0x3f00u
                                     : (random & 0x87ffu) | 0x3800u;
      elements[i] = sign_exponent_mantissa;
    }
    Pattern(type_, elements, session_.seed).fill(at_.send, 0, count_);
  }

  Status checked_call(int step, scape_stats* before, uint64_t* wrong) {
    // Small integers: all sums of all steps stay exact in the buffer's type.
    ReductionCase input;
    SCAPE_RETURN_IF_ERROR(make_reduction_case(
        type_, Op::kSum, session_.control.rank(), session_.control.ranks(), session_.seed++,
        std::min(max_integer(type_), kMostPending) / kCheckedCalls, &input));
    const size_t size = size_of(type_);
    session_.recv.set_guard(at_.recv, count_ * size);
    std::vector<std::byte> given(keeps_in_place() ? count_ * size : 0);
    if (keeps_in_place()) {
      input.input.fill(given.data(), 0, count_);
      if (step == 0) std::memset(at_.send, 0, count_ * size);
      add_to_buffer(given);
      given.assign(at_.send, at_.send + count_ * size);
    } else {
      std::memset(at_.recv, 0x5a, count_ * size);
      input.input.fill(at_.send, 0, count_);
    }
    std::vector<std::byte> sum(count_ * size);
    input.expected.fill(sum.data(), 0, count_);
    for (size_t i = 0; i < count_; ++i) {
      pending_[i] += static_cast<float>(decode(type_, load(sum.data(), i, size)));
      const auto sent = static_cast<float>(decode(type_, load(at_.send, i, size)));
      residual_[i] = keeps_in_place() ? sent : residual_[i] + sent;
    }

    if (const NcclResult result = call(); result != 0) return failure(result);
    if (nccl_.read_mask(at_.send, count_, mask_.data(), mask_.size()) != SCAPE_OK) {
      return scape_error(nccl_, "scape_read_mask");
    }
    const bool touched =
        keeps_in_place() && std::memcmp(given.data(), at_.send, count_ * size) != 0;
    SCAPE_RETURN_IF_ERROR(after_call());
    scape_stats after{};
    SCAPE_RETURN_IF_ERROR(read_stats(&after));

    std::vector<float> held(count_);
    if (nccl_.read_residual(at_.send, count_, held.data(), held.size()) != SCAPE_OK) {
      return scape_error(nccl_, "scape_read_residual");
    }
    std::vector<float> held_by_all(held);
    if (!exact()) {
      // What all ranks still hold, summed by a dense call on a buffer that is not registered.
      const NcclResult result =
          nccl_.all_reduce(held.data(), held_by_all.data(), count_, static_cast<int>(Type::kFloat),
                           static_cast<NcclRedOp>(Op::kSum), session_.comm, nullptr);
      if (result != 0) return failure(result);
    }

    const bool sparse = step > 0 && session_.options.sparsity > 0;
    uint64_t found = wrong_bits(sparse) + session_.recv.broken_guard(at_.recv, count_ * size);
    if (fused()) {
      // The call leaves the gradient alone.
      found += keeps_in_place() ? touched : input.input.count_wrong(at_.send, 0, count_);
      found += wrong_parameters(sparse);
    } else {
      found += wrong_outputs(held_by_all);
    }
    found += wrong_residuals(held, held_by_all);
    // k elements and a few bytes of flags.
    const uint64_t payload = after.payload_bytes - before->payload_bytes;
    const uint64_t least = total_bits_ * size_of_payload();
    if (sparse && (payload < least || payload > least + 64)) {
      std::fprintf(stderr, "rank %d: a call's payload was %llu bytes, not %llu\n",
                   session_.control.rank(), static_cast<unsigned long long>(payload),
                   static_cast<unsigned long long>(least));
      ++found;
    }
    *before = after;
    *wrong += found;
    return compare_ranks(wrong);
  }

  // The mask, and what comes out, must be the same bits on all ranks.
  Status compare_ranks(uint64_t* wrong) {
    const void* replicated = fused() ? static_cast<const void*>(parameters_.data()) : at_.recv;
    const uint64_t mine = hash(digest(mask_.data(), mask_.size() * sizeof mask_[0]),
                               digest(replicated, count_ * (fused() ? 4 : size_of(type_))));
    std::vector<uint64_t> all;
    SCAPE_RETURN_IF_ERROR(session_.control.all_gather(mine, &all));
    if (mine != all[0]) {
      std::fprintf(stderr, "rank %d: mask or result differs from rank 0's\n",
                   session_.control.rank());
      ++*wrong;
    }
    return Status::Ok();
  }

  // A flush sends all that is pending: the buffer gets its sum, and no rank holds anything back.
  Status checked_flush(uint64_t* wrong) {
    SCAPE_RETURN_IF_ERROR(flush());
    std::vector<float> held(count_);
    if (nccl_.read_residual(at_.send, count_, held.data(), held.size()) != SCAPE_OK) {
      return scape_error(nccl_, "scape_read_residual");
    }
    const double scale = op_ == Op::kAvg ? 1.0 / session_.control.ranks() : 1.0;
    const double tolerance = op_ == Op::kAvg ? 2 / max_integer(type_) : 0;
    for (size_t i = 0; i < count_; ++i) {
      *wrong += held[i] != 0;
      // Sparsity 0 holds nothing back: there is no sum to write.
      if (fused() || session_.options.sparsity == 0) continue;
      const double got = decode(type_, load(at_.send, i, size_of(type_)));
      const double due = pending_[i] * scale;
      if (exact() && !(std::fabs(got - due) <= tolerance * std::fabs(due))) ++*wrong;
    }
    return Status::Ok();
  }

  // Bits that are too many or too few in a partition.
  uint64_t wrong_bits(bool sparse) const {
    uint64_t wrong = 0;
    for (size_t q = 0; q + 1 < begins_.size(); ++q) {
      uint64_t set = 0;
      // Partitions begin at whole words.
      for (size_t word = (begins_[q] + 63) / 64; word * 64 < begins_[q + 1]; ++word) {
        set += static_cast<uint64_t>(__builtin_popcountll(mask_[word]));
      }
      const uint64_t due = sparse ? bits_[q] : begins_[q + 1] - begins_[q];
      wrong += set > due ? set - due : due - set;
    }
    return wrong;
  }

  // On the mask the sum (mean) of all that was pending, less what the ranks held back; off it 0.
  uint64_t wrong_outputs(const std::vector<float>& held_by_all) const {
    const int ranks = session_.control.ranks();
    const double scale = op_ == Op::kAvg ? 1.0 / ranks : 1.0;
    // Sums of small integers are exact. Means may round; a bf16 payload's sum is rounded to bf16.
    double tolerance = op_ == Op::kAvg ? 2 / max_integer(type_) : 0;
    double slack = 0;
    if (!exact()) {
      tolerance = std::ldexp(1, -7);
      // What the ranks hold back was rounded to fp32, relative to values that may cancel in the
      // sum.
      slack = std::ldexp(kMostPending, -20) * ranks;
    }
    uint64_t wrong = 0;
    for (size_t i = 0; i < count_; ++i) {
      const double got = decode(type_, load(at_.recv, i, size_of(type_)));
      double due = 0;
      if (masked_bit(mask_, i)) due = (pending_[i] - (exact() ? 0 : held_by_all[i])) * scale;
      if (!(std::fabs(got - due) <= tolerance * std::fabs(due) + slack)) ++wrong;
    }
    return wrong;
  }

  // This rank's residual: what it had off the mask, and on it the payload's rounding error at most.
  // Afterwards residual_ and pending_ are what the next call starts from.
  uint64_t wrong_residuals(const std::vector<float>& held, const std::vector<float>& held_by_all) {
    uint64_t wrong = 0;
    for (size_t i = 0; i < count_; ++i) {
      const bool sent = masked_bit(mask_, i);
      if (sent && exact()) pending_[i] = residual_[i] = 0;
      if (sent && !exact()) {
        if (!(std::fabs(held[i]) <= std::ldexp(std::fabs(residual_[i]), -7))) ++wrong;
        pending_[i] = held_by_all[i];
        residual_[i] = held[i];
      }
      if (held[i] != residual_[i]) ++wrong;
    }
    return wrong;
  }

  // Off the mask no parameter may move.
  uint64_t wrong_parameters(bool sparse) {
    uint64_t wrong = 0;
    if (sparse) {
      for (size_t i = 0; i < count_; ++i) {
        if (!masked_bit(mask_, i) && parameters_[i] != parameters_before_[i]) ++wrong;
        if (!std::isfinite(parameters_[i])) ++wrong;
      }
    }
    parameters_before_ = parameters_;
    return wrong;
  }

  Session& session_;
  const NcclLibrary& nccl_;
  const size_t count_;
  const Type type_;
  const Op op_;
  Placement at_;
  std::vector<size_t> begins_;  // of the partitions, and the end of the last
  std::vector<size_t> bits_;    // k of each
  size_t total_bits_ = 0;
  std::vector<float>
      pending_;  // sum over ranks of what was not sent yet, this call's input included
  std::vector<float> residual_;  // this rank's part of it
  std::vector<float> parameters_, parameters_before_;
  std::vector<uint64_t> mask_;
};

}  // namespace

Status run_masked(Session& session, size_t count, Type type, Op op, bool in_place, Figures* figures,
                  bool* in_force) {
  MaskedRun run(session, count, type, op, in_place);
  uint64_t wrong = 0;
  if (session.options.checks > 0 && session.options.sparsity == 0) {
    SCAPE_RETURN_IF_ERROR(run.check_dense_equality(&wrong));
  }
  SCAPE_RETURN_IF_ERROR(run.time(figures, in_force));
  figures->checked = session.options.checks > 0;
  if (!figures->checked) return Status::Ok();
  SCAPE_RETURN_IF_ERROR(run.check(&wrong));
  std::vector<uint64_t> all;
  SCAPE_RETURN_IF_ERROR(session.control.all_gather(wrong, &all));
  figures->wrong = std::accumulate(all.begin(), all.end(), uint64_t{0});
  return Status::Ok();
}

}  // namespace scape::perf
