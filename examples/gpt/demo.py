#!/usr/bin/env python3
"""Trains the same small GPT four times on two ranks of this machine and compares the runs.

    examples/gpt/demo.py            # under 10 minutes on two cores
    examples/gpt/demo.py --quick    # under a minute: shows that all works, not how well
    examples/gpt/demo.py --hosts 4 --rate 1gbit    # on test hosts behind links of that rate (root)

Dense AdamW, dense AdamS, Scape at 90 % and at 99 % with equal seeds and data (and one learning rate
for all three AdamS runs), all through the
preloaded library, which counts what its transport sends. Ends with a table and loss.png, and with a
non-zero status when a run failed or Scape sent more than it promises.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

HERE = os.path.dirname(os.path.abspath(__file__))
try:
    from scape import run as launcher
except ImportError:  # not installed: take the package of this source tree
    sys.path.insert(0, os.path.join(HERE, "..", "..", "python"))
    from scape import run as launcher

# Each optimizer family has the learning rate that does well here: where gradients are mostly noise,
# AdamS's steps are about three times as long as AdamW's at the same rate.
ADAMW_LR = ["--lr", "2e-3"]
ADAMS_LR = ["--lr", "5e-4"]
# (title, arguments of train.py, largest share of dense AdamS's bytes).
RUNS = (
    ("dense AdamW", ["--optimizer", "adamw", *ADAMW_LR], None),
    ("dense AdamS", ["--optimizer", "adams", *ADAMS_LR], None),
    ("Scape 90 %", ["--optimizer", "scape-adams", "--sparsity", "0.9", *ADAMS_LR], 1 / 7),
    ("Scape 99 %", ["--optimizer", "scape-adams", "--sparsity", "0.99", *ADAMS_LR], 1 / 50),
)
BASELINE = 1  # dense AdamS
FULL = dict(width=128, layers=4, batch=4, context=128)
# On test hosts all compute shares this machine's cores, so there is less of it a step: what a rank
# of its own machine would be done with sooner.
HOSTS = dict(width=128, layers=4, batch=1, context=128)
QUICK = dict(width=64, layers=2, batch=4, context=64)
GBIT = 1e9 / 8


def launcher_of(args):
    """The command that train.py and its arguments are put behind."""
    if args.hosts:
        hosts = os.path.join(HERE, "..", "..", "perf", "hosts.sh")
        return [hosts, "-q", "-n", str(args.hosts), "-r", args.rate, "--", sys.executable]
    local = ["--standalone", "--local-addr", "127.0.0.1"]  # not every machine knows its own name
    torchrun = [sys.executable, "-m", "torch.distributed.run", *local]
    return [*torchrun, "--nproc-per-node", str(args.ranks)]


def train(command, arguments, environment, json_path, title):
    """Runs train.py behind `command` and passes its lines on. Returns its records by event."""
    command = [*command, os.path.join(HERE, "train.py"), *arguments, "--json", json_path]
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        for line in process.stdout:
            print(f"[{title}] {line}", end="", flush=True)
    if process.returncode != 0:
        raise SystemExit(f"demo: the run '{title}' failed with status {process.returncode}")
    records = {"step": [], "eval": []}
    with open(json_path) as file:
        for line in file:
            record = json.loads(line)
            event = record.pop("event")
            if event in records:
                records[event].append(record)
            else:
                records[event] = record
    return records


def seconds(step):
    """What a step took on the first rank."""
    return sum(step[part] for part in ("compute_s", "wait_s", "exchange_s", "optimizer_s"))


def fitting_steps(shape, environment, args, folder):
    """How many steps of four runs the time budget has room for on this machine: 200 to 2000."""
    probe = train(
        launcher_of(args),
        ["--optimizer", "adams", "--steps", "9", "--eval-windows", "8", *shape],
        environment,
        os.path.join(folder, "probe.json"),
        "timing this machine",
    )
    times = [seconds(step) for step in probe["step"][3:]]
    start_up_s = 15 * len(RUNS)
    room = (args.budget_s - start_up_s) / len(RUNS) / (1.25 * statistics.median(times))
    return int(min(2000, max(200, room // 50 * 50)))


def table(results, hosts):
    """The closing table, as text."""
    baseline = results[BASELINE]["summary"]["sent_bytes_per_step"]
    step_s = results[BASELINE]["summary"]["step_s"]
    header = (
        "run",
        "val loss",
        "flushed",
        "step ms",
        "compute",
        "wait",
        "exchange",
        "optimizer",
        "bytes/step",
    )
    header += ("ratio", "overlap")
    header += ("speed-up",) if hosts else ("1 Gbit/s", "10 Gbit/s", "100 Gbit/s")
    rows = [header]
    for (title, _, _), result in zip(RUNS, results):
        summary = result["summary"]
        sent = summary["sent_bytes_per_step"]
        overlap, flushed = summary["mask_overlap"], summary["validation_loss_flushed"]
        rows.append(
            (
                title,
                f"{summary['validation_loss']:.4f}",
                "-" if flushed is None else f"{flushed:.4f}",
                *(
                    f"{summary[part] * 1e3:.2f}"
                    for part in ("step_s", "compute_s", "wait_s", "exchange_s", "optimizer_s")
                ),
                f"{sent:,.0f}",
                "1" if sent == baseline else f"1/{baseline / sent:.1f}",
                "-" if overlap is None else f"{overlap:.2f}",
                *(
                    (f"{step_s / summary['step_s']:.2f}",)
                    if hosts
                    else (f"{sent / (rate * GBIT) * 1e3:.3f}" for rate in (1, 10, 100))
                ),
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(header))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths)) for row in rows]
    lines.insert(1, "-" * len(lines[0]))
    return "\n".join(lines)


def remarks(results, args):
    """What the table does and does not say."""
    settled = results[BASELINE]["summary"]
    lines = [
        (
            f"Times in ms and bytes are means over {args.ranks} ranks and the"
            f" {settled['measured_steps']} steps after warm-up and ramp."
        ),
        (
            "wait: for the slower rank; exchange: the all-reduce itself, nothing overlaps it;"
            " bytes/step: sent per rank, counted at the transport, masks and everything else"
            " included."
        ),
        "flushed: validation loss after a last dense step that sends what had waited.",
        "ratio: to dense AdamS. overlap: share of a mask's elements that the mask before had.",
    ]
    if args.hosts:
        lines.append(
            f"speed-up: steps a second against dense AdamS, measured on {args.hosts} test hosts"
            f" with links of {args.rate}. All of them share this machine's {os.cpu_count()} cores,"
            " which makes compute, and choosing what to send, slower than on hosts of their own."
        )
        return "\n".join(lines)
    costs = [
        f"{(result['summary']['exchange_s'] + result['summary']['optimizer_s']) * 1e3:.2f} ms"
        f" ({title})"
        for (title, _, _), result in zip(RUNS[BASELINE:], results[BASELINE:])
    ]
    lines += [
        (
            "1, 10, 100 Gbit/s: ms the exchange would take at that rate per rank. Computed from the"
            " bytes, without latency; not measured."
        ),
        (
            "All ranks are on one host, whose memory is the network: sending less saves little time"
            " there, and choosing what to send takes the cores that compute, so dense may well win"
            f" the wall clock here. Exchange and optimizer took {', '.join(costs)}. Between hosts"
            " the bytes count: see make demo-net."
        ),
    ]
    return "\n".join(lines)


def picture(results, path, hosts):
    """Loss against steps, and against bytes sent or, on test hosts, the time it took."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (by_step, by_cost) = plt.subplots(1, 2, figsize=(11, 4.2), sharey=True)
    for (title, _, _), result in zip(RUNS, results):
        losses = [step["loss"] for step in result["step"]]
        window = max(1, len(losses) // 25)
        smooth = [
            statistics.fmean(losses[max(0, i + 1 - window) : i + 1]) for i in range(len(losses))
        ]
        cost, total = [], 0
        for step in result["step"]:
            total += seconds(step) if hosts else step["sent_bytes"] / 1e6
            cost.append(total)
        (line,) = by_step.plot(smooth, label=title, linewidth=1.2)
        by_step.plot(
            [point["step"] for point in result["eval"]],
            [point["loss"] for point in result["eval"]],
            "o",
            color=line.get_color(),
            markersize=4,
        )
        by_cost.plot(cost, smooth, label=title, linewidth=1.2, color=line.get_color())
    by_step.set(xlabel="step", ylabel="loss, nats per byte (line: training, dots: validation)")
    if hosts:
        by_cost.set(xlabel="seconds of training, measured")
    else:
        by_cost.set(xlabel="megabytes sent per rank", xscale="log")
    by_step.legend()
    for axes in (by_step, by_cost):
        axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=130)


def broken_promises(results):
    """A line for each sparse run that was not sparse, or sent more than it may."""
    baseline = results[BASELINE]["summary"]["sent_bytes_per_step"]
    for (title, _, limit), result in zip(RUNS, results):
        summary = result["summary"]
        if limit is None:
            continue
        if not summary["sparse"]:
            yield f"{title}: the run was dense"
        elif summary["sent_bytes_per_step"] > limit * baseline:
            share = summary["sent_bytes_per_step"] / baseline
            yield f"{title}: sent {share:.2%} of dense AdamS's bytes, more than 1/{1 / limit:.0f}"


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a tiny model and few steps")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument(
        "--hosts", type=int, help="on so many test hosts, a rank on each, instead (root)"
    )
    parser.add_argument(
        "--rate", default="1gbit", help="of a test host's link, as tc writes it (1gbit)"
    )
    parser.add_argument("--steps", type=int, help="default: as many as the time has room for")
    parser.add_argument(
        "--budget-s", type=float, default=330, help="time for the four runs (330 s)"
    )
    parser.add_argument("--lib", help="libscape_nccl.so to preload; default: the one of this tree")
    parser.add_argument("--out", default=".", metavar="FOLDER", help="where loss.png goes (.)")
    args = parser.parse_args()
    if args.hosts:
        args.ranks = args.hosts

    started = time.monotonic()
    environment = dict(os.environ)
    # Torch is told its threads by train.py; this keeps torchrun from remarking on it.
    environment.setdefault("OMP_NUM_THREADS", "1")
    try:
        library = launcher.find_library(args.lib)
        environment["LD_PRELOAD"] = launcher.preload_with(
            library, environment.get("LD_PRELOAD", "")
        )
    except launcher.LaunchError as error:
        raise SystemExit(f"demo: {error}") from None
    environment["SCAPE_REQUIRED"] = "1"
    # The ranks stand for hosts: what they exchange is counted, so it goes through the transport.
    environment.setdefault("SCAPE_SHARED_MEMORY", "0")
    print(f"demo: preloads {library}")
    os.makedirs(args.out, exist_ok=True)

    shape = [
        text
        for name, value in (QUICK if args.quick else HOSTS if args.hosts else FULL).items()
        for text in (f"--{name}", str(value))
    ]
    with tempfile.TemporaryDirectory() as folder:
        steps = args.steps or (
            80 if args.quick else fitting_steps(shape, environment, args, folder)
        )
        where = f"test hosts, links of {args.rate}" if args.hosts else "ranks"
        print(f"demo: four runs of {steps} steps on {args.ranks} {where}", flush=True)
        shape += ["--steps", str(steps), "--eval-every", str(max(1, steps // 6))]
        shape += ["--log-every", str(max(1, steps // 30))]
        if args.quick:
            shape += ["--eval-windows", "64", "--max-bytes", "6000000"]
        results = [
            train(
                launcher_of(args),
                [*arguments, *shape],
                environment,
                os.path.join(folder, f"{index}.json"),
                title,
            )
            for index, (title, arguments, _) in enumerate(RUNS)
        ]
    path = os.path.abspath(os.path.join(args.out, "loss.png"))
    picture(results, path, args.hosts)
    print(f"\n{table(results, args.hosts)}\n\n{remarks(results, args)}")
    print(f"picture: {path}\ntook {time.monotonic() - started:.0f} s in all")
    broken = list(broken_promises(results))
    for line in broken:
        print(f"demo: {line}", file=sys.stderr)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
