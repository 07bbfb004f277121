"""A rank of what happens to loaded state that is not taken, refused, or another optimizer's, and of
what registrations refuse; through the real library. Arguments: the cases, and a folder.
"""

import copy
import os
import pathlib
import stat
import sys

import torch

import scape
from scape import distributed

CASES, FOLDER = sys.argv[1].split(","), pathlib.Path(sys.argv[2])
RANK, SIZE = distributed.world_from_env()


class Run:
    """A matrix under AdamS, with gradients of its own kind on each rank."""

    def __init__(self, width=24, **options):
        torch.manual_seed(width)
        self.matrix = torch.nn.Parameter(torch.randn(40, width))
        options = {"sparsity": 0.9, "dense_steps": 2, "ramp_steps": 4, **options}
        self.optimizer = scape.AdamS([self.matrix], **options)
        self.steps = 0

    def step(self, count=1):
        for _ in range(count):
            generator = torch.Generator().manual_seed(100 * self.steps + RANK)
            (self.matrix * torch.randn(self.matrix.shape, generator=generator)).sum().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.steps += 1
        return self

    @property
    def buffer(self):
        return self.optimizer.buckets[0][1]

    def library_steps(self):
        return scape.stats(self.buffer).step

    def library_state(self):
        return self.optimizer.state_dict()["scape"]["library"]


def trained_state():
    run = Run().step(8)
    state = run.optimizer.state_dict()
    run.optimizer.close()
    return state


def assert_fresh():
    run = Run().step()
    assert run.library_steps() == 1, run.library_steps()
    assert scape.stats(run.buffer).sparse_calls == 0
    run.optimizer.close()


def refused(call, *parts, kind=(scape.ScapeError, ValueError)):
    """The call raises an error with these words."""
    try:
        result = call()
    except kind as error:
        assert all(part in str(error) for part in parts), (parts, str(error))
    else:
        raise AssertionError(f"not refused: {parts}: {result!r}")


def not_taken():
    """State that no call took goes with the optimizer that it was loaded for."""
    state = trained_state()
    run = Run()
    run.optimizer.load_state_dict(state)
    run.optimizer.close()
    assert_fresh()


def refused_at_the_call():
    """State that a call refuses, on one rank first, is kept on none."""
    state = trained_state()
    run = Run(rule="plain")
    run.optimizer.load_state_dict(state)
    refused(run.step, "", kind=RuntimeError)
    run.optimizer.close()
    assert_fresh()


def refused_at_loading():
    """What is refused when it is loaded changes nothing, in torch's part neither."""
    state = trained_state()

    def altered(**entries):
        result = copy.copy(state)
        result["scape"] = {**state["scape"], **entries}
        return result

    library = state["scape"]["library"]
    damaged = library.clone()
    damaged[-1] ^= 1
    smaller = copy.copy(state)
    smaller["param_groups"] = [{**state["param_groups"][0], "params": []}]
    bare = copy.copy(state)
    bare["param_groups"] = [{"params": [0]}]
    run = Run(lr=0.5).step(3)
    before = run.library_state()
    for wrong, *words in (
        (altered(library=damaged), "damaged"),
        (altered(library=library[:-5]), "it was cut"),
        (altered(library=torch.cat([library, library[:7]])), "something was appended"),
        (altered(library="abc"), "library part is 'abc'", "tensor of bytes"),
        (altered(library=torch.ones(10)), "tensor of bytes"),
        (altered(rank=1 - RANK), "each rank loads what it saved"),
        (altered(name="other"), "optimizer named 'other'", "name='other'"),
        (altered(step="5"), "step is '5'"),
        ({**state, "scape": {}}, "should hold rank, size, step, name, library"),
        ({**state, "scape": 3}, "its entry 'scape' is 3"),
        ({"scape": state["scape"]}, "no 'param_groups'"),
        (smaller, "groups have [0] parameters, the optimizer's [1]"),
    ):
        refused(lambda: run.optimizer.load_state_dict(wrong), *words)
        assert run.optimizer.param_groups[0]["lr"] == 0.5
        assert torch.equal(run.library_state(), before)
    wide = Run(width=25)
    wide_state = {**state, "scape": {**state["scape"], "name": "adams.2"}}
    refused(lambda: wide.optimizer.load_state_dict(wide_state), "shape (40, 24)", "(40, 25)")
    wide.optimizer.close()
    run.step()
    assert run.library_steps() == 4
    run.optimizer.close()
    assert_fresh()


def two_optimizers():
    """An optimizer's state holds its own buffers, and loading it moves no other's."""
    one, other = Run().step(6), Run().step(5)
    state_of_one = one.optimizer.state_dict()
    other.step()
    state_of_other = other.optimizer.state_dict()
    one.step(2)
    other.step(3)
    one.optimizer.load_state_dict(state_of_one)
    assert one.step().library_steps() == 7
    assert other.step().library_steps() == 10
    # Both, one after the other, before either is called.
    one.optimizer.load_state_dict(state_of_one)
    other.optimizer.load_state_dict(state_of_other)
    assert one.step().library_steps() == 7
    assert other.step().library_steps() == 7
    one.optimizer.close()
    other.optimizer.close()


def saved_before_the_call():
    """State that is saved again before a call has taken it is that state, once."""
    state = trained_state()
    run = Run().step(3)
    run.optimizer.load_state_dict(state)
    assert torch.equal(run.library_state(), state["scape"]["library"])
    run.step(2)
    assert run.library_steps() == 10
    run.optimizer.close()


def flushed_after_loading():
    """What was loaded is what a flush sends; where no step says in which communicator, it refuses."""
    for residual in ("internal", "in_place"):
        run = Run(residual=residual).step(8)
        state, matrix = run.optimizer.state_dict(), run.matrix.detach().clone()
        run.optimizer.flush()
        sent = run.matrix.detach().clone()
        assert not torch.equal(sent, matrix)
        moment = run.optimizer.state_dict()["state"][0]["exp_avg"]
        run.step(2)
        run.optimizer.load_state_dict(state)
        with torch.no_grad():
            run.matrix.copy_(matrix)
        run.optimizer.flush()
        assert torch.equal(run.matrix, sent)
        assert torch.equal(run.optimizer.state_dict()["state"][0]["exp_avg"], moment)
        run.optimizer.close()
        run = Run(residual=residual)
        run.optimizer.load_state_dict(state)
        refused(run.optimizer.flush, "the state loaded for buffer", "first all-reduce")
        run.optimizer.close()


def changed_values():
    """Of what was registered nothing may change in a run; a state brings its own values."""
    run = Run().step()
    group = run.optimizer.param_groups[0]
    for key, value in (("sparsity", 0.5), ("betas", (0.8, 0.9)), ("eps", 1e-3)):
        kept, group[key] = group[key], value
        refused(run.step, f"{key} of adams.0.matrices is {value}", "only lr and weight_decay")
        group[key] = kept
    run.optimizer.zero_grad()
    run.step(5)
    assert scape.stats(run.buffer).mask_elements < 0.15 * run.buffer.numel()
    run.optimizer.close()

    state = trained_state()
    again = Run(sparsity=0.5, betas=(0.7, 0.8))
    again.optimizer.load_state_dict(state)
    again.step(2)
    assert again.library_steps() == 10
    assert scape.stats(again.buffer).mask_elements < 0.15 * again.buffer.numel()
    again.optimizer.close()


def clipped():
    """The default keeps what waits from those who clip and clear gradients."""
    runs = [Run(name=name) for name in ("plain", "cleared")]
    for _ in range(10):
        for run in runs:
            generator = torch.Generator().manual_seed(100 * run.steps + RANK)
            (run.matrix * torch.randn(run.matrix.shape, generator=generator)).sum().backward()
            torch.nn.utils.clip_grad_norm_([run.matrix], 0.1)
            run.optimizer.step()
            run.steps += 1
        runs[0].optimizer.zero_grad()
        runs[1].matrix.grad.zero_()
    residuals = [scape.read_residual(run.buffer) for run in runs]
    assert residuals[0].abs().sum() > 0.1 and torch.equal(*residuals)
    assert torch.equal(runs[0].matrix, runs[1].matrix)
    for run in runs:
        run.optimizer.close()


def files():
    """A saved state goes where the path leads, and into regular files alone."""
    tensor = torch.zeros(10)
    with scape.register(tensor, name="kept"):
        state = scape.save_state()
        target, link, chain = FOLDER / "target", FOLDER / "link", FOLDER / "chain"
        link.symlink_to("target")
        chain.symlink_to(link)
        for path in (chain, link, str(link), os.fsencode(link)):  # the first: nothing there yet
            scape.save_state_file(path)
            assert link.is_symlink() and chain.is_symlink() and not target.is_symlink()
            assert target.read_bytes() == state
        target.chmod(0o600)
        scape.save_state_file(link)
        assert stat.S_IMODE(target.stat().st_mode) == 0o600
        scape.load_state_file(link)

        pipe = FOLDER / "pipe"
        os.mkfifo(pipe)
        alias = FOLDER / "alias"
        alias.symlink_to(pipe)
        for call in (scape.save_state_file, scape.load_state_file):
            refused(lambda: call(pipe), str(pipe), "is a pipe; name a regular file")
            refused(lambda: call(alias), "is a pipe; name a regular file")
            refused(lambda: call(FOLDER), "is a folder; name a regular file")
            refused(lambda: call("/dev/zero/"), "/dev/zero")
            refused(lambda: call("a\0b"), "path is 'a\\x00b'", "zero byte", kind=ValueError)
            refused(lambda: call(5.0), "path is 5.0", kind=ValueError)
            refused(lambda: call(""), "path is ''", kind=ValueError)
        assert stat.S_ISFIFO(pipe.stat().st_mode) and alias.is_symlink()
        ring = FOLDER / "ring"
        ring.symlink_to(ring)
        refused(lambda: scape.save_state_file(ring), str(ring))
    names = {entry.name for entry in FOLDER.iterdir()}
    assert names == {"target", "link", "chain", "pipe", "alias", "ring"}, names


def arguments():
    """Arguments of the functions over tensors, each refused by name and value."""
    tensor, meta = torch.zeros(64), torch.empty(2, 3, device="meta")
    for call, *words in (
        (lambda: scape.register([1, 2]), "tensor is [1, 2]", "torch tensor"),
        (lambda: scape.register(None), "tensor is None"),
        (lambda: scape.register(torch.zeros(0, 3)), "(0, 3) has no elements", "unregistered"),
        (lambda: scape.register(torch.zeros(4, 4).t()), "not contiguous"),
        (lambda: scape.register(tensor, name="a\0b"), "name is 'a\\x00b'", "zero byte"),
        (lambda: scape.register(tensor, name=""), "name is ''"),
        (lambda: scape.register(tensor, name=5), "name is 5"),
        (lambda: scape.register(tensor, role=["fused"]), "role is ['fused']", "one of fused"),
        (lambda: scape.register(tensor, sparsity=1 - 1e-16), "sparsity is 0.99999", "the most is"),
        (lambda: scape.register(tensor, sparsity="x"), "sparsity is 'x'", "must be a number"),
        (lambda: scape.register(tensor, beta1=[0]), "beta1 is [0]", "must be a number"),
        (lambda: scape.register(tensor, dense_steps=2**64 - 1), "dense_steps is 1844", "2^48"),
        (lambda: scape.register(tensor, ramp_steps=float("inf")), "ramp_steps is inf"),
        (lambda: scape.register(tensor, total_steps="a"), "total_steps is 'a'"),
        (lambda: scape.next_call(None), "name is None"),
        (lambda: scape.next_call("a\0b"), "zero byte"),
        (lambda: scape.stats([1]), "tensor is [1]"),
        (lambda: scape.stats(tensor, count=-1), "count is -1"),
        (lambda: scape.read_mask(3), "tensor is 3"),
        (lambda: scape.read_residual(tensor.reshape(8, 8).t()), "not contiguous"),
        (lambda: scape.adams_step(tensor, 5, 0.1), "param is 5"),
        (lambda: scape.adams_step(tensor, tensor, "a"), "lr is 'a': must be a number"),
        (lambda: scape.adams_step(tensor, tensor, 0.1, None), "weight_decay is None"),
        (lambda: scape.flush(5), "tensor is 5"),
        (lambda: scape.flush(tensor, tensor, lr=None), "lr is None: must be a number"),
        (lambda: scape.post_step(tensor, tensor, tensor, "a"), "lr is 'a'"),
        (lambda: scape.post_step(tensor, tensor, tensor, 0.1, offset=0.5), "offset is 0.5: must be a whole number"),
        (lambda: scape.register(meta), "tensor of shape (2, 3) is on the meta device", "no memory"),
        (lambda: scape.adams_step(tensor, meta, 0.1), "param of shape (2, 3) is on the meta device"),
        (lambda: scape.unregister(None), "registration is None", "register() returned"),
        (lambda: scape.clear_masked(5), "tensor is 5"),
        (lambda: scape.post_step(tensor, 1, tensor, 0.1), "before is 1"),
        (lambda: scape.load_state(5), "data is 5", "save_state()"),
        (lambda: scape.load_state(None), "data is None"),
    ):
        refused(call, *words)
    assert scape.stats(count=None).buffer_elements == 0


for case in CASES:
    globals()[case]()
