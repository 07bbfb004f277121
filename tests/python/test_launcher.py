"""scape-run: LD_PRELOAD is extended, never overwritten; settings and exit status pass through."""

import os
import re
import subprocess
import sys

import pytest

from conftest import clean_environment
from scape import run as launcher


@pytest.fixture
def libraries(tmp_path):
    """Paths of two empty libraries, A and B, and of an empty libscape_nccl.so."""
    source = tmp_path / "empty.c"
    source.write_text("typedef int empty;\n")
    paths = []
    for name in ("libA.so", "libB.so", "libscape_nccl.so"):
        path = str(tmp_path / name)
        compiler = os.environ.get("SCAPE_TEST_CC", "cc")
        subprocess.run([compiler, "-shared", "-fPIC", str(source), "-o", path], check=True)
        paths.append(path)
    return paths


def scape_run(*arguments, **environment):
    return subprocess.run(
        [sys.executable, "-m", "scape.run", *arguments],
        env={**clean_environment(), **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )


PRINT_PRELOAD = "import os; print(os.environ['LD_PRELOAD'])"


@pytest.mark.parametrize("separator", [" ", ":", "  ", " : "])
def test_entries_are_kept_in_order_and_ours_comes_last_once(libraries, separator):
    a, b, scape = libraries
    result = scape_run(
        "--no-torchrun",
        "--lib",
        scape,
        "--",
        sys.executable,
        "-c",
        PRINT_PRELOAD,
        LD_PRELOAD=f"{a}{separator}{b}",
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == f"{a}{separator}{b}:{scape}"
    # The loader took all of it: a missing entry would be one line of its own.
    assert result.stderr == ""


def test_an_entry_that_is_there_is_not_repeated(libraries):
    a, b, scape = libraries
    assert launcher.preload_with(scape, f"{a}:{scape} {b}") == f"{a}:{scape} {b}"
    assert launcher.preload_with(scape, f"{scape}:{a}:{scape}").split(":").count(scape) == 1
    assert launcher.preload_with(scape, "") == scape
    assert launcher.preload_with(scape, ":") == scape


def test_other_spellings_give_way_to_the_absolute_path(libraries, tmp_path, monkeypatch):
    a, _, scape = libraries
    monkeypatch.chdir(tmp_path)
    assert launcher.preload_with(scape, f"{a}:./libscape_nccl.so") == f"{a}:{scape}"
    link = tmp_path / "libnccl.so.2"
    link.symlink_to(scape)
    assert launcher.preload_with(scape, f"{link}:{a}") == f"{scape}:{a}"
    # A path that the loader would miss without a word that anybody reads.
    assert launcher.preload_with(scape, f"/nowhere/libscape_nccl.so:{a}") == f"{scape}:{a}"


def test_a_second_build_is_refused(libraries, tmp_path):
    _, _, scape = libraries
    other = tmp_path / "other"
    other.mkdir()
    copy = other / "libscape_nccl.so"
    copy.write_bytes(open(scape, "rb").read())
    with pytest.raises(launcher.LaunchError, match="names .* already"):
        launcher.preload_with(scape, str(copy))


def test_a_path_that_ld_preload_cannot_name_is_refused(tmp_path):
    with pytest.raises(launcher.LaunchError, match="blank or a colon"):
        launcher.preload_with("/opt/my libs/libscape_nccl.so", "")


def test_library_is_found_by_flag_variable_and_folder(libraries, tmp_path):
    _, _, scape = libraries
    assert launcher.find_library(scape, {}) == scape
    assert launcher.find_library(str(tmp_path), {}) == scape
    assert launcher.find_library(None, {"SCAPE_LIB": str(tmp_path)}) == scape
    with pytest.raises(launcher.LaunchError, match="SCAPE_LIB is /nowhere"):
        launcher.find_library(None, {"SCAPE_LIB": "/nowhere"})
    with pytest.raises(launcher.LaunchError, match="empty.c: that is no shared library"):
        launcher.find_library(str(tmp_path / "empty.c"), {})


def test_flags_become_variables(libraries):
    _, _, scape = libraries
    names = ("SCAPE_SPARSITY", "SCAPE_PAYLOAD", "SCAPE_MODE", "SCAPE_LOG", "SCAPE_REQUIRED", "X_Y")
    result = scape_run(
        "--no-torchrun",
        "--lib",
        scape,
        "--sparsity",
        "0.95",
        "--payload",
        "bf16",
        "--mode",
        "host",
        "--log",
        "info",
        "--required",
        "--set",
        "X_Y=a=b",
        "--",
        sys.executable,
        "-c",
        f"import os; print([os.environ[name] for name in {names!r}])",
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "['0.95', 'bf16', 'host', 'info', '1', 'a=b']"


def test_exit_status_is_the_commands(libraries):
    _, _, scape = libraries
    for status in (0, 3):
        result = scape_run("--no-torchrun", "--lib", scape, "--", "sh", "-c", f"exit {status}")
        assert result.returncode == status
    result = scape_run("--no-torchrun", "--lib", scape, "--", "/nowhere/program")
    assert result.returncode == 1 and "cannot start /nowhere/program" in result.stderr
    assert scape_run("--lib", scape).returncode == 2


def test_a_count_below_one_is_refused_in_a_line(libraries):
    _, _, scape = libraries
    for count in ("0", "-1"):
        result = scape_run("--nproc-per-node", count, "--lib", scape, "--", "x.py")
        assert result.returncode == 1 and result.stdout == ""
        assert re.fullmatch(f"scape-run: --nproc-per-node is {count}: must be 1 or more.*\n", result.stderr)


def test_ranks_get_the_preload_and_a_failure_fails_the_launch(libraries, tmp_path):
    _, _, scape = libraries
    script = tmp_path / "rank.py"
    script.write_text(
        "import os, pathlib, sys\n"
        "rank = os.environ['RANK']\n"
        "pathlib.Path(sys.argv[1], rank).write_text(os.environ['LD_PRELOAD'])\n"
        "sys.exit(int(sys.argv[2]))\n"
    )
    for status in (0, 5):
        result = scape_run(
            "--nproc-per-node",
            "2",
            "--torchrun-arg=--standalone",
            "--torchrun-arg=--local-addr=127.0.0.1",
            "--lib",
            scape,
            "--",
            str(script),
            str(tmp_path),
            str(status),
        )
        assert (result.returncode == 0) == (status == 0), result.stderr
        for rank in "01":
            assert (tmp_path / rank).read_text() == scape
            (tmp_path / rank).unlink()
