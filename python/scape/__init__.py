"""Scape: sparse gradient exchange for AdamS training.

    LD_PRELOAD=/path/to/libscape_nccl.so torchrun --nproc_per_node 2 train.py

    optimizer = scape.AdamS(model.parameters(), lr=1e-3, sparsity=0.99, total_steps=10_000)
    for batch in data:
        loss = model(batch)
        loss.backward()
        optimizer.step()        # exchanges 1 % of the gradient, steps what was exchanged
        optimizer.zero_grad()

Without the preloaded library the same program trains dense, to the same equations, and says so
once; SCAPE_REQUIRED=1 makes it stop instead.
"""

from ._api import (
    Registration,
    adams_step,
    clear_masked,
    flush,
    load_state,
    load_state_file,
    next_call,
    post_step,
    read_ages,
    read_mask,
    read_moment,
    read_residual,
    register,
    save_state,
    save_state_file,
    stats,
    unregister,
)
from ._library import ScapeError, Stats, Status, is_active, require, version

__version__ = "0.1.0"

# These need torch, which the rest of the package can do without.
_LAZY = {"AdamS": "optim", "wrap": "hooked", "Hooked": "hooked"}

__all__ = [
    "AdamS",
    "Hooked",
    "Registration",
    "ScapeError",
    "Stats",
    "Status",
    "adams_step",
    "clear_masked",
    "flush",
    "is_active",
    "load_state",
    "load_state_file",
    "next_call",
    "post_step",
    "read_ages",
    "read_mask",
    "read_moment",
    "read_residual",
    "register",
    "require",
    "save_state",
    "save_state_file",
    "stats",
    "unregister",
    "version",
    "wrap",
]


def __getattr__(name):
    import importlib

    if name in _LAZY:
        return getattr(importlib.import_module(f".{_LAZY[name]}", __name__), name)
    if name in ("nccl", "distributed", "flat"):
        return importlib.import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
