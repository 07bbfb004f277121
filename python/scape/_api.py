"""Registration, statistics, reading and saving: the C functions over torch tensors."""

import ctypes

from . import _library as lib


def stream_of(tensor):
    """The cudaStream_t that work on this tensor goes to; None for host memory."""
    if tensor.device.type != "cuda":
        return None
    import torch

    return torch.cuda.current_stream(tensor.device).cuda_stream


def _dtype_of(tensor):
    name = str(tensor.dtype).replace("torch.", "")
    if name not in lib.DTYPES:
        raise ValueError(
            f"tensor has type {name}: only {', '.join(lib.DTYPES)} can be registered; "
            "leave it unregistered, it then travels dense"
        )
    return lib.DTYPES[name]


def _range(tensor):
    """(address, elements) of a tensor."""
    lib.check_tensor("tensor", tensor)
    return tensor.data_ptr(), tensor.numel()


class Registration:
    """A registered tensor. Keeps the tensor alive; ends with unregister(), or as a `with` block."""

    def __init__(self, tensor, name, handle):
        self.tensor = tensor
        self.name = name
        self._handle = handle

    def unregister(self):
        """Drops the registration and its residual; the library logs how much. Idempotent."""
        handle, self._handle = self._handle, None
        if handle is not None:
            lib.call("scape_unregister", handle)

    def self_check(self):
        """Raises ScapeError with the reason unless calls were met and travel as registered."""
        if self._handle is None:
            raise lib.ScapeError(lib.Status.NOT_FOUND, f"registration {self.name!r} has ended")
        lib.call("scape_self_check", self._handle)

    def stats(self):
        """The counters of all the buffers inside this registration."""
        return stats(self.tensor, count=0)

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.unregister()

    def __repr__(self):
        state = "" if self._handle is not None else ", unregistered"
        return f"Registration({self.name!r}, {self.tensor.numel()} elements{state})"


def register(
    tensor,
    *,
    name=None,
    role="fused",
    sparsity=None,
    beta1=None,
    beta2=None,
    eps=None,
    age_cap=None,
    payload=None,
    residual=None,
    rule="lazy",
    total_steps=None,
    dense_steps=None,
    ramp_steps=None,
    ramp_sparsity=None,
):
    """Registers a contiguous tensor: its all-reduces become masked collectives.

    tensor: fp32, bf16 or fp16, any shape; must stay where it is until it is unregistered.
    name: identifies the buffer on all ranks and in saved state; 1 to 63 bytes.
    role: "fused", "first_moment", "hooked" or "gradient" (docs/algorithm.md, "Roles").
    sparsity: the fraction NOT sent, in [0, 1); 0.99 sends 1 %.
    payload: "fp32" or "bf16". rule: "lazy" or "plain".
    residual: "internal"; "in_place": what was not sent stays in the tensor itself, which then
        nobody may clear, scale or clip; or "host": in page-locked memory of the host instead of
        the GPU's (docs/api.md, "Where the residual is kept").
    What is None takes the library's default, which SCAPE_* variables may move. All ranks must
    agree on every option.

    Returns a Registration. Raises ScapeError (INACTIVE where the library is absent or off,
    ARGUMENT with the field, value and range), ValueError for what is no choice at all.
    """
    lib.require()
    address, elements = _range(tensor)
    if elements == 0:
        raise ValueError(
            f"tensor of shape {tuple(tensor.shape)} has no elements: leave it unregistered"
        )
    dtype = _dtype_of(tensor)
    config = lib.default_config()
    config.name = None if name is None else lib.text("name", name)
    config.role = lib.choice("role", role, lib.ROLES)
    if residual is not None:
        config.residual = lib.choice("residual", residual, lib.RESIDUALS)
    config.rule = lib.choice("rule", rule, lib.RULES)
    if payload is not None:
        config.payload = lib.choice("payload", payload, lib.PAYLOADS)
    for field, value in (
        ("sparsity", sparsity),
        ("ramp_sparsity", ramp_sparsity),
    ):
        if value is not None:
            lib.check_sparsity(field, value)
            setattr(config, field, float(value))
    for field, value in (
        ("beta1", beta1),
        ("beta2", beta2),
        ("eps", eps),
        ("age_cap", age_cap),
    ):
        if value is not None:
            setattr(config, field, lib.number(field, value))
    for field, value in (
        ("total_steps", total_steps),
        ("dense_steps", dense_steps),
        ("ramp_steps", ramp_steps),
    ):
        if value is not None:
            setattr(config, field, lib.steps(field, value))
    handle = ctypes.c_void_p()
    lib.call(
        "scape_register",
        address,
        elements,
        dtype,
        ctypes.byref(config),
        ctypes.byref(handle),
    )
    return Registration(tensor, name or "buffer", handle)


def unregister(registration):
    """Ends a registration; the same as registration.unregister()."""
    if not isinstance(registration, Registration):
        raise ValueError(f"registration is {registration!r}: must be what register() returned")
    registration.unregister()


def next_call(name):
    """Names the buffer of this thread's next collective, where one address serves several."""
    lib.call("scape_next", lib.text("name", name))


def stats(tensor=None, *, count=None):
    """Counters of the buffer that `tensor` is; of the process when tensor is None.

    count: elements of the buffer, when it is not the whole tensor; 0 asks for the whole
    registration that the tensor's address lies in.
    """
    result = lib.Stats(size=ctypes.sizeof(lib.Stats))
    if tensor is None:
        address, elements = None, 0
    else:
        address, elements = _range(tensor)
        if count is not None:
            elements = lib.steps("count", count)
    lib.call("scape_get_stats", address, elements, ctypes.byref(result))
    return result


def read_mask(tensor):
    """The mask of the last call, as a boolean tensor of the same shape, on the CPU."""
    import torch

    address, elements = _range(tensor)
    words = torch.zeros((elements + 63) // 64, dtype=torch.int64)
    lib.call("scape_read_mask", address, elements, words.data_ptr(), words.numel())
    bits = words.view(torch.uint8).unsqueeze(1) >> torch.arange(8, dtype=torch.uint8)
    return (bits & 1).bool().reshape(-1)[:elements].reshape(tensor.shape)


def read_ages(tensor):
    """Steps since each element was last exchanged (what the last call met, on its mask): int32."""
    import torch

    address, elements = _range(tensor)
    ages = torch.zeros(elements, dtype=torch.int16)
    lib.call("scape_read_ages", address, elements, ages.data_ptr(), ages.numel())
    return (ages.to(torch.int32) & 0xFFFF).reshape(tensor.shape)


def _read_floats(name, tensor):
    import torch

    address, elements = _range(tensor)
    out = torch.zeros(elements, dtype=torch.float32)
    lib.call(name, address, elements, out.data_ptr(), out.numel())
    return out.reshape(tensor.shape)


def read_residual(tensor):
    """This rank's residual, fp32, on the CPU."""
    return _read_floats("scape_read_residual", tensor)


def read_moment(tensor):
    """The replicated first moment, fp32, on the CPU."""
    return _read_floats("scape_read_moment", tensor)


def adams_step(tensor, param, lr, weight_decay=0.0):
    """The fused AdamS update after the all-reduce of `tensor`; param is fp32, of the same size."""
    _check_param(tensor, param)
    lib.call(
        "scape_adams_step",
        *_range(tensor),
        param.data_ptr(),
        lr,
        weight_decay,
        stream_of(tensor),
    )


def post_step(tensor, before, param, lr, weight_decay=0.0, *, offset=0):
    """Hooked role, after the optimizer's step: scales the change of what was masked by its age.

    before, param: the parameters of elements offset .. offset + param.numel() of `tensor`, before
    and after the optimizer's step.
    """
    lib.check_tensor("before", before)
    lib.check_tensor("param", param)
    if before.numel() != param.numel() or str(param.dtype) != "torch.float32":
        raise ValueError(
            f"param has {param.numel()} elements of {param.dtype}, before {before.numel()}: "
            "both must be fp32 and of one size"
        )
    lib.call(
        "scape_post_step",
        *_range(tensor),
        offset,
        param.numel(),
        before.data_ptr(),
        param.data_ptr(),
        lr,
        weight_decay,
        stream_of(tensor),
    )


def clear_masked(tensor):
    """Clears the masked elements of an in-place gradient buffer; the others are the residual."""
    lib.call("scape_clear_masked", *_range(tensor), stream_of(tensor))


def flush(tensor, param=None, lr=0.0, weight_decay=0.0):
    """Collective: one dense step that sends every residual.

    Fused role: also applies it, and the pending weight decay, to param. Other roles: param is None
    and the result is written to `tensor`.
    """
    if param is not None:
        _check_param(tensor, param)
    lib.call(
        "scape_flush",
        *_range(tensor),
        None if param is None else param.data_ptr(),
        lr,
        weight_decay,
        stream_of(tensor),
    )


def _check_param(tensor, param):
    lib.check_tensor("tensor", tensor)
    lib.check_tensor("param", param)
    if param.numel() != tensor.numel() or str(param.dtype) != "torch.float32":
        raise ValueError(
            f"param has {param.numel()} elements of {param.dtype}: must be fp32 with the "
            f"{tensor.numel()} elements of the buffer"
        )


def save_state():
    """This rank's state of all buffers (residual, moment, ages, masks, step), as bytes."""
    needed = ctypes.c_size_t()
    lib.call("scape_save_state", None, 0, ctypes.byref(needed))
    # A refresh that ends between the two calls may change the size: ask until it fits.
    while True:
        data = ctypes.create_string_buffer(max(needed.value, 1))
        capacity = needed.value
        try:
            lib.call("scape_save_state", data, capacity, ctypes.byref(needed))
        except lib.ScapeError as error:
            if error.status == lib.Status.MEMORY and needed.value > capacity:
                continue
            raise
        return data.raw[: needed.value]


def load_state(data):
    """Takes what save_state() gave; each buffer finds its part by name at its next call."""
    try:
        data = memoryview(data).tobytes()
    except TypeError:
        raise ValueError(f"data is {data!r}: must be bytes, as save_state() gives them") from None
    lib.call("scape_load_state", data, len(data))


def save_state_file(path):
    """Writes save_state() to a file, as a whole or not at all. Each rank needs a file of its own; a
    symbolic link stays and leads to the new file; what is no regular file is refused.
    """
    lib.call("scape_save_state_file", lib.path(path))


def load_state_file(path):
    """Reads what save_state_file() wrote."""
    lib.call("scape_load_state_file", lib.path(path))
