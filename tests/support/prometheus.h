// Reads Prometheus's text form, strictly: what it does not take, a collector may not either.
#pragma once

#include <cctype>
#include <map>
#include <regex>
#include <set>
#include <sstream>
#include <stdexcept>
#include <string>

namespace scape::testing_support {

using PrometheusLabels = std::map<std::string, std::string>;

struct PrometheusFamily {
  std::string type;
  std::map<PrometheusLabels, unsigned long long> samples;
};

// Families by name. Throws std::runtime_error with the line that is wrong.
inline std::map<std::string, PrometheusFamily> read_prometheus(const std::string& text) {
  static const std::regex kHelp(R"(# HELP ([a-zA-Z_][a-zA-Z0-9_]*) (\S.*))");
  static const std::regex kType(R"(# TYPE ([a-zA-Z_][a-zA-Z0-9_]*) (counter|gauge))");
  static const std::regex kSample(R"(([a-zA-Z_][a-zA-Z0-9_]*)\{(.*)\} ([0-9]+))");
  static const std::regex kLabel(R"x(([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\\n]|\\["\\n])*)")x");
  std::map<std::string, PrometheusFamily> families;
  if (text.empty() || text.back() != '\n') throw std::runtime_error("no newline at the end");
  std::istringstream lines(text);
  std::string line, current;
  bool has_type = false;
  while (std::getline(lines, line)) {
    std::smatch match;
    const auto wrong = [&](const char* why) { throw std::runtime_error(line + ": " + why); };
    if (std::regex_match(line, match, kHelp)) {
      current = match[1];
      has_type = false;
      if (families.count(current) != 0) wrong("a second family of the name");
      families[current];
    } else if (std::regex_match(line, match, kType)) {
      if (match[1] != current || has_type) wrong("the type does not follow the help");
      has_type = true;
      families[current].type = match[2];
      const bool total = current.size() > 6 && current.substr(current.size() - 6) == "_total";
      if (total != (match[2] == "counter")) wrong("counters, and they alone, end in _total");
    } else if (std::regex_match(line, match, kSample)) {
      if (match[1] != current || !has_type) wrong("a sample outside its family");
      PrometheusLabels labels;
      std::string rest = match[2];
      while (!rest.empty()) {
        std::smatch label;
        if (!std::regex_search(rest, label, kLabel, std::regex_constants::match_continuous)) {
          wrong("bad labels");
        }
        if (!labels.emplace(label[1], label[2]).second) wrong("a label twice");
        rest = label.suffix();
        if (rest.empty()) break;
        if (rest[0] != ',' || rest.size() == 1) wrong("bad labels");
        rest.erase(0, 1);
      }
      if (!families[current].samples.emplace(labels, std::stoull(match[3])).second) {
        wrong("a sample twice");
      }
    } else {
      wrong("neither help, type nor sample");
    }
  }
  return families;
}

}  // namespace scape::testing_support
