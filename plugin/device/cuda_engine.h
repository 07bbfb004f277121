// The engine of a CUDA device: every operation goes to its stream, and none waits for it, but for
// reading, saving and loading.
//
// What the data decides stands in `state_` on the device, where the kernels of the next operation
// find it. A copy of it comes to page-locked memory behind each call, so that counters() knows what
// the device has got to.
#pragma once

#include <array>
#include <memory>
#include <mutex>
#include <vector>

#include "kernels/cuda/cuda_ops.h"
#include "plugin/device/cuda_device_impl.h"
#include "plugin/masked/engine.h"

namespace scape::plugin {

class CudaEngine final : public Engine {
 public:
  explicit CudaEngine(std::shared_ptr<CudaDeviceImpl> device);
  ~CudaEngine() override;
  Status open();

  void* allocate(size_t bytes, Home home) override;
  void release(void* memory, size_t bytes) override;
  void set(Stream stream, void* memory, std::byte value, size_t bytes) override;
  void copy_in(Stream stream, void* memory, const void* host, size_t bytes) override;
  void copy_out(Stream stream, void* host, const void* memory, size_t bytes) override;
  void* allocate_staging(size_t bytes) override;
  void release_staging(void* memory, size_t bytes) override;
  void copy(Stream stream, void* to, const void* from, size_t bytes) override;

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

  // Never known in time.
  bool may_have_skipped() const override { return true; }
  uint16_t oldest_age(Stream, const uint16_t*, size_t, uint16_t bound) override { return bound; }
  Counters counters() const override;
  bool flag(Stream stream) override;
  void restore(Stream stream, bool flag) override;
  void end_call(Stream stream) override;
  Status failure() const override { return failure_; }

 private:
  // What the data decided, on the device. Calls and refreshes run side by side, so that each has a
  // part of its own.
  struct Decided {
    kernels::cuda::Verdict verdict;
    kernels::cuda::NonfiniteFlag flag;
    unsigned long long skips;
    unsigned long long overlap;
  };
  struct Chosen {
    uint32_t refused;  // 1 + the part whose code was damaged, ever since
    float threshold;   // of the last selection
  };
  struct OnDevice {
    Decided decided;
    Chosen chosen;
  };
  // The index of a mask, for as long as nobody writes to the mask.
  struct Index {
    const uint64_t* mask = nullptr;
    bool valid = false;
    uint64_t* index = nullptr;
    size_t bytes = 0;
  };
  // An array whose home is the host.
  struct HostArray {
    const std::byte* memory = nullptr;
    size_t bytes = 0;
    std::unique_ptr<Event> last_use;  // behind the last work on it
  };
  // A part of page-locked memory that copies read from or write to, one after another.
  struct Slot {
    void* memory = nullptr;
    std::unique_ptr<Event> copied;
    bool under_way = false;
  };

  // Enqueues what `body`, which gives a Status, puts on the stream; nothing once something failed.
  template <typename Body>
  void enqueue(Stream stream, Body&& body);
  // The array that `memory` is in; null where its home is the device.
  HostArray* host_array(const void* memory);
  // Runs `body`, which puts work on `memory` on the stream, behind all earlier such work. Kernels
  // reach an array of the host in its place.
  template <typename Body>
  Status use_in_turn(cudaStream_t stream, const void* memory, Body&& body);
  // Calls kernel(residual, begin, n) for elements begin .. end of the step's residual: at once, or
  // in chunks where its home is the host.
  template <typename Kernel>
  Status over_residual(const StepView& step, size_t begin, size_t end, ChunkPipe::Use use,
                       Kernel&& kernel);
  // Copies between the device and the host, and waits.
  void transfer(Stream stream, void* to, const void* from, size_t bytes);
  // The same from or to an array of the host, once no work touches it any more.
  void copy_on_host(HostArray& array, void* to, const void* from, size_t bytes);
  Status make_slot(size_t bytes, Slot* out);
  // A slot that nothing reads from any more; waits where none is free.
  Status free_slot(Slot** out);

  Index& index_of(const uint64_t* mask);
  void touched(const void* memory, size_t bytes);
  Status make_index(cudaStream_t stream, const uint64_t* mask, size_t n);
  Status view_of(cudaStream_t stream, const uint64_t* mask, size_t n, kernels::cuda::MaskView* out);
  Status view_of(const StepView& step, kernels::cuda::MaskView* out);
  Status params_of(const StepView& step, kernels::StepParams* out);
  Status upload_decay(cudaStream_t stream, kernels::StepParams* params);
  void* scratch(size_t bytes);
  void harvest() const;
  // Asks for what became of the masks so far, and takes what came of the last time.
  Status mirror_refusal(cudaStream_t stream);

  const std::shared_ptr<CudaDeviceImpl> device_;
  Event owners_;  // behind the last call of the buffer's owner
  bool in_call_ = false;
  cudaStream_t stream_ = nullptr;  // of the call under way
  Status failure_;

  OnDevice* state_ = nullptr;
  bool state_cleared_ = false;
  const float* judged_ = nullptr;  // what decode_bf16() judged on the way

  std::vector<HostArray> host_arrays_;
  ChunkPipe* chunk_pipe_ = nullptr;  // the device's, once there is a HostArray

  std::vector<Index> indices_;
  float* powers_ = nullptr;
  Slot powers_slot_;
  std::array<Slot, 4> decay_slots_;
  size_t next_decay_slot_ = 0;
  float* decay_ = nullptr;
  void* scratch_ = nullptr;  // of the refresh, on the side stream
  size_t scratch_bytes_ = 0;
  Slot refusal_;  // comes behind the taking of masks
  uint32_t refused_ = 0;

  mutable std::mutex mirror_mutex_;  // guards what follows
  mutable std::array<Slot, 4> mirrors_;
  size_t newest_mirror_ = 0;
  mutable Decided known_{};
};

}  // namespace scape::plugin
