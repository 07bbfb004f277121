"""wrap(): a third-party AdamS whose gradient exchange Scape makes sparse."""

import weakref

import torch

from . import _api
from . import _library as lib
from . import distributed
from ._buckets import (
    check_group,
    check_number,
    choose_sparse,
    claim_name,
    close_buckets,
    make_buckets,
)


def wrap(
    optimizer,
    *,
    sparsity=None,
    total_steps=0,
    dense_steps=0,
    ramp_steps=0,
    ramp_sparsity=None,
    payload=None,
    age_cap=None,
    communicator=None,
    use_scape=None,
    name="wrapped",
):
    """Makes a torch optimizer with AdamS's equations exchange its gradients, sparse where Scape is
    active. Returns the same optimizer, so that schedulers and scalers go on working; what was
    added hangs on it as `optimizer.scape` (a Hooked).

    Its step() then all-reduces the gradients first (leave DistributedDataParallel out), and
    afterwards lengthens the step of each exchanged element by the steps it waited. The optimizer
    must keep AdamS's m, read `lr`, `betas`, `eps` and `weight_decay` (decoupled) from its groups,
    and have taken no step yet. Parameters become views of flat buffers. step(closure) is refused.

    Collective; the arguments are those of AdamS. state_dict() gains an entry "scape".
    """
    if getattr(optimizer, "scape", None) is not None:
        raise ValueError("the optimizer is wrapped already")
    if optimizer.state:
        raise ValueError(
            "the optimizer has state: wrap it before its first step, then load its state"
        )
    if sparsity is not None:
        check_number("sparsity", sparsity, 0, 1)
    options = dict(
        total_steps=total_steps,
        dense_steps=dense_steps,
        ramp_steps=ramp_steps,
        ramp_sparsity=ramp_sparsity,
        payload=payload,
        age_cap=age_cap,
    )
    optimizer.scape = Hooked(
        optimizer, sparsity, options, communicator, use_scape, claim_name(name)
    )
    return optimizer


class _Bucket:
    def __init__(self, group_index, flat, registration):
        self.group_index = group_index
        self.flat = flat
        self.registration = registration
        self.before = torch.empty_like(flat.param) if registration is not None else None


class Hooked:
    """What wrap() hangs on an optimizer."""

    def __init__(self, optimizer, sparsity, options, communicator, use_scape, name):
        self._optimizer = weakref.ref(optimizer)
        self._buckets = []
        self._finalizer = weakref.finalize(self, close_buckets, self._buckets, name)
        self._finalizer.atexit = False
        self._reduced = False
        self._communicator = communicator
        self._sparse = False
        try:
            self._lay_out(optimizer, sparsity, options, use_scape, name)
        except Exception:
            self._finalizer()
            raise
        self._hooks = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
            optimizer.register_state_dict_post_hook(self._save),
            optimizer.register_load_state_dict_pre_hook(self._load),
        ]

    def _lay_out(self, optimizer, sparsity, options, use_scape, name):
        for index, group in enumerate(optimizer.param_groups):
            missing = [key for key in ("lr", "betas", "eps", "weight_decay") if key not in group]
            if missing:
                raise ValueError(
                    f"parameter group {index} has no {', '.join(missing)}: wrap() is for an AdamS"
                    " with AdamW's names of hyperparameters"
                )
            check_group(group)
            layout = make_buckets(group["params"])
            if index == 0:
                if self._communicator is None:
                    device = layout[0][1].param.device if layout else "cpu"
                    self._communicator = distributed.from_env(device)
                self._sparse = choose_sparse(self._communicator, use_scape, "the wrapped optimizer")
            for kind, flat in layout:
                self._communicator.broadcast(flat.param, root=0)
                registration = None
                if self._sparse:
                    registration = _api.register(
                        flat.grad,
                        name=f"{name}.{index}.{kind}",
                        role="hooked",
                        residual="internal",
                        sparsity=group.get("sparsity", sparsity) if kind == "matrices" else 0.0,
                        beta1=group["betas"][0],
                        beta2=group["betas"][1],
                        eps=group["eps"],
                        **options,
                    )
                self._buckets.append(_Bucket(index, flat, registration))

    @property
    def is_sparse(self):
        """True when Scape serves the exchange."""
        return self._sparse

    @property
    def communicator(self):
        return self._communicator

    @property
    def buckets(self):
        """The flat gradient buffers: what scape.stats() and scape.read_mask() take."""
        return [bucket.flat.grad for bucket in self._buckets]

    @torch.no_grad()
    def all_reduce(self):
        """Exchanges the gradients; collective. step() does it unless it has been done."""
        if self._reduced:
            raise lib.ScapeError(
                lib.Status.USAGE, "all_reduce() was called twice without a step() in between"
            )
        for bucket in self._buckets:
            bucket.flat.check_parameters()
            bucket.flat.gather_gradients()
            self._communicator.all_reduce(bucket.flat.grad, "avg")
        self._reduced = True

    def unwrap(self):
        """Takes the hooks off and ends the registrations; step() then exchanges nothing."""
        for hook in self._hooks:
            hook.remove()
        self._finalizer()
        optimizer = self._optimizer()
        if optimizer is not None:
            optimizer.scape = None

    @torch.no_grad()
    def _before_step(self, optimizer, args, kwargs):
        # args begins with the optimizer itself.
        if any(arg is not None for arg in args[1:]) or kwargs.get("closure") is not None:
            raise lib.ScapeError(
                lib.Status.USAGE,
                "step(closure) of a wrapped optimizer: gradients are exchanged before the step, the"
                " closure would make new ones; call it yourself, then step()",
            )
        if not self._reduced:
            self.all_reduce()
        for bucket in self._buckets:
            if bucket.before is not None:
                bucket.before.copy_(bucket.flat.param)

    @torch.no_grad()
    def _after_step(self, optimizer, args, kwargs):
        self._reduced = False
        for bucket in self._buckets:
            if bucket.registration is not None:
                group = optimizer.param_groups[bucket.group_index]
                _api.post_step(
                    bucket.flat.grad,
                    bucket.before,
                    bucket.flat.param,
                    float(group["lr"]),
                    float(group["weight_decay"]),
                )

    def _save(self, optimizer, state_dict):
        library = None
        if self._sparse:
            library = torch.frombuffer(bytearray(_api.save_state()), dtype=torch.uint8)
        state_dict["scape"] = {
            "rank": self._communicator.rank,
            "size": self._communicator.size,
            "library": library,
        }

    def _load(self, optimizer, state_dict):
        saved = state_dict.get("scape")
        if not self._sparse:
            return
        if saved is None or saved["library"] is None:
            lib.warn_once("the state was saved without Scape: residuals start from zero")
            return
        here = (self._communicator.rank, self._communicator.size)
        if (saved["rank"], saved["size"]) != here:
            raise lib.ScapeError(
                lib.Status.DATA,
                f"the state is of rank {saved['rank']} of {saved['size']}, this is rank {here[0]}"
                f" of {here[1]}: each rank loads what it saved, in a run of as many ranks",
            )
        _api.load_state(saved["library"].cpu().numpy().tobytes())
