#include "perf/common/options.h"

#include <CLI/CLI.hpp>
#include <cstdio>
#include <cstdlib>

#include "perf/common/control.h"

namespace scape::perf {
bool parse_options(const Collective& collective, int argc, char** argv, Options* out,
                   int* exit_code) {
  *exit_code = kExitUsage;
  Options& options = *out;
  CLI::App app(std::string("Measures and checks ") + collective.name() +
               " of the NCCL library in the process, on host memory.\n"
               "Ranks: -g starts them here; under torchrun or mpirun each process is one.");
  std::string type = "float", op = "sum", root = "0", role = "gradient", payload = "fp32",
              residual = "internal";
  int threads = 1, ignored = 0, graphs = 0;

  options.add_options(&app);
  app.add_option("-n,--iters", options.iterations, "timed calls a size")
      ->check(CLI::Range(1, 10000000))
      ->capture_default_str();
  app.add_option("--seconds", options.seconds,
                 "instead of -n: as many calls a size as take about this long, 5 to 2000")
      ->check(CLI::Range(0.0, 1e5));
  app.add_option("-w,--warmup_iters", options.warmup, "calls before them that are not timed")
      ->check(CLI::Range(0, 10000000))
      ->capture_default_str();
  app.add_option("-c,--check", options.checks, "checked calls a size; 0 checks nothing")
      ->check(CLI::Range(0, 1000000))
      ->capture_default_str();
  app.add_option("-m,--agg_iters", options.aggregated, "calls in one group")
      ->check(CLI::Range(1, 1000))
      ->capture_default_str();
  app.add_option("-a,--average", options.average,
                 "time shown: 0 rank 0's, 1 mean, 2 least, 3 most over ranks")
      ->check(CLI::Range(0, 3))
      ->capture_default_str();
  app.add_option("-d,--datatype", type, "element type, or all")->capture_default_str();
  app.add_option("-o,--op", op, "reduction: sum, prod, max, min, avg, mulsum, or all")
      ->capture_default_str();
  app.add_option("-r,--root", root, "root rank, or all")->capture_default_str();
  app.add_option("-g,--ngpus", options.local_ranks, "ranks that this command starts on this host")
      ->check(CLI::Range(1, 1024))
      ->capture_default_str();
  app.add_option("-t,--nthreads", threads, "multiplies -g: ranks are processes here")
      ->check(CLI::Range(1, 1024))
      ->capture_default_str();
  app.add_option("-p,--parallel_init", ignored,
                 "taken for nccl-tests' sake: ranks always start in parallel");
  app.add_option("-z,--blocking", ignored,
                 "taken for nccl-tests' sake: calls on host memory always block");
  app.add_option("-G,--cudagraph", graphs, "must be 0: host memory has no CUDA graphs");
  app.add_option("-T,--timeout", options.timeout_s,
                 "seconds that one line of the table may take; 0 sets no limit")
      ->check(CLI::Range(0.0, 1e6))
      ->capture_default_str();
  app.add_option("-J,--output_file", options.json, "file for the results as JSON");
  app.add_option("--nccl-lib", options.nccl_lib,
                 "library to measure; else the one preloaded, else ../lib/libscape_nccl.so");
  app.add_option(
      "--id-file", options.id_file,
      "file, seen by all ranks, where they find rank 0 (instead of MASTER_ADDR and MASTER_PORT)");
  CLI::Option* sparsity = nullptr;
  if (collective.can_be_sparse()) {
    sparsity = app.add_option("-s,--sparsity", options.sparsity,
                              "registers the buffer: this fraction of its elements is not sent")
                   ->check(CLI::Range(0.0, 0.999999));
    app.add_option("--role", role, "role of the registration")
        ->needs(sparsity)
        ->check(CLI::IsMember({"gradient", "fused"}))
        ->capture_default_str();
    app.add_option("--payload", payload, "type that masked values travel in")
        ->needs(sparsity)
        ->check(CLI::IsMember({"fp32", "bf16"}))
        ->capture_default_str();
    app.add_option(
           "--residual", residual,
           "where what is not sent waits: inside the library, or in the buffer (role fused)")
        ->needs(sparsity)
        ->check(CLI::IsMember({"internal", "in-place"}))
        ->capture_default_str();
    app.add_option("--compute-us", options.compute_us,
                   "microseconds of arithmetic between timed calls, as training has them")
        ->needs(sparsity)
        ->check(CLI::Range(int64_t{0}, int64_t{10000000}))
        ->capture_default_str();
    app.add_option("--idle-us", options.idle_us,
                   "microseconds of sleep between timed calls, where something else computes, or "
                   "there are more ranks than cores")
        ->needs(sparsity)
        ->check(CLI::Range(int64_t{0}, int64_t{10000000}))
        ->capture_default_str();
  }
  app.add_option("--worker", options.worker)->group("");

  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& refused) {
    const int code = app.exit(refused);
    *exit_code = code == 0 ? kExitOk : kExitUsage;
    return false;
  }
  auto refuse = [](const std::string& why) {
    std::fprintf(stderr, "%s\n", why.c_str());
    return false;
  };

  if (const Status status = options.complete(); !status.ok()) return refuse(status.message());
  if (graphs != 0) return refuse("-G must be 0: host memory has no CUDA graphs");
  if (const Status status = parse_types(type, &options.types); !status.ok())
    return refuse(status.message());
  if (!collective.reduces()) {
    options.ops = {Op::kNone};
  } else if (const Status status = parse_ops(op, &options.ops); !status.ok()) {
    return refuse(status.message());
  }
  char* end = nullptr;
  options.roots = {root == "all" ? -1 : static_cast<int>(std::strtol(root.c_str(), &end, 10))};
  if (end != nullptr && (*end != '\0' || root.empty())) {
    return refuse("-r " + root + " is neither a rank nor all");
  }
  options.local_ranks *= threads;

  options.sparse = sparsity != nullptr && sparsity->count() > 0;
  options.role = role == "fused" ? SCAPE_ROLE_FUSED : SCAPE_ROLE_GRADIENT;
  options.payload = payload == "bf16" ? SCAPE_BFLOAT16 : SCAPE_FLOAT32;
  if (residual == "in-place") options.residual = SCAPE_RESIDUAL_IN_PLACE;
  if (options.sparse) {
    if (options.residual == SCAPE_RESIDUAL_IN_PLACE &&
        (options.role != SCAPE_ROLE_FUSED || options.types != std::vector<Type>{Type::kFloat})) {
      return refuse("--residual in-place needs --role fused and -d float");
    }
    if (options.aggregated != 1) return refuse("-s measures one call at a time: leave -m at 1");
    for (const Type each : options.types) {
      if (each != Type::kFloat && each != Type::kBfloat16 && each != Type::kHalf) {
        return refuse(format("-s takes the types float, bfloat16 and half, not %s", name_of(each)));
      }
      if (options.min_bytes < size_of(each))
        return refuse("-s needs sizes of at least one element");
    }
    for (const Op each : options.ops) {
      if (each != Op::kSum && each != Op::kAvg) {
        return refuse(format("-s takes the operators sum and avg, not %s", name_of(each)));
      }
    }
  }
  return true;
}

}  // namespace scape::perf
