#include "perf/common/sizes.h"

#include <algorithm>
#include <cctype>
#include <cstdlib>

namespace scape::perf {

bool parse_bytes(const std::string& text, size_t* out) {
  char* end = nullptr;
  if (text.empty() || std::isdigit(static_cast<unsigned char>(text[0])) == 0) return false;
  const double number = std::strtod(text.c_str(), &end);
  double unit = 1;
  switch (std::toupper(static_cast<unsigned char>(*end))) {
    case 'G':
      unit = 1 << 30;
      break;
    case 'M':
      unit = 1 << 20;
      break;
    case 'K':
      unit = 1 << 10;
      break;
    case 'B':
    case '\0':
      break;
    default:
      return false;
  }
  if (*end != '\0' && end[1] != '\0') return false;
  if (!(number * unit < 1e15)) return false;
  *out = static_cast<size_t>(number * unit);
  return true;
}

void SizeRange::add_options(CLI::App* app) {
  const auto add = [app](const char* name, size_t* bytes, const char* what) {
    return app->add_option_function<std::string>(
        name,
        [bytes](const std::string& text) {
          if (!parse_bytes(text, bytes)) {
            throw CLI::ValidationError("'" + text + "' is not a size such as 8, 4K or 256M");
          }
        },
        what);
  };
  add("-b,--minbytes", &min_bytes, "first size in bytes")->type_name("SIZE")->default_str("32M");
  add("-e,--maxbytes", &max_bytes, "last size in bytes; the first when not given")
      ->type_name("SIZE");
  add("-i,--stepbytes", &step_bytes, "distance of sizes")->type_name("SIZE")->default_str("1M");
  app->add_option("-f,--stepfactor", step_factor, "factor between sizes, instead of -i")
      ->check(CLI::Range(1.0, 1e9));
}

Status SizeRange::complete() {
  if (max_bytes == SIZE_MAX) max_bytes = min_bytes;
  if (max_bytes >= min_bytes) return Status::Ok();
  return error(SCAPE_ERR_ARGUMENT, "-e is below -b: there is no size to run");
}

std::vector<size_t> SizeRange::sizes() const {
  std::vector<size_t> all;
  for (size_t bytes = min_bytes; bytes <= max_bytes;) {
    all.push_back(bytes);
    const size_t next = step_factor > 1
                            ? static_cast<size_t>(static_cast<double>(bytes) * step_factor)
                            : bytes + step_bytes;
    bytes = std::max(next, bytes + 1);
  }
  return all;
}

std::string SizeRange::step_text() const {
  return step_factor > 1 ? format("%g(factor)", step_factor) : format("%zu(bytes)", step_bytes);
}

}  // namespace scape::perf
