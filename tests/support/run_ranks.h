// Runs a test body on several ranks: as processes made by fork, or as threads.
//
//   const std::vector<RankResult> results = run_ranks(3, [](int rank, int size) -> std::string {
//     ...
//     return "";                       // all is well; anything else is the failure's text
//   });
//   EXPECT_TRUE(all_well(results)) << text_of(results);
//
// The parent of run_ranks() must not have made communicators before: its children would inherit
// them.
#pragma once

#include <sys/types.h>

#include <functional>
#include <string>
#include <vector>

namespace scape::test {

// A rank's body: what it returns is handed to the parent. By convention empty means success.
using RankBody = std::function<std::string(int rank, int size)>;

struct RankResult {
  std::string text;    // what the body returned
  bool ended = false;  // within the time limit
  int exit_status = -1;
  int signal = 0;  // that ended it
  double seconds = 0;
};

// Forks `size` processes. Those that are not over in time (longer in a sanitizer build) are killed.
std::vector<RankResult> run_ranks(int size, const RankBody& body, double limit_s = 30);

// The same with a thread a rank. No time limit: a hang is the test program's.
std::vector<RankResult> run_rank_threads(int size, const RankBody& body);

// True when each rank ended by itself, with status 0 and an empty text.
bool all_well(const std::vector<RankResult>& results);
std::string text_of(const std::vector<RankResult>& results);

}  // namespace scape::test
