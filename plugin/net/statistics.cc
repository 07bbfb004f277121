#include "plugin/net/statistics.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <mutex>

#include "base/clock.h"
#include "base/log.h"
#include "base/settings.h"
#include "plugin/net/nccl_log.h"

namespace scape::net {
namespace {

// ---- metrics ----

// What tells the values of one metric apart.
struct Label {
  const char* name;
  std::vector<const char*> values;
};

struct Metric {
  const char* name;
  bool total;  // a counter of Prometheus's; else a gauge
  const char* help;
  std::vector<Label> labels;
};

// Both forms of the file, and the order of a Reading, come from this table.
const std::vector<Metric>& metrics() {
  static const auto* const table = [] {
    const Label interface = {"interface", {"net", "collnet"}};
    const Label direction = {"direction", {"send", "receive"}};
    return new std::vector<Metric>{
        {"bytes", true, "Bytes of messages.", {interface, direction}},
        {"messages", true, "Messages sent or received.", {interface, direction}},
        {"retries",
         true,
         "What had to be done again: calls of NCCL's that gave no request or connection yet, "
         "further addresses tried, messages that the network library had no room for at first.",
         {{"operation",
           {"send", "receive", "connect", "accept", "collective", "address", "post"}}}},
        {"errors",
         true,
         "Connections and groups that failed, or did not come about, and registrations refused.",
         {{"operation",
           {"send", "receive", "connect", "accept", "join", "collective", "register"}}}},
        {"connections_opened", true, "Connections made.", {direction}},
        {"connections", false, "Connections open now.", {direction}},
        {"groups_opened", true, "CollNet groups joined.", {}},
        {"groups", false, "CollNet groups open now.", {}},
        {"registrations", true, "Registrations made with the network library.", {interface}},
        {"registration_hits",
         true,
         "Registrations served by one that was there already.",
         {interface}},
        {"registered", false, "Registrations with the network library now.", {interface}},
    };
  }();
  return *table;
}

void append(std::vector<uint64_t>* values, std::span<const Counter> counters) {
  for (const Counter& counter : counters) values->push_back(counter.value());
}

// In quotes; both forms escape alike what can be in a name.
std::string quoted(const std::string& text) {
  std::string out = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') out += '\\';
    out += c >= ' ' && c <= '~' ? c : '?';
  }
  return out + '"';
}

// The metric's values from the label of this number on, an object in an object for each.
void append_json(const Metric& metric, size_t label, const uint64_t** value, std::string* text) {
  if (label == metric.labels.size()) {
    *text += std::to_string(*(*value)++);
    return;
  }
  *text += '{';
  for (const char* key : metric.labels[label].values) {
    if (text->back() != '{') *text += ", ";
    *text += format("\"%s\": ", key);
    append_json(metric, label + 1, value, text);
  }
  *text += '}';
}

// The same, a line for each. `line`: how it begins, with the labels before this one.
void append_samples(const Metric& metric, size_t label, const std::string& line,
                    const uint64_t** value, std::string* text) {
  if (label == metric.labels.size()) {
    *text += line + "} " + std::to_string(*(*value)++) + '\n';
    return;
  }
  for (const char* key : metric.labels[label].values) {
    append_samples(metric, label + 1, line + format(",%s=\"%s\"", metric.labels[label].name, key),
                   value, text);
  }
}

// ---- the file ----

struct Statistics {
  Origin origin;
  std::string path;
  bool prometheus = false;
  uint64_t interval_ns = 0;
  std::vector<const DeviceCounters*> counters;
  std::mutex mutex;  // of one write
  bool failed = false;
};

// Set once, by start_statistics(); never destroyed.
constinit std::atomic<Statistics*> statistics{nullptr};

bool ends_with(const std::string& text, const char* end) {
  const size_t length = std::strlen(end);
  return text.size() >= length && text.compare(text.size() - length, length, end) == 0;
}

Status write_now(const Statistics& to) {
  std::vector<Reading> readings;
  for (const DeviceCounters* counters : to.counters) readings.push_back(read_counters(*counters));
  const auto time = std::chrono::duration_cast<std::chrono::milliseconds>(
      std::chrono::system_clock::now().time_since_epoch());
  return replace_file(to.path, to.prometheus ? prometheus_of(to.origin, readings)
                                             : json_of(to.origin, time.count(), readings));
}

// `say`: the logger may be called.
void write(bool say) noexcept {
  Statistics* const to = statistics.load(std::memory_order_acquire);
  if (to == nullptr) return;
  if (to->origin.process != ::getpid()) return;  // a forked child has none of its own
  try {
    Status status;
    {
      std::lock_guard<std::mutex> lock(to->mutex);
      status = write_now(*to);
      if (to->failed) say = false;
      to->failed = !status.ok();
    }
    // Not under the lock: a logger may end the process, which writes once more.
    if (!status.ok() && say) SCAPE_WARN("net: %s", status.message().c_str());
  } catch (const std::exception&) {
    // No memory. The next write brings what this one would have.
  }
}

// NCCL, and its logger with it, may be unloaded by now.
void write_at_exit() { write(false); }

Status start(const Devices& devices) {
  auto made = std::make_unique<Statistics>();
  made->origin = find_origin();
  SCAPE_RETURN_IF_ERROR(statistics_path(settings().net_stats, made->origin, &made->path));
  made->prometheus = ends_with(made->path, ".prom");
  made->interval_ns = static_cast<uint64_t>(settings().net_stats_interval_s * 1e9);
  for (const Device& device : devices.list) {
    made->counters.push_back(&counters_of(devices, device));
  }
  const uint64_t interval = made->interval_ns;
  statistics.store(made.release(), std::memory_order_release);
  if (interval != 0) detail::statistics_due_ns.store(coarse_now_ns() + interval);
  std::atexit(write_at_exit);
  write(true);
  return Status::Ok();
}

}  // namespace

namespace detail {

constinit std::atomic<uint64_t> statistics_due_ns{UINT64_MAX};

void write_statistics_if_due() noexcept {
  uint64_t due = statistics_due_ns.load(std::memory_order_relaxed);
  const uint64_t now = coarse_now_ns();
  if (now < due) return;
  const Statistics* const to = statistics.load(std::memory_order_acquire);
  if (to == nullptr) return;
  // Whoever moves the time on writes.
  if (statistics_due_ns.compare_exchange_strong(due, now + to->interval_ns)) write(true);
}

}  // namespace detail

Origin find_origin() {
  Origin origin;
  char host[256] = "";
  ::gethostname(host, sizeof host - 1);
  origin.host = host;
  origin.process = static_cast<int>(::getpid());
  // Launchers' names, not settings: where several are set, the innermost launcher's comes first.
  for (const char* name :
       {"RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "SLURM_PROCID"}) {
    const char* const text = std::getenv(name);
    if (text == nullptr || *text == '\0') continue;
    char* end = nullptr;
    const long value = std::strtol(text, &end, 10);
    if (*end != '\0' || value < 0 || value > INT32_MAX) continue;
    origin.rank = static_cast<int>(value);
    break;
  }
  return origin;
}

Reading read_counters(const DeviceCounters& counters) {
  Reading reading = {counters.device(), counters.library(), {}};
  std::vector<uint64_t>& values = reading.values;
  const plugin::TransportCounters traffic[] = {counters.traffic(Interface::kNet),
                                               counters.traffic(Interface::kCollNet)};
  for (const plugin::TransportCounters& t : traffic) {
    values.insert(values.end(), {t.sent_bytes, t.received_bytes});
  }
  for (const plugin::TransportCounters& t : traffic) {
    values.insert(values.end(), {t.sent_messages, t.received_messages});
  }
  append(&values, counters.retries);
  values.push_back(traffic[0].posted_again + traffic[1].posted_again);
  append(&values, counters.errors);
  append(&values, counters.connections_opened);
  append(&values, counters.connections);
  append(&values, {&counters.groups_opened, 1});
  append(&values, {&counters.groups, 1});
  append(&values, counters.registrations);
  append(&values, counters.registration_hits);
  append(&values, counters.registered);
  return reading;
}

std::string json_of(const Origin& origin, int64_t time_ms, std::span<const Reading> readings) {
  std::string text = format("{\n  \"scape\": \"%s\",\n  \"host\": %s,\n  \"pid\": %d,\n",
                            SCAPE_VERSION_STRING, quoted(origin.host).c_str(), origin.process);
  text += "  \"rank\": " + (origin.rank < 0 ? "null" : std::to_string(origin.rank));
  // Not as a double: its point is the locale's.
  text += format(",\n  \"time\": %lld.%03lld,\n  \"devices\": [",
                 static_cast<long long>(time_ms / 1000), static_cast<long long>(time_ms % 1000));
  for (size_t d = 0; d < readings.size(); ++d) {
    const Reading& reading = readings[d];
    text += format("%s\n    {\n      \"device\": %s,\n      \"library\": %s", d == 0 ? "" : ",",
                   quoted(reading.device).c_str(), quoted(reading.library).c_str());
    const uint64_t* value = reading.values.data();
    for (const Metric& metric : metrics()) {
      text += format(",\n      \"%s\": ", metric.name);
      append_json(metric, 0, &value, &text);
    }
    text += "\n    }";
  }
  return text + "\n  ]\n}\n";
}

std::string prometheus_of(const Origin& origin, std::span<const Reading> readings) {
  std::string text;
  std::vector<const uint64_t*> values;
  for (const Reading& reading : readings) values.push_back(reading.values.data());
  for (const Metric& metric : metrics()) {
    const std::string name = format("scape_net_%s%s", metric.name, metric.total ? "_total" : "");
    text += format("# HELP %s %s\n# TYPE %s %s\n", name.c_str(), metric.help, name.c_str(),
                   metric.total ? "counter" : "gauge");
    for (size_t d = 0; d < readings.size(); ++d) {
      std::string line =
          name + format("{device=%s,library=%s,host=%s,pid=\"%d\"",
                        quoted(readings[d].device).c_str(), quoted(readings[d].library).c_str(),
                        quoted(origin.host).c_str(), origin.process);
      if (origin.rank >= 0) line += format(",rank=\"%d\"", origin.rank);
      append_samples(metric, 0, line, &values[d], &text);
    }
  }
  return text;
}

Status statistics_path(const std::string& setting, const Origin& origin, std::string* out) {
  const auto replace = [&](const std::string& pattern) -> Status {
    for (size_t i = 0; i < pattern.size(); ++i) {
      if (pattern[i] != '%') {
        *out += pattern[i];
        continue;
      }
      const char placeholder = ++i < pattern.size() ? pattern[i] : '\0';
      if (placeholder == 'h') {
        *out += origin.host;
      } else if (placeholder == 'p') {
        *out += std::to_string(origin.process);
      } else if (placeholder == 'r') {
        *out += origin.rank < 0 ? "unknown" : std::to_string(origin.rank);
      } else if (placeholder == '%') {
        *out += '%';
      } else {
        return error(SCAPE_ERR_ARGUMENT,
                     "SCAPE_NET_STATS=\"%s\": after %% there can be h (host), p (process), r "
                     "(rank) or %%; no counters are written",
                     setting.c_str());
      }
    }
    return Status::Ok();
  };
  out->clear();
  SCAPE_RETURN_IF_ERROR(replace(setting));
  struct stat found = {};
  const bool folder = ends_with(*out, "/");
  if (folder || (::stat(out->c_str(), &found) == 0 && S_ISDIR(found.st_mode))) {
    SCAPE_RETURN_IF_ERROR(replace(folder ? "scape_net_%h_%p.json" : "/scape_net_%h_%p.json"));
  }
  return Status::Ok();
}

Status replace_file(const std::string& path, const std::string& text) {
  const auto failed = [&](const char* what) {
    return error(SCAPE_ERR_SYSTEM,
                 "the counters cannot be written to %s: %s: %s; see that its folder exists, can be "
                 "written to and has room, or unset SCAPE_NET_STATS",
                 path.c_str(), what, std::strerror(errno));
  };
  struct stat found = {};
  if (::lstat(path.c_str(), &found) == 0 && !S_ISREG(found.st_mode)) {
    return error(SCAPE_ERR_SYSTEM,
                 "the counters cannot be written to %s, which is no plain file; SCAPE_NET_STATS "
                 "takes the path of one, which is replaced, or a folder",
                 path.c_str());
  }
  // Beside it, so that the renaming is one step; by a name that no collector of *.prom takes.
  std::string temporary = path + ".XXXXXX";
  const int file = ::mkostemp(temporary.data(), O_CLOEXEC);
  if (file < 0) return failed("open");
  Status status;
  size_t written = 0;
  while (status.ok() && written < text.size()) {
    const ssize_t more = ::write(file, text.data() + written, text.size() - written);
    if (more >= 0) {
      written += static_cast<size_t>(more);
    } else if (errno != EINTR) {
      status = failed("write");
    }
  }
  // Collectors are other users.
  if (status.ok() && ::fchmod(file, 0644) != 0) status = failed("chmod");
  if (::close(file) != 0 && status.ok()) status = failed("close");
  if (status.ok() && ::rename(temporary.c_str(), path.c_str()) != 0) status = failed("rename");
  if (!status.ok()) ::unlink(temporary.c_str());
  return status;
}

void start_statistics(const Devices& devices) {
  if (settings().net_stats.empty()) return;
  static const bool started = [&] {
    const Status status = start(devices);
    if (!status.ok()) SCAPE_WARN("net: %s", status.message().c_str());
    return status.ok();
  }();
  static_cast<void>(started);
}

void write_statistics() noexcept { write(true); }

}  // namespace scape::net
