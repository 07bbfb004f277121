"""The C interface of libscape_nccl.so, as found in this process.

Mirrors include/scape/scape.h. Nothing is linked or loaded: the functions are looked up among the
symbols of the process, where LD_PRELOAD puts them. Where they are absent every helper says so by
raising ScapeError with the status INACTIVE, and is_active() is False.
"""

import ctypes
import enum
import math
import operator
import os
import sys

_size_t = ctypes.c_size_t
_u64 = ctypes.c_uint64
_void_p = ctypes.c_void_p

_ABSENT = (
    "libscape_nccl.so is not in the process: start the program with "
    "LD_PRELOAD=/path/to/libscape_nccl.so, or through scape-run"
)


class Status(enum.IntEnum):
    """scape_status."""

    OK = 0
    INACTIVE = 1
    ARGUMENT = 2
    USAGE = 3
    NOT_FOUND = 4
    MISMATCH = 5
    MEMORY = 6
    SYSTEM = 7
    REMOTE = 8
    TIMEOUT = 9
    DATA = 10
    INTERNAL = 11


class ScapeError(RuntimeError):
    """A Scape call failed. `status` says how; the text says why and what to do next."""

    def __init__(self, status, message):
        super().__init__(message)
        self.status = Status(status)


DTYPES = {"float32": 0, "bfloat16": 1, "float16": 2}
PAYLOADS = {"fp32": 0, "bf16": 1}
ROLES = {"fused": 0, "first_moment": 1, "hooked": 2, "gradient": 3}
RESIDUALS = {"internal": 0, "in_place": 1, "host": 2}
RULES = {"lazy": 0, "plain": 1}


class Config(ctypes.Structure):
    """scape_config."""

    _fields_ = [
        ("size", _size_t),
        ("name", ctypes.c_char_p),
        ("role", ctypes.c_int),
        ("payload", ctypes.c_int),
        ("residual", ctypes.c_int),
        ("rule", ctypes.c_int),
        ("sparsity", ctypes.c_double),
        ("beta1", ctypes.c_double),
        ("beta2", ctypes.c_double),
        ("eps", ctypes.c_double),
        ("age_cap", ctypes.c_double),
        ("total_steps", _u64),
        ("dense_steps", _u64),
        ("ramp_steps", _u64),
        ("ramp_sparsity", ctypes.c_double),
    ]


class Stats(ctypes.Structure):
    """scape_stats: the counters of one buffer, one registration or the process."""

    _fields_ = [("size", _size_t)] + [
        (name, _u64)
        for name in (
            "intercepted_calls",
            "sparse_calls",
            "dense_calls",
            "fallback_calls",
            "skipped_steps",
            "nonfinite_values",
            "payload_bytes",
            "mask_bytes",
            "wire_bytes_sent",
            "wire_bytes_received",
            "refreshes",
            "refresh_waits",
            "pack_ns",
            "exchange_ns",
            "unpack_ns",
            "score_ns",
            "refresh_ns",
            "refresh_wait_ns",
            "step_ns",
            "mask_elements",
            "buffer_elements",
            "mask_overlap",
            "step",
        )
    ]

    def as_dict(self):
        """The counters by name."""
        return {name: getattr(self, name) for name, _ in self._fields_ if name != "size"}

    def __repr__(self):
        return "Stats(" + ", ".join(f"{k}={v}" for k, v in self.as_dict().items()) + ")"


# Of the C functions: what they return, and their parameters by name.
_INT, _TEXT, _PATH = ctypes.c_int, ctypes.c_char_p, {"path": ctypes.c_char_p}
_HANDLE = {"registration": _void_p}
_BUFFER = {"buffer": _void_p, "count": _size_t}
_RATES = {"lr": ctypes.c_double, "weight_decay": ctypes.c_double, "stream": _void_p}
_OUT = {**_BUFFER, "out": _void_p, "capacity": _size_t}
_SIGNATURES = {
    "scape_is_active": (_INT, {}),
    "scape_version": (_INT, {}),
    "scape_status_string": (_TEXT, {"status": _INT}),
    "scape_last_error": (_TEXT, {}),
    "scape_config_init": (_INT, {"config": ctypes.POINTER(Config), "size": _size_t}),
    "scape_register": (
        _INT,
        {
            **_BUFFER,
            "dtype": _INT,
            "config": ctypes.POINTER(Config),
            "registration": ctypes.POINTER(_void_p),
        },
    ),
    "scape_unregister": (_INT, _HANDLE),
    "scape_next": (_INT, {"name": _TEXT}),
    "scape_self_check": (_INT, _HANDLE),
    "scape_adams_step": (_INT, {**_BUFFER, "param": _void_p, **_RATES}),
    "scape_post_step": (
        _INT,
        {
            **_BUFFER,
            "offset": _size_t,
            "length": _size_t,
            "before": _void_p,
            "param": _void_p,
            **_RATES,
        },
    ),
    "scape_clear_masked": (_INT, {**_BUFFER, "stream": _void_p}),
    "scape_flush": (_INT, {**_BUFFER, "param": _void_p, **_RATES}),
    "scape_read_mask": (_INT, {**_BUFFER, "words": _void_p, "capacity": _size_t}),
    "scape_read_ages": (_INT, {**_BUFFER, "ages": _void_p, "capacity": _size_t}),
    "scape_read_residual": (_INT, _OUT),
    "scape_read_moment": (_INT, _OUT),
    "scape_get_stats": (_INT, {**_BUFFER, "stats": ctypes.POINTER(Stats)}),
    "scape_save_state": (
        _INT,
        {"data": _void_p, "capacity": _size_t, "needed": ctypes.POINTER(_size_t)},
    ),
    "scape_save_state_file": (_INT, _PATH),
    "scape_load_state": (_INT, {"data": ctypes.c_char_p, "size": _size_t}),
    "scape_load_state_file": (_INT, _PATH),
}

_process = ctypes.CDLL(None)
_functions = {}


def function(name):
    """The C function `name` of the library in the process, or None when there is none."""
    found = _functions.get(name)
    if found is None:
        try:
            found = getattr(_process, name)
        except AttributeError:
            return None
        found.restype, parameters = _SIGNATURES[name]
        found.argtypes = list(parameters.values())
        _functions[name] = found
    return found


_KINDS = {ctypes.c_double: "a number", ctypes.c_int: "a whole number", _size_t: "a whole number"}


def invoke(entry, parameters, args):
    """entry(*args). ValueError that names the argument, of the {name: C type} in `parameters`, whose
    value is none of its C type.
    """
    try:
        return entry(*args)
    except ctypes.ArgumentError:
        # The error has a number alone, which means nothing to callers of this package.
        for (what, kind), value in zip(parameters.items(), args):
            try:
                kind.from_param(value)
            except Exception:
                must = _KINDS.get(kind, f"a {kind.__name__}")
                raise ValueError(f"{what} is {value!r}: must be {must}") from None
        raise


def call(name, *args):
    """Calls a function that returns a scape_status; raises ScapeError unless it is OK."""
    entry = function(name)
    if entry is None:
        raise ScapeError(Status.INACTIVE, f"{name}: {_ABSENT}")
    status = invoke(entry, _SIGNATURES[name][1], args)
    if status != Status.OK:
        text = function("scape_last_error")().decode(errors="replace")
        raise ScapeError(status, text or f"{name}: {status_string(status)}")


def status_string(status):
    """What a status means, in the library's words."""
    return function("scape_status_string")(status).decode(errors="replace")


def version():
    """(major, minor, patch) of the library in the process, or None when there is none."""
    entry = function("scape_version")
    if entry is None:
        return None
    code = entry()
    return (code // 10000, code // 100 % 100, code % 100)


def is_active():
    """True when the library is in the process and enabled (SCAPE_ENABLE)."""
    entry = function("scape_is_active")
    return entry is not None and entry() == 1


def is_required():
    """True when SCAPE_REQUIRED asks that the program stop rather than train dense. ValueError for
    a word that the library refuses: a slip of the pen must not train dense unnoticed.
    """
    word = os.environ.get("SCAPE_REQUIRED", "0")
    if word not in ("0", "1", "on", "off", "true", "false"):
        raise ValueError(
            f"SCAPE_REQUIRED is {word!r}: it takes 0, 1, on, off, true or false; correct it or"
            " unset it"
        )
    return word in ("1", "on", "true")


def why_inactive():
    """One sentence that says why is_active() is False."""
    if function("scape_is_active") is None:
        return _ABSENT
    return "Scape is in the process but switched off: unset SCAPE_ENABLE, or set it to 1"


def require():
    """Raises ScapeError unless Scape is active. Call it first where dense training is no option."""
    if not is_active():
        raise ScapeError(Status.INACTIVE, why_inactive())


_warned = set()


def warn_once(text):
    """Writes one line to stderr the first time it is asked to."""
    if text not in _warned:
        _warned.add(text)
        print(f"scape: {text}", file=sys.stderr, flush=True)


def default_config():
    """A Config of the library's defaults, which SCAPE_* variables may have moved."""
    config = Config()
    call("scape_config_init", ctypes.byref(config), ctypes.sizeof(config))
    return config


def default_residual():
    """Where a registration that names no place keeps its residual, by its name in RESIDUALS."""
    value = default_config().residual
    return next(name for name, each in RESIDUALS.items() if each == value)


def choice(what, value, choices):
    """The C value of a named choice; raises ValueError that lists the choices."""
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"{what} is {value!r}: must be one of {', '.join(choices)}")
    return choices[value]


def number(what, value):
    """The value as a float; ValueError unless it is a number."""
    try:
        return float(value)
    except (TypeError, ValueError):
        raise ValueError(f"{what} is {value!r}: must be a number") from None


def check_number(what, value, low, high=math.inf, *, open_low=False):
    """Raises ValueError unless low <= value < high (low < value where open_low)."""
    given = number(what, value)
    if not ((given > low if open_low else given >= low) and given < high):
        left = "above" if open_low else "at least"
        right = "finite" if high == math.inf else f"below {high:g}"
        raise ValueError(f"{what} is {value!r}: must be {left} {low:g} and {right}")


# A buffer has up to 2^33 elements: a fraction nearer to 1 would send one element and no more.
_MOST_SPARSITY = 1 - 1e-9


def check_sparsity(what, value):
    """Raises ValueError unless the value is a fraction that leaves something to send."""
    check_number(what, value, 0, 1)
    if float(value) > _MOST_SPARSITY:
        raise ValueError(
            f"{what} is {value!r}: that is 1 but for rounding; the most is {_MOST_SPARSITY!r}"
        )


_MOST_STEPS = 2**48


def steps(what, value):
    """The value as an int; ValueError unless it is a number of steps."""
    try:
        whole = int(value)
    except (TypeError, ValueError, OverflowError):
        whole = None
    if whole is None or whole != value or whole < 0:
        raise ValueError(f"{what} is {value!r}: must be a whole number, 0 or more")
    if whole > _MOST_STEPS:
        raise ValueError(
            f"{what} is {value!r}: no run has more than 2^48 steps; sparsity=0 sends all of every "
            "step"
        )
    return whole


def check_whole(what, value, low, high):
    """Raises ValueError unless the value is a whole number in low .. high; C would cut it short."""
    try:
        within = low <= operator.index(value) <= high
    except TypeError:
        within = False
    if not within:
        raise ValueError(f"{what} is {value!r}: must be a whole number in {low} .. {high}")


def text(what, value):
    """The bytes of a string for C; ValueError unless it is one that C takes whole."""
    if not isinstance(value, str) or not value:
        raise ValueError(f"{what} is {value!r}: must be a string that is not empty")
    if "\0" in value:
        raise ValueError(f"{what} is {value!r}: a name cannot hold a zero byte, leave it out")
    return value.encode()


def path(value):
    """The bytes of a file's path for C; ValueError unless it is one that C takes whole."""
    try:
        encoded = os.fsencode(value)
    except TypeError:
        raise ValueError(f"path is {value!r}: must be a string or a path") from None
    if not encoded or b"\0" in encoded:
        raise ValueError(f"path is {value!r}: must be neither empty nor hold a zero byte")
    return encoded


def check_tensor(what, value):
    """Raises ValueError unless the value is a torch tensor that has memory, in one piece."""
    if not (hasattr(value, "data_ptr") and hasattr(value, "is_contiguous")):
        raise ValueError(f"{what} is {value!r}: must be a torch tensor")
    if value.device.type == "meta":
        raise ValueError(
            f"{what} of shape {tuple(value.shape)} is on the meta device, where tensors have no"
            " memory: make it on the CPU or a GPU, e.g. with to_empty(device=...) of its module"
        )
    if not value.is_contiguous():
        raise ValueError(
            f"{what} of shape {tuple(value.shape)} and strides {value.stride()} is not "
            f"contiguous: pass {what}.contiguous(), or the flat buffer that holds it"
        )
