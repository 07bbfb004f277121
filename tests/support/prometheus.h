// Reads Prometheus's text form, strictly: what it does not take, a collector may not either.
#pragma once

#include <cctype>
#include <cstddef>
#include <map>
#include <sstream>
#include <stdexcept>
#include <string>

namespace scape::testing_support {

using PrometheusLabels = std::map<std::string, std::string>;

struct PrometheusFamily {
  std::string type;
  std::map<PrometheusLabels, unsigned long long> samples;
};

// One line, from its left. Each function ends it with an error where something else is there.
class PrometheusLine {
 public:
  explicit PrometheusLine(const std::string& text) : text_(text) {}

  [[noreturn]] void wrong(const std::string& why) const {
    throw std::runtime_error(text_ + ": " + why);
  }
  bool has(const std::string& what) const { return text_.compare(at_, what.size(), what) == 0; }
  void take(const std::string& what) {
    if (!has(what)) wrong("no '" + what + "' at " + std::to_string(at_));
    at_ += what.size();
  }
  std::string name() {
    const size_t begin = at_;
    while (at_ < text_.size() &&
           (std::isalnum(static_cast<unsigned char>(text_[at_])) != 0 || text_[at_] == '_')) {
      ++at_;
    }
    if (at_ == begin || std::isdigit(static_cast<unsigned char>(text_[begin])) != 0) {
      wrong("no name at " + std::to_string(begin));
    }
    return text_.substr(begin, at_ - begin);
  }
  // In quotes, with its escapes.
  std::string value() {
    take("\"");
    const size_t begin = at_;
    while (!has("\"")) {
      if (has("\\") && ++at_ < text_.size() && !has("\\") && !has("\"") && !has("n")) {
        wrong("an escape there is not");
      }
      if (++at_ > text_.size()) wrong("a value without an end");
    }
    return text_.substr(begin, at_++ - begin);
  }
  unsigned long long number() {
    const size_t begin = at_;
    while (at_ < text_.size() && std::isdigit(static_cast<unsigned char>(text_[at_])) != 0) ++at_;
    if (at_ == begin) wrong("no number at " + std::to_string(begin));
    return std::stoull(text_.substr(begin, at_ - begin));
  }
  std::string rest() {
    const std::string left = text_.substr(at_);
    at_ = text_.size();
    return left;
  }
  void end() const {
    if (at_ != text_.size()) wrong("more at " + std::to_string(at_));
  }

 private:
  const std::string text_;
  size_t at_ = 0;
};

// Families by name. Throws std::runtime_error with the line that is wrong.
inline std::map<std::string, PrometheusFamily> read_prometheus(const std::string& text) {
  std::map<std::string, PrometheusFamily> families;
  if (text.empty() || text.back() != '\n') throw std::runtime_error("no newline at the end");
  std::istringstream lines(text);
  std::string whole, current;
  bool has_type = false;
  while (std::getline(lines, whole)) {
    PrometheusLine line(whole);
    if (line.has("# HELP ")) {
      line.take("# HELP ");
      current = line.name();
      line.take(" ");
      if (line.rest().empty()) line.wrong("no help");
      if (!families.emplace(current, PrometheusFamily()).second) line.wrong("a family twice");
      has_type = false;
    } else if (line.has("# TYPE ")) {
      line.take("# TYPE ");
      if (line.name() != current || has_type) line.wrong("the type does not follow the help");
      line.take(" ");
      const std::string type = line.rest();
      if (type != "counter" && type != "gauge") line.wrong("no type");
      const bool total = current.size() > 6 && current.substr(current.size() - 6) == "_total";
      if (total != (type == "counter")) line.wrong("counters, and they alone, end in _total");
      families[current].type = type;
      has_type = true;
    } else {
      if (line.name() != current || !has_type) line.wrong("a sample outside its family");
      PrometheusLabels labels;
      line.take("{");
      do {
        if (!labels.empty()) line.take(",");
        const std::string label = line.name();
        line.take("=");
        if (!labels.emplace(label, line.value()).second) line.wrong("a label twice");
      } while (!line.has("}"));
      line.take("} ");
      if (!families[current].samples.emplace(labels, line.number()).second) {
        line.wrong("a sample twice");
      }
      line.end();
    }
  }
  return families;
}

}  // namespace scape::testing_support
