// One source, compiled for each SIMD target; each target's table is reached directly. Highway is
// used for its headers only: its library is needed for its own detection and for its assertions,
// and neither is used here.
#define HWY_IS_DEBUG_BUILD 0

// Targets are AVX-512, AVX2, and SSSE3 as the baseline of x86; NEON on Arm.
#define HWY_DISABLED_TARGETS \
  (HWY_SSE4 | HWY_AVX3_DL | HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128)

#include "kernels/cpu/cpu.h"

#if defined(__x86_64__) || defined(__i386__)
#include <cpuid.h>
#endif

#include <functional>

#include "kernels/scalar/element.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/cpu.cc"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

// Where the compiler's own baseline has no vectors at all, Highway compiles that target too; the
// scalar reference serves it.
#if HWY_TARGET != HWY_SCALAR && HWY_TARGET != HWY_EMU128

#include "kernels/cpu/mask-inl.h"
#include "kernels/cpu/pack-inl.h"
#include "kernels/cpu/select-inl.h"
#include "kernels/cpu/step-inl.h"

HWY_BEFORE_NAMESPACE();
namespace scape::kernels::HWY_NAMESPACE {

const Ops& target_ops() {
  // What is not named here (rare, or bound by memory) is the reference's.
  static const Ops kOps = [] {
    Ops ops = scalar_ops();
#if HWY_TARGET == HWY_AVX3
    ops.name = "avx512";
#elif HWY_TARGET == HWY_AVX2
    ops.name = "avx2";
#elif HWY_TARGET == HWY_NEON
    ops.name = "neon";
#else
    ops.name = "baseline";
#endif
    ops.to_float = to_float;
    ops.from_float = from_float;
    ops.accumulate_pack = accumulate_pack;
    ops.accumulate_pack_moment = accumulate_pack_moment;
    ops.gather = gather;
    ops.scatter = scatter;
    ops.clear_masked = clear_masked;
    ops.gather_ages = gather_ages;
    ops.encode_bf16 = encode_bf16;
    ops.decode_bf16 = decode_bf16;
    ops.any_nonfinite = any_nonfinite;
    ops.adams_step = adams_step;
    ops.moment_step = moment_step;
    ops.hooked_step = hooked_step;
    ops.expand = expand;
    ops.score = score;
    ops.select = select;
    ops.count_bits = count_bits;
    ops.count_common_bits = count_common_bits;
    ops.encode_offsets = encode_offsets;
    ops.restamp = restamp;
    return ops;
  }();
  return kOps;
}

}  // namespace scape::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif

#if HWY_ONCE

namespace scape::kernels {

#if HWY_ARCH_X86
namespace {
// Not every compiler's detection knows this one.
bool has_f16c() {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  return __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & bit_F16C) != 0;
}
}  // namespace
#endif

// A target's table is asked for only where the CPU can run it: the code that fills it is compiled
// for that target as well.
std::vector<const Ops*> usable_cpu_ops() {
  std::vector<const Ops*> usable;
#if HWY_ARCH_X86
  // The compiler's detection covers the operating system's part (XCR0) as well.
  __builtin_cpu_init();
#define SCAPE_CPU_HAS(feature) (__builtin_cpu_supports(feature) != 0)
  const bool baseline = SCAPE_CPU_HAS("ssse3");
  const bool avx2 = baseline && SCAPE_CPU_HAS("sse4.2") && SCAPE_CPU_HAS("pclmul") &&
                    SCAPE_CPU_HAS("aes") && SCAPE_CPU_HAS("popcnt") && SCAPE_CPU_HAS("avx") &&
                    SCAPE_CPU_HAS("avx2") && SCAPE_CPU_HAS("bmi") && SCAPE_CPU_HAS("bmi2") &&
                    SCAPE_CPU_HAS("fma") && has_f16c();
  const bool avx512 = avx2 && SCAPE_CPU_HAS("avx512f") && SCAPE_CPU_HAS("avx512vl") &&
                      SCAPE_CPU_HAS("avx512dq") && SCAPE_CPU_HAS("avx512bw");
#undef SCAPE_CPU_HAS
#if HWY_TARGETS & HWY_AVX3
  if (avx512) usable.push_back(&N_AVX3::target_ops());
#endif
#if HWY_TARGETS & HWY_AVX2
  if (avx2) usable.push_back(&N_AVX2::target_ops());
#endif
#if HWY_TARGETS & HWY_SSSE3
  if (baseline) usable.push_back(&N_SSSE3::target_ops());
#endif
#elif HWY_TARGETS & HWY_NEON
  usable.push_back(&N_NEON::target_ops());
#endif
  return usable;
}

}  // namespace scape::kernels

#endif  // HWY_ONCE
