// scape_net_perf: times and checks the network plugin for NCCL, driven as NCCL drives it, and
// beside it the same loops over the network libraries themselves.
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "base/clock.h"
#include "perf/common/control.h"
#include "perf/common/memory.h"
#include "perf/common/pattern.h"
#include "perf/common/sizes.h"
#include "perf/net/carrier.h"
#include "perf/net/loops.h"

namespace scape::perf {
namespace {

constexpr int kRanks = 2;
constexpr double kMeetSeconds = 120;
// What a rank has left to report a failure of its own after another one has left.
constexpr double kGraceSeconds = 5;

struct NetOptions : SizeRange {
  std::vector<int> connections = {1, 4};
  int window = 8;
  int group = 1;
  int slots = 0;
  int rounds = 3;
  long iterations = 0;
  double seconds = 0.05;
  int checks = 1;
  double timeout_s = 600;
  PluginChoice plugin;
  std::vector<std::string> rivals;
  int local_ranks = kRanks;
  std::string worker;
  std::string id_file;
  std::string json;
};

bool parse_options(int argc, char** argv, NetOptions* out, int* exit_code) {
  *exit_code = kExitUsage;
  NetOptions& options = *out;
  CLI::App app(
      "Measures and checks libnccl-net-scape.so between two ranks, on host memory: latency by "
      "single "
      "messages to and fro,\nbandwidth and message rate by messages from rank 0 to rank 1.\n"
      "Ranks: two are started here; under torchrun, mpirun or hosts.sh each process is one.");
  options.add_options(&app);
  app.add_option("--connections", options.connections, "how many at once; a line of the table each")
      ->delimiter(',')
      ->check(CLI::Range(1, 256))
      ->capture_default_str();
  app.add_option("--window", options.window, "requests under way on a connection, as NCCL's steps")
      ->check(CLI::Range(1, kMaxWindow))
      ->capture_default_str();
  app.add_option("--group", options.group, "receives in one request, for bandwidth and rate")
      ->check(CLI::Range(1, kMaxGroup))
      ->capture_default_str();
  app.add_option("--slots", options.slots,
                 "buffers that a connection's messages take in turns; 0: as many as are under way")
      ->check(CLI::Range(0, kMaxWindow * kMaxGroup))
      ->capture_default_str();
  app.add_option("--rounds", options.rounds,
                 "how often each carrier has its turn a line; figures are medians of these")
      ->check(CLI::Range(1, 1000))
      ->capture_default_str();
  app.add_option("--seconds", options.seconds, "that each figure of a round takes, about")
      ->check(CLI::Range(0.0001, 1e5))
      ->capture_default_str();
  app.add_option("-n,--iters", options.iterations,
                 "instead of --seconds: messages of each figure, to and fro, or a connection")
      ->check(CLI::Range(1L, 100000000L));
  app.add_option("-c,--check", options.checks,
                 "passes a line with data of their own for each message; 0 checks nothing")
      ->check(CLI::Range(0, 1000))
      ->capture_default_str();
  app.add_option("--rival", options.rivals, "carriers beside the plugin: ucp, ofi")
      ->delimiter(',')
      ->check(CLI::IsMember({"ucp", "ofi"}));
  app.add_option("--plugin", options.plugin.path,
                 "library to measure; else ../lib/libnccl-net-scape.so");
  app.add_option("--abi", options.plugin.version,
                 "version of its interface; else the newest, as NCCL takes it")
      ->check(CLI::Range(6, 12));
  app.add_option("--device", options.plugin.devices,
                 "number of the plugin's device; several, as in 0,1, are joined to one")
      ->delimiter(',')
      ->check(CLI::Range(0, 1000))
      ->capture_default_str();
  app.add_option("-g,--ngpus", options.local_ranks, "ranks that this command starts: 2")
      ->check(CLI::Range(kRanks, kRanks));
  app.add_option("-T,--timeout", options.timeout_s,
                 "seconds that one line of the table may take; 0 sets no limit")
      ->check(CLI::Range(0.0, 1e6))
      ->capture_default_str();
  app.add_option("-J,--output_file", options.json, "file for the results as JSON");
  app.add_option("--id-file", options.id_file,
                 "file, seen by both ranks, where they find rank 0 (instead of MASTER_ADDR and "
                 "MASTER_PORT)");
  app.add_option("--worker", options.worker)->group("");
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& refused) {
    const int code = app.exit(refused);
    *exit_code = code == 0 ? kExitOk : kExitUsage;
    return false;
  }
  if (const Status status = options.complete(); !status.ok()) {
    std::fprintf(stderr, "%s\n", status.message().c_str());
    return false;
  }
  if (options.slots == 0) options.slots = options.window * options.group;
  return true;
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const size_t half = values.size() / 2;
  return values.size() % 2 == 1 ? values[half] : (values[half - 1] + values[half]) / 2;
}

double quantile(std::vector<double>* values, double q) {
  const auto at = static_cast<ptrdiff_t>(q * static_cast<double>(values->size() - 1) + 0.5);
  std::nth_element(values->begin(), values->begin() + at, values->end());
  return (*values)[static_cast<size_t>(at)];
}

// One carrier on one line: a sample a round.
struct Figures {
  std::vector<double> latency_us,
      latency_p99_us;             // half of a round trip: medians, 99th percentiles
  std::vector<double> bandwidth;  // GB/s, from rank 0 to rank 1
  std::vector<double> rate;       // million messages a second
  uint64_t wrong = 0;             // bytes, and messages of a wrong size
};

class Measurement {
 public:
  Measurement(const NetOptions& options, Control* control)
      : options_(options), control_(*control) {}

  Status open(std::vector<std::unique_ptr<Carrier>>* carriers) {
    const size_t stride = std::max<size_t>(4096, (options_.max_bytes + 4095) / 4096 * 4096);
    Areas areas;
    areas.connections = *std::max_element(options_.connections.begin(), options_.connections.end());
    areas.bytes = stride * static_cast<size_t>(options_.slots);
    const size_t all = areas.bytes * static_cast<size_t>(areas.connections);
    for (Memory* memory : {&send_, &receive_}) SCAPE_RETURN_IF_ERROR(memory->allocate(all));
    areas.send = send_.data();
    areas.receive = receive_.data();
    receive_.set_guard(receive_.data(), all);
    for (auto& carrier : *carriers) SCAPE_RETURN_IF_ERROR(carrier->open(control_, areas));
    course_.areas = areas;
    course_.window = options_.window;
    course_.group = options_.group;
    course_.slots = options_.slots;
    course_.stride = stride;
    return Status::Ok();
  }

  // One line: the carriers in turns, which begin with another one each round.
  Status measure(const std::vector<std::unique_ptr<Carrier>>& carriers, int connections,
                 size_t bytes, std::vector<Figures>* out) {
    course_.connections = connections;
    out->assign(carriers.size(), {});
    for (size_t i = 0; i < carriers.size(); ++i) {
      Figures& figures = (*out)[i];
      for (int pass = 0; pass < options_.checks; ++pass) {
        SCAPE_RETURN_IF_ERROR(check_pass(carriers[i].get(), bytes, pass, &figures.wrong));
      }
    }
    for (int round = 0; round < options_.rounds; ++round) {
      for (size_t turn = 0; turn < carriers.size(); ++turn) {
        const size_t i = (turn + static_cast<size_t>(round)) % carriers.size();
        SCAPE_RETURN_IF_ERROR(latency(carriers[i].get(), bytes, &(*out)[i]));
        SCAPE_RETURN_IF_ERROR(bandwidth(carriers[i].get(), bytes, &(*out)[i]));
      }
    }
    for (Figures& figures : *out) {
      std::vector<uint64_t> all;
      SCAPE_RETURN_IF_ERROR(control_.all_gather(figures.wrong, &all));
      figures.wrong = all[0] + all[1];
    }
    return Status::Ok();
  }

  size_t broken_guard() const {
    return receive_.broken_guard(
        receive_.data(), course_.areas.bytes * static_cast<size_t>(course_.areas.connections));
  }

 private:
  bool first() const { return control_.rank() == 0; }

  static uint64_t seed_of(int connection, long message) {
    return hash(static_cast<uint64_t>(connection), static_cast<uint64_t>(message));
  }
  void fill(int connection, long message, std::byte* data, size_t bytes) {
    pattern_.set_seed(seed_of(connection, message));
    pattern_.fill(data, 0, bytes);
  }
  uint64_t count_wrong(int connection, long message, const std::byte* data, size_t bytes) {
    pattern_.set_seed(seed_of(connection, message));
    return pattern_.count_wrong(data, 0, bytes);
  }

  // Messages to and fro that all differ; each is looked at before its place is used again.
  Status check_pass(Carrier* carrier, size_t bytes, int pass, uint64_t* wrong) {
    // As many at once as there are places.
    Course course = course_;
    course.window = std::max(1, std::min(course.window, course.slots / course.group));
    course.group = std::min(course.group, course.slots);
    const long messages = 2L * course.window * course.group + course.group;
    const Visit visit = [&](bool sends, int connection, long message, std::byte* data,
                            size_t size) {
      const long number = message + pass * messages;
      if (sends) {
        fill(connection, number, data, size);
      } else {
        *wrong += count_wrong(connection, number, data, size);
      }
    };
    for (const bool forth : {true, false}) {
      poison(bytes);
      double ns = 0;
      SCAPE_RETURN_IF_ERROR(one_way(carrier, course, forth, bytes, messages, &visit, wrong, &ns));
    }
    return Status::Ok();
  }

  void poison(size_t bytes) {
    for_each_place([&](int connection, long slot) {
      std::memset(course_.slot(course_.areas.receive, connection, slot), 0xee, bytes);
    });
  }
  template <typename Body>
  void for_each_place(const Body& body) {
    for (int connection = 0; connection < course_.connections; ++connection) {
      for (long slot = 0; slot < course_.slots; ++slot) body(connection, slot);
    }
  }

  // Before a timed loop: what it sends, and places that are not right by themselves.
  void prepare(size_t bytes) {
    if (options_.checks == 0) return;
    for_each_place([&](int connection, long slot) {
      fill(connection, slot, course_.slot(course_.areas.send, connection, slot), bytes);
    });
    poison(bytes);
  }
  // After it: what has come to the first of a connection's places.
  void verify(size_t bytes, long slots, uint64_t* wrong) {
    if (options_.checks == 0) return;
    for_each_place([&](int connection, long slot) {
      if (slot >= slots) return;
      *wrong += count_wrong(connection, slot, course_.slot(course_.areas.receive, connection, slot),
                            bytes);
    });
  }

  // Warms up with run(count, &ns), which rank 0 times, until that tells how many take the time that
  // a figure is given; that many come out, the same on both ranks, in multiples of `step`.
  template <typename Run>
  Status warm_up(const Run& run, long step, long* count) {
    constexpr double kShare = 0.1;
    const double wanted_ns = options_.seconds * 1e9;
    double ns = 0;
    for (long tried = step;; tried *= 4) {
      SCAPE_RETURN_IF_ERROR(run(tried, &ns));
      std::vector<double> all;
      SCAPE_RETURN_IF_ERROR(control_.all_gather(ns, &all));
      const double fit = wanted_ns / std::max(all[0], 1.0) * static_cast<double>(tried);
      *count = options_.iterations > 0 ? options_.iterations : static_cast<long>(fit);
      if (options_.iterations > 0 || all[0] >= kShare * wanted_ns) break;
    }
    *count = std::max(1L, (*count + step - 1) / step) * step;
    return Status::Ok();
  }

  Status latency(Carrier* carrier, size_t bytes, Figures* figures) {
    prepare(bytes);
    std::vector<double> times;
    const auto run = [&](long count, double* ns) -> Status {
      SCAPE_RETURN_IF_ERROR(control_.barrier());
      const uint64_t start = now_ns();
      SCAPE_RETURN_IF_ERROR(
          ping_pong(carrier, course_, first(), bytes, count, &times, &figures->wrong));
      *ns = static_cast<double>(now_ns() - start);
      return Status::Ok();
    };
    long count = 0;
    double ns = 0;
    SCAPE_RETURN_IF_ERROR(warm_up(run, course_.connections, &count));
    SCAPE_RETURN_IF_ERROR(run(count, &ns));
    if (first()) {
      figures->latency_us.push_back(quantile(&times, 0.5) / 2e3);
      figures->latency_p99_us.push_back(quantile(&times, 0.99) / 2e3);
    }
    verify(bytes, 1, &figures->wrong);
    return Status::Ok();
  }

  // From rank 0 to rank 1 (`forth`) or back; the time from the first send until word comes that all
  // has arrived. The word is also what keeps both ranks at it: what a library still has to say to
  // the other side moves in its calls only.
  Status one_way(Carrier* carrier, const Course& course, bool forth, size_t bytes, long messages,
                 const Visit* visit, uint64_t* wrong, double* ns) {
    const bool sends = forth == first();
    Stream stream(carrier, &course, sends, bytes, messages, visit);
    Course word = course;
    word.connections = word.window = word.group = word.slots = 1;
    Stream answer(carrier, &word, !sends, std::min<size_t>(bytes, 1), 1);
    SCAPE_RETURN_IF_ERROR(sends ? answer.fill() : stream.fill());
    SCAPE_RETURN_IF_ERROR(control_.barrier());
    const uint64_t start = now_ns();
    SCAPE_RETURN_IF_ERROR(stream.run());
    SCAPE_RETURN_IF_ERROR(answer.run());
    *ns = static_cast<double>(now_ns() - start);
    *wrong += stream.wrong_sizes() + answer.wrong_sizes();
    return Status::Ok();
  }

  Status bandwidth(Carrier* carrier, size_t bytes, Figures* figures) {
    prepare(bytes);
    const auto run = [&](long messages, double* ns) {
      return one_way(carrier, course_, true, bytes, messages, nullptr, &figures->wrong, ns);
    };
    long messages = 0;
    double ns = 0;
    SCAPE_RETURN_IF_ERROR(warm_up(run, course_.group, &messages));
    SCAPE_RETURN_IF_ERROR(run(messages, &ns));
    if (first()) {
      const double all = static_cast<double>(messages) * course_.connections;
      figures->bandwidth.push_back(all * static_cast<double>(bytes) / ns);
      figures->rate.push_back(all / ns * 1e3);
    } else {
      verify(bytes, std::min<long>(course_.slots, messages), &figures->wrong);
    }
    return Status::Ok();
  }

  const NetOptions& options_;
  Control& control_;
  Memory send_, receive_;
  Course course_;
  Pattern pattern_ = make_copy_pattern(Type::kUint8, 1);
};

// The table on stdout, and the same as JSON; rank 0's.
class NetReport {
 public:
  NetReport(const NetOptions& options, const PluginInfo& plugin)
      : options_(options), plugin_(plugin) {}

  void print_header() const {
    std::printf(
        "# net: ranks %d minBytes %zu maxBytes %zu step: %s window: %d group: %d slots: %d rounds: "
        "%d validation: %d\n",
        kRanks, options_.min_bytes, options_.max_bytes, options_.step_text().c_str(),
        options_.window, options_.group, options_.slots, options_.rounds, options_.checks);
    std::printf("# Plugin: %s, version %d, device %d: %s, %d Mb/s\n", plugin_.path.c_str(),
                plugin_.version, plugin_.number, plugin_.device.c_str(), plugin_.speed_mbps);
    std::printf(
        "# latency: half of a round trip. lat + and algbw x: what the plugin takes longer than, "
        "and "
        "its share of,\n# the carrier of the line, medians over rounds.\n#\n");
    constexpr char kHeading[] = "#%11s  %6s  %-16s  %8s  %8s  %7s  %8s  %6s  %8s  %6s\n";
    std::printf(kHeading, "size", "conns", "carrier", "latency", "p99", "algbw", "rate", "lat +",
                "algbw x", "#wrong");
    std::printf(kHeading, "(B)", "", "", "(us)", "(us)", "(GB/s)", "(Mmsg/s)", "(ns)", "", "");
    std::fflush(stdout);
  }

  void add(size_t bytes, int connections, const std::vector<std::unique_ptr<Carrier>>& carriers,
           const std::vector<Figures>& all) {
    for (size_t i = 0; i < all.size(); ++i) {
      const Figures& figures = all[i];
      std::printf("%12zu  %6d  %-16s  %8.2f  %8.2f  %7.3f  %8.3f", bytes, connections,
                  carriers[i]->name().c_str(), median(figures.latency_us),
                  median(figures.latency_p99_us), median(figures.bandwidth), median(figures.rate));
      // Turn by turn, so that what the machine did besides meets both.
      std::vector<double> later, ratio;
      for (size_t round = 0; round < figures.latency_us.size(); ++round) {
        later.push_back((all[0].latency_us[round] - figures.latency_us[round]) * 1e3);
        ratio.push_back(all[0].rate[round] / figures.rate[round]);
      }
      if (i == 0) {
        std::printf("  %6s  %8s", "", "");
      } else {
        std::printf("  %6.0f  %8.3f", median(later), median(ratio));
      }
      std::printf("  %6s\n", options_.checks > 0 ? std::to_string(figures.wrong).c_str() : "N/A");
      results_.push_back({{"size", bytes},
                          {"connections", connections},
                          {"carrier", carriers[i]->name()},
                          {"latency_us", figures.latency_us},
                          {"latency_p99_us", figures.latency_p99_us},
                          {"algbw_gbps", figures.bandwidth},
                          {"rate_mmsgps", figures.rate},
                          {"wrong", figures.wrong}});
    }
    std::fflush(stdout);
  }

  Status finish(uint64_t wrong) const {
    std::printf("# Out of bounds values : %llu %s\n#\n", static_cast<unsigned long long>(wrong),
                wrong == 0 ? "OK" : "FAILED");
    std::fflush(stdout);
    if (options_.json.empty()) return Status::Ok();
    const nlohmann::ordered_json json = {{"program", "scape_net_perf"},
                                         {"library", plugin_.path},
                                         {"interface_version", plugin_.version},
                                         {"device", plugin_.device},
                                         {"window", options_.window},
                                         {"group", options_.group},
                                         {"slots", options_.slots},
                                         {"results", results_},
                                         {"out_of_bounds", wrong}};
    std::ofstream file(options_.json);
    file << json.dump(2) << '\n';
    file.close();
    if (file) return Status::Ok();
    return error(SCAPE_ERR_SYSTEM, "cannot write the results to -J %s: %s", options_.json.c_str(),
                 strerror(errno));
  }

 private:
  const NetOptions& options_;
  const PluginInfo& plugin_;
  nlohmann::ordered_json results_ = nlohmann::ordered_json::array();
};

Status run_rank(const NetOptions& options, Control& control, uint64_t* wrong) {
  control.set_deadline(options.timeout_s, "making the connections");
  std::vector<std::unique_ptr<Carrier>> carriers(1);
  PluginInfo plugin;
  SCAPE_RETURN_IF_ERROR(make_plugin_carrier(options.plugin, &plugin, &carriers[0]));
  for (const std::string& rival : options.rivals) {
    carriers.emplace_back();
    SCAPE_RETURN_IF_ERROR(rival == "ucp" ? make_ucp_carrier(plugin.device, &carriers.back())
                                         : make_ofi_carrier(plugin.device, &carriers.back()));
  }
  Measurement measurement(options, &control);
  SCAPE_RETURN_IF_ERROR(measurement.open(&carriers));
  NetReport report(options, plugin);
  if (control.rank() == 0) report.print_header();
  for (const int connections : options.connections) {
    for (const size_t bytes : options.sizes()) {
      control.set_deadline(options.timeout_s,
                           format("%zu bytes on %d connections", bytes, connections));
      std::vector<Figures> figures;
      SCAPE_RETURN_IF_ERROR(measurement.measure(carriers, connections, bytes, &figures));
      for (const Figures& each : figures) *wrong += each.wrong;
      if (control.rank() == 0) report.add(bytes, connections, carriers, figures);
    }
  }
  control.set_deadline(options.timeout_s, "closing the connections");
  std::vector<uint64_t> broken;
  SCAPE_RETURN_IF_ERROR(control.all_gather(measurement.broken_guard(), &broken));
  *wrong += broken[0] + broken[1];
  if (control.rank() == 0) SCAPE_RETURN_IF_ERROR(report.finish(*wrong));
  for (auto& carrier : carriers) SCAPE_RETURN_IF_ERROR(carrier->close(control));
  control.set_deadline(0, "");
  return control.finish();
}

int run_program(int argc, char** argv) {
  NetOptions options;
  int exit_code = kExitOk;
  if (!parse_options(argc, argv, &options, &exit_code)) return exit_code;
  const auto fail = [&](int rank, const Status& status, int code) {
    std::fprintf(stderr, "%s: rank %d: %s\n", argv[0], rank, status.message().c_str());
    return code;
  };
  Launch launch;
  if (const Status status = find_launch(options.worker, options.id_file, 1, &launch);
      !status.ok()) {
    return fail(launch.rank, status, kExitUsage);
  }
  if (launch.ranks == 1) return run_local_ranks(kRanks, argc, argv, kGraceSeconds);
  if (launch.ranks != kRanks) {
    return fail(launch.rank,
                error(SCAPE_ERR_USAGE, "%d ranks under %s: this program is for %d", launch.ranks,
                      launch.origin.c_str(), kRanks),
                kExitUsage);
  }
  std::unique_ptr<Control> control;
  uint64_t wrong = 0;
  Status status = Control::connect(launch, kMeetSeconds, kGraceSeconds, &control);
  if (status.ok()) status = run_rank(options, *control, &wrong);
  if (!status.ok()) {
    const bool refused = status.code() == SCAPE_ERR_ARGUMENT;
    const int code = fail(launch.rank, status, refused ? kExitUsage : kExitFailed);
    // What is left of the connections could wait for a rank that is gone.
    std::fflush(nullptr);
    _exit(code);
  }
  return wrong == 0 ? kExitOk : kExitWrong;
}

}  // namespace
}  // namespace scape::perf

int main(int argc, char** argv) { return scape::perf::run_program(argc, argv); }
