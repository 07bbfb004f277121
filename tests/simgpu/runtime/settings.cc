#include "settings.h"

#include "cuda_runtime_api.h"
#include "errors.h"

namespace simgpu {
namespace {

int usual_error(const std::string& function) {
  if (function == "kernel") return cudaErrorIllegalAddress;
  if (function.find("lloc") != std::string::npos) return cudaErrorMemoryAllocation;
  return cudaErrorUnknown;
}

Settings read_settings() {
  Settings out;
  uint64_t number = 0;
  take("SIMGPU_DEVICES", "a number from 0 to 16", &out.mistake, [&](const std::string& text) {
    if (!read_number(text, &number) || number > 16) return false;
    out.devices = static_cast<int>(number);
    return true;
  });
  take("SIMGPU_MEMORY", "a number of bytes", &out.mistake, [&](const std::string& text) {
    if (!read_number(text, &number)) return false;
    out.memory = number;
    return true;
  });
  take("SIMGPU_REORDER", "a seed, a number", &out.mistake, [&](const std::string& text) {
    out.reorder = true;
    return read_number(text, &out.seed);
  });
  take("SIMGPU_DELAY_US", "a number of microseconds", &out.mistake,
       [&](const std::string& text) { return read_number(text, &out.delay_us); });
  take("SIMGPU_HOST_ACCESS", "allow or fault", &out.mistake, [&](const std::string& text) {
    out.guard_host_access = text == "fault";
    return out.guard_host_access || text == "allow";
  });
  take("SIMGPU_MEMORY_OPERATIONS", "on or off", &out.mistake, [&](const std::string& text) {
    out.memory_operations = text == "on";
    return out.memory_operations || text == "off";
  });
  take("SIMGPU_LEAKS", "ignore, report or fail", &out.mistake, [&](const std::string& text) {
    out.leaks = text == "fail" ? Leaks::kFail : text == "report" ? Leaks::kReport : Leaks::kIgnore;
    return out.leaks != Leaks::kIgnore || text == "ignore";
  });
  take("SIMGPU_FAIL", "function:nth[+][=error], several with commas", &out.mistake,
       [&](const std::string& text) {
         return read_failures(text, error_of, usual_error, &out.failures);
       });
  return out;
}

}  // namespace

const Settings& settings() {
  static const Settings* const instance = new Settings(read_settings());
  return *instance;
}

}  // namespace simgpu
