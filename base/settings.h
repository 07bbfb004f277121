// The settings in force: the environment, read once at first use and never written.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/cpu_set.h"
#include "base/status.h"

namespace scape {

// TCP ports, both included.
struct PortRange {
  uint16_t first = 0, last = 0;  // 0: the system chooses

  std::string text() const;  // as it is written in the environment
};

// CPUs for background threads.
struct CpuChoice {
  bool automatic = true;
  CpuSet cpus;  // empty: none are named

  std::string text() const;  // as it is written in the environment
};

struct Settings {
#define SCAPE_SETTING_CHOICE(field, name, fallback, choices, help) int field;
#define SCAPE_SETTING_STRING(field, name, fallback, help) std::string field;
#define SCAPE_SETTING_BOOL(field, name, fallback, help) bool field;
#define SCAPE_SETTING_INT(field, name, fallback, min, max, help) int64_t field;
#define SCAPE_SETTING_REAL(field, name, fallback, min, max, help) double field;
#define SCAPE_SETTING_PORTS(field, name, help) PortRange field;
#define SCAPE_SETTING_CPUS(field, name, help) CpuChoice field;
#include "base/settings_list.h"
#undef SCAPE_SETTING_CHOICE
#undef SCAPE_SETTING_STRING
#undef SCAPE_SETTING_BOOL
#undef SCAPE_SETTING_INT
#undef SCAPE_SETTING_REAL
#undef SCAPE_SETTING_PORTS
#undef SCAPE_SETTING_CPUS
};

// One row of the registry as a person reads it.
struct SettingRow {
  std::string name;
  std::string type;   // "choice", "string", "bool", "integer", "real", "ports", "cpus"
  std::string range;  // choices, bounds or form; empty for strings
  std::string fallback;
  std::string value;
  bool from_environment;
  Status problem;  // the environment's value, its range and what to do, where it was refused
  std::string help;
};

// Thread-safe; parsed at the first call. A bad value keeps its default here and is reported by
// settings_status(), which every entry point that starts work checks first.
const Settings& settings();

// An error naming the first bad variable, its value and its range; or ok.
const Status& settings_status();

// A line to warn with, with the nearest known name, for each SCAPE_* name in `environment` (entries
// NAME=value, each ended by a zero byte, as in /proc/self/environ) that no row has.
std::vector<std::string> unknown_setting_warnings(std::string_view environment,
                                                  const std::vector<SettingRow>& rows);

// These lines for the environment that the process was started with. Names set later by the program
// itself are not looked at: nobody may walk the environment while other threads may change it.
const std::vector<std::string>& settings_warnings();

std::vector<SettingRow> settings_rows();

// The value that the process was started with for a variable that is no setting of Scape's; empty
// where it had none. Thread-safe, unlike the environment that the program may change.
std::string variable_at_start(std::string_view name);

}  // namespace scape
