#!/usr/bin/env python3
"""Same-host dense fp32 all-reduce: Scape's host mode beside Open MPI and Gloo (through torch).

    perf/compare_dense.py --build build/release

Runs all three in turns, --rounds times, so that whatever else the machine does meets them alike. In a
round each one calls every size for --seconds seconds, back to back and out of place, and gives the
median call of rank 0; the table has the median over rounds and, in brackets, the least and the most. A
rival that is not there (no mpicc at build time, no torch) is left out and named.
"""

import argparse
import importlib.util
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

MAX_CALLS, MIN_CALLS = 2000, 5


def parse_bytes(text):
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    unit = units.get(text[-1:].upper(), 1)
    return int(text[:-1] if unit > 1 else text) * unit


def size_text(size):
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if size % unit == 0:
            return f"{size // unit} {name}"
    return f"{size} B"


def sizes_of(args):
    size = args.min
    while size <= args.max:
        yield size
        size *= args.factor


def gloo_worker(args):
    """One rank of the Gloo measurement; rank 0 prints a line per size: bytes, calls, median."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for size in sizes_of(args):
        tensor = torch.empty(size // 4)

        def call():
            start = time.perf_counter()
            dist.all_reduce(tensor)
            return time.perf_counter() - start

        tensor.fill_(1.0)
        call()
        if not bool((tensor == dist.get_world_size()).all()):
            sys.exit(f"gloo: wrong sum at {size} bytes")
        tensor.fill_(0.0)  # sums of sums would overflow
        calls = torch.tensor([args.seconds / call()])
        dist.broadcast(calls, 0)
        count = int(min(max(calls.item(), MIN_CALLS), MAX_CALLS))
        times = [call() for _ in range(count)]
        if dist.get_rank() == 0:
            print(size, count, statistics.median(times) * 1e6, flush=True)
    dist.barrier()
    dist.destroy_process_group()


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def run(command, environment=None):
    result = subprocess.run(command, env=environment, text=True, capture_output=True, check=False)
    if result.returncode != 0:
        sys.exit(f"{' '.join(map(str, command))}\nended with {result.returncode}:\n"
                 f"{result.stdout}{result.stderr}")
    return result.stdout


def parse_lines(text):
    rows = (line.split() for line in text.splitlines())
    return {int(row[0]): float(row[2]) for row in rows if len(row) == 3}


def run_scape(args):
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        run([args.build / "bin/scape_all_reduce_perf", "-g", str(args.ranks), "-b", str(args.min),
             "-e", str(args.max), "-f", str(args.factor), "--seconds", str(args.seconds),
             "-J", file.name])
        results = json.load(open(file.name, encoding="utf-8"))["results"]
    return {row["size"]: row["out_of_place"]["median_us"] for row in results}


def run_mpi(args):
    command = ["mpirun", "-n", str(args.ranks)]
    if os.geteuid() == 0:
        command.insert(1, "--allow-run-as-root")
    if args.ranks > os.cpu_count():
        command.insert(1, "--oversubscribe")
    return parse_lines(run(command + [args.build / "bin/mpi_all_reduce", str(args.min),
                                      str(args.max), str(args.factor), str(args.seconds)]))


def run_gloo(args):
    environment = dict(os.environ, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()),
                       WORLD_SIZE=str(args.ranks), OMP_NUM_THREADS="1")
    command = [sys.executable, __file__, "--gloo-worker", "--min", str(args.min), "--max",
               str(args.max), "--factor", str(args.factor), "--seconds", str(args.seconds)]
    workers = [subprocess.Popen(command, env=dict(environment, RANK=str(rank)), text=True,
                                stdout=subprocess.PIPE, stderr=subprocess.PIPE)
               for rank in range(args.ranks)]
    outputs = [worker.communicate() for worker in workers]
    for worker, (_, errors) in zip(workers, outputs):
        if worker.returncode != 0:
            sys.exit(f"gloo worker ended with {worker.returncode}:\n{errors}")
    return parse_lines(outputs[0][0])


def contenders(args):
    """Name and function of each, Scape first; those that cannot run are named on stderr."""
    found = [("Scape", run_scape)]
    if shutil.which("mpirun") and (args.build / "bin/mpi_all_reduce").exists():
        version = run(["mpirun", "--version"]).split("\n")[0].split()[-1]
        found.append((f"Open MPI {version}", run_mpi))
    else:
        print("no Open MPI: install libopenmpi-dev and build again", file=sys.stderr)
    if importlib.util.find_spec("torch"):
        from torch import __version__ as torch_version
        found.append((f"Gloo (torch {torch_version.split('+')[0]})", run_gloo))
    else:
        print("no Gloo: run this script with a Python that has torch", file=sys.stderr)
    return found


def cell(values, digits=1):
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f}–{max(values):.{digits}f})"


def markdown(args, samples):
    names = list(samples)
    lines = ["| size | " + " | ".join(f"{name}, µs" for name in names) + " | Scape / better rival |",
             "|" + "---:|" * (len(names) + 2)]
    for size in sizes_of(args):
        rivals = [statistics.median(samples[name][size]) for name in names[1:]]
        ratio = statistics.median(samples[names[0]][size]) / min(rivals) if rivals else float("nan")
        lines.append(f"| {size_text(size)} | " +
                     " | ".join(cell(samples[name][size]) for name in names) + f" | {ratio:.2f} |")
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=Path, default=Path("build/release"), help="build folder")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--min", type=parse_bytes, default="4K")
    parser.add_argument("--max", type=parse_bytes, default="256M")
    parser.add_argument("--factor", type=int, default=4, help="between sizes")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=0.2, help="per size and round")
    parser.add_argument("--json", type=Path, help="file for all samples")
    parser.add_argument("--gloo-worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.gloo_worker:
        gloo_worker(args)
        return

    entries = contenders(args)
    samples = {name: {size: [] for size in sizes_of(args)} for name, _ in entries}
    for turn in range(args.rounds):
        # Nobody always runs first, or always after the same neighbour.
        for name, measure in entries[turn % len(entries):] + entries[:turn % len(entries)]:
            print(f"round {turn + 1} of {args.rounds}: {name}", file=sys.stderr)
            for size, time_us in measure(args).items():
                samples[name][size].append(time_us)
    print(markdown(args, samples))
    if args.json:
        args.json.write_text(json.dumps(samples, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
