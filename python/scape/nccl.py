"""A thin binding to the NCCL in the process: the preloaded one, else libnccl.so.2.

Calls go by name, so that whatever stands in front of NCCL (LD_PRELOAD) is called. In Scape's host
mode tensors live in host memory; with a real NCCL they live on a GPU and calls go to the current
stream of their device.
"""

import contextlib
import ctypes

from . import _library as lib

_DATA_TYPES = {
    "int8": 0,
    "uint8": 1,
    "bool": 1,
    "int32": 2,
    "uint32": 3,
    "int64": 4,
    "uint64": 5,
    "float16": 6,
    "float32": 7,
    "float64": 8,
    "bfloat16": 9,
    "float8_e4m3fn": 10,
    "float8_e5m2": 11,
}
_OPS = {"sum": 0, "prod": 1, "max": 2, "min": 3, "avg": 4}
_RESULTS = {
    1: "unhandled CUDA error",
    2: "system error",
    3: "internal error",
    4: "invalid argument",
    5: "invalid usage",
    6: "remote error",
    7: "in progress",
    8: "timeout",
}


class NcclError(RuntimeError):
    """An NCCL call failed. `result` is its ncclResult_t; 0 when there is no NCCL to call."""

    def __init__(self, result, message):
        super().__init__(message)
        self.result = result


class UniqueId(ctypes.Structure):
    """ncclUniqueId: 128 bytes that rank 0 makes and every rank needs."""

    _fields_ = [("internal", ctypes.c_char * 128)]

    def __bytes__(self):
        return ctypes.string_at(ctypes.byref(self), ctypes.sizeof(self))

    @classmethod
    def from_bytes(cls, data):
        if len(data) != ctypes.sizeof(cls):
            raise ValueError(f"a unique id has 128 bytes, not {len(data)}")
        return cls.from_buffer_copy(data)


_void_p, _size_t, _int = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
# Of the calls, their parameters by name.
_COMM = {"comm": _void_p}
_DATA = {"sendbuff": _void_p, "recvbuff": _void_p, "count": _size_t, "datatype": _int}
_ORDER = {**_COMM, "stream": _void_p}
_SIGNATURES = {
    "ncclGetVersion": {"version": ctypes.POINTER(_int)},
    "ncclGetUniqueId": {"unique_id": ctypes.POINTER(UniqueId)},
    "ncclCommInitRank": {
        "comm": ctypes.POINTER(_void_p),
        "size": _int,
        "unique_id": UniqueId,
        "rank": _int,
    },
    "ncclCommDestroy": _COMM,
    "ncclCommAbort": _COMM,
    "ncclCommGetAsyncError": {**_COMM, "error": ctypes.POINTER(_int)},
    "ncclAllReduce": {**_DATA, "op": _int, **_ORDER},
    "ncclReduceScatter": {**_DATA, "op": _int, **_ORDER},
    "ncclAllGather": {**_DATA, **_ORDER},
    "ncclBroadcast": {**_DATA, "root": _int, **_ORDER},
    "ncclGroupStart": {},
    "ncclGroupEnd": {},
}
_library = None
_functions = {}


def _load():
    global _library
    if _library is None:
        process = ctypes.CDLL(None)
        if hasattr(process, "ncclAllReduce"):
            _library = process
        else:
            try:
                _library = ctypes.CDLL("libnccl.so.2")
            except OSError as error:
                raise NcclError(
                    0,
                    "there is no NCCL in the process and libnccl.so.2 cannot be opened "
                    f"({error}): start the program with LD_PRELOAD=/path/to/libscape_nccl.so, "
                    "or install NCCL",
                ) from None
    return _library


def is_available():
    """True when there is an NCCL to call, preloaded or to be found by the loader."""
    try:
        _load()
    except NcclError:
        return False
    return True


def _call(name, *args):
    entry = _functions.get(name)
    if entry is None:
        entry = getattr(_load(), name)
        entry.restype, entry.argtypes = _int, list(_SIGNATURES[name].values())
        _functions[name] = entry
    result = lib.invoke(entry, _SIGNATURES[name], args)
    if result != 0:
        raise NcclError(result, f"{name}: {_reason(result)}")


def _reason(result):
    kind = _RESULTS.get(result, f"result {result}")
    library = _load()
    if hasattr(library, "ncclGetLastError"):
        last_error = library.ncclGetLastError
        last_error.restype, last_error.argtypes = ctypes.c_char_p, [_void_p]
        text = (last_error(None) or b"").decode(errors="replace").strip()
        if text:
            return f"{kind}: {text}"
    return kind


def get_version():
    """NCCL's version code, e.g. 22802."""
    version = _int()
    _call("ncclGetVersion", ctypes.byref(version))
    return version.value


def get_unique_id():
    """A fresh UniqueId, for one communicator. Made by one rank and handed to the others."""
    unique_id = UniqueId()
    _call("ncclGetUniqueId", ctypes.byref(unique_id))
    return unique_id


@contextlib.contextmanager
def group():
    """Calls inside the block are launched together at the end of the outermost one."""
    _call("ncclGroupStart")
    try:
        yield
    finally:
        # Also after an error inside, so that the thread's group depth is right again.
        _call("ncclGroupEnd")


class Communicator:
    """One rank's handle of a communicator. Collective calls block in host mode, and are enqueued
    on the current stream with a GPU. Calls raise NcclError; the communicator is then of no more
    use but for abort().
    """

    def __init__(self, unique_id, rank, size):
        """Collective: each of the `size` ranks comes with the same id and a rank of its own."""
        lib.check_whole("size", size, 1, 2**31 - 1)
        lib.check_whole("rank", rank, 0, size - 1)
        self.rank = rank
        self.size = size
        self._handle = _void_p()
        _call("ncclCommInitRank", ctypes.byref(self._handle), size, unique_id, rank)

    @classmethod
    def from_env(cls):
        """The communicator of all ranks that torchrun started (RANK, WORLD_SIZE, MASTER_ADDR,
        MASTER_PORT); of this process alone where there are none. Needs no process group.
        Collective; the n-th call of each rank meets the n-th of the others.
        """
        from . import distributed

        return distributed.nccl_from_env()

    def all_reduce(self, tensor, op="sum", out=None):
        """Reduces over the ranks, in place unless `out` is given. Returns where the result is."""
        out = tensor if out is None else out
        send, recv = self._pointer(tensor), self._pointer(out)
        self._same_type(tensor, out)
        if out.numel() != tensor.numel():
            raise ValueError(f"out has {out.numel()} elements, tensor has {tensor.numel()}")
        kind, reduction = self._type(tensor), self._op(op)
        self._collective("ncclAllReduce", tensor, send, recv, tensor.numel(), kind, reduction)
        return out

    def reduce_scatter(self, out, tensor, op="sum"):
        """Rank r gets the r-th part of the reduction of `tensor`, whose size is size * out's."""
        send, recv = self._pointer(tensor), self._pointer(out)
        self._same_type(tensor, out)
        self._sizes(tensor, out, "tensor", "out")
        kind, reduction = self._type(tensor), self._op(op)
        self._collective("ncclReduceScatter", tensor, send, recv, out.numel(), kind, reduction)
        return out

    def all_gather(self, out, tensor):
        """`out` gets the tensors of all ranks, in rank order; its size is size * tensor's."""
        send, recv = self._pointer(tensor), self._pointer(out)
        self._same_type(tensor, out)
        self._sizes(out, tensor, "out", "tensor")
        self._collective("ncclAllGather", tensor, send, recv, tensor.numel(), self._type(tensor))
        return out

    def broadcast(self, tensor, root=0):
        """Every rank's tensor becomes the root's."""
        lib.check_whole("root", root, 0, self.size - 1)
        pointer = self._pointer(tensor)
        kind = self._type(tensor)
        self._collective("ncclBroadcast", tensor, pointer, pointer, tensor.numel(), kind, root)
        return tensor

    def async_error(self):
        """Raises NcclError when the communicator has failed in the background."""
        result = _int()
        _call("ncclCommGetAsyncError", self._live(), ctypes.byref(result))
        if result.value not in (0, 7):
            raise NcclError(result.value, f"communicator failed: {_reason(result.value)}")

    def is_usable(self):
        """False once it has failed or was ended."""
        try:
            self.async_error()
        except NcclError:
            return False
        return True

    def destroy(self):
        """Ends the communicator once its work is done. A second call does nothing."""
        handle, self._handle = self._handle, None
        if handle is not None:
            _call("ncclCommDestroy", handle)

    def abort(self):
        """Ends the communicator at once; works under way fail on all ranks."""
        handle, self._handle = self._handle, None
        if handle is not None:
            _call("ncclCommAbort", handle)

    def _live(self):
        if self._handle is None:
            raise NcclError(5, "the communicator has been destroyed: make a new one")
        return self._handle

    def _collective(self, name, tensor, *args):
        from ._api import stream_of

        _call(name, *args, self._live(), stream_of(tensor))

    @staticmethod
    def _pointer(tensor):
        lib.check_tensor("tensor", tensor)
        if tensor.device.type == "cpu" and lib.version() is None:
            raise NcclError(
                5,
                "the tensor is in host memory, which only Scape's host mode can exchange: start the"
                " program with LD_PRELOAD=/path/to/libscape_nccl.so",
            )
        return tensor.data_ptr()

    @staticmethod
    def _type(tensor):
        name = str(tensor.dtype).replace("torch.", "")
        if name not in _DATA_TYPES:
            raise ValueError(f"NCCL has no type for {name}: use one of {', '.join(_DATA_TYPES)}")
        return _DATA_TYPES[name]

    @staticmethod
    def _op(op):
        return lib.choice("op", op, _OPS)

    @staticmethod
    def _same_type(tensor, out):
        if tensor.dtype != out.dtype:
            raise ValueError(f"out is {out.dtype}, tensor is {tensor.dtype}: they must be alike")

    def _sizes(self, big, small, big_name, small_name):
        if big.numel() != small.numel() * self.size:
            raise ValueError(
                f"{big_name} has {big.numel()} elements and {small_name} {small.numel()}: on "
                f"{self.size} ranks it must have {small.numel() * self.size}"
            )
