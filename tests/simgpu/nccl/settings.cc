#include "tests/simgpu/nccl/settings.h"

namespace simnccl {
namespace {

Settings read_settings() {
  Settings out;
  uint64_t number = 0;
  const auto milliseconds = [&](std::chrono::milliseconds* into) {
    return [&number, into](const std::string& text) {
      if (!simgpu::read_number(text, &number)) return false;
      *into = std::chrono::milliseconds(number);
      return true;
    };
  };
  simgpu::take("SIMGPU_NCCL_VERSION", "a version code", &out.mistake, [&](const std::string& text) {
    if (!simgpu::read_number(text, &number)) return false;
    out.version = static_cast<int>(number);
    return true;
  });
  simgpu::take("SIMGPU_NCCL_IN_PROGRESS_MS", "a number of milliseconds", &out.mistake,
               milliseconds(&out.in_progress));
  simgpu::take("SIMGPU_NCCL_LAUNCH_MS", "a number of milliseconds", &out.mistake,
               milliseconds(&out.launch));
  const auto error_of = [&](const std::string& text, int* error) {
    if (!simgpu::read_number(text, &number) || number == 0) return false;
    *error = static_cast<int>(number);
    return number < scape::nccl::ncclNumResults;
  };
  const auto usual_error = [](const std::string&) { return int{scape::nccl::ncclSystemError}; };
  simgpu::take("SIMGPU_NCCL_FAIL", "function:nth[+][=error number], several with commas",
               &out.mistake, [&](const std::string& text) {
                 return simgpu::read_failures(text, error_of, usual_error, &out.failures);
               });
  return out;
}

}  // namespace

const Settings& settings() {
  static const Settings* const instance = new Settings(read_settings());
  return *instance;
}

}  // namespace simnccl
