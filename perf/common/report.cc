#include "perf/common/report.h"

#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fstream>

namespace scape::perf {
namespace {

constexpr char kHeading[] = "#%11s  %12s %9s  %6s  %6s  %7s  %6s  %6s  %6s  %7s  %6s  %6s  %6s%s\n";

// Microseconds in seven columns, with as many decimals as fit.
std::string time_text(double us) {
  return format(us < 10000 ? "%.2f" : us < 100000 ? "%.1f" : "%.0f", us);
}

std::string wrong_text(const Figures& figures) {
  return figures.checked ? std::to_string(figures.wrong) : "N/A";
}

std::string host_name() {
  char name[256] = "unknown";
  gethostname(name, sizeof name - 1);
  return name;
}

nlohmann::ordered_json to_json(const Figures& figures) {
  nlohmann::ordered_json json = {
      {"calls", figures.calls},
      {"time_us", figures.time_us},
      {"min_us", figures.least_us},
      {"median_us", figures.median_us},
      {"p99_us", figures.p99_us},
      {"max_us", figures.most_us},
      {"algbw_gbps", figures.algorithm_bandwidth},
      {"busbw_gbps", figures.bus_bandwidth},
      {"roof_percent", figures.roof_percent},
  };
  json["wrong"] = figures.checked ? nlohmann::ordered_json(figures.wrong) : nullptr;
  json["wire_bytes"] = figures.wire_bytes ? nlohmann::ordered_json(*figures.wire_bytes) : nullptr;
  if (figures.masked) {
    const MaskedFigures& masked = *figures.masked;
    json["density"] = masked.density;
    json["payload_bytes"] = masked.payload_bytes;
    json["mask_bytes"] = masked.mask_bytes;
    json["split_us"] = {{"pack", masked.pack_us},
                        {"exchange", masked.exchange_us},
                        {"exchange_alone", masked.exchange_alone_us},
                        {"unpack", masked.unpack_us},
                        {"score", masked.score_us},
                        {"refresh", masked.refresh_us},
                        {"wait", masked.wait_us},
                        {"step", masked.step_us}};
    json["memory_us"] = masked.memory_us;
  }
  return json;
}

}  // namespace

Report::Report(const Collective& collective, const Options& options, const NcclLibrary& nccl,
               int rank, int ranks)
    : collective_(collective), options_(options), nccl_(nccl), prints_(rank == 0), ranks_(ranks) {}

void Report::print_header() const {
  if (!prints_) return;
  std::printf(
      "# %s: ranks %d minBytes %zu maxBytes %zu step: %s warmup iters: %d iters: %d agg iters: %d "
      "validation: %d\n",
      collective_.name(), ranks_, options_.min_bytes, options_.max_bytes,
      options_.step_text().c_str(), options_.warmup, options_.iterations, options_.aggregated,
      options_.checks);
  std::printf("# Library: %s, NCCL version %d\n", nccl_.path.c_str(), nccl_.version);
  if (options_.sparse) {
    std::printf(
        "# Sparsity %g, role %s, residual %s, payload %s, %lld us of arithmetic and %lld of sleep "
        "between calls.\n"
        "# size/time is dense-equivalent: eqbw; algbw and busbw count the payload. Split and bytes "
        "are the in-place calls';\n"
        "# refresh runs beside them. alone: exch from when the last rank is there. xmem: the "
        "median "
        "call over what the bytes\n"
        "# of a fused call take a += b by all ranks at once, the median of passes between the "
        "calls.\n",
        options_.sparsity, options_.role == SCAPE_ROLE_FUSED ? "fused" : "gradient",
        options_.residual == SCAPE_RESIDUAL_IN_PLACE ? "in place" : "internal",
        options_.payload == SCAPE_BFLOAT16 ? "bf16" : "fp32",
        static_cast<long long>(options_.compute_us), static_cast<long long>(options_.idle_us));
  }
  std::printf(
      "# wire: bytes one rank's transport sends a call. %%roof: busbw as a share of memcpy by all "
      "ranks at once, same bytes.\n#\n");
  const char* sparse_names =
      "  density       wire    eqbw    pack    exch   alone  unpack   score    wait refresh    "
      "step  %roof "
      "  xmem";
  const char* sparse_units =
      "                  (B)  (GB/s)    (us)    (us)    (us)    (us)    (us)    (us)    (us)    "
      "(us)";
  std::printf("#%63s%41s\n", "out-of-place", "in-place");
  std::printf(kHeading, "size", "count", "type", "redop", "root", "time", "algbw", "busbw",
              "#wrong", "time", "algbw", "busbw", "#wrong",
              options_.sparse ? sparse_names : "       wire  %roof");
  std::printf(kHeading, "(B)", "(elements)", "", "", "", "(us)", "(GB/s)", "(GB/s)", "", "(us)",
              "(GB/s)", "(GB/s)", "", options_.sparse ? sparse_units : "        (B)");
  std::fflush(stdout);
}

void Report::add(const Line& line) {
  for (const Figures* half : {&line.out_of_place, &line.in_place}) {
    if (half->calls == 0) continue;
    bus_bandwidth_sum_ += half->bus_bandwidth;
    ++bus_bandwidths_;
  }
  if (!prints_) return;
  std::printf("%12zu  %12zu %9s  %6s  %6d", line.bytes, line.count, name_of(line.type),
              name_of(line.op), line.root);
  for (const Figures* half : {&line.out_of_place, &line.in_place}) {
    if (half->calls == 0) {
      std::printf("  %7s  %6s  %6s  %6s", "N/A", "N/A", "N/A", "N/A");
      continue;
    }
    std::printf("  %7s  %6.2f  %6.2f  %6s", time_text(half->time_us).c_str(),
                half->algorithm_bandwidth, half->bus_bandwidth, wrong_text(*half).c_str());
  }
  const Figures& last = line.in_place;
  const std::string wire = last.wire_bytes ? format("%.0f", *last.wire_bytes) : "N/A";
  if (last.masked) {
    const MaskedFigures& masked = *last.masked;
    const double equivalent = last.time_us > 0 ? static_cast<double>(line.bytes) / last.time_us /
                                                     1e3 * collective_.bus_factor(ranks_)
                                               : 0;
    std::printf("  %7.5f %10s  %6.2f", masked.density, wire.c_str(), equivalent);
    for (const double us :
         {masked.pack_us, masked.exchange_us, masked.exchange_alone_us, masked.unpack_us,
          masked.score_us, masked.wait_us, masked.refresh_us, masked.step_us}) {
      std::printf(" %7s", time_text(us).c_str());
    }
    std::printf("  %5.1f", last.roof_percent);
    masked.memory_us > 0 ? std::printf("  %5.2f\n", last.median_us / masked.memory_us)
                         : std::printf("  %5s\n", "N/A");
  } else {
    std::printf(" %10s  %5.1f\n", wire.c_str(), last.roof_percent);
  }
  std::fflush(stdout);
  results_.push_back({{"size", line.bytes},
                      {"count", line.count},
                      {"type", name_of(line.type)},
                      {"redop", name_of(line.op)},
                      {"root", line.root},
                      {"out_of_place", to_json(line.out_of_place)},
                      {"in_place", to_json(line.in_place)}});
}

Status Report::finish(uint64_t wrong) {
  if (!prints_) return Status::Ok();
  const double mean = bus_bandwidths_ > 0 ? bus_bandwidth_sum_ / bus_bandwidths_ : 0;
  std::printf("# Out of bounds values : %llu %s\n", static_cast<unsigned long long>(wrong),
              wrong == 0 ? "OK" : "FAILED");
  std::printf("# Avg bus bandwidth    : %g\n#\n", mean);
  std::fflush(stdout);
  if (options_.json.empty()) return Status::Ok();
  nlohmann::ordered_json json = {
      {"program", format("scape_%s_perf", collective_.name())},
      {"host", host_name()},
      {"library", nccl_.path},
      {"nccl_version", nccl_.version},
      {"ranks", ranks_},
      {"sparsity", options_.sparse ? nlohmann::ordered_json(options_.sparsity) : nullptr},
      {"results", results_},
      {"out_of_bounds", wrong},
      {"average_bus_bandwidth", mean},
  };
  std::ofstream file(options_.json);
  file << json.dump(2) << '\n';
  file.close();
  if (!file) {
    return error(SCAPE_ERR_SYSTEM, "cannot write the results to -J %s: %s", options_.json.c_str(),
                 strerror(errno));
  }
  return Status::Ok();
}

}  // namespace scape::perf
