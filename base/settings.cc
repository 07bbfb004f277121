#include "base/settings.h"

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <utility>

namespace scape {
namespace {

std::vector<std::string_view> split_choices(std::string_view choices) {
  std::vector<std::string_view> parts;
  while (true) {
    const size_t bar = choices.find('|');
    parts.push_back(choices.substr(0, bar));
    if (bar == std::string_view::npos) return parts;
    choices.remove_prefix(bar + 1);
  }
}

int choice_index(std::string_view choices, std::string_view value) {
  const auto parts = split_choices(choices);
  const auto found = std::find(parts.begin(), parts.end(), value);
  return found == parts.end() ? -1 : static_cast<int>(found - parts.begin());
}

bool parse_bool(std::string_view text, bool* value) {
  if (text == "1" || text == "on" || text == "true") {
    *value = true;
    return true;
  }
  if (text == "0" || text == "off" || text == "false") {
    *value = false;
    return true;
  }
  return false;
}

bool parse_int(const char* text, int64_t min, int64_t max, int64_t* value) {
  if (*text == '\0' || std::isspace(static_cast<unsigned char>(*text))) return false;
  char* end = nullptr;
  errno = 0;
  const long long parsed = std::strtoll(text, &end, 10);
  if (errno != 0 || *end != '\0' || parsed < min || parsed > max) return false;
  *value = parsed;
  return true;
}

bool parse_real(const char* text, double min, double max, double* value) {
  if (*text == '\0' || std::isspace(static_cast<unsigned char>(*text))) return false;
  char* end = nullptr;
  errno = 0;
  const double parsed = std::strtod(text, &end);
  if (errno != 0 || *end != '\0' || !std::isfinite(parsed) || parsed < min || parsed > max) {
    return false;
  }
  *value = parsed;
  return true;
}

// "first-last".
bool parse_ports(const char* text, PortRange* range) {
  const std::string whole = text;
  const size_t dash = whole.find('-');
  int64_t first = 0, last = 0;
  if (dash == std::string::npos || !parse_int(whole.substr(0, dash).c_str(), 1, 65535, &first) ||
      !parse_int(whole.c_str() + dash + 1, first, 65535, &last)) {
    return false;
  }
  *range = {static_cast<uint16_t>(first), static_cast<uint16_t>(last)};
  return true;
}

// "auto", "none" or a list of CPUs.
bool parse_cpu_choice(std::string_view text, CpuChoice* choice) {
  if (text == "auto" || text == "none") {
    *choice = {text == "auto", {}};
    return true;
  }
  if (!CpuSet::parse(text, &choice->cpus)) return false;
  choice->automatic = false;
  return true;
}

std::string short_number(double value) {
  if (value == std::floor(value) && std::fabs(value) < 1e15) {
    return format("%lld", static_cast<long long>(value));
  }
  return format("%g", value);
}

// Values from the environment may be thousands of characters long; a message shows the first few.
std::string shown(const char* value) {
  const std::string text(value);
  return text.size() <= 64 ? text : text.substr(0, 61) + "...";
}

size_t edit_distance(std::string_view a, std::string_view b) {
  // Damerau's, with swaps of neighbours counted once: the usual slips of a keyboard.
  std::vector<std::vector<size_t>> d(a.size() + 1, std::vector<size_t>(b.size() + 1));
  for (size_t i = 0; i <= a.size(); ++i) d[i][0] = i;
  for (size_t j = 0; j <= b.size(); ++j) d[0][j] = j;
  for (size_t i = 1; i <= a.size(); ++i) {
    for (size_t j = 1; j <= b.size(); ++j) {
      const size_t cost = a[i - 1] == b[j - 1] ? 0 : 1;
      d[i][j] = std::min({d[i - 1][j] + 1, d[i][j - 1] + 1, d[i - 1][j - 1] + cost});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1]) {
        d[i][j] = std::min(d[i][j], d[i - 2][j - 2] + 1);
      }
    }
  }
  return d[a.size()][b.size()];
}

// The environment that this program was started with. Walking `environ` instead would race with any
// thread that sets a variable: the C library moves the array.
std::string environment_at_start() {
  std::ifstream file("/proc/self/environ", std::ios::binary);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

struct Parsed {
  Settings values;
  Status status, problem;
  std::vector<std::string> warnings;
  std::vector<SettingRow> rows;

  Parsed() {
#define SCAPE_SETTING_CHOICE(field, name, fallback, choices, help) \
  read_choice(&values.field, name, fallback, choices, help);
#define SCAPE_SETTING_STRING(field, name, fallback, help) \
  read_string(&values.field, name, fallback, help);
#define SCAPE_SETTING_BOOL(field, name, fallback, help) \
  read_bool(&values.field, name, fallback, help);
#define SCAPE_SETTING_INT(field, name, fallback, min, max, help) \
  read_int(&values.field, name, fallback, min, max, help);
#define SCAPE_SETTING_REAL(field, name, fallback, min, max, help) \
  read_real(&values.field, name, fallback, min, max, help);
#define SCAPE_SETTING_PORTS(field, name, help) read_ports(&values.field, name, help);
#define SCAPE_SETTING_CPUS(field, name, help) read_cpus(&values.field, name, help);
#include "base/settings_list.h"
#undef SCAPE_SETTING_CHOICE
#undef SCAPE_SETTING_STRING
#undef SCAPE_SETTING_BOOL
#undef SCAPE_SETTING_INT
#undef SCAPE_SETTING_REAL
#undef SCAPE_SETTING_PORTS
#undef SCAPE_SETTING_CPUS
    warnings = unknown_setting_warnings(environment_at_start(), rows);
  }

  // Of the row that add_row() comes to next.
  void reject(const char* name, const char* text, const std::string& range) {
    problem =
        error(SCAPE_ERR_ARGUMENT, "%s=\"%s\" is not valid: it takes %s; correct it or unset it",
              name, shown(text).c_str(), range.c_str());
  }

  void add_row(const char* name, const char* type, std::string range, std::string fallback,
               std::string value, const char* text, const char* help) {
    if (status.ok()) status = problem;
    rows.push_back({name, type, std::move(range), std::move(fallback), std::move(value),
                    text != nullptr, std::exchange(problem, {}), help});
  }

  void read_choice(int* field, const char* name, const char* fallback, const char* choices,
                   const char* help) {
    *field = choice_index(choices, fallback);
    const char* text = std::getenv(name);
    if (text != nullptr) {
      const int index = choice_index(choices, text);
      if (index >= 0) {
        *field = index;
      } else {
        reject(name, text, std::string("one of ") + choices);
      }
    }
    add_row(name, "choice", choices, fallback,
            std::string(split_choices(choices)[static_cast<size_t>(*field)]), text, help);
  }

  void read_string(std::string* field, const char* name, const char* fallback, const char* help) {
    const char* text = std::getenv(name);
    *field = text != nullptr ? text : fallback;
    add_row(name, "string", "", fallback, *field, text, help);
  }

  void read_bool(bool* field, const char* name, bool fallback, const char* help) {
    *field = fallback;
    const char* text = std::getenv(name);
    if (text != nullptr && !parse_bool(text, field))
      reject(name, text, "0, 1, on, off, true or false");
    add_row(name, "bool", "0|1|on|off|true|false", fallback ? "1" : "0", *field ? "1" : "0", text,
            help);
  }

  void read_int(int64_t* field, const char* name, int64_t fallback, int64_t min, int64_t max,
                const char* help) {
    *field = fallback;
    const char* text = std::getenv(name);
    const std::string range = std::to_string(min) + " .. " + std::to_string(max);
    if (text != nullptr && !parse_int(text, min, max, field))
      reject(name, text, "an integer in " + range);
    add_row(name, "integer", range, std::to_string(fallback), std::to_string(*field), text, help);
  }

  void read_real(double* field, const char* name, double fallback, double min, double max,
                 const char* help) {
    *field = fallback;
    const char* text = std::getenv(name);
    const std::string range = short_number(min) + " .. " + short_number(max);
    if (text != nullptr && !parse_real(text, min, max, field))
      reject(name, text, "a number in " + range);
    add_row(name, "real", range, short_number(fallback), short_number(*field), text, help);
  }

  void read_ports(PortRange* field, const char* name, const char* help) {
    const char* text = std::getenv(name);
    if (text != nullptr && *text != '\0' && !parse_ports(text, field)) {
      reject(name, text,
             "first-last, two ports of 1 .. 65535 such as 20000-20099, or nothing for any");
    }
    add_row(name, "ports", "first-last", "", field->text(), text, help);
  }

  void read_cpus(CpuChoice* field, const char* name, const char* help) {
    const char* text = std::getenv(name);
    if (text != nullptr && !parse_cpu_choice(text, field)) {
      reject(name, text, "auto, none, or a list of CPUs such as 0-3,8");
    }
    add_row(name, "cpus", "auto|none|list", "auto", field->text(), text, help);
  }
};

const Parsed& parsed() {
  static const Parsed* const instance = new Parsed;  // never destroyed: used until the last moment
  return *instance;
}

}  // namespace

std::vector<std::string> unknown_setting_warnings(std::string_view environment,
                                                  const std::vector<SettingRow>& rows) {
  std::vector<std::string> warnings;
  while (!environment.empty()) {
    const std::string_view entry = environment.substr(0, environment.find('\0'));
    environment.remove_prefix(std::min(entry.size() + 1, environment.size()));
    if (entry.substr(0, 6) != "SCAPE_") continue;
    const std::string_view name = entry.substr(0, std::min(entry.find('='), size_t{64}));
    size_t best = SIZE_MAX;
    std::string nearest;
    for (const SettingRow& row : rows) {
      const size_t distance = edit_distance(name, row.name);
      if (distance < best) {
        best = distance;
        nearest = row.name;
      }
    }
    if (best == 0) continue;
    warnings.push_back(
        format("%.*s is not a setting of scape and is ignored; the nearest is %s (scape-info "
               "lists all)",
               static_cast<int>(name.size()), name.data(), nearest.c_str()));
  }
  return warnings;
}

std::string variable_at_start(std::string_view name) {
  const std::string environment = environment_at_start();
  for (size_t at = 0; at < environment.size();) {
    const std::string_view entry = environment.c_str() + at;
    if (entry.size() > name.size() && entry.substr(0, name.size()) == name &&
        entry[name.size()] == '=') {
      return std::string(entry.substr(name.size() + 1));
    }
    at += entry.size() + 1;
  }
  return {};
}

std::string CpuChoice::text() const {
  return automatic ? "auto" : cpus.empty() ? "none" : cpus.text();
}
std::string PortRange::text() const { return first == 0 ? "" : format("%u-%u", first, last); }

const Settings& settings() { return parsed().values; }
const Status& settings_status() { return parsed().status; }
const std::vector<std::string>& settings_warnings() { return parsed().warnings; }
std::vector<SettingRow> settings_rows() { return parsed().rows; }

}  // namespace scape
