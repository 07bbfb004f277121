#!/usr/bin/env python3
"""Masked against dense all-reduce on this host, over sizes and sparsities, with where the time goes.

    perf/compare_masked.py --build build/release

Each round measures, per size: the dense call; per sparsity the masked call back to back, where every
call waits for the refresh of its mask, and again with a pause of twice the refresh between calls, as
training's forward and backward leave. The table has medians over rounds of the mean in-place call.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from compare_dense import parse_bytes, size_text, sizes_of


def measure(args, size, *options):
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        command = [args.build / "bin/scape_all_reduce_perf", "-g", str(args.ranks), "-b", str(size),
                   "-n", str(args.iterations), "-w", "2", "-c", "0", "-J", file.name,
                   *options]
        result = subprocess.run(command, text=True, capture_output=True, check=False)
        if result.returncode != 0:
            sys.exit(f"{' '.join(map(str, command))}\nended with {result.returncode}:\n"
                     f"{result.stdout}{result.stderr}")
        return json.load(open(file.name, encoding="utf-8"))["results"][0]["in_place"]


def median(samples, *path):
    values = []
    for sample in samples:
        for key in path:
            sample = sample[key]
        values.append(sample)
    return statistics.median(values)


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=Path, default=Path("build/release"), help="build folder")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--min", type=parse_bytes, default="1M")
    parser.add_argument("--max", type=parse_bytes, default="64M")
    parser.add_argument("--factor", type=int, default=8, help="between sizes")
    parser.add_argument("--sparsity", type=float, nargs="+", default=[0.9, 0.99, 0.999])
    parser.add_argument("--role", default="gradient", choices=["gradient", "fused"])
    parser.add_argument("--iterations", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()

    dense = {size: [] for size in sizes_of(args)}
    tight = {(size, s): [] for size in sizes_of(args) for s in args.sparsity}
    paced = {key: [] for key in tight}
    for turn in range(args.rounds):
        for size in sizes_of(args):
            print(f"round {turn + 1} of {args.rounds}: {size_text(size)}", file=sys.stderr)
            dense[size].append(measure(args, size))
            for s in args.sparsity:
                masked = ["-s", str(s), "--role", args.role]
                tight[size, s].append(measure(args, size, *masked))
                pause = int(2 * tight[size, s][-1]["split_us"]["refresh"])
                paced[size, s].append(measure(args, size, *masked, "--compute-us", str(pause)))

    print("| size | sparsity | dense, µs | masked, µs | of it pack | exchange | unpack | score | wait |"
          " refresh beside it | back to back, µs | wire bytes, masked / dense |")
    print("|" + "---:|" * 12)
    for size in sizes_of(args):
        for s in args.sparsity:
            runs = paced[size, s]
            split = [f"{median(runs, 'split_us', part):.0f}"
                     for part in ("pack", "exchange", "unpack", "score", "wait", "refresh")]
            wire = median(runs, "wire_bytes") / max(median(dense[size], "wire_bytes"), 1)
            print(f"| {size_text(size)} | {s:g} | {median(dense[size], 'time_us'):.0f} |"
                  f" {median(runs, 'time_us'):.0f} | {' | '.join(split)} |"
                  f" {median(tight[size, s], 'time_us'):.0f} | {wire:.4f} |")


if __name__ == "__main__":
    main()
