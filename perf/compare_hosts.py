#!/usr/bin/env python3
"""All-reduce between test hosts (perf/hosts.sh): Gloo's dense one, Scape's, and the masked one.

    perf/compare_hosts.py --build build/release            # as root

Runs all in turns, --rounds times. The table has medians over rounds and, in brackets, the least and the
most. The masked calls keep their residual in place, in the fused role, with a gap of --gap-ms between
them that the mask refresh can hide in. Scoring is a part of the step in this role, and the whole is the call
and the scoring behind it. "exchange alone" counts from when the last rank is there: with more ranks than
cores they pack one after the other.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from compare_dense import parse_bytes, run, size_text

HERE = Path(__file__).resolve().parent


def gloo_worker(args):
    """One rank; rank 0 writes the mean of its calls, in microseconds, to --json."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    tensor = torch.zeros(args.size // 4)
    times = []
    for _ in range(args.iterations + 1):
        dist.barrier()
        start = time.perf_counter()
        dist.all_reduce(tensor)
        times.append(time.perf_counter() - start)
    if dist.get_rank() == 0:
        args.json.write_text(json.dumps(statistics.mean(times[1:]) * 1e6), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def on_hosts(args, command, environment=None):
    hosts = [HERE / "hosts.sh", "-n", str(args.hosts), "-p", str(args.ranks), "-r", args.rate, "-q", "--"]
    return run(hosts + command, dict(os.environ, **(environment or {})))


def measure_gloo(args):
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        on_hosts(args, [sys.executable, __file__, "--gloo-worker", "--size", str(args.size),
                        "--iterations", str(args.iterations), "--json", file.name],
                 {"GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"})
        call = json.loads(Path(file.name).read_text(encoding="utf-8"))
        return {"call": call, "whole": call}


def measure_scape(args, transport, sparsity):
    command = [args.build / "bin/scape_all_reduce_perf", "-b", str(args.size), "-e", str(args.size),
               "-n", str(args.iterations), "-w", "2" if sparsity else "1", "-c", "0", "-T", "300"]
    if sparsity:
        command += ["-s", str(sparsity), "--role", "fused", "--residual", "in-place",
                    "--idle-us", str(args.gap_ms * 1000)]
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        on_hosts(args, command + ["-J", file.name],
                 {"SCAPE_TRANSPORT": transport, "SCAPE_MODE": "host"})
        row = json.load(open(file.name, encoding="utf-8"))["results"][0]["in_place"]
    figures = {"call": row["time_us"], "whole": row["time_us"], "wire": row["wire_bytes"]}
    if sparsity:
        split = row["split_us"]
        figures |= {"whole": row["time_us"] + split["score"], "score": split["score"],
                    "exchange": split["exchange_alone"], "refresh": split["refresh"]}
    return figures


def cell(samples, key):
    values = [sample[key] / 1e3 for sample in samples if key in sample]
    if not values:
        return ""
    return f"{statistics.median(values):.1f} ({min(values):.1f}–{max(values):.1f})"


def markdown(samples):
    gloo = statistics.median(sample["whole"] for sample in samples["Gloo, dense"])
    lines = ["| all-reduce | call, ms | scoring, ms | exchange alone, ms | wire bytes a rank | Gloo / whole | "
             "Gloo / exchange |", "|---|---:|---:|---:|---:|---:|---:|"]
    for name, runs in samples.items():
        whole = statistics.median(sample["whole"] for sample in runs)
        exchange = [sample["exchange"] for sample in runs if "exchange" in sample]
        wire = [sample["wire"] for sample in runs if sample.get("wire")]
        lines.append(f"| {name} | {cell(runs, 'call')} | {cell(runs, 'score')} | {cell(runs, 'exchange')} | "
                     f"{format(round(statistics.median(wire)), ',') if wire else ''} | "
                     f"{gloo / whole:.2f} | {format(gloo / statistics.median(exchange), '.1f') if exchange else ''} |")
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=Path, default=Path("build/release"), help="build folder")
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--ranks", type=int, default=1, help="on each host")
    parser.add_argument("--rate", default="1gbit", help="of each host's link")
    parser.add_argument("--size", type=parse_bytes, default="256M")
    parser.add_argument("--sparsity", type=float, nargs="+", default=[0.9, 0.99])
    parser.add_argument("--transports", nargs="+", default=["ucx", "ofi"], choices=["ucx", "ofi"])
    parser.add_argument("--gap-ms", type=int, default=1500, help="between masked calls")
    parser.add_argument("--iterations", type=int, default=3, help="calls a round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="file for all samples")
    parser.add_argument("--gloo-worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.gloo_worker:
        return gloo_worker(args)
    args.build = args.build.resolve()
    contenders = {"Gloo, dense": lambda: measure_gloo(args)}
    for transport in args.transports:
        contenders[f"Scape {transport}, dense"] = lambda t=transport: measure_scape(args, t, 0)
        for sparsity in args.sparsity:
            contenders[f"Scape {transport}, {sparsity * 100:g} %"] = (
                lambda t=transport, s=sparsity: measure_scape(args, t, s))
    samples = {name: [] for name in contenders}
    for number in range(args.rounds):
        for name, measure in contenders.items():
            samples[name].append(measure())
            print(f"round {number + 1}, {name}: {samples[name][-1]['call'] / 1e3:.1f} ms",
                  file=sys.stderr, flush=True)
    print(f"{size_text(args.size)}, {args.hosts} hosts of {args.ranks}, links of {args.rate}, "
          f"a gap of {args.gap_ms} ms between masked calls\n")
    print(markdown(samples))
    if args.json:
        args.json.write_text(json.dumps(samples, indent=1), encoding="utf-8")
    return None


if __name__ == "__main__":
    main()
