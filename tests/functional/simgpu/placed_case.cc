#include "tests/functional/simgpu/placed_case.h"

#include <cstdio>
#include <sstream>

namespace scape::cases {
namespace {

constexpr char kMark[] = "journal: ";

// The lines of a rank's log that begin so, each with its end.
std::string lines_of(const std::string& log, const std::string& begin) {
  std::istringstream lines(log);
  std::string found;
  for (std::string line; std::getline(lines, line);) {
    if (line.starts_with(begin)) found += line + "\n";
  }
  return found;
}

std::string preload(const char* library) {
  const char* first = std::getenv("FIELD_CASES_PRELOAD_FIRST");  // a sanitizer's runtime
  return first != nullptr && *first != '\0' ? std::string(first) + ":" + library : library;
}

// Where two journals part.
std::string difference(const std::string& host, const std::string& device) {
  std::istringstream a(host), b(device);
  std::string of_host, of_device;
  while (std::getline(a, of_host) && std::getline(b, of_device)) {
    if (of_host != of_device) return of_host + " on the host, " + of_device + " on the device";
  }
  return "one is longer: " + std::to_string(host.size()) + " bytes on the host, " +
         std::to_string(device.size()) + " on the device";
}

}  // namespace

void Journal::add_state(const void* buffer, size_t count, bool moment) {
  std::vector<uint64_t> mask((count + 63) / 64);
  std::vector<uint16_t> ages(count);
  std::vector<float> values(count);
  SCAPE(scape_read_mask(buffer, count, mask.data(), mask.size()));
  SCAPE(scape_read_ages(buffer, count, ages.data(), count));
  add(mask);
  add(ages);
  SCAPE(scape_read_residual(buffer, count, values.data(), count));
  add(values);
  if (moment) {
    SCAPE(scape_read_moment(buffer, count, values.data(), count));
    add(values);
  }
  const scape_stats stats = stats_of(buffer, count);
  for (const uint64_t value : {stats.sparse_calls, stats.dense_calls, stats.fallback_calls,
                               stats.skipped_steps, stats.nonfinite_values, stats.mask_elements,
                               stats.mask_overlap, stats.refreshes, stats.step}) {
    add(&value, sizeof value);
  }
}

void Journal::line(const std::string& what) {
  std::fprintf(stderr, "%s%s %016llx\n", kMark, what.c_str(),
               static_cast<unsigned long long>(digest_));
}

void same_in_both_modes(const std::string& name, int ranks, const std::string& with) {
  const std::vector<int> well(static_cast<size_t>(ranks), 0);
  std::vector<std::string> of_host;
  for (const char* variant : {"host", "device", "reordered"}) {
    std::vector<Run> runs = rank_runs(name, ranks, with);
    const bool host = std::string(variant) == "host";
    for (Run& one : runs) {
      one.limit_s = 60;  // the test's own limit is for all three
      one.environment["LD_PRELOAD"] = preload(host ? HOST_SCAPE_NCCL : SCAPE_NCCL);
      one.environment["SCAPE_MODE"] = host ? "host" : "device";
      // Device memory that is closed and opened around each work: little of it.
      one.environment["SCAPE_RESIDUAL_CHUNK"] = "8192";
      // The stand-in sums whole buffers over its transport; what ranks share is summed elsewise.
      if (host) one.environment["SCAPE_SHARED_MEMORY"] = "0";
      one.environment["SIMGPU_HOST_ACCESS"] = std::string(variant) == "device" ? "fault" : "allow";
      if (std::string(variant) == "reordered") {
        one.environment["SIMGPU_REORDER"] = "5";
        one.environment["SIMGPU_DELAY_US"] = "300";
      }
    }
    const std::vector<Outcome> outcomes = expect(runs, well);
    for (size_t rank = 0; rank < outcomes.size(); ++rank) {
      const std::string journal = lines_of(outcomes[rank].err, kMark);
      CHECK_SAYING(!journal.empty(), outcomes[rank].err);
      const std::string all = std::string(kMark) + "all";
      CHECK_SAYING(
          lines_of(journal, all) == lines_of(outcomes[0].err, all),
          std::string(variant) + ": ranks differ: " + outcomes[0].err + outcomes[rank].err);
      if (host) {
        of_host.push_back(journal);
        continue;
      }
      CHECK_SAYING(journal == of_host[rank], std::string(variant) + ", rank " +
                                                 std::to_string(rank) + ": " +
                                                 difference(of_host[rank], journal));
    }
  }
}

}  // namespace scape::cases
