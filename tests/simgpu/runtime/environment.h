// Reading the SIMGPU_* variables.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <functional>
#include <string>
#include <vector>

namespace simgpu {

// A call that is to fail.
struct Failure {
  std::string function;
  uint64_t nth = 1;
  bool later_too = false;
  int error = 0;
};

bool read_number(const std::string& text, uint64_t* out);

// function:nth, function:nth+, either with =error; several with commas. `error_of` reads an error's
// name or number; `usual_error` is for entries without one.
bool read_failures(const std::string& text,
                   const std::function<bool(const std::string&, int*)>& error_of,
                   const std::function<int(const std::string&)>& usual_error,
                   std::vector<Failure>* out);

// The error that is wanted of a function's `call`-th call; 0 where none is.
int wanted_failure(const std::vector<Failure>& failures, const std::string& function,
                   uint64_t call);

// Calls `read` with the variable's value, where it has one; where that gives false, says so in
// *mistake.
template <typename Read>
void take(const char* name, const char* form, std::string* mistake, Read&& read) {
  const char* value = std::getenv(name);
  if (value == nullptr || *value == '\0' || read(std::string(value))) return;
  *mistake +=
      std::string(mistake->empty() ? "" : "; ") + name + "=\"" + value + "\" is not " + form;
}

}  // namespace simgpu
