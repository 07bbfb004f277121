// The engine of host memory: each operation is done when it returns, and its outcome known.
#pragma once

#include <atomic>

#include "plugin/masked/engine.h"

namespace scape::plugin {

class HostEngine : public Engine {
 public:
  void* allocate(size_t bytes, Home home) override;
  void release(void* memory, size_t bytes) override;
  void set(Stream stream, void* memory, std::byte value, size_t bytes) override;
  void copy_in(Stream stream, void* memory, const void* host, size_t bytes) override;
  void copy_out(Stream stream, void* host, const void* memory, size_t bytes) override;
  void* allocate_staging(size_t bytes) override { return allocate(bytes, Home::kHost); }
  void release_staging(void* memory, size_t bytes) override { release(memory, bytes); }
  void copy(Stream stream, void* to, const void* from, size_t bytes) override {
    copy_in(stream, to, from, bytes);
  }

  void to_float(Stream stream, kernels::Type type, const void* in, float* out, size_t n) override;
  void add(Stream stream, const float* in, float* out, size_t n) override;
  void pack(const StepView& step, const void* send, float* payload) override;
  void gather_ages(Stream stream, const uint64_t* mask, size_t n, const uint16_t* last, uint16_t t,
                   uint16_t* ages) override;
  void encode_fp32(const StepView& step, float* payload) override;
  void encode_bf16(const StepView& step, const float* payload, uint16_t* wire,
                   float* error) override;
  void decode_bf16(const StepView& step, const uint16_t* wire, float* payload) override;
  void judge(Stream stream, kernels::Type type, const void* values, size_t n) override;
  void finish_direct(const StepView& step, const void* unkept, const void* recv) override;
  void finish_packed(const StepView& step, const float* reduced, const float* error,
                     void* recv) override;
  void adams_step(const StepView& step, const float* reduced, float* param) override;
  void clear_sent(const StepView& step, const float* error) override;
  void post_step(const StepView& step, size_t offset, size_t length, const float* before,
                 float* param, float decay, float age_cap) override;
  void restamp(const StepView& step, size_t begin, size_t end) override;
  void score(const StepView& step, const Partition& part, float scale, float* scores) override;
  void choose(Stream stream, const float* scores, size_t n, size_t k, uint64_t* mask,
              std::byte* code) override;
  int take_masks(Stream stream, std::span<const Partition> parts, std::span<const size_t> bits,
                 const std::byte* codes, size_t stride, uint64_t* mask) override;
  void set_all_bits(Stream stream, uint64_t* mask, size_t n) override;
  void count_overlap(Stream stream, const uint64_t* a, const uint64_t* b, size_t n) override;

  bool may_have_skipped() const override { return skipped_; }
  uint16_t oldest_age(Stream stream, const uint16_t* ages, size_t n, uint16_t bound) override;
  Counters counters() const override;
  bool flag(Stream stream) override;
  void restore(Stream stream, bool flag) override;
  void end_call(Stream) override {}
  Status failure() const override { return {}; }

 private:
  float take_flag();
  bool any_nonfinite(kernels::Type type, const void* values, size_t n) const;
  void write_output(const StepView& step, const float* reduced, void* recv);
  void write_skipped_output(const StepView& step, void* recv);

  const kernels::Ops& ops_ = kernels::ops();
  bool skipped_ = false;
  bool flag_ = false;
  std::atomic<uint64_t> skipped_steps_{0}, nonfinite_values_{0}, mask_overlap_{0};
};

}  // namespace scape::plugin
