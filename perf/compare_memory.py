#!/usr/bin/env python3
"""The masked all-reduce in shared memory: against the bytes it has to move, and dense rivals.

    perf/compare_memory.py --build build/release

Per number of ranks, in turns, --rounds times: Open MPI's, Gloo's and Scape's dense all-reduce, and per
sparsity the masked call in the fused role with an internal residual and --compute-ms of arithmetic
between calls, longer than a refresh takes. All times are medians of rank 0's calls. "x bytes" is the
call over the time of the bytes that docs/performance.md lists ("The bytes of a masked call"), which the
same processes take for as many bytes of a += b between the calls. The table has medians over rounds and,
in brackets, the least and the most.
"""

import argparse
import copy
import sys
from pathlib import Path

from compare_dense import cell, contenders, parse_bytes, size_text
from compare_masked import measure


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=Path, default=Path("build/release"), help="build folder")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--size", type=parse_bytes, default="256M")
    parser.add_argument("--sparsity", type=float, nargs="+", default=[0.9, 0.99])
    parser.add_argument("--compute-ms", type=int, nargs="+", default=[300, 600],
                        help="for each of --ranks: more ranks than cores need longer")
    parser.add_argument("--iterations", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    if len(args.compute_ms) != len(args.ranks):
        sys.exit(f"--compute-ms has {len(args.compute_ms)} values, --ranks {len(args.ranks)}; give as many")
    args.build = args.build.resolve()
    args.min = args.max = args.size
    args.factor, args.seconds = 2, 2

    rows = []
    for ranks, compute in zip(args.ranks, args.compute_ms):
        turn = copy.copy(args)
        turn.ranks = ranks
        dense = {name: [] for name, _ in contenders(turn)}
        masked = {sparsity: [] for sparsity in args.sparsity}
        for number in range(args.rounds):
            for name, run in contenders(turn):
                dense[name].append(run(turn)[args.size] / 1e3)
            for sparsity in args.sparsity:
                masked[sparsity].append(measure(turn, args.size, "-s", str(sparsity), "--role", "fused",
                                                "--compute-us", str(1000 * compute)))
            print(f"{ranks} ranks, round {number + 1} of {args.rounds}", file=sys.stderr, flush=True)
        for sparsity, runs in masked.items():
            rows.append((ranks, sparsity, dense, runs))

    names = list(rows[0][2])
    print(f"{size_text(args.size)} of fp32, ms\n")
    print(f"| ranks | sparsity | {' | '.join(name + ', dense' for name in names)} | masked | its bytes |"
          " x bytes | pack | exchange | unpack |")
    print("|" + "---:|" * (8 + len(names)))
    for ranks, sparsity, dense, runs in rows:
        split = [cell([run["split_us"][part] / 1e3 for run in runs])
                 for part in ("pack", "exchange", "unpack")]
        print(f"| {ranks} | {sparsity:g} | {' | '.join(cell(dense[name]) for name in names)} |"
              f" {cell([run['median_us'] / 1e3 for run in runs])} |"
              f" {cell([run['memory_us'] / 1e3 for run in runs])} |"
              f" {cell([run['median_us'] / run['memory_us'] for run in runs], 2)} | {' | '.join(split)} |")


if __name__ == "__main__":
    main()
