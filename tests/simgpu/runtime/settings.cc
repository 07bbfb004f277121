#include "settings.h"

#include <cerrno>
#include <cstdlib>
#include <cstring>

#include "errors.h"

namespace simgpu {
namespace {

bool read_number(const std::string& text, uint64_t* out) {
  if (text.empty() || text.find_first_not_of("0123456789") != std::string::npos) return false;
  errno = 0;
  *out = std::strtoull(text.c_str(), nullptr, 10);
  return errno == 0;
}

// function:nth, function:nth+, either with =error (a name or a number); several with commas.
bool read_failures(const std::string& text, std::vector<Failure>* out) {
  for (size_t begin = 0; begin < text.size();) {
    const size_t comma = std::min(text.find(',', begin), text.size());
    std::string entry = text.substr(begin, comma - begin);
    begin = comma + 1;
    Failure failure;
    const size_t equals = entry.find('=');
    if (equals != std::string::npos) {
      if (!error_of(entry.substr(equals + 1), &failure.error)) return false;
      entry.resize(equals);
    }
    const size_t colon = entry.find(':');
    if (colon == std::string::npos || colon == 0) return false;
    failure.function = entry.substr(0, colon);
    std::string nth = entry.substr(colon + 1);
    if (nth.ends_with('+')) {
      failure.later_too = true;
      nth.pop_back();
    }
    if (!read_number(nth, &failure.nth) || failure.nth == 0) return false;
    if (equals == std::string::npos) {
      failure.error = failure.function == "kernel" ? cudaErrorIllegalAddress
                      : failure.function.find("lloc") != std::string::npos
                          ? cudaErrorMemoryAllocation
                          : cudaErrorUnknown;
    }
    out->push_back(std::move(failure));
  }
  return true;
}

// Calls `read` with the variable's value, where it has one, and notes when it is refused.
template <typename Read>
void take(Settings* settings, const char* name, const char* form, Read&& read) {
  const char* value = std::getenv(name);
  if (value == nullptr || *value == '\0' || read(std::string(value))) return;
  settings->mistake += std::string(settings->mistake.empty() ? "" : "; ") + name + "=\"" + value +
                       "\" is not " + form;
}

Settings read_settings() {
  Settings out;
  uint64_t number = 0;
  take(&out, "SIMGPU_DEVICES", "a number from 0 to 16", [&](const std::string& text) {
    if (!read_number(text, &number) || number > 16) return false;
    out.devices = static_cast<int>(number);
    return true;
  });
  take(&out, "SIMGPU_MEMORY", "a number of bytes", [&](const std::string& text) {
    if (!read_number(text, &number)) return false;
    out.memory = number;
    return true;
  });
  take(&out, "SIMGPU_REORDER", "a seed, a number", [&](const std::string& text) {
    out.reorder = true;
    return read_number(text, &out.seed);
  });
  take(&out, "SIMGPU_DELAY_US", "a number of microseconds",
       [&](const std::string& text) { return read_number(text, &out.delay_us); });
  take(&out, "SIMGPU_HOST_ACCESS", "allow or fault", [&](const std::string& text) {
    out.guard_host_access = text == "fault";
    return out.guard_host_access || text == "allow";
  });
  take(&out, "SIMGPU_LEAKS", "ignore, report or fail", [&](const std::string& text) {
    out.leaks = text == "fail" ? Leaks::kFail : text == "report" ? Leaks::kReport : Leaks::kIgnore;
    return out.leaks != Leaks::kIgnore || text == "ignore";
  });
  take(&out, "SIMGPU_FAIL", "function:nth[+][=error], several with commas",
       [&](const std::string& text) { return read_failures(text, &out.failures); });
  return out;
}

}  // namespace

const Settings& settings() {
  static const Settings* const instance = new Settings(read_settings());
  return *instance;
}

}  // namespace simgpu
