"""examples/gpt/train.py under scape-run and torchrun, with the real library."""

import json
import os
import subprocess
import sys

import pytest

from conftest import clean_environment

TINY = "--steps 40 --width 32 --layers 2 --heads 2 --batch 2 --context 32 --eval-windows 8".split()
TINY += "--max-bytes 3000000 --log-every 10 --eval-every 20".split()


def train(root, log, *arguments, launcher=(), **environment):
    result = subprocess.run(
        [
            sys.executable,
            *launcher,
            os.path.join(root, "examples/gpt/train.py"),
            *TINY,
            "--json",
            str(log),
        ]
        + list(arguments),
        env={**clean_environment(), **environment},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr}"
    records = [json.loads(line) for line in log.read_text().splitlines()]
    by_event = {}
    for record in records:
        by_event.setdefault(record["event"], []).append(record)
    return result, by_event


# By an address: not every machine knows its own name.
LOCAL = ("--standalone", "--local-addr=127.0.0.1")
TORCHRUN = ("-m", "torch.distributed.run", *LOCAL, "--nproc-per-node", "2")


def test_sparse_run_sends_a_fraction_of_the_dense_one(root, library, tmp_path):
    _, dense = train(
        root, tmp_path / "dense", "--optimizer", "adams", launcher=TORCHRUN, LD_PRELOAD=library
    )
    result, sparse = train(
        root,
        tmp_path / "sparse",
        "--optimizer",
        "scape-adams",
        "--sparsity",
        "0.9",
        launcher=(
            "-m",
            "scape.run",
            "--lib",
            library,
            "--required",
            "--nproc-per-node",
            "2",
            *(f"--torchrun-arg={argument}" for argument in LOCAL),
            "--",
        ),
    )
    dense, sparse_summary = dense["summary"][0], sparse["summary"][0]
    assert not dense["sparse"] and sparse_summary["sparse"]
    assert 0 < sparse_summary["sent_bytes_per_step"] <= dense["sent_bytes_per_step"] / 5
    assert sparse_summary["counters"]["fallback_calls"] == 0
    assert 0 <= sparse_summary["mask_overlap"] <= 1
    assert len(sparse["step"]) == 40 and "90.00% not sent" in result.stdout
    # It learns: bytes of text are far from uniform.
    assert sparse_summary["validation_loss"] < sparse["step"][0]["loss"] - 0.5


@pytest.mark.parametrize("optimizer", ["adamw", "scape-adams"])
def test_without_the_library_it_trains_dense(root, optimizer, tmp_path):
    result, records = train(root, tmp_path / "log", "--optimizer", optimizer)
    summary = records["summary"][0]
    assert not summary["sparse"] and summary["sent_bytes_per_step"] is None
    assert summary["validation_loss"] < records["step"][0]["loss"] - 0.5
    assert ("LD_PRELOAD" in result.stderr) == (optimizer == "scape-adams")


@pytest.mark.parametrize("option", ["--steps", "--batch", "--log-every", "--eval-windows"])
def test_counts_below_one_are_refused_in_a_line(option, root):
    command = [sys.executable, os.path.join(root, "examples/gpt/train.py"), option, "0"]
    result = subprocess.run(command, env=clean_environment(), capture_output=True, text=True)
    assert result.returncode == 2
    assert result.stderr.endswith(f"error: argument {option}: 0: must be 1 or more\n")
