#!/usr/bin/env python3
"""Same-host messages: the net plugin beside UCX and libfabric themselves, ucx_perftest and fi_pingpong.

    perf/compare_net.py --build build/release

For each network library (--over), scape_net_perf runs the plugin and the same loop over the library
itself in one run, in turns; ucx_perftest (tag_lat, tag_bw) or fi_pingpong (tagged) stand beside it where
they are found. All of them in turns, --rounds times, each of two processes on a core of its own, so that
whatever else the machine does meets them alike. The tables have medians and, in brackets, quartiles;
ratios are medians over rounds of what is divided within a round.
"""

import argparse
import json
import os
import random
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

# What each is called in the tables, and what its processes are told.
OVER = {
    "ucx-shm": ("ucp", {"SCAPE_NET": "ucx", "UCX_TLS": "shm,self"}),
    "ucx-tcp": ("ucp", {"SCAPE_NET": "ucx", "UCX_TLS": "tcp,self"}),
    "ofi-tcp": ("ofi", {"SCAPE_NET": "ofi", "FI_PROVIDER": "tcp"}),
    "ofi-shm": ("ofi", {"SCAPE_NET": "ofi", "FI_PROVIDER": "shm"}),
}


def parse_bytes(text):
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    unit = units.get(text[-1:].upper(), 1)
    return int(text[:-1] if unit > 1 else text) * unit


def size_text(size):
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if size and size % unit == 0:
            return f"{size // unit} {name}"
    return f"{size} B"


def sizes_of(args):
    size = args.min
    while size <= args.max:
        yield size
        size *= args.factor


def free_port():
    """One that the system gives nobody by itself: what is tried may have connections in their last state."""
    while True:
        port = random.randrange(15000, 30000)
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port


def run_pair(args, commands, environments, pause=0.0):
    """A process that receives and one that sends, each bound to its core, and what they print. Any failure
    ends the script."""
    started = []
    with tempfile.TemporaryFile("w+") as first, tempfile.TemporaryFile("w+") as second:
        files = (first, second)
        for i, (command, environment) in enumerate(zip(commands, environments)):
            core = args.cores[(i + 1) % len(args.cores)]
            started.append(subprocess.Popen(["taskset", "-c", str(core), *map(str, command)],
                                            env=dict(os.environ, **environment), text=True,
                                            stdout=files[i], stderr=subprocess.STDOUT))
            time.sleep(pause)
        deadline = time.monotonic() + args.timeout
        while any(process.poll() is None for process in started):
            failed = any(process.poll() not in (None, 0) for process in started)
            if failed or time.monotonic() > deadline:
                for process in started:
                    process.kill()
                    process.wait()
            time.sleep(0.02)
        outputs = []
        for file in files:
            file.seek(0)
            outputs.append(file.read())
    for process, output in zip(started, outputs):
        if process.returncode != 0:
            sys.exit(f"{' '.join(process.args)}\nended with {process.returncode}:\n" + "\n".join(outputs))
    return outputs


def run_net_perf(args, over):
    """{(size, connections): {carrier: {figure: median over the run's rounds}}}, and the device."""
    rival, environment = OVER[over]
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.json"
        command = [args.build / "bin/scape_net_perf", "-b", args.min, "-e", args.max, "-f", args.factor,
                   "--connections", ",".join(map(str, args.connections)), "--window", args.window,
                   "--slots", args.slots, "--rounds", args.turns, "--seconds", args.seconds, "--rival",
                   rival, "-J", results, "--id-file", f"{folder}/meet"]
        run_pair(args, [command, command],
                 [dict(environment, RANK=str(rank), WORLD_SIZE="2") for rank in (1, 0)])
        results = json.loads(results.read_text(encoding="utf-8"))
    figures = {}
    for row in results["results"]:
        carrier = "plugin" if row["carrier"] == "plugin" else "raw"
        figures.setdefault((row["size"], row["connections"]), {})[carrier] = {
            name: statistics.median(row[name]) for name in ("latency_us", "algbw_gbps", "rate_mmsgps")}
    return figures, results["device"]


def messages_for(args, us_each):
    return int(min(max(args.seconds * 1e6 / max(us_each, 0.1), 20), 1000000))


def run_ucx_perftest(args, over, device, raw):
    """{size: {figure: value}} of ucx_perftest, over the same device, with as many messages as take --seconds."""
    environment = dict(OVER[over][1])
    if device != "memory":
        environment["UCX_NET_DEVICES"] = device
    figures = {}
    for size in sizes_of(args):
        estimate = raw[size, args.connections[0]]["raw"]
        found = {}
        for test, figure, each in (("tag_lat", "latency_us", 2 * estimate["latency_us"]),
                                   ("tag_bw", "algbw_gbps", 1 / estimate["rate_mmsgps"])):
            count = messages_for(args, each)
            port = str(free_port())
            options = ["-t", test, "-s", str(size), "-n", str(count), "-w", str(max(count // 10, 10)),
                       "-f", "-v", "-p", port]
            if test == "tag_bw":
                options += ["-O", str(args.window)]
            out = run_pair(args, [["ucx_perftest", *options], ["ucx_perftest", "127.0.0.1", *options]],
                           [environment, environment], pause=0.3)[1]
            # iterations, median, average and overall latency, average and overall MiB/s, messages
            row = out.strip().splitlines()[-1].split(",")
            found[figure] = (float(row[1]) if test == "tag_lat" else float(row[5]) * (1 << 20) / 1e9)
        figures[size] = found
    return figures


def run_fi_pingpong(args, over, device, raw):
    """{size: {figure: value}} of fi_pingpong, whose bandwidth is that of single messages to and fro."""
    provider = {"tcp": "tcp;ofi_rxm"}.get(OVER[over][1]["FI_PROVIDER"], OVER[over][1]["FI_PROVIDER"])
    figures = {}
    for size in sizes_of(args):
        count = messages_for(args, 2 * raw[size, args.connections[0]]["raw"]["latency_us"])
        port = str(free_port())
        options = ["-e", "rdm", "-m", "tagged", "-p", provider, "-d", device, "-S", str(size), "-I", str(count)]
        out = run_pair(args, [["fi_pingpong", *options, "-B", port],
                              ["fi_pingpong", *options, "-P", port, "127.0.0.1"]], [{}, {}], pause=0.3)[1]
        # bytes, sent, acknowledged, total, time, MB/s, us a message, messages a second
        figures[size] = {"latency_us": float(out.strip().splitlines()[-1].split()[6])}
    return figures


BESIDE = {"ucp": ("ucx_perftest", run_ucx_perftest, "ucx-utils"),
          "ofi": ("fi_pingpong", run_fi_pingpong, "libfabric-bin")}


def cell(values, digits):
    if not values:
        return ""
    if len(values) == 1:
        return f"{values[0]:.{digits}f}"
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return f"{middle:.{digits}f} ({low:.{digits}f}–{high:.{digits}f})"


def collect(rounds, size, connections, carrier, figure):
    """One value a round; of `beside`, which knows one connection only, nothing for more."""
    values = []
    for figures, beside in rounds:
        row = beside.get(size, {}) if carrier == "beside" else figures[size, connections][carrier]
        if figure in row and (carrier != "beside" or connections == 1):
            values.append(row[figure])
    return values


def ratio(left, right):
    return f"{statistics.median(a / b for a, b in zip(left, right)):.3f}" if right else ""


def difference(left, right):
    return f"{statistics.median(a - b for a, b in zip(left, right)) * 1e3:+.0f}" if right else ""


def markdown(args, over, rounds):
    beside = BESIDE[OVER[over][0]][0]
    raw = {"ucp": "UCP", "ofi": "libfabric"}[OVER[over][0]]
    lines = [f"Over {over}, latency:", "",
             f"| size | connections | plugin, µs | {raw}, µs | {beside}, µs | plugin − {raw}, ns | plugin − {beside}, ns |",
             "|" + "---:|" * 7]
    keys = [(size, count) for count in args.connections for size in sizes_of(args)]
    for size, count in keys:
        plugin, own, other = (collect(rounds, size, count, carrier, "latency_us")
                              for carrier in ("plugin", "raw", "beside"))
        lines.append(f"| {size_text(size)} | {count} | {cell(plugin, 2)} | {cell(own, 2)} | {cell(other, 2)} | "
                     f"{difference(plugin, own)} | {difference(plugin, other)} |")
    lines += ["", f"Over {over}, bandwidth and messages a second:", "",
              f"| size | connections | plugin, GB/s | {raw}, GB/s | {beside}, GB/s | plugin / {raw} | plugin / {beside} | "
              f"plugin, million/s |",
              "|" + "---:|" * 8]
    for size, count in keys:
        plugin, own, other = (collect(rounds, size, count, carrier, "algbw_gbps")
                              for carrier in ("plugin", "raw", "beside"))
        rate = collect(rounds, size, count, "plugin", "rate_mmsgps")
        lines.append(f"| {size_text(size)} | {count} | {cell(plugin, 3)} | {cell(own, 3)} | {cell(other, 3)} | "
                     f"{ratio(plugin, own)} | {ratio(plugin, other)} | {cell(rate, 3)} |")
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=Path, default=Path("build/release"), help="build folder")
    parser.add_argument("--over", nargs="+", choices=OVER, default=list(OVER), metavar="LIBRARY",
                        help="of " + ", ".join(OVER))
    parser.add_argument("--min", type=parse_bytes, default="8")
    parser.add_argument("--max", type=parse_bytes, default="16M")
    parser.add_argument("--factor", type=int, default=8, help="between sizes")
    parser.add_argument("--connections", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--window", type=int, default=8, help="messages under way on a connection")
    parser.add_argument("--slots", type=int, default=1,
                        help="buffers that a connection's messages take in turns; the others have one")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--turns", type=int, default=3, help="of the plugin and its rival in a run")
    parser.add_argument("--seconds", type=float, default=0.05, help="of each figure and turn")
    parser.add_argument("--cores", type=int, nargs="+", default=sorted(os.sched_getaffinity(0))[:2])
    parser.add_argument("--timeout", type=float, default=300, help="seconds, of one program")
    parser.add_argument("--json", type=Path, help="file for all samples")
    args = parser.parse_args()

    for name, _, package in BESIDE.values():
        if shutil.which(name) is None:
            print(f"no {name}: install {package}", file=sys.stderr)
    rounds = {over: [] for over in args.over}
    for turn in range(args.rounds):
        for over in args.over:
            print(f"round {turn + 1} of {args.rounds}: {over}", file=sys.stderr)
            figures, device = run_net_perf(args, over)
            name, measure, _ = BESIDE[OVER[over][0]]
            beside = measure(args, over, device, figures) if shutil.which(name) else {}
            rounds[over].append((figures, beside))
    print("\n\n".join(markdown(args, over, rounds[over]) for over in args.over))
    if args.json:
        args.json.write_text(json.dumps({over: [{"net_perf": [{"size": size, "connections": count, **row}
                                                              for (size, count), row in figures.items()],
                                                 "beside": beside} for figures, beside in samples]
                                         for over, samples in rounds.items()}, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
