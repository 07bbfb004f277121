// Runs a perf program and looks at what it prints.
#pragma once

#include <gtest/gtest.h>
#include <sys/wait.h>

#include <cctype>
#include <chrono>
#include <cstdio>
#include <sstream>
#include <string>

struct Outcome {
  int code = -1;
  std::string output;  // stdout and stderr
  double seconds = 0;
};

// Runs a shell command.
inline Outcome run(const std::string& command) {
  Outcome result;
  const auto start = std::chrono::steady_clock::now();
  FILE* pipe = popen(("exec 2>&1; " + command).c_str(), "re");
  EXPECT_NE(pipe, nullptr);
  if (pipe == nullptr) return result;
  char buffer[4096];
  size_t length = 0;
  while ((length = fread(buffer, 1, sizeof buffer, pipe)) > 0) result.output.append(buffer, length);
  const int status = pclose(pipe);
  result.code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  result.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return result;
}

// Lines of the table.
inline size_t count_rows(const std::string& output) {
  std::istringstream lines(output);
  std::string line;
  size_t rows = 0;
  while (std::getline(lines, line)) {
    const size_t first = line.find_first_not_of(' ');
    rows += first != std::string::npos && isdigit(static_cast<unsigned char>(line[first])) != 0;
  }
  return rows;
}

inline void expect_all_right(const Outcome& result, size_t rows) {
  EXPECT_EQ(result.code, 0) << result.output;
  EXPECT_NE(result.output.find("# Out of bounds values : 0 OK"), std::string::npos)
      << result.output;
  EXPECT_EQ(count_rows(result.output), rows) << result.output;
}
