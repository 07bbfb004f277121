#include "plugin/collectives/reduce.h"

namespace scape::plugin {
namespace {

const detail::ReduceOps& best() {
#if defined(__x86_64__)
  static const detail::ReduceOps& ops = []() -> const detail::ReduceOps& {
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
      return detail::reduce_avx512();
    }
    return __builtin_cpu_supports("avx2") ? detail::reduce_avx2() : detail::reduce_baseline();
  }();
  return ops;
#else
  return detail::reduce_baseline();
#endif
}

}  // namespace

DataType accumulation_type(DataType type) {
  switch (type) {
    case DataType::kFloat16:
    case DataType::kBfloat16:
    case DataType::kFloat8e4m3:
    case DataType::kFloat8e5m2:
      return DataType::kFloat32;
    default:
      return type;
  }
}

void reduce(const ReduceCall& call) { best().reduce(call); }

void scale(DataType type, const Reduction& reduction, void* out, const void* in, size_t n) {
  best().scale(type, reduction, out, in, n);
}

}  // namespace scape::plugin
