"""Who the other ranks are, and a communicator over them, without initialising a process group."""

import datetime
import os

from . import _library as lib
from . import nccl

_store = None
_sequence = 0


def world_from_env():
    """(rank, size) as torchrun or a like launcher set them; (0, 1) where nothing did."""
    size = _integer("WORLD_SIZE", 1)
    rank = _integer("RANK", 0)
    if not 0 <= rank < size:
        raise ValueError(f"RANK is {rank} and WORLD_SIZE is {size}: RANK must be below it")
    return rank, size


def _integer(name, default):
    text = os.environ.get(name, "")
    if not text:
        return default
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{name} is {text!r}: must be a whole number") from None


def _rendezvous(rank, size):
    """The launcher's key-value store. Kept for the life of the process: rank 0 may be its host."""
    global _store
    if _store is None:
        import torch.distributed as dist

        missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
        if missing:
            raise ValueError(
                f"WORLD_SIZE is {size} but {' and '.join(missing)} is not set: start the program "
                "with torchrun or scape-run, or set it"
            )
        store, _, _ = next(dist.rendezvous("env://", rank=rank, world_size=size))
        _store = dist.PrefixStore("scape", store)
    return _store


def nccl_from_env():
    """See scape.nccl.Communicator.from_env()."""
    global _sequence
    rank, size = world_from_env()
    if size == 1:
        return nccl.Communicator(nccl.get_unique_id(), 0, 1)
    store = _rendezvous(rank, size)
    key = f"nccl/{_sequence}"
    _sequence += 1
    if rank == 0:
        unique_id = nccl.get_unique_id()
        store.set(key, bytes(unique_id))
    else:
        unique_id = nccl.UniqueId.from_bytes(bytes(store.get(key)))
    return nccl.Communicator(unique_id, rank, size)


class LocalCommunicator:
    """A single rank: every collective is the identity."""

    rank = 0
    size = 1

    def all_reduce(self, tensor, op="sum", out=None):
        if out is not None and out is not tensor:
            out.copy_(tensor)
            return out
        return tensor

    def broadcast(self, tensor, root=0):
        return tensor


class TorchCommunicator:
    """The same calls over a torch.distributed process group (Gloo on host memory): dense always."""

    def __init__(self, process_group=None):
        import torch.distributed as dist

        self._dist = dist
        self._group = process_group
        self.rank = dist.get_rank(process_group)
        self.size = dist.get_world_size(process_group)

    def all_reduce(self, tensor, op="sum", out=None):
        if out is None:
            out = tensor
        elif out is not tensor:
            out.copy_(tensor)
        ops = self._dist.ReduceOp
        choices = {
            "sum": ops.SUM,
            "avg": ops.SUM,
            "max": ops.MAX,
            "min": ops.MIN,
            "prod": ops.PRODUCT,
        }
        self._dist.all_reduce(out, lib.choice("op", op, choices), group=self._group)
        if op == "avg":  # Gloo has none of its own
            out.div_(self.size)
        return out

    def broadcast(self, tensor, root=0):
        source = root if self._group is None else self._dist.get_global_rank(self._group, root)
        self._dist.broadcast(tensor, source, group=self._group)
        return tensor


def from_env(device="cpu"):
    """A communicator over the ranks that the launcher started, for tensors on `device`.

    With the preloaded library, or tensors on a GPU, it is an NCCL communicator; else one over
    torch.distributed's default group, which is made with Gloo where there is none yet; of a single
    process, LocalCommunicator. Collective.
    """
    if lib.version() is not None:
        return nccl_from_env()
    rank, size = world_from_env()
    if size == 1:
        return LocalCommunicator()
    if str(device).startswith("cuda") and nccl.is_available():
        return nccl_from_env()
    import torch.distributed as dist

    if not dist.is_initialized():
        store = _rendezvous(rank, size)
        timeout = datetime.timedelta(minutes=5)
        dist.init_process_group(
            "gloo",
            store=dist.PrefixStore("gloo", store),
            rank=rank,
            world_size=size,
            timeout=timeout,
        )
    return TorchCommunicator()
