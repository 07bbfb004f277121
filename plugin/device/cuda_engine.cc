#include "plugin/device/cuda_engine.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <utility>

#include "plugin/masked/decay_table.h"
#include "plugin/masked/mask_code.h"

namespace scape::plugin {
namespace {

namespace ops = kernels::cuda;
using kernels::StepParams;
using kernels::Type;

constexpr size_t kDecayBytes = (DecayTable::kLongest + 1) * sizeof(float);

Status no_memory(const char* what, size_t bytes) {
  return error(SCAPE_ERR_MEMORY, "no device memory for %s (%zu bytes); register less, or free some",
               what, bytes);
}

}  // namespace

template <typename Body>
void CudaEngine::enqueue(Stream stream, Body&& body) {
  if (!failure_.ok()) return;
  const DeviceScope scope(device_->ordinal());
  if (cuda(stream) != cuda(device_->side_stream())) {
    in_call_ = true;
    stream_ = cuda(stream);
  }
  try {
    if (!state_cleared_) {
      failure_ = check_cuda(cudaMemsetAsync(state_, 0, sizeof(*state_), cuda(stream)),
                            "clearing the state of a buffer");
      state_cleared_ = true;
    }
    if (failure_.ok()) failure_ = body();
  } catch (const std::bad_alloc&) {
    failure_ = error(SCAPE_ERR_MEMORY, "no memory for what a buffer's step needs");
  }
}

template <typename Body>
Status CudaEngine::use_in_turn(cudaStream_t stream, const void* memory, Body&& body) {
  HostArray* const array = host_array(memory);
  if (array == nullptr) return body();
  SCAPE_RETURN_IF_ERROR(array->last_use->hold(stream));
  const Status status = body();
  const Status marked = array->last_use->mark(stream);
  return status.ok() ? marked : status;
}

template <typename Kernel>
Status CudaEngine::over_residual(const StepView& step, size_t begin, size_t end, ChunkPipe::Use use,
                                 Kernel&& kernel) {
  float* const first = step.residual + begin;
  HostArray* const array = host_array(step.residual);
  if (array == nullptr) return kernel(first, begin, end - begin);
  return chunk_pipe_->run(
      cuda(step.stream), first, end - begin, use, *array->last_use,
      [&](float* chunk, size_t at, size_t n) { return kernel(chunk, begin + at, n); });
}

CudaEngine::CudaEngine(std::shared_ptr<CudaDeviceImpl> device)
    : device_(std::move(device)), owners_(device_->ordinal()) {}

Status CudaEngine::open() {
  if (!owners_.valid()) return error(SCAPE_ERR_INTERNAL, "CUDA: no event could be made");
  state_ = static_cast<OnDevice*>(allocate(sizeof(*state_), Home::kPlace));
  if (state_ == nullptr) return no_memory("a buffer's state", sizeof(*state_));
  for (Slot& mirror : mirrors_) SCAPE_RETURN_IF_ERROR(make_slot(sizeof(Decided), &mirror));
  return make_slot(sizeof(Chosen::refused), &refusal_);
}

CudaEngine::~CudaEngine() {
  for (const Index& index : indices_) release(index.index, index.bytes);
  for (void* memory : {static_cast<void*>(state_), static_cast<void*>(powers_),
                       static_cast<void*>(decay_), scratch_}) {
    release(memory, 0);
  }
  const auto drop = [&](Slot& slot) {
    if (slot.memory != nullptr) device_->release(slot.memory, {slot.copied.get()});
  };
  drop(powers_slot_);
  for (Slot& slot : decay_slots_) drop(slot);
  for (Slot& slot : mirrors_) drop(slot);
  drop(refusal_);
}

// ---- memory ----

void* CudaEngine::allocate(size_t bytes, Home home) {
  if (home == Home::kPlace) return device_->allocate(bytes, home);
  try {
    auto last_use = std::make_unique<Event>(device_->ordinal());
    host_arrays_.reserve(host_arrays_.size() + 1);
    if (!last_use->valid() || !device_->chunk_pipe(&chunk_pipe_).ok()) return nullptr;
    void* const memory = device_->allocate(bytes, home);
    if (memory != nullptr) {
      host_arrays_.push_back({static_cast<const std::byte*>(memory), bytes, std::move(last_use)});
    }
    return memory;
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}

CudaEngine::HostArray* CudaEngine::host_array(const void* memory) {
  const auto* const at = static_cast<const std::byte*>(memory);
  for (HostArray& array : host_arrays_) {
    if (at >= array.memory && at < array.memory + array.bytes) return &array;
  }
  return nullptr;
}

void CudaEngine::release(void* memory, size_t) {
  if (memory == nullptr) return;
  if (in_call_) (void)owners_.mark(stream_);
  std::erase_if(indices_, [&](const Index& index) {
    if (index.mask != memory) return false;
    if (index.index != nullptr) device_->release(index.index, {&owners_});
    return true;
  });
  if (HostArray* const array = host_array(memory); array != nullptr) {
    device_->release(memory, {&owners_, array->last_use.get()});
    host_arrays_.erase(host_arrays_.begin() + (array - host_arrays_.data()));
    return;
  }
  device_->release(memory, {&owners_});
}

void CudaEngine::touched(const void* memory, size_t bytes) {
  const auto* begin = static_cast<const std::byte*>(memory);
  for (Index& index : indices_) {
    const auto* mask = reinterpret_cast<const std::byte*>(index.mask);
    if (mask >= begin && mask < begin + bytes) index.valid = false;
  }
}

void CudaEngine::set(Stream stream, void* memory, std::byte value, size_t bytes) {
  if (bytes == 0) return;
  touched(memory, bytes);
  enqueue(stream, [&] {
    return use_in_turn(cuda(stream), memory, [&] {
      return check_cuda(cudaMemsetAsync(memory, std::to_integer<int>(value), bytes, cuda(stream)),
                        "filling memory");
    });
  });
}

void CudaEngine::transfer(Stream stream, void* to, const void* from, size_t bytes) {
  if (bytes == 0) return;
  // The last call's stream may be gone; what it did is marked.
  const bool apart = !in_call_ && cuda(stream) == stream_;
  const cudaStream_t through = apart ? device_->access_stream() : cuda(stream);
  const bool was_in_call = in_call_;
  const cudaStream_t was_on = stream_;
  enqueue({through}, [&]() -> Status {
    if (apart) SCAPE_RETURN_IF_ERROR(owners_.hold(through));
    SCAPE_RETURN_IF_ERROR(
        check_cuda(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, through), "copying"));
    return check_cuda(cudaStreamSynchronize(through), "copying");
  });
  in_call_ = was_in_call;
  stream_ = was_on;
}

void CudaEngine::copy_on_host(HostArray& array, void* to, const void* from, size_t bytes) {
  if (failure_.ok()) failure_ = array.last_use->wait();
  if (failure_.ok()) std::memcpy(to, from, bytes);
}

void CudaEngine::copy_in(Stream stream, void* memory, const void* host, size_t bytes) {
  if (HostArray* const array = host_array(memory); array != nullptr)
    return copy_on_host(*array, memory, host, bytes);
  touched(memory, bytes);
  transfer(stream, memory, host, bytes);
}

void CudaEngine::copy_out(Stream stream, void* host, const void* memory, size_t bytes) {
  if (HostArray* const array = host_array(memory); array != nullptr)
    return copy_on_host(*array, host, memory, bytes);
  transfer(stream, host, memory, bytes);
}

void* CudaEngine::allocate_staging(size_t bytes) { return device_->allocate(bytes, Home::kHost); }

void CudaEngine::release_staging(void* memory, size_t bytes) { release(memory, bytes); }

void CudaEngine::copy(Stream stream, void* to, const void* from, size_t bytes) {
  if (bytes == 0) return;
  touched(to, bytes);
  enqueue(stream, [&] {
    return check_cuda(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, cuda(stream)), "copying");
  });
}

void* CudaEngine::scratch(size_t bytes) {
  if (bytes <= scratch_bytes_) return scratch_;
  release(scratch_, scratch_bytes_);
  scratch_bytes_ = 0;
  scratch_ = allocate(bytes, Home::kPlace);
  if (scratch_ == nullptr) throw std::bad_alloc();
  scratch_bytes_ = bytes;
  return scratch_;
}

Status CudaEngine::make_slot(size_t bytes, Slot* out) {
  if (out->memory != nullptr) return Status::Ok();
  out->copied = std::make_unique<Event>(device_->ordinal());
  out->memory = device_->allocate(bytes, Home::kHost);
  if (out->memory == nullptr || !out->copied->valid()) {
    return error(
        SCAPE_ERR_MEMORY,
        "no page-locked memory (%zu bytes) or no event could be had; register less, or free "
        "some",
        bytes);
  }
  return Status::Ok();
}

// ---- masks and their indices ----

CudaEngine::Index& CudaEngine::index_of(const uint64_t* mask) {
  for (Index& index : indices_) {
    if (index.mask == mask) return index;
  }
  indices_.emplace_back().mask = mask;
  return indices_.back();
}

Status CudaEngine::make_index(cudaStream_t stream, const uint64_t* mask, size_t n) {
  Index& index = index_of(mask);
  if (index.index == nullptr) {
    const size_t bytes = ops::mask_index_bytes(n);
    index.index = static_cast<uint64_t*>(device_->allocate(bytes, Home::kPlace));
    if (index.index == nullptr) return no_memory("the index of a mask", bytes);
    index.bytes = bytes;
  }
  SCAPE_RETURN_IF_ERROR(ops::index_mask(stream, mask, n, index.index));
  index.valid = true;
  return Status::Ok();
}

Status CudaEngine::view_of(cudaStream_t stream, const uint64_t* mask, size_t n,
                           ops::MaskView* out) {
  if (n > 0 && !index_of(mask).valid) SCAPE_RETURN_IF_ERROR(make_index(stream, mask, n));
  *out = {mask, n > 0 ? index_of(mask).index : nullptr, n};
  return Status::Ok();
}

Status CudaEngine::view_of(const StepView& step, ops::MaskView* out) {
  return view_of(cuda(step.stream), step.mask, step.count, out);
}

void CudaEngine::set_all_bits(Stream stream, uint64_t* mask, size_t n) {
  if (n == 0) return;
  enqueue(stream, [&]() -> Status {
    auto* bytes = reinterpret_cast<std::byte*>(mask);
    const size_t whole = n / 8, all = kernels::mask_words(n) * sizeof(uint64_t);
    const auto fill = [&](size_t begin, int value, size_t size) {
      if (size == 0) return Status::Ok();
      return check_cuda(cudaMemsetAsync(bytes + begin, value, size, cuda(stream)),
                        "filling a mask");
    };
    SCAPE_RETURN_IF_ERROR(fill(0, 0xff, whole));
    SCAPE_RETURN_IF_ERROR(fill(whole, (1 << n % 8) - 1, std::min<size_t>(all - whole, 1)));
    if (all > whole + 1) SCAPE_RETURN_IF_ERROR(fill(whole + 1, 0, all - whole - 1));
    return make_index(cuda(stream), mask, n);
  });
}

void CudaEngine::count_overlap(Stream stream, const uint64_t* a, const uint64_t* b, size_t n) {
  enqueue(stream, [&] {
    return ops::count_common_bits(cuda(stream), a, b, kernels::mask_words(n),
                                  &state_->decided.overlap);
  });
}

// ---- tables ----

Status CudaEngine::params_of(const StepView& step, StepParams* out) {
  *out = step.params;
  const size_t bytes = step.params.powers.size * sizeof(float);
  if (powers_ == nullptr && bytes > 0) {
    SCAPE_RETURN_IF_ERROR(make_slot(bytes, &powers_slot_));
    powers_ = static_cast<float*>(allocate(bytes, Home::kPlace));
    if (powers_ == nullptr) return no_memory("a table of powers", bytes);
    std::memcpy(powers_slot_.memory, step.params.powers.pow, bytes);
    SCAPE_RETURN_IF_ERROR(check_cuda(cudaMemcpyAsync(powers_, powers_slot_.memory, bytes,
                                                     cudaMemcpyHostToDevice, cuda(step.stream)),
                                     "copying a table"));
    SCAPE_RETURN_IF_ERROR(powers_slot_.copied->mark(cuda(step.stream)));
    powers_slot_.under_way = true;
  }
  out->powers.pow = powers_;
  out->decay = nullptr;
  out->decay_size = 0;
  return Status::Ok();
}

Status CudaEngine::free_slot(Slot** out) {
  Slot& slot = decay_slots_[next_decay_slot_++ % decay_slots_.size()];
  SCAPE_RETURN_IF_ERROR(make_slot(kDecayBytes, &slot));
  if (slot.under_way) {
    bool passed = false;
    SCAPE_RETURN_IF_ERROR(slot.copied->passed(&passed));
    // The host is that many steps ahead of the device.
    if (!passed) SCAPE_RETURN_IF_ERROR(slot.copied->wait());
  }
  *out = &slot;
  return Status::Ok();
}

Status CudaEngine::upload_decay(cudaStream_t stream, StepParams* params) {
  const float* const table = params->decay;
  if (table == nullptr) return Status::Ok();
  Slot* slot = nullptr;
  SCAPE_RETURN_IF_ERROR(free_slot(&slot));
  if (decay_ == nullptr) decay_ = static_cast<float*>(allocate(kDecayBytes, Home::kPlace));
  if (decay_ == nullptr) return no_memory("a table of decays", kDecayBytes);
  const size_t bytes = params->decay_size * sizeof(float);
  std::memcpy(slot->memory, table, bytes);
  SCAPE_RETURN_IF_ERROR(
      check_cuda(cudaMemcpyAsync(decay_, slot->memory, bytes, cudaMemcpyHostToDevice, stream),
                 "copying a table"));
  slot->under_way = true;
  params->decay = decay_;
  return slot->copied->mark(stream);
}

// ---- elements ----

void CudaEngine::to_float(Stream stream, Type type, const void* in, float* out, size_t n) {
  enqueue(stream, [&] {
    return use_in_turn(cuda(stream), out,
                       [&] { return ops::to_float(cuda(stream), type, in, out, n); });
  });
}

void CudaEngine::add(Stream stream, const float* in, float* out, size_t n) {
  enqueue(stream, [&] { return ops::add(cuda(stream), in, out, n); });
}

// ---- step 1, and codecs ----

void CudaEngine::pack(const StepView& step, const void* send, float* payload) {
  enqueue(step.stream, [&]() -> Status {
    ops::MaskView mask;
    SCAPE_RETURN_IF_ERROR(view_of(step, &mask));
    const cudaStream_t stream = cuda(step.stream);
    const auto use = send == nullptr ? ChunkPipe::Use::kRead : ChunkPipe::Use::kUpdate;
    return over_residual(step, 0, step.count, use, [&](float* residual, size_t begin, size_t n) {
      // The index counts from the mask's beginning, so the payload stays whole.
      const ops::MaskView part{mask.words + begin / 64, mask.index + ops::mask_index_runs(begin),
                               n};
      if (send == nullptr) return ops::gather(stream, residual, part, payload, nullptr);
      const auto* const in =
          static_cast<const std::byte*>(send) + begin * kernels::size_of(step.type);
      if (step.role != SCAPE_ROLE_FIRST_MOMENT) {
        return ops::accumulate_pack(stream, step.type, in, residual, part, payload, nullptr);
      }
      return ops::accumulate_pack_moment(stream, step.type, in, step.moment + begin,
                                         step.params.beta1, residual, part, payload, nullptr);
    });
  });
}

void CudaEngine::gather_ages(Stream stream, const uint64_t* mask, size_t n, const uint16_t* last,
                             uint16_t t, uint16_t* ages) {
  enqueue(stream, [&]() -> Status {
    ops::MaskView view;
    SCAPE_RETURN_IF_ERROR(view_of(cuda(stream), mask, n, &view));
    return ops::gather_ages(cuda(stream), view, last, t, ages);
  });
}

void CudaEngine::encode_fp32(const StepView& step, float* payload) {
  enqueue(step.stream, [&] {
    return ops::put_flag(cuda(step.stream), &state_->decided.flag, payload + step.masked);
  });
}

void CudaEngine::encode_bf16(const StepView& step, const float* payload, uint16_t* wire,
                             float* error) {
  enqueue(step.stream, [&]() -> Status {
    StepParams params;
    SCAPE_RETURN_IF_ERROR(params_of(step, &params));
    return ops::encode_bf16(cuda(step.stream), payload, step.ages, step.masked, params, wire, error,
                            &state_->decided.flag);
  });
}

void CudaEngine::decode_bf16(const StepView& step, const uint16_t* wire, float* payload) {
  enqueue(step.stream, [&]() -> Status {
    StepParams params;
    SCAPE_RETURN_IF_ERROR(params_of(step, &params));
    judged_ = payload;
    return ops::decode_bf16(cuda(step.stream), wire, step.ages, step.masked, params, payload,
                            &state_->decided.verdict);
  });
}

// ---- the verdict, and what it decides ----

void CudaEngine::judge(Stream stream, Type type, const void* values, size_t n) {
  enqueue(stream, [&]() -> Status {
    if (std::exchange(judged_, nullptr) != values) {
      SCAPE_RETURN_IF_ERROR(
          ops::any_nonfinite(cuda(stream), type, values, n, &state_->decided.verdict));
    }
    return ops::count_skip(cuda(stream), &state_->decided.verdict, &state_->decided.skips);
  });
}

void CudaEngine::finish_direct(const StepView& step, const void* unkept, const void* recv) {
  enqueue(step.stream, [&]() -> Status {
    const cudaStream_t stream = cuda(step.stream);
    // Cleared again where the step is taken: here, or by clear_sent() after the AdamS step.
    if (unkept != nullptr) {
      SCAPE_RETURN_IF_ERROR(use_in_turn(stream, step.residual, [&] {
        return ops::to_float(stream, step.type, unkept, step.residual, step.count);
      }));
    }
    if (recv == nullptr) return Status::Ok();
    ops::MaskView mask;
    StepParams params;
    SCAPE_RETURN_IF_ERROR(view_of(step, &mask));
    SCAPE_RETURN_IF_ERROR(params_of(step, &params));
    const ops::Verdict* const verdict = &state_->decided.verdict;
    SCAPE_RETURN_IF_ERROR(
        ops::moment_step(stream, step.type, recv, mask, params, step.moment, step.last, verdict));
    if (step.role == SCAPE_ROLE_GRADIENT_HOOKED) {
      SCAPE_RETURN_IF_ERROR(ops::copy_mask(stream, step.mask, step.count, step.before, verdict));
    }
    return use_in_turn(stream, step.residual,
                       [&] { return ops::clear_masked(stream, step.residual, mask, verdict); });
  });
}

// Off the mask the next scoring sees to what is not finite; on it clear_sent() does.
void CudaEngine::finish_packed(const StepView& step, const float* reduced, const float* error,
                               void* recv) {
  if (recv == nullptr) return;
  enqueue(step.stream, [&]() -> Status {
    const cudaStream_t stream = cuda(step.stream);
    ops::MaskView mask;
    StepParams params;
    SCAPE_RETURN_IF_ERROR(view_of(step, &mask));
    SCAPE_RETURN_IF_ERROR(params_of(step, &params));
    const ops::Verdict* const verdict = &state_->decided.verdict;
    if (step.role == SCAPE_ROLE_GRADIENT_HOOKED) {
      SCAPE_RETURN_IF_ERROR(ops::hooked_step(stream, reduced, mask, step.before, params, step.type,
                                             recv, step.moment, step.last, verdict));
      return ops::copy_mask(stream, step.mask, step.count, step.before, verdict);
    }
    SCAPE_RETURN_IF_ERROR(ops::moment_step(stream, Type::kFloat32, reduced, mask, params,
                                           step.moment, step.last, verdict));
    if (step.role == SCAPE_ROLE_FIRST_MOMENT)
      return ops::moment_output(stream, step.type, step.moment, mask, recv, verdict);
    return ops::expand(stream, step.type, reduced, mask, recv, verdict);
  });
  clear_sent(step, error);
}

void CudaEngine::adams_step(const StepView& step, const float* reduced, float* param) {
  enqueue(step.stream, [&]() -> Status {
    ops::MaskView mask;
    StepParams params;
    SCAPE_RETURN_IF_ERROR(view_of(step, &mask));
    SCAPE_RETURN_IF_ERROR(params_of(step, &params));
    params.decay = step.params.decay;
    params.decay_size = step.params.decay_size;
    SCAPE_RETURN_IF_ERROR(upload_decay(cuda(step.stream), &params));
    return ops::adams_step(cuda(step.stream), reduced, mask, params, step.moment, step.last, param,
                           &state_->decided.verdict);
  });
}

void CudaEngine::clear_sent(const StepView& step, const float* error) {
  enqueue(step.stream, [&]() -> Status {
    ops::MaskView mask;
    SCAPE_RETURN_IF_ERROR(view_of(step, &mask));
    const cudaStream_t stream = cuda(step.stream);
    const ops::Verdict* const verdict = &state_->decided.verdict;
    return use_in_turn(stream, step.residual, [&] {
      return error == nullptr ? ops::clear_masked(stream, step.residual, mask, verdict)
                              : ops::scatter(stream, error, mask, step.residual, verdict);
    });
  });
}

void CudaEngine::post_step(const StepView& step, size_t offset, size_t length, const float* before,
                           float* param, float decay, float age_cap) {
  enqueue(step.stream, [&]() -> Status {
    ops::MaskView mask;
    SCAPE_RETURN_IF_ERROR(view_of(step, &mask));
    return ops::post_step(cuda(step.stream), before, mask, step.ages, offset, length, decay,
                          age_cap, param, &state_->decided.verdict);
  });
}

// ---- step 6 ----

void CudaEngine::restamp(const StepView& step, size_t begin, size_t end) {
  enqueue(step.stream, [&] {
    return ops::restamp(cuda(step.stream), step.last + begin, end - begin, step.params.t);
  });
}

void CudaEngine::score(const StepView& step, const Partition& part, float scale, float* scores) {
  if (part.size() == 0) return;
  enqueue(step.stream, [&]() -> Status {
    StepParams params;
    SCAPE_RETURN_IF_ERROR(params_of(step, &params));
    // What is not finite is cleared in its place: so chunks need not go back.
    return over_residual(step, part.begin, part.end, ChunkPipe::Use::kRead,
                         [&](const float* residual, size_t begin, size_t n) {
                           return ops::score(cuda(step.stream), step.moment + begin,
                                             step.last + begin, residual, step.residual + begin, n,
                                             params, scale, scores + (begin - part.begin),
                                             &state_->decided.flag);
                         });
  });
}

void CudaEngine::choose(Stream stream, const float* scores, size_t n, size_t k, uint64_t* mask,
                        std::byte* code) {
  if (n == 0) return;
  enqueue(stream, [&]() -> Status {
    void* const memory = scratch(std::max(ops::select_scratch_bytes(n), ops::mask_index_bytes(n)));
    SCAPE_RETURN_IF_ERROR(
        ops::select(cuda(stream), scores, n, k, mask, &state_->chosen.threshold, memory));
    if (mask_code_for(n, k) == MaskCode::kBitmask)
      return ops::encode_words(cuda(stream), mask, n, code);
    auto* const index = static_cast<uint64_t*>(memory);
    SCAPE_RETURN_IF_ERROR(ops::index_mask(cuda(stream), mask, n, index));
    return ops::encode_offsets(cuda(stream), {mask, index, n}, code);
  });
}

int CudaEngine::take_masks(Stream stream, std::span<const Partition> parts,
                           std::span<const size_t> bits, const std::byte* codes, size_t stride,
                           uint64_t* mask) {
  enqueue(stream, [&]() -> Status {
    size_t count = 0, longest = 0;
    for (const Partition& part : parts) {
      count = std::max(count, part.end);
      longest = std::max(longest, part.size());
    }
    if (count == 0) return Status::Ok();
    void* const memory = scratch(ops::decode_scratch_bytes(longest));
    ops::MaskParts expected{.size = longest};
    for (size_t i = 0; i < parts.size(); ++i) {
      const size_t n = parts[i].size();
      if (n == 0) continue;
      (n == longest ? expected.bits : expected.last_bits) = bits[i];
      const ops::Refusal refusal{&state_->chosen.refused, static_cast<uint32_t>(i + 1)};
      const std::byte* const code = codes + i * stride;
      uint64_t* const words = mask + parts[i].begin / 64;
      SCAPE_RETURN_IF_ERROR(
          mask_code_for(n, bits[i]) == MaskCode::kOffsets
              ? ops::decode_offsets(cuda(stream), code, n, bits[i], words, memory, refusal)
              : ops::decode_words(cuda(stream), code, n, bits[i], words, memory, refusal));
    }
    SCAPE_RETURN_IF_ERROR(
        ops::replace_refused(cuda(stream), mask, count, expected, &state_->chosen.refused));
    SCAPE_RETURN_IF_ERROR(make_index(cuda(stream), mask, count));
    return mirror_refusal(cuda(stream));
  });
  return static_cast<int>(refused_) - 1;
}

Status CudaEngine::mirror_refusal(cudaStream_t stream) {
  if (refusal_.under_way) {
    bool passed = false;
    SCAPE_RETURN_IF_ERROR(refusal_.copied->passed(&passed));
    if (!passed) return Status::Ok();  // what is refused stays so: a later copy has it
    std::memcpy(&refused_, refusal_.memory, sizeof(refused_));
  }
  SCAPE_RETURN_IF_ERROR(
      check_cuda(cudaMemcpyAsync(refusal_.memory, &state_->chosen.refused, sizeof(refused_),
                                 cudaMemcpyDeviceToHost, stream),
                 "copying what became of a mask"));
  refusal_.under_way = true;
  return refusal_.copied->mark(stream);
}

// ---- what the host gets to know ----

// What came with copies that are done.
void CudaEngine::harvest() const {
  for (size_t i = 1; i <= mirrors_.size(); ++i) {  // from the oldest on
    Slot& mirror = mirrors_[(newest_mirror_ + i) % mirrors_.size()];
    bool passed = false;
    if (!mirror.under_way || !mirror.copied->passed(&passed).ok() || !passed) continue;
    std::memcpy(&known_, mirror.memory, sizeof(known_));
    mirror.under_way = false;
  }
}

void CudaEngine::end_call(Stream stream) {
  if (!in_call_) return;
  enqueue(stream, [&]() -> Status {
    const std::lock_guard lock(mirror_mutex_);
    harvest();
    // Where all are under way the newest gets the newer content.
    const size_t next = (newest_mirror_ + 1) % mirrors_.size();
    if (!mirrors_[next].under_way) newest_mirror_ = next;
    Slot& mirror = mirrors_[newest_mirror_];
    SCAPE_RETURN_IF_ERROR(
        check_cuda(cudaMemcpyAsync(mirror.memory, &state_->decided, sizeof(Decided),
                                   cudaMemcpyDeviceToHost, cuda(stream)),
                   "copying what a step decided"));
    SCAPE_RETURN_IF_ERROR(mirror.copied->mark(cuda(stream)));
    mirror.under_way = true;
    return owners_.mark(cuda(stream));
  });
  in_call_ = false;
}

Counters CudaEngine::counters() const {
  const std::lock_guard lock(mirror_mutex_);
  harvest();
  return {known_.skips, known_.flag.cleared, known_.overlap};
}

bool CudaEngine::flag(Stream stream) {
  uint32_t raised = 0;
  transfer(stream, &raised, &state_->decided.flag.raised, sizeof(raised));
  return raised != 0;
}

void CudaEngine::restore(Stream stream, bool flag) {
  const uint32_t raised = flag ? 1 : 0;
  const ops::Verdict taken{0};
  transfer(stream, &state_->decided.flag.raised, &raised, sizeof(raised));
  transfer(stream, &state_->decided.verdict, &taken, sizeof(taken));
}

}  // namespace scape::plugin
