"""A rank whose models are not always those of the others; says what the optimizers make of each."""

import sys

import torch

import scape
from adams_reference import ReferenceAdamS
from scape import distributed

rank, size = distributed.world_from_env()
odd = rank == size - 1


def weight(*shape):
    return torch.nn.Parameter(torch.zeros(shape))


for kind in ("transposed", "order", "frozen", "fewer", "alike"):
    layers = [weight(20, 30), weight(20, 20), weight(20, 20)]
    if kind == "transposed" and odd:
        layers[0] = weight(30, 20)
    elif kind == "order" and odd:
        layers.insert(0, layers.pop())
    elif kind == "frozen":
        layers[2 if odd else 1].requires_grad_(False)
    elif kind == "fewer" and odd:
        layers.pop()
    try:
        if sys.argv[1] == "wrap":
            scape.wrap(ReferenceAdamS(layers))
        else:
            scape.AdamS(layers)
        print(f"{kind}: taken")
    except scape.ScapeError as error:
        assert error.status == scape.Status.MISMATCH
        print(f"{kind}: {error}")
