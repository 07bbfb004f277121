"""Where the package and the library under test are, and how to start ranks."""

import os
import random
import signal
import socket
import subprocess
import sys
from concurrent import futures

import pytest

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
sys.path.insert(0, os.path.join(ROOT, "python"))

from scape import run as launcher


@pytest.fixture(scope="session")
def root():
    """The source tree."""
    return ROOT


@pytest.fixture(scope="session")
def library():
    """libscape_nccl.so under test: SCAPE_LIB as ctest sets it, or the release build's."""
    try:
        return launcher.find_library()
    except launcher.LaunchError as error:
        pytest.fail(str(error))


def clean_environment():
    """This environment without what would steer a rank."""
    drop = ("LD_PRELOAD", "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in drop and not name.startswith("SCAPE_")
    }
    environment["PYTHONPATH"] = os.path.join(ROOT, "python")
    environment["OMP_NUM_THREADS"] = "1"
    environment["PYTHONFAULTHANDLER"] = "1"
    # Below the time that a test waits for its ranks: the library then says what it waits for.
    environment["SCAPE_TIMEOUT"] = "120"
    return environment


def free_port():
    """A port that nothing listens at, of those that the system gives to no connection by itself."""
    for port in random.sample(range(12000, 32000), 100):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
                return port
            except OSError:
                continue
    raise RuntimeError("no free port between 12000 and 32000")


def run_ranks(script, size, *arguments, preload=None, environment=None, timeout=280):
    """Starts `size` ranks of a script of this folder, as torchrun would. `preload`: the library of
    all ranks, or a list with one, or None, for each.

    Returns [(status, stdout, stderr)] in rank order. When one has not ended after `timeout` seconds
    all are ended, and where each was in its Python code is in its stderr.
    """
    base = clean_environment()
    base.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()), WORLD_SIZE=str(size))
    base.update(environment or {})
    preloads = preload if isinstance(preload, list) else [preload] * size
    sparse = [{"LD_PRELOAD": each, "SCAPE_MODE": "host"} if each else {} for each in preloads]
    ranks = [
        subprocess.Popen(
            [sys.executable, os.path.join(HERE, script), *map(str, arguments)],
            env={**base, **sparse[rank], "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]
    # Each rank's output is read all the while, so that none waits for a full pipe.
    with futures.ThreadPoolExecutor(size) as readers:
        outputs = [readers.submit(process.communicate) for process in ranks]
        if futures.wait(outputs, timeout=timeout).not_done:
            for process in ranks:
                process.send_signal(signal.SIGABRT)
            futures.wait(outputs, timeout=10)
            for process in ranks:
                process.kill()
    return [(process.returncode, *output.result()) for process, output in zip(ranks, outputs)]


def assert_all_ended_well(results):
    for rank, (status, out, err) in enumerate(results):
        assert status == 0, f"rank {rank} ended with {status}\n{out}\n{err}"
