"""One rank of a training under the preloaded library, on a GPU over PyTorch's NCCL.

    LD_PRELOAD=.../libscape_nccl.so PYTHONPATH=python python3 -m torch.distributed.run --standalone \
        --nproc-per-node 2 tests/device/nccl_rank.py [cuda | cpu]

cpu: in host mode, which shows that the program itself is right where there is no GPU.
Prints a line for each check. NCCL lets one rank use a GPU; where there are fewer GPUs than ranks and it refuses,
a line that begins with "skipped" says so, and that is all.
"""

import os
import sys

import scape
import torch
import torch.distributed as dist
from scape.distributed import from_env

STEPS = 16
SIZES = [(257, 129), (129,), (1000, 33)]


def say(text):
    if int(os.environ["RANK"]) == 0:
        print(text, flush=True)


def all_reduces_of_torch(device):
    """PyTorch's own calls: of a buffer that nobody registered, and of one that is."""
    dist.init_process_group("nccl")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    plain = torch.full((1001,), float(rank + 1), device=device)
    dist.all_reduce(plain)
    assert torch.equal(plain, torch.full_like(plain, ranks * (ranks + 1) / 2)), plain
    gradient = torch.zeros(100_000, device=device)
    with scape.register(gradient, name="torch's", role="gradient", sparsity=0.9, dense_steps=1, ramp_steps=1) as known:
        for step in range(STEPS):
            gradient.copy_(torch.randn(gradient.shape, generator=torch.Generator().manual_seed(step * ranks + rank)))
            dist.all_reduce(gradient)
        torch.cuda.synchronize()
        counted = known.stats()
    assert (counted.intercepted_calls, counted.fallback_calls) == (STEPS, 0), counted
    assert ranks == 1 or counted.sparse_calls > 0, counted
    dist.destroy_process_group()
    say(f"ok: of PyTorch's all-reduces over {ranks} ranks {counted.intercepted_calls} were taken, "
        f"{counted.sparse_calls} of them sparse")


def parameters(device):
    generator = torch.Generator().manual_seed(1)
    return [torch.nn.Parameter(torch.randn(*size, generator=generator).to(device)) for size in SIZES]


def train(device, communicator, use_scape):
    """The parameters after some steps whose gradients differ by rank, and the optimizer."""
    values = parameters(device)
    optimizer = scape.AdamS(values, lr=1e-2, weight_decay=0.1, sparsity=0.9, dense_steps=2, ramp_steps=2,
                            communicator=communicator, use_scape=use_scape, name=f"scape {use_scape}")
    generator = torch.Generator().manual_seed(2 + communicator.rank)
    for _ in range(STEPS):
        for value in values:
            value.grad = torch.randn(*value.shape, generator=generator).to(device)
        optimizer.step()
        optimizer.zero_grad()
    return [value.detach().clone() for value in values], optimizer


def main():
    kind = sys.argv[1] if len(sys.argv) > 1 else "cuda"
    device = torch.device(kind)
    if kind == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        torch.cuda.set_device(device)
    assert scape.is_active(), "the library is not preloaded"
    try:
        if kind == "cuda":
            all_reduces_of_torch(device)
        communicator = from_env(device)
        plain = torch.full((1001,), float(communicator.rank + 1), device=device)
        communicator.all_reduce(plain, op="sum")
    except Exception as failure:  # of whatever kind torch makes of NCCL's
        if "Duplicate GPU" in str(failure):
            say("skipped: this NCCL lets one rank use a GPU")
            os._exit(0)  # what was begun of a communicator is not waited for
        raise
    ranks = communicator.size
    assert torch.equal(plain, torch.full_like(plain, ranks * (ranks + 1) / 2)), plain
    say(f"ok: an all-reduce of an unregistered buffer over {ranks} ranks")

    before = scape.stats()
    sparse, optimizer = train(device, communicator, True)
    counted = scape.stats()
    calls = counted.intercepted_calls - before.intercepted_calls
    masked = counted.sparse_calls - before.sparse_calls
    assert counted.fallback_calls == before.fallback_calls, counted
    assert calls >= STEPS, counted
    assert ranks == 1 or masked > 0, counted
    assert all(torch.isfinite(value).all() for value in sparse)
    for value in sparse:
        first = communicator.broadcast(value.clone(), 0)
        assert torch.equal(value, first), "a rank has other parameters than rank 0"
    say(f"ok: {calls} calls taken, {masked} of them sparse; all ranks have the same parameters")
    del optimizer  # whose registrations the next one's calls would miss

    dense, _ = train(device, communicator, False)
    apart = max((a - b).abs().max().item() for a, b in zip(sparse, dense))
    if ranks == 1:
        assert apart < 1e-4, apart
        say(f"ok: one rank trains as without the library (at most {apart:.1e} apart)")
    else:
        assert apart > 0, "nothing was left out"
        say("ok: what is left out shows")


main()
