#include "plugin/masked/payload_codec.h"

namespace scape::plugin {
namespace {

class Float32Codec final : public PayloadCodec {
 public:
  explicit Float32Codec(Engine& engine) : engine_(engine) {}

  DataType wire_type() const override { return DataType::kFloat32; }

  bool plain() const override { return true; }

  void encode(const StepView& step, float* values, void*) override {
    engine_.encode_fp32(step, values);
  }

  const float* decode(const StepView&, const void* wire, float*) override {
    return static_cast<const float*>(wire);
  }

  const float* error() const override { return nullptr; }

 private:
  Engine& engine_;
};

class Bfloat16Codec final : public PayloadCodec {
 public:
  explicit Bfloat16Codec(Engine& engine) : engine_(engine), error_(engine) {}

  DataType wire_type() const override { return DataType::kBfloat16; }

  bool plain() const override { return false; }

  void encode(const StepView& step, float* values, void* wire) override {
    error_.resize(step.masked);
    engine_.encode_bf16(step, values, static_cast<uint16_t*>(wire), error_.data());
  }

  const float* decode(const StepView& step, const void* wire, float* values) override {
    engine_.decode_bf16(step, static_cast<const uint16_t*>(wire), values);
    return values;
  }

  const float* error() const override { return error_.data(); }

 private:
  Engine& engine_;
  Array<float> error_;
};

}  // namespace

std::unique_ptr<PayloadCodec> make_payload_codec(Engine& engine, scape_dtype payload) {
  if (payload == SCAPE_BFLOAT16) return std::make_unique<Bfloat16Codec>(engine);
  return std::make_unique<Float32Codec>(engine);
}

}  // namespace scape::plugin
