"""A rank of masked training through the real library.

The first argument names the cases, separated by commas, that it runs one after another; what the
ranks saw is saved in the folder of the second, one file per case and rank, for the test to compare.
"""

import pathlib
import sys

import numpy as np
import torch

import scape
from adams_reference import ReferenceAdamS
from scape import distributed

CASES, FOLDER = sys.argv[1].split(","), pathlib.Path(sys.argv[2])
RANK, SIZE = distributed.world_from_env()
SHAPE = (37, 30)
OPTIONS = dict(
    lr=0.01,
    betas=(0.9, 0.95),
    weight_decay=0.1,
    sparsity=0.9,
    dense_steps=3,
    ramp_steps=6,
    ramp_sparsity=0.5,
)


def gradients(steps):
    """The same on all ranks: [step, rank, ...] for a matrix, and for a vector."""
    generator = torch.Generator().manual_seed(11)
    matrix = torch.randn(steps, SIZE, *SHAPE, generator=generator)
    # Magnitudes differ, as those of a model do.
    matrix *= torch.logspace(-2, 1, SHAPE[1])
    return matrix, torch.randn(steps, SIZE, 50, generator=generator)


def parameters(seed=5):
    torch.manual_seed(seed)
    return torch.nn.Parameter(torch.randn(SHAPE)), torch.nn.Parameter(torch.randn(50))


def backward(matrix, vector, step, data):
    (matrix * data[0][step, RANK]).sum().backward()
    (vector * data[1][step, RANK]).sum().backward()


def fused():
    matrix, vector = parameters()
    optimizer = scape.AdamS([matrix, vector], residual="in_place", **OPTIONS)
    assert optimizer.is_sparse
    buffer = dict(optimizer.buckets)["adams.0.matrices"]
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    data = gradients(24)
    masks, thetas, moments, residuals, ages = [], [], [], [], []
    for step in range(24):
        backward(matrix, vector, step, data)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        masks.append(scape.read_mask(buffer).numpy())
        ages.append(scape.read_ages(buffer).numpy())
        moments.append(scape.read_moment(buffer).numpy())
        residuals.append(buffer.clone().numpy())
        thetas.append(matrix.detach().clone().numpy())
        # In place: the library reads the residual where the optimizer keeps it.
        assert torch.equal(scape.read_residual(buffer), buffer)
    stats = scape.stats(buffer)
    assert stats.step == 24 and stats.intercepted_calls == 24
    assert stats.fallback_calls == 0
    if SIZE > 1:
        assert stats.sparse_calls == 24 - 3 and stats.dense_calls == 3
        assert stats.mask_elements < 0.12 * stats.buffer_elements
        assert stats.payload_bytes > 0 and scape.stats().wire_bytes_sent > 0
    np.savez(
        FOLDER / f"fused{RANK}.npz",
        masks=masks,
        thetas=thetas,
        moments=moments,
        residuals=residuals,
        ages=ages,
        vector=vector.detach().numpy(),
    )


def internal():
    """The residual inside the library: gradients from anywhere, the values of in place."""
    matrix, vector = parameters()
    optimizer = scape.AdamS([matrix, vector], **OPTIONS)
    twin_matrix, twin_vector = parameters()
    twin = scape.AdamS(
        [twin_matrix, twin_vector],
        communicator=optimizer.communicator,
        residual="in_place",
        name="twin",
        **OPTIONS,
    )
    data = gradients(14)
    for step in range(14):
        optimizer.zero_grad(set_to_none=True)
        backward(matrix, vector, step, data)
        optimizer.step()
        backward(twin_matrix, twin_vector, step, data)
        twin.step()
        twin.zero_grad()
    assert torch.equal(matrix, twin_matrix) and torch.equal(vector, twin_vector)
    residual = scape.read_residual(dict(optimizer.buckets)["adams.0.matrices"])
    assert torch.equal(residual, dict(twin.buckets)["twin.0.matrices"])


def place_by_environment():
    """SCAPE_RESIDUAL=inplace moves the default; an argument prevails over it."""
    matrix, vector = parameters()
    optimizer = scape.AdamS([matrix, vector], **OPTIONS)
    told_matrix, told_vector = parameters()
    told = scape.AdamS(
        [told_matrix, told_vector],
        communicator=optimizer.communicator,
        residual="host",
        name="told",
        **OPTIONS,
    )
    data = gradients(12)
    for step in range(12):
        backward(matrix, vector, step, data)
        optimizer.step()
        optimizer.zero_grad()
        backward(told_matrix, told_vector, step, data)
        told.step()
        told.zero_grad(set_to_none=False)
    assert torch.equal(matrix, told_matrix) and torch.equal(vector, told_vector)
    waiting = dict(optimizer.buckets)["adams.0.matrices"]
    apart = dict(told.buckets)["told.0.matrices"]
    assert waiting.any() and not apart.any()
    assert torch.equal(scape.read_residual(apart), waiting)


def resume():
    """State saved after 9 steps, loaded by new optimizers, goes on bit for bit."""
    matrix, vector = parameters()
    optimizer = scape.AdamS([matrix, vector], **OPTIONS)
    data = gradients(20)
    for step in range(9):
        backward(matrix, vector, step, data)
        optimizer.step()
        optimizer.zero_grad()
    torch.save(
        {"matrix": matrix, "vector": vector, "optimizer": optimizer.state_dict()},
        FOLDER / f"{RANK}.pt",
    )
    for step in range(9, 20):
        backward(matrix, vector, step, data)
        optimizer.step()
        optimizer.zero_grad()
    communicator = optimizer.communicator
    optimizer.close()

    saved = torch.load(FOLDER / f"{RANK}.pt")
    again_matrix, again_vector = parameters(seed=6)
    again = scape.AdamS([again_matrix, again_vector], communicator=communicator, **OPTIONS)
    assert [name for name, _ in again.buckets] == [name for name, _ in optimizer.buckets]

    if SIZE > 1:
        wrong = dict(saved["optimizer"], scape=dict(saved["optimizer"]["scape"], rank=1 - RANK))
        refused(
            lambda: again.load_state_dict(wrong), scape.Status.DATA, "each rank loads what it saved"
        )
        cut = dict(saved["optimizer"], scape=dict(saved["optimizer"]["scape"]))
        cut["scape"]["library"] = cut["scape"]["library"][:-5]
        refused(lambda: again.load_state_dict(cut), scape.Status.DATA, "")

    with torch.no_grad():
        again_matrix.copy_(saved["matrix"])
        again_vector.copy_(saved["vector"])
    again.load_state_dict(saved["optimizer"])
    for step in range(9, 20):
        backward(again_matrix, again_vector, step, data)
        again.step()
        again.zero_grad()
    assert torch.equal(again_matrix, matrix) and torch.equal(again_vector, vector)
    assert torch.equal(
        dict(again.buckets)["adams.0.matrices"], dict(optimizer.buckets)["adams.0.matrices"]
    )

    # And the same optimizer, taken back to where it was.
    with torch.no_grad():
        again_matrix.copy_(saved["matrix"])
        again_vector.copy_(saved["vector"])
    again.load_state_dict(saved["optimizer"])
    for step in range(9, 20):
        backward(again_matrix, again_vector, step, data)
        again.step()
        again.zero_grad()
    assert torch.equal(again_matrix, matrix)


def rules():
    """What zero_grad() and step() allow with the residual in place."""
    matrix, vector = parameters()
    optimizer = scape.AdamS([matrix, vector], residual="in_place", **OPTIONS)
    buffer = dict(optimizer.buckets)["adams.0.matrices"]
    data = gradients(12)
    for step in range(10):
        backward(matrix, vector, step, data)
        optimizer.step()
    held = buffer.clone()
    assert held.any()
    optimizer.zero_grad(set_to_none=True)
    assert matrix.grad is not None and torch.equal(buffer, held)

    # A gradient that is thrown away leaves the elements of the mask clear.
    mask = scape.read_mask(buffer)
    backward(matrix, vector, 10, data)
    assert buffer[mask].any()
    optimizer.zero_grad()
    assert not buffer[mask].any() and buffer[~mask].any()

    backward(matrix, vector, 11, data)
    optimizer.all_reduce()
    refused(optimizer.zero_grad, scape.Status.USAGE, "call it after step")
    matrix.grad.mul_(0.5)
    refused(optimizer.step, scape.Status.USAGE, "written between all_reduce")


def flush():
    """What waits is sent by one dense step; nothing is lost and ranks stay alike."""
    matrix, vector = parameters()
    optimizer = scape.AdamS([matrix, vector], residual="in_place", **OPTIONS)
    buffer = dict(optimizer.buckets)["adams.0.matrices"]
    data = gradients(10)
    for step in range(10):
        backward(matrix, vector, step, data)
        optimizer.step()
        optimizer.zero_grad()
    assert buffer.any()
    optimizer.flush()
    assert not buffer.any()
    np.savez(FOLDER / f"flush{RANK}.npz", theta=matrix.detach().numpy())


def hooked():
    """wrap(): a third-party AdamS; it is that AdamS while dense, and ranks stay alike."""
    matrix, vector = parameters()
    reference_matrix, reference_vector = parameters()
    options = dict(lr=0.01, weight_decay=0.1)
    optimizer = scape.wrap(
        ReferenceAdamS([matrix, vector], **options), sparsity=0.9, dense_steps=4, ramp_steps=8
    )
    assert optimizer.scape.is_sparse
    reference = ReferenceAdamS([reference_matrix, reference_vector], **options)
    # Large against eps: what rounding leaves of an m that was made zero would be whole steps.
    data = gradients(20)
    for step in range(20):
        optimizer.zero_grad()
        backward(matrix, vector, step, data)
        before = matrix.detach().clone()
        optimizer.step()
        if step < 4:
            reference_matrix.grad = data[0][step].mean(0)
            reference_vector.grad = data[1][step].mean(0)
            reference.step()
            torch.testing.assert_close(matrix, reference_matrix, rtol=1e-5, atol=1e-6)
    buffer = max(optimizer.scape.buckets, key=len)
    mask = scape.read_mask(buffer).reshape(SHAPE)
    moved = matrix.detach() != before * (1 - 0.01 * 0.1)
    if SIZE > 1:
        # What is not in the mask decays, and not a bit else; what is in it moves.
        assert not moved[~mask].any()
        assert moved[mask].float().mean() > 0.9
        assert scape.stats(buffer).sparse_calls == 16
    np.savez(FOLDER / f"hooked{RANK}.npz", theta=matrix.detach().numpy())


def hooked_resume():
    """A wrapped optimizer's state, loaded by a new one, goes on bit for bit."""

    def wrapped(seed, communicator=None):
        matrix, vector = parameters(seed)
        optimizer = scape.wrap(
            ReferenceAdamS([matrix, vector], lr=0.01),
            sparsity=0.9,
            dense_steps=3,
            ramp_steps=4,
            communicator=communicator,
        )
        return matrix, vector, optimizer

    def train(matrix, vector, optimizer, steps):
        for step in steps:
            optimizer.zero_grad()
            backward(matrix, vector, step, data)
            optimizer.step()

    data = gradients(16)
    matrix, vector, optimizer = wrapped(seed=5)
    train(matrix, vector, optimizer, range(8))
    path = FOLDER / f"hooked{RANK}.pt"
    torch.save({"matrix": matrix, "vector": vector, "optimizer": optimizer.state_dict()}, path)
    train(matrix, vector, optimizer, range(8, 16))
    communicator = optimizer.scape.communicator
    optimizer.scape.unwrap()

    again_matrix, again_vector, again = wrapped(seed=6, communicator=communicator)
    saved = torch.load(path)
    with torch.no_grad():
        again_matrix.copy_(saved["matrix"])
        again_vector.copy_(saved["vector"])
    again.load_state_dict(saved["optimizer"])
    train(again_matrix, again_vector, again, range(8, 16))
    assert torch.equal(again_matrix, matrix) and torch.equal(again_vector, vector)


def refused(call, status, text):
    try:
        call()
    except scape.ScapeError as error:
        assert error.status == status and text in str(error), (error.status, str(error))
    else:
        raise AssertionError(f"not refused: {status}")


for case in CASES:
    globals()[case]()
