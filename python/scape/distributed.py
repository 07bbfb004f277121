"""Who the other ranks are, and a communicator over them, without initialising a process group."""

import atexit
import datetime
import math
import os
import socket
import time

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


def _bootstrap_seconds():
    """SCAPE_BOOTSTRAP_TIMEOUT, as the library reads it."""
    text = os.environ.get("SCAPE_BOOTSTRAP_TIMEOUT", "120")
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0.1 <= seconds <= 86400:
        raise ValueError(
            f"SCAPE_BOOTSTRAP_TIMEOUT is {text!r}: it takes a number in 0.1 .. 86400; correct it or"
            " unset it"
        )
    return seconds


class _Meeting:
    """The n-th meeting of all ranks in the launcher's key-value store. All of it ends within
    SCAPE_BOOTSTRAP_TIMEOUT, with a ScapeError that names who is missing.
    """

    def __init__(self, rank, size):
        global _sequence
        self._rank, self._size = rank, size
        self._scope = f"meeting/{_sequence}"
        _sequence += 1
        self._seconds = _bootstrap_seconds()
        self._end = time.monotonic() + self._seconds

    def _left(self):
        return datetime.timedelta(seconds=max(0.001, self._end - time.monotonic()))

    def store(self):
        """Kept for the life of the process: rank 0 may be its host."""
        global _store
        if _store is None:
            _store = self._open_store()
        return _store

    def _open_store(self):
        import torch.distributed as dist

        missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
        if missing:
            raise ValueError(
                f"WORLD_SIZE is {self._size} but {' and '.join(missing)} is not set: start the "
                "program with torchrun or scape-run, or set it"
            )
        address, port = os.environ["MASTER_ADDR"], _integer("MASTER_PORT", 0)
        if not 0 < port < 65536:
            raise ValueError(f"MASTER_PORT is {port}: must be in 1 .. 65535")
        # torchrun hosts a store itself.
        host = self._rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        if not host:
            self._wait_for_host(address, port)
        try:
            # That of torch.distributed's env:// rendezvous, where a group is made that way too.
            store = dist.TCPStore(
                address,
                port,
                self._size,
                host,
                timeout=self._left(),
                wait_for_workers=False,
                multi_tenant=True,
            )
        except RuntimeError as error:
            raise lib.ScapeError(
                lib.Status.SYSTEM,
                f"the store at MASTER_ADDR:MASTER_PORT, {address}:{port}, cannot be opened by rank "
                f"{self._rank}: {_first_line(error)}",
            ) from None
        return dist.PrefixStore("scape", store)

    def _wait_for_host(self, address, port):
        # Torch itself would write a stack trace for each time that it tries in vain.
        while True:
            try:
                socket.create_connection((address, port), self._left().total_seconds()).close()
                return
            except OSError as error:
                if time.monotonic() + 0.1 >= self._end:
                    raise lib.ScapeError(
                        lib.Status.TIMEOUT,
                        f"rank 0, which keeps the store at MASTER_ADDR:MASTER_PORT, {address}:"
                        f"{port}, did not come within {self._seconds:g} s"
                        f" (SCAPE_BOOTSTRAP_TIMEOUT): {error}; see whether it started, and how it"
                        " ended",
                    ) from None
            time.sleep(0.1)

    def say(self, value):
        """Leaves this rank's value for the others."""
        store = self.store()
        try:
            store.set(self._key(self._rank), value)
        except RuntimeError as error:
            raise self._gone(error) from None

    def hear(self):
        """What each rank said, once all have."""
        store = self.store()
        keys = [self._key(rank) for rank in range(self._size)]
        try:
            store.wait(keys, self._left())
            return [bytes(value) for value in store.multi_get(keys)]
        except RuntimeError as error:
            try:
                missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
            except RuntimeError:
                missing = []
            if not missing:
                raise self._gone(error) from None
        shown = ", ".join(map(str, missing[:16])) + (", ..." if len(missing) > 16 else "")
        raise lib.ScapeError(
            lib.Status.TIMEOUT,
            f"rank {shown} of {self._size} did not come within {self._seconds:g} s"
            " (SCAPE_BOOTSTRAP_TIMEOUT); see whether it started, how it ended, and whether"
            " libscape_nccl.so is in its process as in this one",
        )

    def agree(self, kind, value=b""):
        """What rank 0 gave as its value. ScapeError where the ranks are not all of one kind."""
        self.say(kind.encode() + b":" + value)
        said = [word.partition(b":") for word in self.hear()]
        kinds = [_KINDS.get(kind.decode(), "another version of scape") for kind, _, _ in said]
        for rank, other in enumerate(kinds):
            if other != kinds[0]:
                raise lib.ScapeError(
                    lib.Status.MISMATCH,
                    f"rank 0 is to exchange over {kinds[0]}, rank {rank} over {other}: start all"
                    " ranks alike, with or without LD_PRELOAD=/path/to/libscape_nccl.so (or"
                    " scape-run)",
                )
        return said[0][2]

    def _key(self, rank):
        return f"{self._scope}/{rank}"

    def _gone(self, error):
        return lib.ScapeError(
            lib.Status.REMOTE,
            f"the store that rank 0, or torchrun, keeps for {self._size} ranks is gone"
            f" ({_first_line(error)}); see how rank 0 ended",
        )


# What a rank exchanges over, as it tells the others.
_KINDS = {
    "scape": "NCCL with libscape_nccl.so in the process",
    "nccl": "NCCL without libscape_nccl.so",
    "gloo": "Gloo without libscape_nccl.so",
}


def _first_line(error):
    return str(error).partition("\n")[0]


def nccl_from_env():
    """See scape.nccl.Communicator.from_env()."""
    rank, size = world_from_env()
    if size == 1:
        return nccl.Communicator(nccl.get_unique_id(), 0, 1)
    kind = "nccl" if lib.version() is None else "scape"
    mine = bytes(nccl.get_unique_id()) if rank == 0 else b""
    unique_id = nccl.UniqueId.from_bytes(_Meeting(rank, size).agree(kind, mine))
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
        lib.check_whole("root", root, 0, self.size - 1)
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
        lib.check_whole("root", root, 0, self.size - 1)
        source = root if self._group is None else self._dist.get_global_rank(self._group, root)
        self._dist.broadcast(tensor, source, group=self._group)
        return tensor


_shared = {}  # by process, since a forked child cannot use its parent's, and device


def shared_from_env(device="cpu"):
    """from_env()'s communicator, one for all optimizers of the process: each costs a thread and
    some twenty descriptors. Another one where it has failed or was destroyed. Collective.
    """
    key = (os.getpid(), str(device))
    found = _shared.get(key)
    if not isinstance(found, nccl.Communicator) or not found.is_usable():
        found = _shared[key] = from_env(device)
    return found


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
        meeting = _Meeting(rank, size)
        meeting.agree("gloo")
        timeout = datetime.timedelta(minutes=5)
        dist.init_process_group(
            "gloo",
            store=dist.PrefixStore("gloo", meeting.store()),
            rank=rank,
            world_size=size,
            timeout=timeout,
        )
        # Left to the interpreter's end, Gloo's threads now and then abort the process.
        atexit.register(_end_process_group)
    return TorchCommunicator()


def _end_process_group():
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
