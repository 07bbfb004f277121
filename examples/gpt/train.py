#!/usr/bin/env python3
"""Trains a small GPT on real text, with dense or sparse gradient exchange.

    LD_PRELOAD=/path/to/libscape_nccl.so torchrun --nproc_per_node 2 \\
        examples/gpt/train.py --optimizer scape-adams --sparsity 0.9

Without the preloaded library it trains dense (over Gloo where there are several ranks) and says so.
"""

import argparse
import json
import math
import os
import sys
import time

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, HERE)
try:
    import scape
except ImportError:  # not installed: take the package of this source tree
    sys.path.insert(0, os.path.join(HERE, "..", "..", "python"))
    import scape

import torch

import data
from model import Gpt
from scape import distributed
from scape.flat import FlatBucket


class DenseAdamW:
    """torch's AdamW over one flat buffer per parameter group, with a dense all-reduce of it: what
    Scape is compared to, through the same NCCL calls.
    """

    is_sparse = False

    def __init__(self, groups, communicator, lr, betas, eps):
        self.communicator = communicator
        self._flat = [FlatBucket(group["params"]) for group in groups]
        for flat in self._flat:
            communicator.broadcast(flat.param, root=0)
            flat.param.grad = flat.grad
        self._adamw = torch.optim.AdamW(
            [
                {"params": [flat.param], "weight_decay": group["weight_decay"]}
                for flat, group in zip(self._flat, groups)
            ],
            lr=lr,
            betas=betas,
            eps=eps,
            fused=True,
        )
        self.param_groups = self._adamw.param_groups

    def all_reduce(self):
        for flat in self._flat:
            self.communicator.all_reduce(flat.grad, "avg")

    def step(self):
        self._adamw.step()

    def zero_grad(self):
        self._adamw.zero_grad(set_to_none=False)


def positive(text):
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value}: must be 1 or more")
    return value


def parse_arguments():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add = parser.add_argument
    add("--optimizer", choices=("adamw", "adams", "scape-adams"), default="scape-adams")
    add("--sparsity", type=float, default=0.9, help="fraction of the gradient NOT sent (0.9)")
    add("--payload", choices=("fp32", "bf16"), default="fp32", help="type that values travel in")
    add(
        "--residual",
        choices=("in_place", "internal", "host"),
        default="in_place",
        help="where what was not sent waits: in the gradients, which nothing here clips or scales,"
        " in the library, or there in host memory",
    )
    add("--steps", type=positive, default=600)
    add("--batch", type=positive, default=8, help="sequences per rank and step (8)")
    add("--context", type=positive, default=128, help="bytes per sequence (128)")
    add("--width", type=positive, default=128)
    add("--layers", type=positive, default=4)
    add("--heads", type=positive, default=4)
    add("--lr", type=float, default=2e-3)
    add("--lr-warmup", type=float, default=0.05, help="fraction of the run with rising lr (0.05)")
    add("--weight-decay", type=float, default=0.1)
    add("--dense-steps", type=int, default=0, help="dense warm-up; 0: 1 %% of the run")
    add("--ramp-steps", type=int, default=0, help="end of the ramp; 0: 10 %% of the run")
    add("--seed", type=int, default=0)
    add(
        "--data",
        nargs="+",
        metavar="FOLDER",
        help="text to train on; default: Python's own sources",
    )
    add("--max-bytes", type=positive, default=24_000_000, help="read at most so much text (24 MB)")
    add("--log-every", type=positive, default=20)
    add("--eval-every", type=positive, default=100)
    add("--eval-windows", type=positive, default=256, help="windows of the final validation (256)")
    add(
        "--json",
        metavar="FILE",
        help="write one JSON object per line: config, steps, evals, summary",
    )
    add("--threads", type=positive, default=1, help="torch threads per rank (1)")
    return parser.parse_args()


def learning_rate(args, step):
    """Linear warm-up, then a cosine down to a tenth."""
    warmup = max(1, round(args.lr_warmup * args.steps))
    if step < warmup:
        return args.lr * (step + 1) / warmup
    progress = (step - warmup) / max(1, args.steps - warmup)
    return args.lr * (0.1 + 0.45 * (1 + math.cos(math.pi * progress)))


def make_optimizer(args, model, communicator):
    groups = [
        {
            "params": [p for p in model.parameters() if p.dim() > 1],
            "weight_decay": args.weight_decay,
        },
        {"params": [p for p in model.parameters() if p.dim() <= 1], "weight_decay": 0.0},
    ]
    common = dict(lr=args.lr, betas=(0.9, 0.95), eps=1e-8, communicator=communicator)
    if args.optimizer == "adamw":
        return DenseAdamW(groups, **common)
    return scape.AdamS(
        groups,
        **common,
        sparsity=args.sparsity,
        payload=args.payload,
        residual=args.residual,
        total_steps=args.steps,
        dense_steps=args.dense_steps,
        ramp_steps=args.ramp_steps,
        use_scape=None if args.optimizer == "scape-adams" else False,
    )


def sent_bytes():
    """Bytes that this process's transports have sent; None where nobody counts them."""
    return None if scape.version() is None else scape.stats().wire_bytes_sent


class Mean:
    """Means over the ranks of a few numbers, by one small all-reduce."""

    def __init__(self, communicator):
        self._communicator = communicator

    def __call__(self, *values):
        tensor = torch.tensor(values, dtype=torch.float64)
        self._communicator.all_reduce(tensor, "sum")
        return [value / self._communicator.size for value in tensor.tolist()]


@torch.no_grad()
def validate(model, text, args, windows, communicator, mean):
    losses = [
        model(inputs, targets).item() * len(inputs)
        for inputs, targets in data.validation_batches(
            text, windows, args.batch, args.context, communicator.rank, communicator.size
        )
    ]
    return mean(sum(losses))[0] * communicator.size / windows


class Log:
    """Progress on the first rank's stdout, and the JSON file."""

    def __init__(self, args, rank):
        self._main = rank == 0
        self._file = open(args.json, "w") if self._main and args.json else None

    def say(self, text):
        if self._main:
            # One write, so that lines of the library, on stderr, do not fall into it.
            sys.stdout.write(text + "\n")
            sys.stdout.flush()

    def record(self, event, **fields):
        if self._file:
            self._file.write(json.dumps({"event": event, **fields}) + "\n")
            self._file.flush()


def train(args):
    # The model is on the CPU, so NCCL's calls must be served there, GPU or not. The library reads
    # its settings at its first use, which comes later.
    os.environ.setdefault("SCAPE_MODE", "host")
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    communicator = distributed.from_env()
    mean = Mean(communicator)
    log = Log(args, communicator.rank)
    folders = args.data or data.default_folders()
    train_text, validation_text, documents = data.load(folders, args.max_bytes)
    model = Gpt(args.width, args.layers, args.heads, args.context)
    optimizer = make_optimizer(args, model, communicator)

    parameters = sum(p.numel() for p in model.parameters())
    vectors = sum(p.numel() for p in model.parameters() if p.dim() <= 1)
    transport = "Scape's NCCL" if scape.version() else type(communicator).__name__
    exchange = f"sparse, {args.sparsity:.2%} not sent" if optimizer.is_sparse else "dense"
    log.say(
        f"{args.optimizer}: {parameters:,} parameters ({vectors / parameters:.2%} in vectors), "
        f"{communicator.size} ranks over {transport}, "
        f"{exchange}"
    )
    log.say(
        f"text: {documents} files from {', '.join(folders)}; {len(train_text) / 1e6:.1f} MB to"
        f" train, {len(validation_text) / 1e6:.2f} MB held out"
    )
    log.record("config", parameters=parameters, ranks=communicator.size, **vars(args))

    # Bytes and times are averaged from here on: the end of the ramp, or of dense warm-up.
    settled = min(args.ramp_steps or max(1, round(0.1 * args.steps)), args.steps - 1)
    sums, counted, bytes_at_start, overlaps = [0.0] * 4, 0, None, []
    bytes_before = sent_bytes()
    started = time.perf_counter()
    for step in range(args.steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(args, step)
        inputs, targets = data.train_batch(
            train_text, step, communicator.rank, args.seed, args.batch, args.context
        )
        marks = [time.perf_counter()]
        loss = model(inputs, targets)
        loss.backward()
        marks.append(time.perf_counter())
        # Also where ranks wait for the slowest, so that the next mark times the exchange alone.
        train_loss = mean(loss.item())[0]
        marks.append(time.perf_counter())
        optimizer.all_reduce()
        marks.append(time.perf_counter())
        optimizer.step()
        optimizer.zero_grad()
        marks.append(time.perf_counter())
        parts = [after - before for before, after in zip(marks, marks[1:])]

        bytes_now = sent_bytes()
        overlap = mask_overlap(optimizer)
        if step == settled:
            bytes_at_start = bytes_before
        if step >= settled:
            sums = [total + part for total, part in zip(sums, parts)]
            counted += 1
            if overlap is not None:
                overlaps.append(overlap)
        fields = dict(zip(("compute_s", "wait_s", "exchange_s", "optimizer_s"), parts))
        if bytes_now is not None:
            fields["sent_bytes"] = bytes_now - bytes_before
        log.record(
            "step", step=step, loss=train_loss, lr=group["lr"], mask_overlap=overlap, **fields
        )
        if not math.isfinite(train_loss):
            raise SystemExit(f"the loss is {train_loss} in step {step}: try a lower --lr")
        if step % args.log_every == 0 or step == args.steps - 1:
            sent = "" if bytes_now is None else f"  sent {(bytes_now - bytes_before) / 1e3:9.1f} kB"
            log.say(
                f"step {step:5d}/{args.steps}  loss {train_loss:.4f}  {sum(parts) * 1e3:7.1f} ms "
                f"(compute {parts[0] * 1e3:.1f}, wait {parts[1] * 1e3:.1f}, exchange "
                f"{parts[2] * 1e3:.2f}, optimizer {parts[3] * 1e3:.2f}){sent}"
            )
        bytes_before = bytes_now
        if (step + 1) % args.eval_every == 0 and step + 1 < args.steps:
            windows = max(communicator.size, args.eval_windows // 4)
            value = validate(model, validation_text, args, windows, communicator, mean)
            log.record("eval", step=step + 1, loss=value)
            log.say(f"step {step + 1:5d}/{args.steps}  validation loss {value:.4f}")

    per_step = mean(*(total / counted for total in sums))
    sent = None
    if bytes_at_start is not None:
        sent = mean((bytes_before - bytes_at_start) / counted)[0]
    final = validate(model, validation_text, args, args.eval_windows, communicator, mean)
    log.record("eval", step=args.steps, loss=final)
    flushed = None
    if optimizer.is_sparse:
        # As before a last checkpoint: what has waited is sent and applied.
        optimizer.flush()
        flushed = validate(model, validation_text, args, args.eval_windows, communicator, mean)
    summary = dict(
        validation_loss=final,
        validation_loss_flushed=flushed,
        compute_s=per_step[0],
        wait_s=per_step[1],
        exchange_s=per_step[2],
        optimizer_s=per_step[3],
        step_s=sum(per_step),
        sent_bytes_per_step=sent,
        measured_steps=counted,
        mask_overlap=sum(overlaps) / len(overlaps) if overlaps else None,
        sparse=optimizer.is_sparse,
        wall_s=time.perf_counter() - started,
    )
    if optimizer.is_sparse:
        counters = scape.stats()
        summary["counters"] = counters.as_dict()
        if counters.fallback_calls or counters.skipped_steps:
            log.say(
                f"note: {counters.fallback_calls} calls fell back to dense, "
                f"{counters.skipped_steps} steps were skipped"
            )
    log.record("summary", **summary)
    bytes_text = "not counted" if sent is None else f"{sent:,.0f}"
    after = "" if flushed is None else f" ({flushed:.4f} after a flush)"
    log.say(
        f"validation loss {final:.4f}{after}; bytes sent per step and rank after warm-up:"
        f" {bytes_text}"
    )


def mask_overlap(optimizer):
    """The share of the last mask's elements that the mask before had; None where all is sent."""
    if not optimizer.is_sparse:
        return None
    stats = scape.stats(max((grad for _, grad in optimizer.buckets), key=len))
    if stats.mask_elements == stats.buffer_elements:
        return None
    return stats.mask_overlap / stats.mask_elements


if __name__ == "__main__":
    train(parse_arguments())
