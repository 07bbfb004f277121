// The CUDA kernels, beside what they are to be held against: the rate of a copy measured in the
// same run (`roof` is the percentage of it reached), CUB's DeviceSelect::Flagged, which packs by
// flags as `gather` packs by a mask, and where CUB has it DeviceTopK, which selects, but not always
// the same of equal ones.
//
//   scape_cuda_bench [elements [per mille set]] [--json FILE]     default: 2^28; 1, 10, 100, 1000
//
// A row is the median of 20 runs by events of the device. Bytes are those that the memory has to
// move for the operation, once each: it moves sectors of 32 bytes, so of masked elements the
// sectors that hold any, as they lie in this mask. `bar` lines hold the figures against what is
// wanted of them; whether they are reached does not show in the exit status, which is 0, 2 for a
// bad option and 3 where a call failed.
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <cub/device/device_select.cuh>
#if __has_include(<cub/device/device_topk.cuh>)
#include <cub/device/device_topk.cuh>
#include <cuda/stream_ref>
#define SCAPE_HAVE_TOPK
#endif
#include <functional>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "kernels/cuda/cuda_ops.h"

namespace scape::kernels::cuda {
namespace {

void require(cudaError_t result, const char* what) {
  if (result == cudaSuccess) return;
  std::fprintf(stderr, "scape_cuda_bench: %s: %s\n", what, cudaGetErrorString(result));
  std::exit(3);
}
void require(const Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "scape_cuda_bench: %s\n", status.message().c_str());
  std::exit(3);
}

template <typename T>
class Array {
 public:
  explicit Array(size_t n) {
    require(cudaMalloc(reinterpret_cast<void**>(&data_), std::max<size_t>(n, 1) * sizeof(T)),
            "cudaMalloc");
    require(cudaMemset(data_, 0, std::max<size_t>(n, 1) * sizeof(T)), "cudaMemset");
  }
  ~Array() { cudaFree(data_); }
  Array(const Array&) = delete;
  T* get() const { return data_; }
  void set(const std::vector<T>& from) {
    require(cudaMemcpy(data_, from.data(), from.size() * sizeof(T), cudaMemcpyHostToDevice),
            "cudaMemcpy");
  }

 private:
  T* data_ = nullptr;
};

class Bench {
 public:
  explicit Bench(size_t n)
      : n_(n),
        values_(n),
        residual_(n),
        m_(n),
        param_(n),
        out_(n),
        payload_(n + 1),
        half_(n + 1),
        last_(n),
        ages_(n),
        flags_(n),
        mask_(mask_words(n)),
        before_(mask_words(n)),
        index_(mask_index_bytes(n) / sizeof(uint64_t)),
        code_(offset_code_bytes(n, n) / 2),
        scratch_(std::max(cuda::select_scratch_bytes(n), decode_scratch_bytes(n)) / 8),
        verdict_(1),
        flag_(1),
        threshold_(1),
        refused_(1),
        selected_(1) {
    require(cudaStreamCreate(&stream_), "cudaStreamCreate");
    require(cudaEventCreate(&begin_), "cudaEventCreate");
    require(cudaEventCreate(&end_), "cudaEventCreate");
    std::mt19937 random(1);
    std::normal_distribution<float> normal;
    std::vector<float> host(n);
    for (float& value : host) value = normal(random);
    values_.set(host);
    residual_.set(host);
    m_.set(host);
    const std::vector<float> powers = make_power_table(0.9);
    powers_ = new Array<float>(powers.size());
    powers_->set(powers);
    step_.t = 50;
    step_.powers = {powers_->get(), static_cast<uint32_t>(powers.size())};
    step_.beta1 = 0.9f;
    step_.beta2 = 0.95f;
    step_.eps = 1e-8f;
    step_.lr = 1e-3f;
  }
  ~Bench() { delete powers_; }

  void run(int per_mille) {
    set_mask(per_mille);
    const MaskView mask{mask_.get(), index_.get(), n_};
    const double n = static_cast<double>(n_), k = static_cast<double>(k_), words = n / 8;
    // Of one array's masked elements: sectors of 8 floats, and of 16 elements of 16 bits.
    const double f = 32.0 * static_cast<double>(float_sectors_);
    const double h = 32.0 * static_cast<double>(half_sectors_);
    per_mille_ = per_mille;
    std::printf("# %zu elements, %d per mille set (%zu)\n", n_, per_mille, k_);
    std::printf("%-28s %12s %10s %8s\n", "kernel", "us", "GB/s", "roof %");
    roof_ = 0;
    roof_ = row("copy (roof)", 8 * n, [&] {
      require(cudaMemcpyAsync(out_.get(), values_.get(), n_ * 4, cudaMemcpyDeviceToDevice, stream_),
              "cudaMemcpyAsync");
    });
    const auto op = [&](const char* name, double bytes, const std::function<Status()>& body) {
      row(name, bytes, [&] { require(body()); });
    };
    op("index_mask", words, [&] { return index_mask(stream_, mask_.get(), n_, index_.get()); });
    op("accumulate_pack fp32", 12 * n + 4 * k + words, [&] {
      return accumulate_pack(stream_, Type::kFloat32, values_.get(), residual_.get(), mask,
                             payload_.get(), flag_.get());
    });
    op("accumulate_pack bf16", 10 * n + 4 * k + words, [&] {
      return accumulate_pack(stream_, Type::kBfloat16, half_.get(), residual_.get(), mask,
                             payload_.get(), flag_.get());
    });
    op("accumulate_pack_moment fp32", 16 * n + 4 * k + words, [&] {
      return accumulate_pack_moment(stream_, Type::kFloat32, values_.get(), m_.get(), 0.9f,
                                    residual_.get(), mask, payload_.get(), flag_.get());
    });
    op("gather", f + 4 * k + words,
       [&] { return gather(stream_, values_.get(), mask, payload_.get(), flag_.get()); });
    op("gather_ages", h + 2 * k + words,
       [&] { return gather_ages(stream_, mask, last_.get(), step_.t, ages_.get()); });
    run_rival();
    op("clear_masked", 2 * f + words,
       [&] { return clear_masked(stream_, residual_.get(), mask, verdict_.get()); });
    op("adams_step", 4 * f + 2 * h + 4 * k + words, [&] {
      return adams_step(stream_, payload_.get(), mask, step_, m_.get(), last_.get(), param_.get(),
                        nullptr);
    });
    op("hooked_step fp32", 4 * n + 4 * f + 2 * h + 4 * k + 2 * words, [&] {
      return hooked_step(stream_, payload_.get(), mask, before_.get(), step_, Type::kFloat32,
                         out_.get(), m_.get(), last_.get(), nullptr);
    });
    op("expand fp32", 4 * n + 4 * k + words,
       [&] { return expand(stream_, Type::kFloat32, payload_.get(), mask, out_.get(), nullptr); });
    op("score", 14 * n, [&] {
      return score(stream_, m_.get(), last_.get(), residual_.get(), residual_.get(), n_, step_, 1,
                   out_.get(), flag_.get());
    });
    op("one pass over the scores", 4 * n,
       [&] { return any_nonfinite(stream_, Type::kFloat32, out_.get(), n_, verdict_.get()); });
    op("select, guess of before", 12 * n + words, [&] {
      return cuda::select(stream_, out_.get(), n_, k_, before_.get(), threshold_.get(),
                          scratch_.get());
    });
    run_top_k();
    op("encode_offsets", 2 * k + words, [&] { return encode_offsets(stream_, mask, code_.get()); });
    op("decode_offsets", 2 * k + words, [&] {
      return decode_offsets(stream_, code_.get(), n_, k_, before_.get(), scratch_.get(),
                            {refused_.get(), 1});
    });
    if (per_mille != 10 && per_mille != 100) return;  // what training has
    bar("pack: of the roof", "accumulate_pack fp32", share("accumulate_pack fp32"), 80, "%");
    bar("unpack: of the roof", "expand fp32", share("expand fp32"), 80, "%");
    bar("step: of the roof", "adams_step", share("adams_step"), 80, "%");
    bar("select: passes", "select, guess of before",
        seconds_["select, guess of before"] / seconds_["one pass over the scores"], -2.5, "passes");
    if (per_mille == 10) {
      bar("pack: against CUB", "gather", seconds_["CUB DeviceSelect::Flagged"] / seconds_["gather"],
          3, "x");
    }
  }

  // All rows and bars so far.
  bool write_json(const char* path) const {
    std::FILE* const file = std::fopen(path, "w");
    if (file == nullptr) return false;
    const auto list = [&](const char* name, const std::vector<std::string>& lines) {
      std::fprintf(file, "  \"%s\": [", name);
      for (size_t i = 0; i < lines.size(); ++i)
        std::fprintf(file, "%s\n    %s", i > 0 ? "," : "", lines[i].c_str());
      std::fprintf(file, "\n  ]");
    };
    std::fprintf(file, "{\n");
    list("rows", rows_);
    std::fprintf(file, ",\n");
    list("bars", bars_);
    std::fprintf(file, "\n}\n");
    return std::fclose(file) == 0;
  }

 private:
  void set_mask(int per_mille) {
    std::mt19937 random(2);
    std::vector<uint64_t> words(mask_words(n_));
    std::vector<uint8_t> flags(n_);
    k_ = 0;
    for (size_t j = 0; j < n_; ++j) {
      const bool set = static_cast<int>(random() % 1000) < per_mille;
      words[j / 64] |= uint64_t{set} << (j % 64);
      flags[j] = set;
      k_ += set;
    }
    float_sectors_ = half_sectors_ = 0;
    for (const uint64_t word : words) {
      for (unsigned bit = 0; bit < 64; bit += 8) float_sectors_ += (word >> bit & 0xff) != 0;
      for (unsigned bit = 0; bit < 64; bit += 16) half_sectors_ += (word >> bit & 0xffff) != 0;
    }
    mask_.set(words);
    before_.set(words);
    flags_.set(flags);
    require(index_mask(stream_, mask_.get(), n_, index_.get()));
  }

  double share(const std::string& name) const { return 100 * rates_.at(name) / roof_; }

  // A figure that has to be `wanted` at least or, where that is negative, at most -wanted.
  void bar(const char* name, const char* kernel, double figure, double wanted, const char* unit) {
    const bool reached = wanted >= 0 ? figure >= wanted : figure <= -wanted;
    std::printf("bar %-20s %4d per mille %10.2f %-7s wanted: %s %.1f  %s\n", name, per_mille_,
                figure, unit, wanted >= 0 ? "at least" : "at most", std::abs(wanted),
                reached ? "reached" : "MISSED");
    note(&bars_,
         "{\"bar\": \"%s\", \"kernel\": \"%s\", \"per_mille\": %d, \"value\": %.4g, \"unit\": "
         "\"%s\", \"wanted\": \"%s %g\", \"reached\": %s}",
         name, kernel, per_mille_, figure, unit, wanted >= 0 ? "at least" : "at most",
         std::abs(wanted), reached ? "true" : "false");
  }

  static void note(std::vector<std::string>* lines, const char* format, ...)
      __attribute__((format(printf, 2, 3))) {
    char text[512];
    va_list args;
    va_start(args, format);
    std::vsnprintf(text, sizeof(text), format, args);
    va_end(args);
    lines->push_back(text);
  }

  // Bytes a second of the median run; prints the row.
  template <typename Body>
  double row(const char* name, double bytes, Body&& body) {
    std::vector<double> seconds;
    for (int i = 0; i < 23; ++i) {
      require(cudaEventRecord(begin_, stream_), "cudaEventRecord");
      body();
      require(cudaEventRecord(end_, stream_), "cudaEventRecord");
      require(cudaEventSynchronize(end_), name);
      float milliseconds = 0;
      require(cudaEventElapsedTime(&milliseconds, begin_, end_), "cudaEventElapsedTime");
      if (i >= 3) seconds.push_back(milliseconds * 1e-3);
    }
    std::nth_element(seconds.begin(), seconds.begin() + 10, seconds.end());
    const double rate = bytes / seconds[10];
    const double reached = roof_ > 0 ? 100 * rate / roof_ : 100;
    seconds_[name] = seconds[10];
    rates_[name] = rate;
    note(&rows_,
         "{\"kernel\": \"%s\", \"elements\": %zu, \"per_mille\": %d, \"us\": %.3f, \"gb_per_s\": "
         "%.1f, \"roof_percent\": %.1f}",
         name, n_, per_mille_, seconds[10] * 1e6, rate * 1e-9, reached);
    std::printf("%-28s %12.1f %10.1f %8.1f\n", name, seconds[10] * 1e6, rate * 1e-9, reached);
    return rate;
  }

  void run_rival() {
    size_t bytes = 0;
    const auto rival = [&](void* scratch) {
      return cub::DeviceSelect::Flagged(scratch, bytes, values_.get(), flags_.get(), out_.get(),
                                        selected_.get(), static_cast<int64_t>(n_), stream_);
    };
    require(rival(nullptr), "DeviceSelect::Flagged");
    const Array<uint8_t> scratch(bytes);
    row("CUB DeviceSelect::Flagged", 5 * static_cast<double>(n_) + 4 * static_cast<double>(k_),
        [&] { require(rival(scratch.get()), "DeviceSelect::Flagged"); });
  }

  // Keys alone: where they were is still to be found out.
  void run_top_k() {
#ifdef SCAPE_HAVE_TOPK
    size_t bytes = 0;
    const auto rival = [&](void* scratch) {
      const auto wanted = ::cuda::execution::require(::cuda::execution::determinism::not_guaranteed,
                                                     ::cuda::execution::output_ordering::unsorted);
      const ::cuda::std::execution::env environment{::cuda::stream_ref{stream_}, wanted};
      return cub::DeviceTopK::MaxKeys(scratch, bytes, out_.get(), payload_.get(),
                                      static_cast<int64_t>(n_), static_cast<int64_t>(k_),
                                      environment);
    };
    require(rival(nullptr), "DeviceTopK::MaxKeys");
    const Array<uint8_t> scratch(bytes);
    row("CUB DeviceTopK::MaxKeys", 4 * static_cast<double>(n_) + 4 * static_cast<double>(k_),
        [&] { require(rival(scratch.get()), "DeviceTopK::MaxKeys"); });
#endif
  }

  size_t n_, k_ = 0, float_sectors_ = 0, half_sectors_ = 0;
  int per_mille_ = 0;
  double roof_ = 0;
  std::map<std::string, double> seconds_, rates_;  // of the last rows by these names
  std::vector<std::string> rows_, bars_;           // JSON
  cudaStream_t stream_ = nullptr;
  cudaEvent_t begin_ = nullptr, end_ = nullptr;
  Array<float> values_, residual_, m_, param_, out_, payload_;
  Array<uint16_t> half_, last_, ages_;
  Array<uint8_t> flags_;
  Array<uint64_t> mask_, before_, index_;
  Array<uint16_t> code_;
  Array<uint64_t> scratch_;
  Array<Verdict> verdict_;
  Array<NonfiniteFlag> flag_;
  Array<float> threshold_;
  Array<uint32_t> refused_;
  Array<size_t> selected_;
  Array<float>* powers_ = nullptr;
  StepParams step_;
};

}  // namespace
}  // namespace scape::kernels::cuda

int main(int argc, char** argv) {
  const char* json = nullptr;
  size_t numbers[2] = {size_t{1} << 28, 0};
  size_t given = 0;
  bool good = true;
  for (int i = 1; i < argc; ++i) {
    if (std::strcmp(argv[i], "--json") == 0 && i + 1 < argc) {
      json = argv[++i];
    } else if (given < 2 && std::strtoull(argv[i], nullptr, 10) > 0) {
      numbers[given++] = std::strtoull(argv[i], nullptr, 10);
    } else {
      good = false;
    }
  }
  if (!good || numbers[1] > 1000) {
    std::fprintf(stderr, "usage: scape_cuda_bench [elements [per mille set]] [--json FILE]\n");
    return 2;
  }
  scape::kernels::cuda::Bench bench(numbers[0]);
  if (numbers[1] > 0) {
    bench.run(static_cast<int>(numbers[1]));
  } else {
    for (const int per_mille : {1, 10, 100, 1000}) bench.run(per_mille);
  }
  if (json != nullptr && !bench.write_json(json)) {
    std::fprintf(stderr, "scape_cuda_bench: %s cannot be written\n", json);
    return 3;
  }
}
