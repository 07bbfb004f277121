"""A rank of a run in which the rank of the argument ends before it has made its optimizer."""

import sys
import time

import torch

import scape
from scape import distributed

if distributed.world_from_env()[0] == int(sys.argv[1]):
    sys.exit("this rank ends early")
parameter = torch.nn.Parameter(torch.ones(2, 2))
begun = time.monotonic()
try:
    scape.AdamS([parameter])
except RuntimeError as error:
    print(error)
    # Twice the time, since the library's own bootstrap follows the store's.
    took = time.monotonic() - begun
    sys.exit(None if took < 30 else f"took {took:.0f} s")
sys.exit("it was made without all ranks")
