"""A rank that tries scape.nccl's calls on host tensors."""

import torch

from scape import distributed, nccl

RANK, SIZE = distributed.world_from_env()
communicator = nccl.Communicator.from_env()
assert (communicator.rank, communicator.size) == (RANK, SIZE)
assert nccl.get_version() > 21800

for dtype in (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int32,
    torch.int64,
):
    x = (torch.arange(1000) % 50 + RANK).to(dtype)
    ranks = [(torch.arange(1000) % 50 + r).to(dtype) for r in range(SIZE)]
    out = communicator.all_reduce(x, "sum", out=torch.empty_like(x))
    assert torch.equal(out, torch.stack(ranks).sum(0).to(dtype)), dtype
    assert torch.equal(x, ranks[RANK])
    assert torch.equal(communicator.all_reduce(x.clone(), "max"), ranks[-1])
    assert torch.equal(communicator.all_reduce(x.clone(), "min"), ranks[0])
assert torch.equal(
    communicator.all_reduce(torch.full((3,), float(RANK)), "avg"), torch.full((3,), (SIZE - 1) / 2)
)
assert communicator.all_reduce(torch.empty(0)).numel() == 0

root = SIZE - 1
x = torch.full((7,), float(RANK))
assert (communicator.broadcast(x, root) == root).all()
gathered = communicator.all_gather(torch.empty(SIZE * 5), torch.full((5,), float(RANK)))
assert torch.equal(gathered, torch.arange(SIZE).repeat_interleave(5).float())
part = communicator.reduce_scatter(torch.empty(4), torch.arange(4.0 * SIZE), "sum")
assert torch.equal(part, SIZE * torch.arange(4.0 * RANK, 4.0 * (RANK + 1)))

a, b = torch.ones(10), torch.full((20,), 2.0)
with nccl.group():
    communicator.all_reduce(a)
    communicator.all_reduce(b)
assert (a == SIZE).all() and (b == 2 * SIZE).all()

for call, text in (
    (lambda: communicator.all_reduce(torch.ones(4, 4).t()[1:, 1:]), "contiguous"),
    (
        lambda: communicator.all_reduce(torch.ones(3, dtype=torch.complex64)),
        "no type for complex64",
    ),
    (lambda: communicator.all_reduce(torch.ones(3), "mean"), "op is 'mean'"),
    (
        lambda: communicator.all_gather(torch.empty(SIZE * 5 + 1), torch.ones(5)),
        f"must have {SIZE * 5}",
    ),
    (lambda: communicator.all_reduce(torch.ones(3), out=torch.ones(4)), "out has 4 elements"),
    (lambda: communicator.broadcast(torch.ones(3), root="a"), "root is 'a': must be a whole number"),
    (lambda: communicator.broadcast(torch.ones(3), root=2**32), "root is 4294967296"),
    (lambda: distributed.LocalCommunicator().broadcast(torch.ones(3), root=1), "root is 1"),
    (lambda: nccl.Communicator(nccl.get_unique_id(), 1, 1), "rank is 1: must be"),
    (lambda: nccl.Communicator(b"id", 0, 1), "unique_id is b'id': must be a UniqueId"),
    (lambda: nccl.Communicator(nccl.get_unique_id(), 0, None), "size is None"),
):
    try:
        call()
    except ValueError as error:
        assert text in str(error), str(error)
    else:
        raise AssertionError(text)

communicator.async_error()
# A second communicator over the same ranks lives beside the first.
second = nccl.Communicator.from_env()
assert (second.all_reduce(torch.ones(2)) == SIZE).all()
second.destroy()
second.destroy()
try:
    second.all_reduce(torch.ones(2))
except nccl.NcclError as error:
    assert "has been destroyed" in str(error)
else:
    raise AssertionError("a destroyed communicator was used")
assert (communicator.all_reduce(torch.ones(2)) == SIZE).all()

if SIZE == 2:
    # Ranks that disagree: both hear of it, with both values.
    try:
        communicator.all_reduce(torch.ones(1000 + RANK))
    except nccl.NcclError as error:
        assert error.result != 0 and "1000" in str(error) and "1001" in str(error), str(error)
    else:
        raise AssertionError("ranks passed different counts and nobody said so")
    communicator.abort()
else:
    communicator.destroy()
