// The sizes that a table runs through, and their options, which are nccl-tests'.
#pragma once

#include <CLI/CLI.hpp>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "base/status.h"

namespace scape::perf {

struct SizeRange {
  size_t min_bytes = size_t{32} << 20;
  size_t max_bytes = SIZE_MAX;  // not given
  size_t step_bytes = size_t{1} << 20;
  double step_factor = 1;  // above 1: sizes grow by it instead of by step_bytes

  // -b, -e, -i and -f.
  void add_options(CLI::App* app);
  // After parsing: -e not given is -b.
  Status complete();

  std::vector<size_t> sizes() const;
  std::string step_text() const;  // as the table's heading names it
};

// "32M", "1K", "256", "1G", "8B" as bytes.
bool parse_bytes(const std::string& text, size_t* out);

}  // namespace scape::perf
