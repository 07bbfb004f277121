"""A rank of dense AdamS without the library: Gloo, equal parameters, the reference's values."""

import pathlib
import sys

import torch

import scape
from adams_reference import ReferenceAdamS
from scape import distributed

folder = pathlib.Path(sys.argv[1])
rank, size = distributed.world_from_env()

# Ranks start apart: the optimizer must bring them together.
parameter = torch.nn.Parameter(torch.full((6, 5), float(rank + 1)))
optimizer = scape.AdamS([parameter], lr=0.01, weight_decay=0.1)
assert isinstance(optimizer.communicator, distributed.TorchCommunicator)
assert (parameter == 1).all()

mirror = torch.nn.Parameter(parameter.detach().clone())
reference = ReferenceAdamS([mirror], lr=0.01, weight_decay=0.1)
gradients = torch.randn(8, size, 6, 5, generator=torch.Generator().manual_seed(3))
for step in gradients:
    (parameter * step[rank]).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    mirror.grad = step.mean(0)
    reference.step()
torch.testing.assert_close(parameter, mirror, rtol=1e-5, atol=1e-6)

(folder / f"{rank}.bin").write_bytes(parameter.detach().numpy().tobytes())
if rank == 0:
    (folder / "reference_matches").touch()
