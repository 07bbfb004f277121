"""A rank whose models are in DistributedDataParallel as well as under scape's optimizers."""

import os
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import scape
from adams_reference import ReferenceAdamS

dist.init_process_group("gloo")


def train(model, make):
    """Makes the optimizer of the plain model, then wraps that; the other order is alike."""
    optimizer = make(model.parameters())
    model = DistributedDataParallel(model)
    for _ in range(3):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


# Another model's is nobody's business.
bystander = DistributedDataParallel(torch.nn.Linear(4, 4))
plain = torch.nn.Linear(4, 4)
optimizer = scape.AdamS(plain.parameters())
plain(torch.ones(2, 4)).sum().backward()
optimizer.step()
print("quiet so far", file=sys.stderr, flush=True)

train(torch.nn.Linear(4, 4), scape.AdamS)
train(torch.nn.Linear(4, 4), lambda parameters: scape.wrap(ReferenceAdamS(parameters)))
dist.barrier()
# Without the interpreter's end: there Gloo has aborted over a thread of its own ("terminate called
# without an active exception").
sys.stderr.flush()
os._exit(0)
