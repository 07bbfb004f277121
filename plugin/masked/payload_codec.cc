#include "plugin/masked/payload_codec.h"

#include <limits>

namespace scape::plugin {
namespace {

constexpr float kRaised = std::numeric_limits<float>::quiet_NaN();

class Float32Codec final : public PayloadCodec {
 public:
  DataType wire_type() const override { return DataType::kFloat32; }

  void* encode(float* values, const uint16_t*, size_t k, bool flag,
               const kernels::StepParams&) override {
    values[k] = flag ? kRaised : 0.0f;
    return values;
  }

  void decode(float*, const uint16_t*, size_t, const kernels::StepParams&) override {}

  const float* error() const override { return nullptr; }
};

class Bfloat16Codec final : public PayloadCodec {
 public:
  DataType wire_type() const override { return DataType::kBfloat16; }

  void* encode(float* values, const uint16_t* ages, size_t k, bool flag,
               const kernels::StepParams& params) override {
    encoded_.resize(k + 1);
    error_.resize(k);
    kernels::ops().encode_bf16(values, ages, k, params, encoded_.data(), error_.data());
    values[k] = flag ? kRaised : 0.0f;
    kernels::ops().from_float(kernels::Type::kBfloat16, values + k, &encoded_[k], 1);
    return encoded_.data();
  }

  void decode(float* values, const uint16_t* ages, size_t k,
              const kernels::StepParams& params) override {
    kernels::ops().decode_bf16(encoded_.data(), ages, k, params, values);
    kernels::ops().to_float(kernels::Type::kBfloat16, &encoded_[k], values + k, 1);
  }

  const float* error() const override { return error_.data(); }

 private:
  std::vector<uint16_t> encoded_;
  std::vector<float> error_;
};

}  // namespace

std::unique_ptr<PayloadCodec> make_payload_codec(scape_dtype payload) {
  if (payload == SCAPE_BFLOAT16) return std::make_unique<Bfloat16Codec>();
  return std::make_unique<Float32Codec>();
}

}  // namespace scape::plugin
