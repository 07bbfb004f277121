#include "environment.h"

#include <algorithm>
#include <cerrno>

namespace simgpu {

bool read_number(const std::string& text, uint64_t* out) {
  if (text.empty() || text.find_first_not_of("0123456789") != std::string::npos) return false;
  errno = 0;
  *out = std::strtoull(text.c_str(), nullptr, 10);
  return errno == 0;
}

bool read_failures(const std::string& text,
                   const std::function<bool(const std::string&, int*)>& error_of,
                   const std::function<int(const std::string&)>& usual_error,
                   std::vector<Failure>* out) {
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
    if (equals == std::string::npos) failure.error = usual_error(failure.function);
    out->push_back(std::move(failure));
  }
  return true;
}

int wanted_failure(const std::vector<Failure>& failures, const std::string& function,
                   uint64_t call) {
  for (const Failure& failure : failures) {
    if (failure.function != function) continue;
    if (call == failure.nth || (failure.later_too && call > failure.nth)) return failure.error;
  }
  return 0;
}

}  // namespace simgpu
