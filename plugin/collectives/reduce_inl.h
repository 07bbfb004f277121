// The element-wise loops, compiled once per instruction set (see CMakeLists.txt). Plain loops over
// blocks that the compiler vectorises; everything is in an unnamed namespace, so that no copy built
// for one CPU can stand in for another's.
#include <cstring>

#include "plugin/collectives/reduce.h"

// The passes of the loop that follows do not depend on each other. Clang has no such hint that it
// may leave unused; it looks for overlap at run time instead.
#ifdef __clang__
#define SCAPE_INDEPENDENT
#else
#define SCAPE_INDEPENDENT _Pragma("GCC ivdep")
#endif

namespace scape::plugin::detail {
namespace {

constexpr size_t kBlock = 1024;  // elements whose accumulators stay in the first-level cache

inline uint32_t bits_of(float value) {
  uint32_t bits;
  __builtin_memcpy(&bits, &value, sizeof bits);
  return bits;
}

inline float float_of(uint32_t bits) {
  float value;
  __builtin_memcpy(&value, &bits, sizeof value);
  return value;
}

// A float of kExponent and kMantissa bits and a sign, in IEEE's layout. kFinite: all-ones exponents
// are numbers too and only the all-ones pattern is NaN (e4m3fn).
template <typename Bits, int kExponent, int kMantissa, bool kFinite>
struct SmallFloat {
  using Storage = Bits;
  using Compute = float;
  static constexpr int kBias = (1 << (kExponent - 1)) - 1;
  static constexpr int kWidth = 1 + kExponent + kMantissa;
  static constexpr uint32_t kMagnitude = (1u << (kWidth - 1)) - 1;
  static constexpr uint32_t kInfinity = ((1u << kExponent) - 1) << kMantissa;

  static float load(Bits bits) {
    const uint32_t magnitude = bits & kMagnitude;
    const uint32_t sign = static_cast<uint32_t>(bits & ~kMagnitude & ((1u << kWidth) - 1))
                          << (32 - kWidth);
    // The fields moved to fp32's place and the bias made good by a power of two: exact, denormals
    // included.
    float value = float_of(magnitude << (23 - kMantissa)) *
                  float_of(static_cast<uint32_t>(127 + 127 - kBias) << 23);
    if (kFinite) {
      value = magnitude == kMagnitude ? float_of(0x7fc00000u) : value;
    } else {
      value =
          magnitude >= kInfinity ? float_of(0x7f800000u | (magnitude << (23 - kMantissa))) : value;
    }
    return float_of(bits_of(value) | sign);
  }

  static Bits store(float value) {
    const uint32_t bits = bits_of(value);
    const uint32_t sign = bits >> 31;
    const uint32_t magnitude = bits & 0x7fffffffu;
    // Normal results: round to nearest even at the last kept bit, then move the exponent.
    constexpr int kShift = 23 - kMantissa;
    const uint32_t odd = (magnitude >> kShift) & 1;
    const uint32_t rounded = magnitude + ((1u << (kShift - 1)) - 1) + odd;
    const uint32_t normal = (rounded >> kShift) - (static_cast<uint32_t>(127 - kBias) << kMantissa);
    // Denormal results: adding a number whose last bit weighs the smallest denormal rounds for us.
    constexpr uint32_t kMagic = static_cast<uint32_t>(127 - kBias + 1 + 23 - kMantissa) << 23;
    const uint32_t denormal = bits_of(float_of(magnitude) + float_of(kMagic)) - kMagic;
    uint32_t result =
        magnitude < (static_cast<uint32_t>(127 - kBias + 1) << 23) ? denormal : normal;
    // The first magnitude that no longer rounds to a number, and what it becomes.
    constexpr uint32_t kLargest = kFinite ? kMagnitude - 1 : kInfinity - 1;
    constexpr uint32_t kOverflow = kFinite ? kMagnitude : kInfinity;
    const bool overflows =
        (rounded >> kShift) >= (kLargest + 1 + (static_cast<uint32_t>(127 - kBias) << kMantissa));
    result = overflows ? kOverflow : result;
    constexpr uint32_t kNan = kFinite ? kMagnitude : (kInfinity | (1u << (kMantissa - 1)));
    result = magnitude > 0x7f800000u ? kNan : result;
    return static_cast<Bits>(result | (sign << (kWidth - 1)));
  }
};

using Half = SmallFloat<uint16_t, 5, 10, false>;
using E4m3 = SmallFloat<uint8_t, 4, 3, true>;
using E5m2 = SmallFloat<uint8_t, 5, 2, false>;

struct Bfloat16 {
  using Storage = uint16_t;
  using Compute = float;
  static float load(uint16_t bits) { return float_of(static_cast<uint32_t>(bits) << 16); }
  static uint16_t store(float value) {
    const uint32_t bits = bits_of(value);
    const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1)) >> 16;
    const uint32_t nan = (bits >> 16) | 0x40u;
    return static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? nan : rounded);
  }
};

template <typename T>
struct Plain {
  using Storage = T;
  using Compute = T;
  static T load(T value) { return value; }
  static T store(T value) { return value; }
};

template <typename T>
struct IsFloat {
  static constexpr bool value = false;
};
template <>
struct IsFloat<float> {
  static constexpr bool value = true;
};
template <>
struct IsFloat<double> {
  static constexpr bool value = true;
};

// Integers wrap, also signed ones: the arithmetic is done on the bits.
template <typename T>
struct WrapOf {
  using type = T;
};
template <>
struct WrapOf<int8_t> {
  using type = uint32_t;  // promoted anyway
};
template <>
struct WrapOf<uint8_t> {
  using type = uint32_t;
};
template <>
struct WrapOf<int32_t> {
  using type = uint32_t;
};
template <>
struct WrapOf<int64_t> {
  using type = uint64_t;
};

struct Sum {
  template <typename T>
  static T apply(T a, T b) {
    using W = typename WrapOf<T>::type;
    return static_cast<T>(static_cast<W>(a) + static_cast<W>(b));
  }
};
struct Prod {
  template <typename T>
  static T apply(T a, T b) {
    using W = typename WrapOf<T>::type;
    return static_cast<T>(static_cast<W>(a) * static_cast<W>(b));
  }
};
struct Max {
  template <typename T>
  static T apply(T a, T b) {
    if constexpr (IsFloat<T>::value) return ((b > a) | (a != a)) ? b : a;
    return b > a ? b : a;
  }
};
struct Min {
  template <typename T>
  static T apply(T a, T b) {
    if constexpr (IsFloat<T>::value) return ((b < a) | (a != a)) ? b : a;
    return b < a ? b : a;
  }
};

template <typename T>
T divide(T value, int divisor) {
  return static_cast<T>(value / static_cast<T>(divisor));
}
// A divisor may exceed what 8 bits hold.
inline int8_t divide(int8_t value, int divisor) { return static_cast<int8_t>(value / divisor); }
inline uint8_t divide(uint8_t value, int divisor) { return static_cast<uint8_t>(value / divisor); }

// In: how operands are stored; Out: how the result is.
template <typename In, typename Out, typename Op>
void reduce_loop(const ReduceCall& call) {
  using T = typename In::Compute;
  auto* const out = static_cast<typename Out::Storage*>(call.out);
  const auto operand = [&](int i) { return static_cast<const typename In::Storage*>(call.in[i]); };
  if (call.operands == 2 && call.divisor == 0) {
    const auto* const a = operand(0);
    const auto* const b = operand(1);
    // `out` may be a or b itself, never a shifted overlap.
    SCAPE_INDEPENDENT
    for (size_t i = 0; i < call.n; ++i)
      out[i] = Out::store(Op::apply(In::load(a[i]), In::load(b[i])));
    return;
  }
  T accumulators[kBlock];
  for (size_t begin = 0; begin < call.n; begin += kBlock) {
    const size_t n = call.n - begin < kBlock ? call.n - begin : kBlock;
    const auto* const first = operand(0) + begin;
    for (size_t i = 0; i < n; ++i) accumulators[i] = In::load(first[i]);
    for (int j = 1; j < call.operands; ++j) {
      const auto* const next = operand(j) + begin;
      for (size_t i = 0; i < n; ++i)
        accumulators[i] = Op::apply(accumulators[i], In::load(next[i]));
    }
    if (call.divisor > 0) {
      for (size_t i = 0; i < n; ++i) accumulators[i] = divide(accumulators[i], call.divisor);
    }
    for (size_t i = 0; i < n; ++i) out[begin + i] = Out::store(accumulators[i]);
  }
}

template <typename In, typename Out>
void reduce_op(const ReduceCall& call) {
  switch (call.op) {
    case ReduceOp::kSum:
    case ReduceOp::kAvg:
    case ReduceOp::kPremulSum:
      return reduce_loop<In, Out, Sum>(call);
    case ReduceOp::kProd:
      return reduce_loop<In, Out, Prod>(call);
    case ReduceOp::kMax:
      return reduce_loop<In, Out, Max>(call);
    case ReduceOp::kMin:
      return reduce_loop<In, Out, Min>(call);
  }
}

template <typename Type>
void reduce_small(const ReduceCall& call) {
  if (call.operand == DataType::kFloat32) return reduce_op<Plain<float>, Type>(call);
  reduce_op<Type, Type>(call);
}

void reduce_any(const ReduceCall& call) {
  switch (call.result) {
    case DataType::kInt8:
      return reduce_op<Plain<int8_t>, Plain<int8_t>>(call);
    case DataType::kUint8:
      return reduce_op<Plain<uint8_t>, Plain<uint8_t>>(call);
    case DataType::kInt32:
      return reduce_op<Plain<int32_t>, Plain<int32_t>>(call);
    case DataType::kUint32:
      return reduce_op<Plain<uint32_t>, Plain<uint32_t>>(call);
    case DataType::kInt64:
      return reduce_op<Plain<int64_t>, Plain<int64_t>>(call);
    case DataType::kUint64:
      return reduce_op<Plain<uint64_t>, Plain<uint64_t>>(call);
    case DataType::kFloat16:
      return reduce_small<Half>(call);
    case DataType::kFloat32:
      return reduce_op<Plain<float>, Plain<float>>(call);
    case DataType::kFloat64:
      return reduce_op<Plain<double>, Plain<double>>(call);
    case DataType::kBfloat16:
      return reduce_small<Bfloat16>(call);
    case DataType::kFloat8e4m3:
      return reduce_small<E4m3>(call);
    case DataType::kFloat8e5m2:
      return reduce_small<E5m2>(call);
  }
}

template <typename Type, typename Factor>
void scale_loop(Factor factor, void* out, const void* in, size_t n) {
  using T = typename Type::Compute;
  auto* const to = static_cast<T*>(out);
  const auto* const from = static_cast<const typename Type::Storage*>(in);
  SCAPE_INDEPENDENT
  for (size_t i = 0; i < n; ++i) to[i] = Prod::apply(Type::load(from[i]), static_cast<T>(factor));
}

void scale_any(DataType type, const Reduction& reduction, void* out, const void* in, size_t n) {
  switch (type) {
    case DataType::kInt8:
      return scale_loop<Plain<int8_t>>(reduction.integer_factor, out, in, n);
    case DataType::kUint8:
      return scale_loop<Plain<uint8_t>>(reduction.integer_factor, out, in, n);
    case DataType::kInt32:
      return scale_loop<Plain<int32_t>>(reduction.integer_factor, out, in, n);
    case DataType::kUint32:
      return scale_loop<Plain<uint32_t>>(reduction.integer_factor, out, in, n);
    case DataType::kInt64:
      return scale_loop<Plain<int64_t>>(reduction.integer_factor, out, in, n);
    case DataType::kUint64:
      return scale_loop<Plain<uint64_t>>(reduction.integer_factor, out, in, n);
    case DataType::kFloat16:
      return scale_loop<Half>(reduction.factor, out, in, n);
    case DataType::kFloat32:
      return scale_loop<Plain<float>>(reduction.factor, out, in, n);
    case DataType::kFloat64:
      return scale_loop<Plain<double>>(reduction.factor, out, in, n);
    case DataType::kBfloat16:
      return scale_loop<Bfloat16>(reduction.factor, out, in, n);
    case DataType::kFloat8e4m3:
      return scale_loop<E4m3>(reduction.factor, out, in, n);
    case DataType::kFloat8e5m2:
      return scale_loop<E5m2>(reduction.factor, out, in, n);
  }
}

}  // namespace

const ReduceOps& SCAPE_REDUCE_NAME() {
  static constexpr ReduceOps kOps = {&reduce_any, &scale_any};
  return kOps;
}

}  // namespace scape::plugin::detail
