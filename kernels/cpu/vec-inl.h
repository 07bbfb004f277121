// Vectors of floats, 16-bit floats and mask bits: what the operations of this folder are made of.
// Compiled once per target (Highway's foreach_target).
#if defined(SCAPE_KERNELS_CPU_VEC_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef SCAPE_KERNELS_CPU_VEC_INL_H_
#undef SCAPE_KERNELS_CPU_VEC_INL_H_
#else
#define SCAPE_KERNELS_CPU_VEC_INL_H_
#endif

#include <hwy/cache_control.h>
#include <hwy/highway.h>

#include "kernels/scalar/element.h"

HWY_BEFORE_NAMESPACE();
namespace scape::kernels::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using Floats = hn::ScalableTag<float>;
using Words = hn::RebindToUnsigned<Floats>;  // uint32
using Ints = hn::RebindToSigned<Floats>;     // int32
using Halves = hn::Rebind<uint16_t, Floats>;
using FloatVec = hn::Vec<Floats>;
using WordVec = hn::Vec<Words>;
using IntVec = hn::Vec<Ints>;

inline constexpr size_t kLanes = hn::MaxLanes(Floats());
static_assert(64 % kLanes == 0, "a mask word is a whole number of vectors");

// ---- conversion ----

HWY_INLINE WordVec widen(const uint16_t* in) {
  return hn::PromoteTo(Words(), hn::LoadU(Halves(), in));
}

// Values of `v` are below 2^16.
HWY_INLINE void narrow(WordVec v, uint16_t* out) {
  hn::StoreU(hn::DemoteTo(Halves(), hn::BitCast(Ints(), v)), Halves(), out);
}

// a > b of values below 2^31.
HWY_INLINE hn::Mask<Words> greater(WordVec a, WordVec b) {
  return hn::RebindMask(Words(), hn::Gt(hn::BitCast(Ints(), a), hn::BitCast(Ints(), b)));
}

HWY_INLINE FloatVec bfloat16_to_float(WordVec v) {
  return hn::BitCast(Floats(), hn::ShiftLeft<16>(v));
}

HWY_INLINE WordVec float_to_bfloat16(FloatVec v) {
  const Words d;
  const auto bits = hn::BitCast(d, v);
  const auto odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(d, 1));
  const auto rounded = hn::ShiftRight<16>(hn::Add(bits, hn::Add(odd, hn::Set(d, 0x7fff))));
  const auto quiet = hn::Or(hn::ShiftRight<16>(bits), hn::Set(d, 0x40));
  const auto nan = greater(hn::And(bits, hn::Set(d, 0x7fffffffu)), hn::Set(d, 0x7f800000u));
  return hn::IfThenElse(nan, quiet, rounded);
}

#if HWY_TARGET == HWY_AVX2 || HWY_TARGET == HWY_AVX3 || HWY_TARGET == HWY_NEON

HWY_INLINE FloatVec load_float16(const uint16_t* in) {
  const hn::Rebind<hwy::float16_t, Floats> d;
  return hn::PromoteTo(Floats(), hn::BitCast(d, hn::LoadU(Halves(), in)));
}

HWY_INLINE void store_float16(FloatVec v, uint16_t* out) {
  const hn::Rebind<hwy::float16_t, Floats> d;
  hn::StoreU(hn::BitCast(Halves(), hn::DemoteTo(d, v)), Halves(), out);
}

#else  // no instruction for it: the integer arithmetic of scalar/element.h

HWY_INLINE FloatVec load_float16(const uint16_t* in) {
  const Words d;
  const auto half = widen(in);
  const auto sign = hn::ShiftLeft<16>(hn::And(half, hn::Set(d, 0x8000u)));
  const auto rest = hn::ShiftLeft<13>(hn::And(half, hn::Set(d, 0x7fffu)));
  const auto normal = hn::Add(rest, hn::Set(d, 0x38000000u));
  const auto offset = hn::Set(d, 0x38800000u);
  const auto small = hn::BitCast(
      d, hn::Sub(hn::BitCast(Floats(), hn::Or(rest, offset)), hn::BitCast(Floats(), offset)));
  const auto infinity = hn::Set(d, 0x0f800000u);
  const auto quiet = hn::IfThenElseZero(greater(rest, infinity), hn::Set(d, 0x400000u));
  const auto special = hn::Or(hn::Or(rest, hn::Set(d, 0x70000000u)), quiet);
  const auto finite = hn::IfThenElse(greater(hn::Set(d, 0x00800000u), rest), small, normal);
  const auto magnitude =
      hn::IfThenElse(greater(rest, hn::Set(d, 0x0f800000u - 1)), special, finite);
  return hn::BitCast(Floats(), hn::Or(sign, magnitude));
}

HWY_INLINE void store_float16(FloatVec v, uint16_t* out) {
  const Words d;
  const auto bits = hn::BitCast(d, v);
  const auto sign = hn::And(hn::ShiftRight<16>(bits), hn::Set(d, 0x8000u));
  const auto magnitude = hn::And(bits, hn::Set(d, 0x7fffffffu));
  const auto quiet =
      hn::Or(hn::And(hn::ShiftRight<13>(magnitude), hn::Set(d, 0x3ffu)), hn::Set(d, 0x7e00u));
  const auto one_half = hn::Set(Floats(), 0.5f);
  const auto small = hn::Sub(hn::BitCast(d, hn::Add(hn::BitCast(Floats(), magnitude), one_half)),
                             hn::BitCast(d, one_half));
  const auto odd = hn::And(hn::ShiftRight<13>(magnitude), hn::Set(d, 1));
  const auto rounded = hn::Add(magnitude, hn::Add(odd, hn::Set(d, 0xfff)));
  auto half = hn::ShiftRight<13>(hn::Sub(rounded, hn::Set(d, 0x38000000u)));
  half = hn::IfThenElse(greater(half, hn::Set(d, 0x7c00u)), hn::Set(d, 0x7c00u), half);
  half = hn::IfThenElse(greater(hn::Set(d, 0x38800000u), magnitude), small, half);
  half = hn::IfThenElse(greater(magnitude, hn::Set(d, 0x7f800000u)), quiet, half);
  narrow(hn::Or(sign, half), out);
}

#endif

// A vector of elements j, j + 1, ... of a caller's buffer, and back.
template <Type type>
HWY_INLINE FloatVec load_vec(const void* values, size_t j) {
  if constexpr (type == Type::kFloat32) {
    return hn::LoadU(Floats(), static_cast<const float*>(values) + j);
  } else if constexpr (type == Type::kBfloat16) {
    return bfloat16_to_float(widen(static_cast<const uint16_t*>(values) + j));
  } else {
    return load_float16(static_cast<const uint16_t*>(values) + j);
  }
}

template <Type type>
HWY_INLINE void store_vec(FloatVec v, void* values, size_t j) {
  if constexpr (type == Type::kFloat32) {
    hn::StoreU(v, Floats(), static_cast<float*>(values) + j);
  } else if constexpr (type == Type::kBfloat16) {
    narrow(float_to_bfloat16(v), static_cast<uint16_t*>(values) + j);
  } else {
    store_float16(v, static_cast<uint16_t*>(values) + j);
  }
}

// Calls f.operator()<type>(), the type as a constant.
template <typename F>
HWY_INLINE auto with_type(Type type, F&& f) {
  switch (type) {
    case Type::kBfloat16:
      return f.template operator()<Type::kBfloat16>();
    case Type::kFloat16:
      return f.template operator()<Type::kFloat16>();
    default:
      return f.template operator()<Type::kFloat32>();
  }
}

// ---- mask bits ----

// The lanes' bits, lane 0 lowest.
template <class D>
HWY_INLINE uint64_t bits_of_mask(D d, hn::Mask<D> mask) {
#if HWY_TARGET == HWY_AVX3
  (void)d;
  return mask.raw;
#else
  uint8_t bytes[8] = {};
  hn::StoreMaskBits(d, mask, bytes);
  return bytes[0];  // at most 8 lanes
#endif
}

// Lanes 0 .. kLanes - 1 of the mask from the low bits of `bits`.
HWY_INLINE hn::Mask<Floats> mask_of_bits(uint64_t bits) {
  uint8_t bytes[8];
  std::memcpy(bytes, &bits, sizeof(bytes));
  return hn::LoadMaskBits(Floats(), bytes);
}

#if HWY_TARGET != HWY_AVX3

// For each combination of kLanes bits, where its set lanes come from: a lane number a byte for
// eight lanes, byte numbers for four. (Highway's own tables of this version live on the stack, and
// are copied there by GCC at every use.)
inline constexpr size_t kIndexBytes = kLanes == 8 ? 8 : 16;
struct CompressTable {
  alignas(16) uint8_t index[size_t{1} << kLanes][kIndexBytes] = {};
  constexpr CompressTable() {
    constexpr size_t kPerLane = kIndexBytes / kLanes;
    for (size_t bits = 0; bits < (size_t{1} << kLanes); ++bits) {
      size_t out = 0;
      for (size_t lane = 0; lane < kLanes; ++lane) {
        if (((bits >> lane) & 1) == 0) continue;
        for (size_t byte = 0; byte < kPerLane; ++byte) {
          index[bits][out++] = static_cast<uint8_t>(lane * kPerLane + byte);
        }
      }
    }
  }
};
inline constexpr CompressTable kCompressTable;

#endif

// The lanes whose bits are set, in order, first; what follows them is unspecified.
HWY_INLINE FloatVec compress(FloatVec v, uint64_t bits) {
#if HWY_TARGET == HWY_AVX3
  return hn::Compress(v, mask_of_bits(bits));
#elif HWY_TARGET == HWY_AVX2
  const hn::Rebind<uint8_t, Floats> bytes;
  const auto index = hn::PromoteTo(Ints(), hn::LoadU(bytes, kCompressTable.index[bits]));
  return hn::TableLookupLanes(v, hn::IndicesFromVec(Floats(), index));
#else
  const hn::Repartition<uint8_t, Floats> bytes;
  const auto index = hn::Load(bytes, kCompressTable.index[bits]);
  return hn::BitCast(Floats(), hn::TableLookupBytes(hn::BitCast(bytes, v), index));
#endif
}

inline constexpr uint64_t kLaneBits = (uint64_t{1} << kLanes) - 1;
inline constexpr uint64_t kFullWord = ~uint64_t{0};

// Calls visit(j) for the set bits of a mask word, j counted from `base`.
template <typename Visit>
HWY_INLINE void for_each_bit(uint64_t word, size_t base, Visit&& visit) {
  for (; word != 0; word &= word - 1) visit(base + static_cast<size_t>(std::countr_zero(word)));
}

// ---- tables by age ----

// table[min(age, size - 1)] per lane.
HWY_INLINE FloatVec look_up(const float* table, uint32_t size, IntVec age) {
  const auto last = hn::Set(Ints(), static_cast<int32_t>(size - 1));
  return hn::GatherIndex(Floats(), table, hn::Min(age, last));
}

}  // namespace scape::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
