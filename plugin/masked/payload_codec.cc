#include "plugin/masked/payload_codec.h"

#include <algorithm>
#include <limits>

namespace scape::plugin {
namespace {

constexpr float kRaised = std::numeric_limits<float>::quiet_NaN();

class Float32Codec final : public PayloadCodec {
 public:
  DataType wire_type() const override { return DataType::kFloat32; }

  bool plain() const override { return true; }

  void encode(float* values, const uint16_t*, size_t k, bool flag, const kernels::StepParams&,
              void* wire) override {
    values[k] = flag ? kRaised : 0.0f;
    if (wire != values) std::copy_n(values, k + 1, static_cast<float*>(wire));
  }

  const float* decode(const void* wire, const uint16_t*, size_t, const kernels::StepParams&,
                      float*) override {
    return static_cast<const float*>(wire);
  }

  const float* error() const override { return nullptr; }
};

class Bfloat16Codec final : public PayloadCodec {
 public:
  DataType wire_type() const override { return DataType::kBfloat16; }

  bool plain() const override { return false; }

  void encode(float* values, const uint16_t* ages, size_t k, bool flag,
              const kernels::StepParams& params, void* wire) override {
    auto* const encoded = static_cast<uint16_t*>(wire);
    error_.resize(k);
    kernels::ops().encode_bf16(values, ages, k, params, encoded, error_.data());
    values[k] = flag ? kRaised : 0.0f;
    kernels::ops().from_float(kernels::Type::kBfloat16, values + k, encoded + k, 1);
  }

  const float* decode(const void* wire, const uint16_t* ages, size_t k,
                      const kernels::StepParams& params, float* values) override {
    const auto* const encoded = static_cast<const uint16_t*>(wire);
    kernels::ops().decode_bf16(encoded, ages, k, params, values);
    kernels::ops().to_float(kernels::Type::kBfloat16, encoded + k, values + k, 1);
    return values;
  }

  const float* error() const override { return error_.data(); }

 private:
  std::vector<float> error_;
};

}  // namespace

std::unique_ptr<PayloadCodec> make_payload_codec(scape_dtype payload) {
  if (payload == SCAPE_BFLOAT16) return std::make_unique<Bfloat16Codec>();
  return std::make_unique<Float32Codec>();
}

}  // namespace scape::plugin
