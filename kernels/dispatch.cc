// Which backends this CPU can run, and which of them is used; the tables shared by all of them.
#include <algorithm>

#include "base/log.h"
#include "base/settings.h"
#include "kernels/cpu/cpu.h"
#include "kernels/kernels.h"

namespace scape::kernels {
namespace {

// The choices of SCAPE_SIMD in the order of base/settings_list.h.
constexpr const char* kChoices[] = {"auto", "scalar", "baseline", "avx2", "avx512", "neon"};

const Ops& choose() {
  const std::vector<const Ops*>& available = available_ops();
  const std::string_view wanted = kChoices[settings().simd];
  if (wanted == "auto") return *available.front();
  const auto found = std::find_if(available.begin(), available.end(),
                                  [&](const Ops* ops) { return ops->name == wanted; });
  if (found != available.end()) return **found;
  SCAPE_WARN(
      "SCAPE_SIMD=%s: this CPU or build has no such kernels, taking %s (results are the same); "
      "unset SCAPE_SIMD or choose another",
      wanted.data(), available.front()->name);
  return *available.front();
}

}  // namespace

std::vector<float> make_power_table(double beta1) {
  // Products one by one instead of pow(): every C library rounds a product alike.
  std::vector<float> table;
  double power = 1;
  do {
    table.push_back(static_cast<float>(power));
    power *= beta1;
  } while (table.back() != 0.0f && table.size() < 65536);
  return table;
}

size_t select_scratch_bytes() { return size_t{1} << 20; }

const std::vector<const Ops*>& available_ops() {
  // Never destroyed: used until the last moment.
  static const auto* const available = [] {
    auto* usable = new std::vector<const Ops*>(usable_cpu_ops());
    usable->push_back(&scalar_ops());
    return usable;
  }();
  return *available;
}

const Ops& ops() {
  static const Ops& chosen = choose();
  return chosen;
}

}  // namespace scape::kernels
