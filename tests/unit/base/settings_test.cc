#include "base/settings.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <functional>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/log.h"

namespace scape {
namespace {

using Environment = std::vector<std::pair<const char*, std::string>>;

// Runs `check` in a child whose environment has these variables; true when it held. The settings
// must not have been read in this process before.
bool in_child(const Environment& environment, const std::function<bool()>& check) {
  const pid_t child = ::fork();
  if (child == 0) {
    for (const auto& [name, value] : environment) ::setenv(name, value.c_str(), 1);
    ::_exit(check() ? 0 : 1);
  }
  int state = 0;
  return ::waitpid(child, &state, 0) == child && WIFEXITED(state) && WEXITSTATUS(state) == 0;
}

bool mentions(const std::string& text, const std::vector<std::string>& parts) {
  for (const std::string& part : parts) {
    if (text.find(part) == std::string::npos) {
      std::fprintf(stderr, "\"%s\" lacks \"%s\"\n", text.c_str(), part.c_str());
      return false;
    }
  }
  return true;
}

TEST(Settings, DefaultsHoldWhereNothingIsSet) {
  EXPECT_TRUE(in_child({}, [] {
    return settings_status().ok() && settings_warnings().empty() && settings().sparsity == 0.99 &&
           settings().enable && settings().mode == 0 && settings().dense_steps == 20 &&
           settings().nccl_lib.empty();
  }));
}

TEST(Settings, ValuesComeFromTheEnvironment) {
  const Environment environment = {{"SCAPE_MODE", "device"},      {"SCAPE_SPARSITY", "0.5"},
                                   {"SCAPE_DENSE_STEPS", "7"},    {"SCAPE_ENABLE", "off"},
                                   {"SCAPE_NCCL_LIB", "/a/b.so"}, {"SCAPE_PAYLOAD", "bf16"}};
  EXPECT_TRUE(in_child(environment, [] {
    return settings_status().ok() && settings().mode == 2 && settings().sparsity == 0.5 &&
           settings().dense_steps == 7 && !settings().enable && settings().nccl_lib == "/a/b.so" &&
           settings().payload == 1;
  }));
}

TEST(Settings, BadValuesAreNamedWithTheirRange) {
  for (const std::string bad : {"abc", "", "-1", "0,01", "1e-400", "nan", "1", " 0.5", "0.5x"}) {
    EXPECT_TRUE(in_child({{"SCAPE_SPARSITY", bad}}, [&] {
      return !settings_status().ok() && settings_status().code() == SCAPE_ERR_ARGUMENT &&
             mentions(settings_status().message(),
                      {"SCAPE_SPARSITY", "\"" + bad + "\"", "0 .. 0.999999"}) &&
             settings().sparsity == 0.99;
    })) << bad;
  }
  EXPECT_TRUE(in_child({{"SCAPE_TRANSPORT", "carrier-pigeon"}}, [] {
    return mentions(settings_status().message(), {"SCAPE_TRANSPORT", "carrier-pigeon", "ucx"});
  }));
  EXPECT_TRUE(in_child({{"SCAPE_RESIDUAL", "in_place"}}, [] {
    return mentions(settings_status().message(), {"SCAPE_RESIDUAL", "in_place", "inplace"});
  }));
  EXPECT_TRUE(in_child({{"SCAPE_RESIDUAL_CHUNK", "8191"}}, [] {
    return mentions(settings_status().message(), {"SCAPE_RESIDUAL_CHUNK", "8191", "8192 .. "});
  }));
}

TEST(Settings, EachBadValueIsInItsRow) {
  EXPECT_TRUE(
      in_child({{"SCAPE_SPARSITY", "2"}, {"SCAPE_MODE", "host"}, {"SCAPE_ENABLE", "no"}}, [] {
        std::vector<std::string> refused;
        for (const SettingRow& row : settings_rows()) {
          if (!row.problem.ok() && mentions(row.problem.message(), {row.name + "=\"", "it takes"}))
            refused.push_back(row.name);
        }
        std::sort(refused.begin(), refused.end());
        return refused == std::vector<std::string>{"SCAPE_ENABLE", "SCAPE_SPARSITY"};
      }));
}

TEST(Settings, CpuChoices) {
  for (const std::string bad : {"", "some", "Auto", "0-", "1,none", "3-2", "auto,0"}) {
    EXPECT_TRUE(in_child({{"SCAPE_PROGRESS_CPUS", bad}}, [&] {
      return mentions(settings_status().message(),
                      {"SCAPE_PROGRESS_CPUS", "\"" + bad + "\"", "auto, none", "0-3,8"}) &&
             settings().progress_cpus.automatic && settings().progress_cpus.cpus.empty();
    })) << bad;
  }
  EXPECT_TRUE(in_child({{"SCAPE_PROGRESS_CPUS", "none"}}, [] {
    const CpuChoice& choice = settings().progress_cpus;
    return settings_status().ok() && !choice.automatic && choice.cpus.empty() &&
           choice.text() == "none";
  }));
  EXPECT_TRUE(in_child({{"SCAPE_PROGRESS_CPUS", "8,0-3"}}, [] {
    const CpuChoice& choice = settings().progress_cpus;
    return settings_status().ok() && !choice.automatic && choice.text() == "0-3,8";
  }));
  EXPECT_TRUE(in_child({}, [] { return settings().progress_cpus.text() == "auto"; }));
}

TEST(Settings, VariablesAreThoseOfTheStart) {
  EXPECT_TRUE(in_child({{"LATER", "1"}}, [] {
    return variable_at_start("LATER").empty() && variable_at_start("PATH") == ::getenv("PATH") &&
           variable_at_start("PAT").empty();
  }));
}

TEST(Settings, PortRanges) {
  for (const std::string bad : {"20000", "20000-", "-20000", "2-1", "0-9", "1-65536", "a-b", "1 -2",
                                "1- 2", "1-2-3", "-", "1--2"}) {
    EXPECT_TRUE(in_child({{"SCAPE_PORT_RANGE", bad}}, [&] {
      return mentions(settings_status().message(),
                      {"SCAPE_PORT_RANGE", "\"" + bad + "\"", "first-last"}) &&
             settings().port_range.first == 0;
    })) << bad;
  }
  EXPECT_TRUE(in_child({{"SCAPE_PORT_RANGE", "20000-20009"}}, [] {
    return settings_status().ok() && settings().port_range.first == 20000 &&
           settings().port_range.last == 20009;
  }));
  EXPECT_TRUE(in_child({{"SCAPE_PORT_RANGE", ""}},
                       [] { return settings_status().ok() && settings().port_range.first == 0; }));
}

TEST(Settings, LongValuesAreCutInMessages) {
  EXPECT_TRUE(in_child({{"SCAPE_SPARSITY", std::string(10000, '7')}}, [] {
    return !settings_status().ok() && settings_status().message().size() < 300;
  }));
}

TEST(Settings, UnknownNamesGetTheNearestKnownOne) {
  EXPECT_TRUE(in_child({}, [] {
    using std::literals::operator""sv;
    const std::string_view environment =
        "PATH=/bin\0SCAPE_SPARSTIY=0.5\0XSCAPE_SPARSTIY=1\0SCAPE_MODE=host\0SCAPE_TI"sv;
    const std::vector<std::string> lines = unknown_setting_warnings(environment, settings_rows());
    return lines.size() == 2 &&
           mentions(lines[0], {"SCAPE_SPARSTIY is", "nearest is SCAPE_SPARSITY"}) &&
           mentions(lines[1], {"SCAPE_TI is"}) &&
           unknown_setting_warnings("", settings_rows()).empty();
  }));
}

TEST(Settings, EveryKnownNameIsTakenWithoutAWarning) {
  const Environment all = {
#define SCAPE_SETTING_CHOICE(field, name, fallback, choices, help) {name, fallback},
#define SCAPE_SETTING_STRING(field, name, fallback, help) {name, fallback},
#define SCAPE_SETTING_BOOL(field, name, fallback, help) {name, (fallback) ? "1" : "0"},
#define SCAPE_SETTING_INT(field, name, fallback, min, max, help) {name, std::to_string(min)},
#define SCAPE_SETTING_REAL(field, name, fallback, min, max, help) {name, std::to_string(max)},
#define SCAPE_SETTING_PORTS(field, name, help) {name, "1-65535"},
#define SCAPE_SETTING_CPUS(field, name, help) {name, "0,2-3"},
#include "base/settings_list.h"
  };
  EXPECT_TRUE(in_child(all, [&] {
    std::string environment;
    for (const auto& [name, value] : all) environment += name + ("=" + value) + '\0';
    return settings_status().ok() && unknown_setting_warnings(environment, settings_rows()).empty();
  }));
}

TEST(Settings, NamesAreUniqueAndDocumented) {
  EXPECT_TRUE(in_child({}, [] {
    std::set<std::string> names;
    for (const SettingRow& row : settings_rows()) {
      if (!names.insert(row.name).second || row.help.empty() || row.type.empty()) return false;
    }
    return names.size() > 10;
  }));
}

TEST(Log, WritesOneLineToTheFileAtTheChosenLevel) {
  char path[] = "/tmp/scape_log_test_XXXXXX";
  const int descriptor = ::mkstemp(path);
  ASSERT_GE(descriptor, 0);
  ASSERT_TRUE(in_child({{"SCAPE_LOG", "info"}, {"SCAPE_LOG_FILE", path}}, [] {
    set_log_rank(3);
    SCAPE_INFO("fact %d", 17);
    SCAPE_DEBUG("not shown");
    return true;
  }));
  char text[512] = {};
  const ssize_t size = ::read(descriptor, text, sizeof text - 1);
  ::close(descriptor);
  ::unlink(path);
  ASSERT_GT(size, 0);
  const std::string line(text);
  EXPECT_NE(line.find(" [3] SCAPE INFO fact 17\n"), std::string::npos) << line;
  EXPECT_EQ(line.find("not shown"), std::string::npos);
  EXPECT_EQ(line.find('\n'), line.size() - 1);
}

}  // namespace
}  // namespace scape
