// What the tests of this room share.
#pragma once

#include <chrono>
#include <cstdint>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "plugin/communicator.h"
#include "plugin/host_communicator.h"
#include "tests/support/run_ranks.h"

// In a rank's body: hands an error Status to the parent.
#define SCAPE_RANK_OK(expression)                                                                  \
  do {                                                                                             \
    if (::scape::Status rank_status_ = (expression); !rank_status_.ok()) {                         \
      return std::string(__FILE__ ":") + std::to_string(__LINE__) + ": " + rank_status_.message(); \
    }                                                                                              \
  } while (0)
#define SCAPE_RANK_EXPECT(condition)                                                     \
  do {                                                                                   \
    if (!(condition))                                                                    \
      return std::string(__FILE__ ":") + std::to_string(__LINE__) + ": not " #condition; \
  } while (0)

namespace scape::plugin::test {

// Values that are exact in every type and in every order: small integers, signed where the type is.
std::vector<std::byte> small_values(DataType type, size_t count, uint64_t seed);
// Anything: random bits with the exponents of floats held in a middling range, so that sums round
// but nothing overflows.
std::vector<std::byte> rough_values(DataType type, size_t count, uint64_t seed);

// A fresh id. Its root is served by a process that ends with this one: this one goes on to fork
// ranks, and a process that forks should have no threads (the thread sanitizer takes it for
// granted).
UniqueId new_id();

double seconds_since(std::chrono::steady_clock::time_point start);
bool contains(const std::string& text, const std::string& part);

// An all-reduce of `count` ones, whose sum must be the number of ranks. Empty, or what went wrong.
std::string sum_ones(Communicator& communicator, size_t count = 1000);

using Clock = std::chrono::steady_clock;

inline Status finish(Communicator& communicator, const Status& started, const WorkPtr& work) {
  SCAPE_RETURN_IF_ERROR(started);
  return wait(communicator, *work);
}

}  // namespace scape::plugin::test
