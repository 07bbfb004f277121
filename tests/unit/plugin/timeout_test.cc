// What ends by the clock. Its settings are short and read once per process, hence a program of its
// own.
#include <gtest/gtest.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>

#include "tests/unit/plugin/testing.h"

namespace scape::plugin::test {
namespace {

using scape::test::all_well;
using scape::test::run_ranks;
using scape::test::text_of;

// Before anything looks at the settings.
[[maybe_unused]] const int environment_is_set =
    ::setenv("SCAPE_TIMEOUT", "1", 1) + ::setenv("SCAPE_BOOTSTRAP_TIMEOUT", "1", 1);

TEST(Bootstrap, MissingRanksAreNamed) {
  const auto results = run_ranks(1, [](int, int) -> std::string {
    UniqueId id;
    SCAPE_RANK_OK(make_unique_id(&id));
    std::shared_ptr<Communicator> communicator;
    const auto start = Clock::now();
    const Status status = create_communicator(id, 1, 4, &communicator);
    SCAPE_RANK_EXPECT(status.code() == SCAPE_ERR_TIMEOUT);
    SCAPE_RANK_EXPECT(seconds_since(start) < 5);
    if (!contains(status.message(), "ranks 0, 2, 3 of 4")) return status.message();
    return "";
  });
  EXPECT_TRUE(all_well(results)) << text_of(results);
}

TEST(Timeout, NamesWhoIsMissing) {
  const UniqueId id = new_id();
  const auto results = run_ranks(3, [&](int rank, int size) -> std::string {
    std::shared_ptr<Communicator> communicator;
    SCAPE_RANK_OK(create_communicator(id, rank, size, &communicator));
    std::string problem = sum_ones(*communicator);
    if (!problem.empty()) return problem;
    if (rank == 2) {
      ::usleep(6000000);  // stays alive, calls nothing
      return "";
    }
    const auto start = Clock::now();
    problem = sum_ones(*communicator);
    SCAPE_RANK_EXPECT(seconds_since(start) < 5);
    SCAPE_RANK_EXPECT(contains(problem, "SCAPE_TIMEOUT"));
    return contains(problem, "rank 2") ? "" : "rank 2 is not in: " + problem;
  });
  EXPECT_TRUE(all_well(results)) << text_of(results);
}

}  // namespace
}  // namespace scape::plugin::test
