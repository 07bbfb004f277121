"""Without the library in the process (F03): helpers say so, training is dense or stops."""

import os
import subprocess
import sys

import pytest

import scape
from conftest import assert_all_ended_well, clean_environment, run_ranks

TRAIN = """
import torch, scape
p = torch.nn.Parameter(torch.ones(4, 4))
optimizer = scape.AdamS([p], lr=0.1, sparsity=0.9)
print("made", optimizer.is_sparse)
(p * p).sum().backward()
optimizer.step()
print("stepped", p.detach().unique().numel())
"""


def run(code, **environment):
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**clean_environment(), **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_helpers_say_so():
    assert scape.is_active() is False
    assert scape.version() is None
    import torch

    for call in (
        scape.require,
        scape.stats,
        scape.save_state,
        lambda: scape.next_call("x"),
        lambda: scape.load_state(b""),
        lambda: scape.register(torch.zeros(8)),
        lambda: scape.read_mask(torch.zeros(8)),
        lambda: scape.flush(torch.zeros(8), torch.zeros(8)),
    ):
        with pytest.raises(scape.ScapeError, match="LD_PRELOAD") as caught:
            call()
        assert caught.value.status == scape.Status.INACTIVE


def test_training_is_dense_and_says_so_once():
    result = run(TRAIN + "scape.AdamS([torch.nn.Parameter(torch.ones(2, 2))], sparsity=0.9)\n")
    assert result.returncode == 0, result.stderr
    assert result.stdout == "made False\nstepped 1\n"
    assert result.stderr.count("AdamS trains dense") == 1
    assert "LD_PRELOAD" in result.stderr


def test_required_stops_before_the_first_step():
    result = run(TRAIN, SCAPE_REQUIRED="1")
    assert result.returncode != 0
    assert result.stdout == ""
    assert "libscape_nccl.so is not in the process" in result.stderr


# None: unset. The words are the library's own.
REQUIRED = {None: False, "0": False, "off": False, "false": False, "1": True, "on": True, "true": True}
INVALID = ("tomato", "True", "yes", "2", "ON", " 1", "0 ", "10", "one", "")


@pytest.mark.parametrize("language", [("c", "c11"), ("c++", "c++17")])
def test_what_required_takes_in_c(language, root, tmp_path):
    source, program = tmp_path / "absent.c", str(tmp_path / "absent")
    source.write_text(
        '#include "scape/scape.h"\n'
        "int main(void) {\n"
        "  scape_registration registration;\n"
        "  float buffer[4];\n"
        "  return scape_register(buffer, 4, SCAPE_FLOAT32, NULL, &registration) == SCAPE_ERR_INACTIVE ? 0 : 2;\n"
        "}\n"
    )
    kind, standard = language
    command = [os.environ.get("SCAPE_TEST_CC", "cc"), "-x", kind, f"-std={standard}", "-Wall", "-Wextra", "-Werror"]
    subprocess.run([*command, "-I", f"{root}/include", str(source), "-o", program, "-ldl"], check=True)

    def outcome(word):
        environment = clean_environment() if word is None else {**clean_environment(), "SCAPE_REQUIRED": word}
        result = subprocess.run([program], env=environment, capture_output=True, text=True, timeout=60)
        return result.returncode, result.stderr

    for word, required in REQUIRED.items():
        status, err = outcome(word)
        assert status == required, word
        assert ("LD_PRELOAD" in err) == required and "not valid" not in err
    for word in INVALID:
        status, err = outcome(word)
        assert status == 1, word
        assert f'SCAPE_REQUIRED="{word}" is not valid (it takes 0, 1, on, off, true or false)' in err


def test_what_required_takes_in_python(monkeypatch):
    from scape import _library

    for word, required in REQUIRED.items():
        monkeypatch.delenv("SCAPE_REQUIRED", raising=False)
        if word is not None:
            monkeypatch.setenv("SCAPE_REQUIRED", word)
        assert _library.is_required() is required, word
    for word in INVALID:
        monkeypatch.setenv("SCAPE_REQUIRED", word)
        with pytest.raises(ValueError, match="it takes 0, 1, on, off, true or false") as caught:
            _library.is_required()
        assert repr(word) in str(caught.value)


def test_a_word_that_required_does_not_take_stops_before_the_first_step():
    result = run(TRAIN, SCAPE_REQUIRED="tomato")
    assert result.returncode != 0 and result.stdout == ""
    assert "SCAPE_REQUIRED is 'tomato'" in result.stderr


def test_a_missing_file_in_ld_preload_is_noticed():
    result = run(TRAIN, SCAPE_REQUIRED="on", LD_PRELOAD="/nowhere/libscape_nccl.so")
    assert result.returncode != 0 and result.stdout == ""


def test_asked_for_by_name_it_must_be_there():
    import torch

    with pytest.raises(scape.ScapeError, match="LD_PRELOAD"):
        scape.AdamS([torch.nn.Parameter(torch.ones(2, 2))], use_scape=True)


def test_host_tensors_are_not_handed_to_a_real_nccl():
    code = """
import torch
from scape import nccl
class Handle(nccl.Communicator):
    def __init__(self): self.rank, self.size, self._handle = 0, 1, None
try:
    Handle().all_reduce(torch.ones(4))
except nccl.NcclError as error:
    print(error)
"""
    assert "host memory" in run(code).stdout


def test_two_ranks_train_dense_over_gloo(tmp_path):
    results = run_ranks("worker_dense.py", 2, tmp_path)
    assert_all_ended_well(results)
    first, second = (open(tmp_path / f"{rank}.bin", "rb").read() for rank in (0, 1))
    assert first == second and len(first) > 0
    assert os.path.exists(tmp_path / "reference_matches")


@pytest.mark.parametrize("preloaded", [False, True])
@pytest.mark.parametrize("dead", [0, 1])
def test_a_rank_that_never_comes_is_named_in_time(dead, preloaded, library):
    results = run_ranks(
        "worker_meeting.py",
        3,
        dead,
        preload=library if preloaded else None,
        environment={"SCAPE_BOOTSTRAP_TIMEOUT": "4"},
        timeout=100,
    )
    for rank, (status, out, err) in enumerate(results):
        if rank != dead:
            assert status == 0, f"rank {rank}\n{out}\n{err}"
            assert f"rank {dead}" in out and "SCAPE_BOOTSTRAP_TIMEOUT" in out, out


def test_data_parallel_around_the_model_is_noticed():
    results = run_ranks("worker_parallel.py", 2)
    assert_all_ended_well(results)
    for _, out, err in results:
        for what in ("AdamS", "the wrapped optimizer"):
            assert err.count(f"{what} exchanges them again") == 1, err
        assert err.index("quiet") < err.index("exchanges the gradients"), err
