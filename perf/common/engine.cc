#include "perf/common/engine.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <limits>
#include <numeric>

#include <unistd.h>

#include "base/large_pages.h"
#include "perf/common/pattern.h"

namespace scape::perf {
namespace {

using Clock = std::chrono::steady_clock;

double microseconds(Clock::duration time) {
  return std::chrono::duration<double, std::micro>(time).count();
}

// Sum of one number over the ranks, for verdicts and means.
Status sum_over_ranks(Control& control, double mine, double* sum) {
  std::vector<double> all;
  SCAPE_RETURN_IF_ERROR(control.all_gather(mine, &all));
  *sum = std::accumulate(all.begin(), all.end(), 0.0);
  return Status::Ok();
}

// The reduction operator as the library knows it; mulsum's is made and destroyed here.
class Operator {
 public:
  static Status make(const Session& session, Type type, Op op, Operator* out) {
    out->session_ = &session;
    out->value_ = op == Op::kNone ? 0 : static_cast<NcclRedOp>(op);
    if (op != Op::kMulSum) return Status::Ok();
    uint64_t factor = premul_factor(type, session.control.rank());
    const NcclResult result = session.nccl.red_op_create_premul_sum(
        &out->value_, &factor, static_cast<int>(type), kNcclScalarHostImmediate, session.comm);
    if (result != 0)
      return nccl_error(session.nccl, result, "ncclRedOpCreatePreMulSum", session.comm);
    out->made_ = true;
    return Status::Ok();
  }
  Operator() = default;
  Operator(const Operator&) = delete;
  Operator& operator=(const Operator&) = delete;
  ~Operator() {
    if (made_) session_->nccl.red_op_destroy(value_, session_->comm);
  }
  NcclRedOp value() const { return value_; }

 private:
  const Session* session_ = nullptr;
  NcclRedOp value_ = 0;
  bool made_ = false;
};

// What goes in and what must come out of the checked calls of one (type, op).
struct TestData {
  Pattern input;
  Pattern expected;
};

Status make_test_data(const Session& session, Type type, Op op, TestData* data) {
  if (op == Op::kNone) {
    data->input = make_copy_pattern(type, session.seed);
    data->expected = data->input;
    return Status::Ok();
  }
  ReductionCase reduction;
  SCAPE_RETURN_IF_ERROR(make_reduction_case(type, op, session.control.rank(),
                                            session.control.ranks(), session.seed,
                                            std::numeric_limits<double>::infinity(), &reduction));
  data->input = std::move(reduction.input);
  data->expected = std::move(reduction.expected);
  return Status::Ok();
}

// One half of a line of a dense collective.
class DenseRun {
 public:
  DenseRun(Session& session, const Shape& shape, Type type, NcclRedOp op, int root, bool in_place)
      : session_(session),
        shape_(shape),
        type_(type),
        op_(op),
        root_(root),
        in_place_(in_place),
        size_(size_of(type)),
        stride_((std::max(shape.send_count, shape.recv_count) * size_ + 127) / 64 * 64) {}

  // Buffers of the i-th call of a group.
  Placement place(int i) const {
    const size_t at = stride_ * static_cast<size_t>(i);
    if (in_place_) {
      std::byte* base = session_.recv.data() + at;
      return {base + shape_.in_place_send_offset * size_,
              base + shape_.in_place_recv_offset * size_};
    }
    return {session_.send.data() + at, session_.recv.data() + at};
  }

  NcclResult call() const {
    const int aggregated = session_.options.aggregated;
    NcclResult result = 0;
    if (aggregated > 1) result = session_.nccl.group_start();
    for (int i = 0; i < aggregated && result == 0; ++i) {
      const Placement at = place(i);
      result = session_.collective.launch(session_.nccl, at.send, at.recv, shape_.argument, type_,
                                          op_, root_, session_.comm);
    }
    if (aggregated > 1) {
      const NcclResult ended = session_.nccl.group_end();
      if (result == 0) result = ended;
    }
    return result;
  }

  void fill(const TestData& data, const Placement& at) const {
    // Results of calls before must not pass for this one's.
    std::memset(at.recv, 0x5a, shape_.recv_count * size_);
    const bool sends = !session_.collective.has_root() || root_ == session_.control.rank();
    if (sends) data.input.fill(at.send, shape_.send_first, shape_.send_count);
  }

  // Checks options.checks calls; the count is of this rank.
  Status check(const TestData& data, uint64_t* wrong) const {
    for (int checked = 0; checked < session_.options.checks; ++checked) {
      for (int i = 0; i < session_.options.aggregated; ++i) {
        const Placement at = place(i);
        // In place the guard is around the whole buffer, of which recv may be a part.
        const Placement whole = guarded(at);
        session_.recv.set_guard(whole.recv, guarded_bytes());
        fill(data, at);
      }
      if (const NcclResult result = call(); result != 0) return failure(result);
      for (int i = 0; i < session_.options.aggregated; ++i) {
        const Placement at = place(i);
        *wrong += data.expected.count_wrong(at.recv, shape_.recv_first, shape_.recv_count);
        *wrong += session_.recv.broken_guard(guarded(at).recv, guarded_bytes());
      }
    }
    return Status::Ok();
  }

  Status failure(NcclResult result) const {
    return nccl_error(session_.nccl, result, session_.collective.name(), session_.comm);
  }

 private:
  Placement guarded(const Placement& at) const {
    return {at.send, in_place_ ? at.recv - shape_.in_place_recv_offset * size_ : at.recv};
  }
  size_t guarded_bytes() const {
    return (in_place_ ? std::max(shape_.send_count, shape_.recv_count) : shape_.recv_count) * size_;
  }

  Session& session_;
  const Shape& shape_;
  const Type type_;
  const NcclRedOp op_;
  const int root_;
  const bool in_place_;
  const size_t size_;
  const size_t stride_;
};

Status run_dense(Session& session, const Shape& shape, Type type, Op op, int root, bool in_place,
                 TestData& data, Figures* figures) {
  Operator operation;
  SCAPE_RETURN_IF_ERROR(Operator::make(session, type, op, &operation));
  const DenseRun run(session, shape, type, operation.value(), root, in_place);
  // Results of an earlier line must not pass for this one's.
  data.input.set_seed(++session.seed);
  data.expected.set_seed(session.seed);
  for (int i = 0; i < session.options.aggregated; ++i) run.fill(data, run.place(i));

  SCAPE_RETURN_IF_ERROR(time_calls(
      session, [&run] { return run.call(); }, [] { return Status::Ok(); }, figures));
  figures->time_us /= session.options.aggregated;
  if (figures->wire_bytes) *figures->wire_bytes /= session.options.aggregated;

  const double bytes =
      static_cast<double>(std::max(shape.send_count, shape.recv_count) * size_of(type));
  figures->algorithm_bandwidth = bytes / figures->time_us / 1e3;
  figures->bus_bandwidth =
      figures->algorithm_bandwidth * session.collective.bus_factor(session.control.ranks());
  double roof = 0;
  SCAPE_RETURN_IF_ERROR(measure_roof(session, static_cast<size_t>(bytes), &roof));
  figures->roof_percent = roof > 0 ? 100 * figures->bus_bandwidth / roof : 0;

  figures->checked = session.options.checks > 0;
  uint64_t wrong = 0;
  SCAPE_RETURN_IF_ERROR(run.check(data, &wrong));
  double sum = 0;
  SCAPE_RETURN_IF_ERROR(sum_over_ranks(session.control, static_cast<double>(wrong), &sum));
  figures->wrong = static_cast<uint64_t>(sum);
  return Status::Ok();
}

struct Verdict {
  uint64_t wrong = 0;
  bool in_force = true;
};

Status run_table(Session& session, Report& report, Verdict* verdict) {
  const Options& options = session.options;
  const int ranks = session.control.ranks();
  std::vector<int> roots = {-1};
  if (session.collective.has_root()) {
    roots = options.roots;
    if (roots[0] < 0) {
      roots.resize(static_cast<size_t>(ranks));
      std::iota(roots.begin(), roots.end(), 0);
    }
  }
  for (const Type type : options.types) {
    for (const Op op : options.ops) {
      TestData data;
      if (!options.sparse) SCAPE_RETURN_IF_ERROR(make_test_data(session, type, op, &data));
      for (const int root : roots) {
        for (const size_t bytes : options.sizes()) {
          const Shape shape =
              session.collective.shape(bytes / size_of(type), session.control.rank(), ranks);
          Line line;
          line.count = shape.argument;
          line.bytes = std::max(shape.send_count, shape.recv_count) * size_of(type);
          line.type = type;
          line.op = op;
          line.root = root;
          session.control.set_deadline(options.timeout_s, format("%zu bytes of %s, %s", line.bytes,
                                                                 name_of(type), name_of(op)));
          for (const bool in_place : {false, true}) {
            Figures* figures = in_place ? &line.in_place : &line.out_of_place;
            if (options.sparse && !in_place && options.residual == SCAPE_RESIDUAL_IN_PLACE)
              continue;
            if (options.sparse) {
              SCAPE_RETURN_IF_ERROR(run_masked(session, shape.argument, type, op, in_place, figures,
                                               &verdict->in_force));
            } else {
              SCAPE_RETURN_IF_ERROR(
                  run_dense(session, shape, type, op, root, in_place, data, figures));
            }
            verdict->wrong += figures->wrong;
          }
          report.add(line);
        }
      }
    }
  }
  session.control.set_deadline(0, "");
  return Status::Ok();
}

// Everything between the ranks' meeting and their parting.
Status run_rank(const Collective& collective, const Options& options, Control& control,
                Verdict* verdict) {
  NcclLibrary nccl;
  SCAPE_RETURN_IF_ERROR(load_nccl(options.nccl_lib, &nccl));
  if (options.sparse && !nccl.has_scape()) {
    return error(SCAPE_ERR_INACTIVE, "-s asks for compression, but %s is not Scape",
                 nccl.path.c_str());
  }
  Session session{collective, options, nccl, control, nullptr, {}, {}};
  const size_t buffer = (options.max_bytes + 256) * static_cast<size_t>(options.aggregated);
  SCAPE_RETURN_IF_ERROR(session.send.allocate(buffer));
  SCAPE_RETURN_IF_ERROR(session.recv.allocate(buffer));

  control.set_deadline(options.timeout_s, "the communicator's creation");
  NcclUniqueId id{};
  NcclResult result = 0;
  if (control.rank() == 0) result = nccl.get_unique_id(&id);
  if (result != 0) return nccl_error(nccl, result, "ncclGetUniqueId", nullptr);
  std::vector<NcclUniqueId> ids;
  SCAPE_RETURN_IF_ERROR(control.all_gather(id, &ids));
  result = nccl.comm_init_rank(&session.comm, control.ranks(), ids[0], control.rank());
  if (result != 0) return nccl_error(nccl, result, "ncclCommInitRank", nullptr);

  Report report(collective, options, nccl, control.rank(), control.ranks());
  report.print_header();
  SCAPE_RETURN_IF_ERROR(run_table(session, report, verdict));
  SCAPE_RETURN_IF_ERROR(report.finish(verdict->wrong));
  SCAPE_RETURN_IF_ERROR(control.barrier());
  result = nccl.comm_destroy(session.comm);
  if (result != 0) return nccl_error(nccl, result, "ncclCommDestroy", session.comm);
  return control.finish();
}

constexpr double kMeetSeconds = 120;
// What a rank has left to report a failure of its own after another one has left.
constexpr double kGraceSeconds = 5;

}  // namespace

Status time_calls(Session& session, const std::function<NcclResult()>& call,
                  const std::function<Status()>& between, Figures* figures) {
  const Options& options = session.options;
  auto checked_call = [&]() -> Status {
    if (const NcclResult result = call(); result != 0) {
      return nccl_error(session.nccl, result, session.collective.name(), session.comm);
    }
    return Status::Ok();
  };
  for (int i = 0; i < options.warmup; ++i) {
    SCAPE_RETURN_IF_ERROR(checked_call());
    SCAPE_RETURN_IF_ERROR(between());
  }
  int iterations = options.iterations;
  if (options.seconds > 0) {
    const Clock::time_point start = Clock::now();
    SCAPE_RETURN_IF_ERROR(checked_call());
    std::vector<double> each;
    SCAPE_RETURN_IF_ERROR(session.control.all_gather(microseconds(Clock::now() - start), &each));
    SCAPE_RETURN_IF_ERROR(between());
    iterations = static_cast<int>(std::clamp(options.seconds * 1e6 / each[0], 5.0, 2000.0));
  }
  std::vector<double> times;
  times.reserve(static_cast<size_t>(iterations));
  SCAPE_RETURN_IF_ERROR(session.control.barrier());
  const std::optional<uint64_t> sent_before = wire_bytes_sent(session.nccl);
  for (int i = 0; i < iterations; ++i) {
    const Clock::time_point start = Clock::now();
    SCAPE_RETURN_IF_ERROR(checked_call());
    times.push_back(microseconds(Clock::now() - start));
    SCAPE_RETURN_IF_ERROR(between());
  }
  SCAPE_RETURN_IF_ERROR(session.control.barrier());
  const std::optional<uint64_t> sent_after = wire_bytes_sent(session.nccl);

  const double mean = std::accumulate(times.begin(), times.end(), 0.0) / iterations;
  std::vector<double> all;
  SCAPE_RETURN_IF_ERROR(session.control.all_gather(mean, &all));
  switch (options.average) {
    case 0:
      figures->time_us = all[0];
      break;
    case 1:
      figures->time_us =
          std::accumulate(all.begin(), all.end(), 0.0) / static_cast<double>(all.size());
      break;
    case 2:
      figures->time_us = *std::min_element(all.begin(), all.end());
      break;
    default:
      figures->time_us = *std::max_element(all.begin(), all.end());
  }
  std::sort(times.begin(), times.end());
  auto quantile = [&](double q) {
    return times[static_cast<size_t>(q * static_cast<double>(times.size() - 1) + 0.5)];
  };
  figures->calls = iterations;
  figures->least_us = times.front();
  figures->median_us = quantile(0.5);
  figures->p99_us = quantile(0.99);
  figures->most_us = times.back();
  if (sent_before && sent_after) {
    double sent = 0;
    SCAPE_RETURN_IF_ERROR(
        sum_over_ranks(session.control, static_cast<double>(*sent_after - *sent_before), &sent));
    figures->wire_bytes = sent / session.control.ranks() / iterations;
  }
  return Status::Ok();
}

Status measure_roof(Session& session, size_t bytes, double* gigabytes_per_second) {
  *gigabytes_per_second = 0;
  SCAPE_RETURN_IF_ERROR(session.control.barrier());
  double best = std::numeric_limits<double>::infinity();
  // Small copies are timed in batches, since one is shorter than the clock can tell.
  const size_t batch = std::max<size_t>(1, (size_t{256} << 10) / std::max<size_t>(bytes, 1));
  for (int i = 0; i < 5 && bytes > 0; ++i) {
    const Clock::time_point start = Clock::now();
    for (size_t copy = 0; copy < batch; ++copy) {
      std::memcpy(session.recv.data(), session.send.data(), bytes);
      asm volatile("" ::: "memory");
    }
    best = std::min(best, microseconds(Clock::now() - start) / static_cast<double>(batch));
  }
  double sum = 0;
  SCAPE_RETURN_IF_ERROR(
      sum_over_ranks(session.control, static_cast<double>(bytes) / best / 1e3, &sum));
  *gigabytes_per_second = sum / session.control.ranks();
  return Status::Ok();
}

Status Stream::open(size_t bytes) {
  bytes_ = bytes;
  for (Memory* array : {&a_, &b_}) {
    SCAPE_RETURN_IF_ERROR(array->allocate(bytes));
    move_to_large_pages(array->data(), bytes);  // as fast as memory is
  }
  return Status::Ok();
}

Status Stream::pass() {
  SCAPE_RETURN_IF_ERROR(session_.control.barrier());
  auto* const a = reinterpret_cast<uint32_t*>(a_.data());
  const auto* const b = reinterpret_cast<const uint32_t*>(b_.data());
  const Clock::time_point start = Clock::now();
  for (size_t at = 0; at < bytes_ / 4; ++at) a[at] += b[at];
  asm volatile("" ::: "memory");
  // Until the last is through: more ranks than cores go one after the other.
  SCAPE_RETURN_IF_ERROR(session_.control.barrier());
  const double mine = microseconds(Clock::now() - start);
  std::vector<double> all;
  SCAPE_RETURN_IF_ERROR(session_.control.all_gather(mine, &all));
  times_us_.push_back(*std::max_element(all.begin(), all.end()));
  return Status::Ok();
}

Status Stream::rate(double* gigabytes_per_second) {
  std::sort(times_us_.begin(), times_us_.end());
  *gigabytes_per_second =
      3 * static_cast<double>(bytes_) / times_us_[times_us_.size() / 2] / 1e3;  // alike on all
  return Status::Ok();
}

std::optional<uint64_t> wire_bytes_sent(const NcclLibrary& nccl) {
  if (nccl.get_stats == nullptr) return std::nullopt;
  scape_stats stats{};
  stats.size = sizeof stats;
  if (nccl.get_stats(nullptr, 0, &stats) != SCAPE_OK) return std::nullopt;
  return stats.wire_bytes_sent;
}

int run_program(const Collective& collective, int argc, char** argv) {
  Options options;
  int exit_code = kExitOk;
  if (!parse_options(collective, argc, argv, &options, &exit_code)) return exit_code;
  auto fail = [&](int rank, const Status& status, int code) {
    std::fprintf(stderr, "%s: rank %d: %s\n", argv[0], rank, status.message().c_str());
    return code;
  };

  Launch launch;
  if (const Status status =
          find_launch(options.worker, options.id_file, options.local_ranks, &launch);
      !status.ok()) {
    return fail(launch.rank, status, kExitUsage);
  }
  if (options.worker.empty() && options.local_ranks > 1) {
    return run_local_ranks(options.local_ranks, argc, argv, kGraceSeconds);
  }
  for (const int root : options.roots) {
    if (collective.has_root() && root >= launch.ranks) {
      return fail(launch.rank,
                  error(SCAPE_ERR_ARGUMENT, "-r %d: there are %d ranks", root, launch.ranks),
                  kExitUsage);
    }
  }
  if (options.sparse && launch.ranks < 2) {
    return fail(
        0, error(SCAPE_ERR_USAGE, "-s needs at least 2 ranks: one rank sends nothing; add -g 2"),
        kExitUsage);
  }

  std::unique_ptr<Control> control;
  Verdict verdict;
  Status status = Control::connect(launch, kMeetSeconds, kGraceSeconds, &control);
  if (status.ok()) status = run_rank(collective, options, *control, &verdict);
  if (!status.ok()) {
    fail(launch.rank, status, kExitFailed);
    // The communicator is broken: its destructors could wait for ranks that are gone.
    std::fflush(nullptr);
    _exit(kExitFailed);
  }
  return verdict.wrong == 0 && verdict.in_force ? kExitOk : kExitWrong;
}

}  // namespace scape::perf
