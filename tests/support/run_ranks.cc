#include "tests/support/run_ranks.h"

#include <poll.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <thread>

#include "tests/support/slowdown.h"

namespace scape::test {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

struct Child {
  pid_t pid = -1;
  int pipe = -1;
  bool open = true;
};

[[noreturn]] void be_a_rank(int rank, int size, const RankBody& body, int out) {
  const std::string text = body(rank, size);
  size_t written = 0;
  while (written < text.size()) {
    const ssize_t got = ::write(out, text.data() + written, text.size() - written);
    if (got <= 0) break;
    written += static_cast<size_t>(got);
  }
  std::fflush(nullptr);
  // Not exit(): the parent's state (gtest's, static objects) is not this process's to end.
  ::_exit(0);
}

}  // namespace

std::vector<RankResult> run_ranks(int size, const RankBody& body, double limit_s) {
  std::vector<RankResult> results(static_cast<size_t>(size));
  std::vector<Child> children(static_cast<size_t>(size));
  const auto start = Clock::now();
  std::fflush(nullptr);
  for (int rank = 0; rank < size; ++rank) {
    int ends[2];
    if (::pipe(ends) != 0) {
      std::perror("pipe");
      std::abort();
    }
    const pid_t pid = ::fork();
    if (pid == 0) {
      ::close(ends[0]);
      for (int other = 0; other < rank; ++other) ::close(children[static_cast<size_t>(other)].pipe);
      be_a_rank(rank, size, body, ends[1]);
    }
    ::close(ends[1]);
    children[static_cast<size_t>(rank)] = {pid, ends[0], true};
  }
  // A rank is over when its end of the pipe is closed, or when it was reaped (its own children may
  // hold the pipe open).
  size_t left = children.size();
  while (left > 0) {
    if (seconds_since(start) > limit_s * kSlowdown) break;
    std::vector<pollfd> entries;
    for (const Child& child : children)
      entries.push_back({child.open ? child.pipe : -1, POLLIN, 0});
    ::poll(entries.data(), static_cast<nfds_t>(entries.size()), 50);
    for (size_t r = 0; r < children.size(); ++r) {
      Child& child = children[r];
      if (child.open && entries[r].revents != 0) {
        char buffer[4096];
        const ssize_t got = ::read(child.pipe, buffer, sizeof buffer);
        if (got > 0) results[r].text.append(buffer, static_cast<size_t>(got));
        if (got == 0) child.open = false;
      }
      int status = 0;
      if (results[r].ended || ::waitpid(child.pid, &status, WNOHANG) != child.pid) continue;
      results[r].ended = true;
      results[r].seconds = seconds_since(start);
      results[r].exit_status = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
      results[r].signal = WIFSIGNALED(status) ? WTERMSIG(status) : 0;
      --left;
      pollfd last{child.pipe, POLLIN, 0};
      while (child.open && ::poll(&last, 1, 0) > 0) {
        char buffer[4096];
        const ssize_t got = ::read(child.pipe, buffer, sizeof buffer);
        if (got <= 0) break;
        results[r].text.append(buffer, static_cast<size_t>(got));
      }
      child.open = false;
    }
  }
  for (size_t r = 0; r < children.size(); ++r) {
    ::close(children[r].pipe);
    if (results[r].ended) continue;
    ::kill(children[r].pid, SIGKILL);
    ::waitpid(children[r].pid, nullptr, 0);
    results[r].seconds = seconds_since(start);
  }
  return results;
}

std::vector<RankResult> run_rank_threads(int size, const RankBody& body) {
  std::vector<RankResult> results(static_cast<size_t>(size));
  std::vector<std::thread> threads;
  const auto start = Clock::now();
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      RankResult& result = results[static_cast<size_t>(rank)];
      result.text = body(rank, size);
      result.ended = true;
      result.exit_status = 0;
      result.seconds = seconds_since(start);
    });
  }
  for (std::thread& thread : threads) thread.join();
  return results;
}

bool all_well(const std::vector<RankResult>& results) {
  return std::all_of(results.begin(), results.end(), [](const RankResult& result) {
    return result.ended && result.exit_status == 0 && result.text.empty();
  });
}

std::string text_of(const std::vector<RankResult>& results) {
  std::string text;
  for (size_t r = 0; r < results.size(); ++r) {
    const RankResult& result = results[r];
    char line[160];
    std::snprintf(line, sizeof line, "rank %zu: %s, status %d, signal %d, %.2f s: ", r,
                  result.ended ? "ended" : "HUNG and was killed", result.exit_status, result.signal,
                  result.seconds);
    text += line + result.text + "\n";
  }
  return text;
}

}  // namespace scape::test
