"""One rank of a small data-parallel training on the CPU, over Gloo: what it prints must not depend on a preload.

Prints the loss of each step, a digest of the parameters, and how many threads the process has at the end.
"""

import hashlib
import os
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def main():
    rank, store = int(sys.argv[1]), sys.argv[2]
    torch.set_num_threads(1)
    torch.manual_seed(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    model = DistributedDataParallel(
        torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, 1))
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = torch.Generator().manual_seed(2 + rank)
    for step in range(5):
        x = torch.randn(8, 16, generator=data)
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}: loss {loss.item():.9g}")
    values = b"".join(parameter.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()
                      for parameter in model.parameters())
    print("parameters", hashlib.sha256(values).hexdigest())
    dist.barrier()
    print("threads", len(os.listdir("/proc/self/task")))
    dist.barrier()
    dist.destroy_process_group()


main()
