"""A rank that trains under a loss scaler; in one step the loss of rank 1 alone overflows."""

import pathlib
import sys

import torch

import scape
from adams_reference import ReferenceAdamS
from scape import distributed

folder, unscale = pathlib.Path(sys.argv[1]), sys.argv[2] == "unscale"
rank, size = distributed.world_from_env()

parameter = torch.nn.Parameter(torch.linspace(-1, 1, 48).reshape(6, 8))
mirror = torch.nn.Parameter(parameter.detach().clone())
optimizer = scape.AdamS([parameter], lr=0.01, weight_decay=0.1, sparsity=0.5, dense_steps=3)
reference = ReferenceAdamS([mirror], lr=0.01, weight_decay=0.1)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
gradients = torch.randn(10, size, 6, 8, generator=torch.Generator().manual_seed(3))
for number, step in enumerate(gradients):
    overflow = float("inf") if number == 4 and rank == 1 else 1.0
    scaler.scale((parameter * step[rank]).sum() * overflow).backward()
    if unscale:
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    if number != 4:
        mirror.grad = step.mean(0)
        reference.step()
assert optimizer.state_dict()["scape"]["step"] == 9
assert scaler.get_scale() != 1024.0
if optimizer.is_sparse:
    assert torch.isfinite(parameter).all() and scape.stats().skipped_steps == 0
else:
    torch.testing.assert_close(parameter, mirror, rtol=1e-5, atol=1e-6)
(folder / f"{rank}.bin").write_bytes(parameter.detach().numpy().tobytes())
