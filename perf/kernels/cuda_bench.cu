// The CUDA kernels, beside what they are to be held against: the rate of a copy measured in the
// same run (`roof` is the percentage of it reached) and CUB's DeviceSelect::Flagged, which packs by
// flags as `gather` packs by a mask.
//
//   scape_cuda_bench [elements [per mille set]]     default: 2^28 elements; 1, 10, 100 and 1000
//
// A row is the median of 20 runs by events of the device. Bytes count each byte that the operation
// must read or write once, masked elements by their size; a kernel cannot reach 100 % of the roof
// where they lie apart, since memory moves in sectors of 32 bytes.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cub/device/device_select.cuh>
#include <functional>
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
    const AgeGather ages{last_.get(), step_.t, ages_.get()};
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
    op("accumulate_pack fp32", 12 * n + 8 * k + words, [&] {
      return accumulate_pack(stream_, Type::kFloat32, values_.get(), residual_.get(), mask,
                             payload_.get(), ages, flag_.get());
    });
    op("accumulate_pack bf16", 10 * n + 8 * k + words, [&] {
      return accumulate_pack(stream_, Type::kBfloat16, half_.get(), residual_.get(), mask,
                             payload_.get(), ages, flag_.get());
    });
    op("accumulate_pack_moment fp32", 16 * n + 8 * k + words, [&] {
      return accumulate_pack_moment(stream_, Type::kFloat32, values_.get(), m_.get(), 0.9f,
                                    residual_.get(), mask, payload_.get(), ages, flag_.get());
    });
    op("gather", 12 * k + words,
       [&] { return gather(stream_, values_.get(), mask, payload_.get(), ages, flag_.get()); });
    run_rival();
    op("clear_masked", 4 * k + words,
       [&] { return clear_masked(stream_, residual_.get(), mask, verdict_.get()); });
    op("adams_step", 24 * k + words, [&] {
      return adams_step(stream_, payload_.get(), mask, step_, m_.get(), last_.get(), param_.get(),
                        nullptr);
    });
    op("hooked_step fp32", 4 * n + 16 * k + 2 * words, [&] {
      return hooked_step(stream_, payload_.get(), mask, before_.get(), step_, Type::kFloat32,
                         out_.get(), m_.get(), last_.get(), nullptr);
    });
    op("expand fp32", 4 * n + 4 * k + words,
       [&] { return expand(stream_, Type::kFloat32, payload_.get(), mask, out_.get(), nullptr); });
    op("score", 14 * n, [&] {
      return score(stream_, m_.get(), last_.get(), residual_.get(), n_, step_, 1, out_.get(),
                   flag_.get());
    });
    op("select, guess of before", 12 * n + words, [&] {
      return cuda::select(stream_, out_.get(), n_, k_, before_.get(), threshold_.get(),
                          scratch_.get());
    });
    op("encode_offsets", 2 * k + words, [&] { return encode_offsets(stream_, mask, code_.get()); });
    op("decode_offsets", 2 * k + words, [&] {
      return decode_offsets(stream_, code_.get(), n_, k_, before_.get(), scratch_.get(),
                            {refused_.get(), 1});
    });
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
    mask_.set(words);
    before_.set(words);
    flags_.set(flags);
    require(index_mask(stream_, mask_.get(), n_, index_.get()));
  }

  // Seconds of the median run; prints the row.
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
    std::printf("%-28s %12.1f %10.1f %8.1f\n", name, seconds[10] * 1e6, rate * 1e-9,
                roof_ > 0 ? 100 * rate / roof_ : 100);
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

  size_t n_, k_ = 0;
  double roof_ = 0;
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
  const size_t n = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : size_t{1} << 28;
  if (n == 0) {
    std::fprintf(stderr, "usage: scape_cuda_bench [elements [per mille set]]\n");
    return 2;
  }
  scape::kernels::cuda::Bench bench(n);
  if (argc > 2) {
    bench.run(std::atoi(argv[2]));
    return 0;
  }
  for (const int per_mille : {1, 10, 100, 1000}) bench.run(per_mille);
}
