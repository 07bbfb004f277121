"""wrap(): a third-party AdamS whose gradient exchange Scape makes sparse."""

import weakref

import torch

from . import _api
from . import _library as lib
from . import _saved, distributed
from ._buckets import (
    Bucket,
    all_reduce,
    check_alike,
    check_communicator,
    check_frozen,
    check_group,
    check_options,
    check_unchanged,
    choose_sparse,
    claim_name,
    close_buckets,
    make_buckets,
    registered_values,
    warn_of_data_parallel,
)
from .optim import AdamS


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
    and have taken no step yet; Adam, AdamW and others of torch's own are refused, since they keep a
    second moment, and so is amsgrad. Parameters become views of flat buffers. step(closure) is
    refused. A GradScaler calls step() only on ranks without an overflow, and leaves the others
    behind: with one, reduce its verdict over the ranks first, or use scape.AdamS, which does.

    Collective; the arguments are those of AdamS. state_dict() gains an entry "scape".
    """
    _check_optimizer(optimizer)
    if getattr(optimizer, "scape", None) is not None:
        raise ValueError("the optimizer is wrapped already")
    if optimizer.state:
        raise ValueError(
            "the optimizer has state: wrap it before its first step, then load its state"
        )
    if sparsity is not None:
        lib.check_sparsity("sparsity", sparsity)
    check_communicator(communicator, use_scape)
    options = dict(
        total_steps=total_steps,
        dense_steps=dense_steps,
        ramp_steps=ramp_steps,
        ramp_sparsity=ramp_sparsity,
        payload=payload,
        age_cap=age_cap,
    )
    check_options(options)
    optimizer.scape = Hooked(
        optimizer, sparsity, options, communicator, use_scape, claim_name(name)
    )
    return optimizer


def _check_optimizer(optimizer):
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ValueError(f"optimizer is {optimizer!r}: must be a torch.optim.Optimizer")
    kind = type(optimizer)
    if isinstance(optimizer, AdamS):
        raise ValueError("optimizer is a scape.AdamS, which exchanges its gradients itself: use it")
    # A class of torch's own: what others derive from one may well be AdamS.
    if kind.__module__.startswith("torch.optim"):
        raise ValueError(
            f"optimizer is torch's {kind.__name__}, not AdamS: wrap() is for AdamS, whose second"
            " moment comes from its first; use scape.AdamS, or register its gradient buffers with"
            ' role="gradient", which costs quality'
        )
    for index, group in enumerate(optimizer.param_groups):
        if group.get("amsgrad"):
            raise ValueError(
                f"amsgrad of parameter group {index} is {group['amsgrad']!r}: the second moment's"
                " maximum is none of AdamS's equations, switch it off"
            )


class Hooked:
    """What wrap() hangs on an optimizer."""

    def __init__(self, optimizer, sparsity, options, communicator, use_scape, name):
        self._optimizer = weakref.ref(optimizer)
        self._buckets = []
        self._finalizer = weakref.finalize(self, close_buckets, self._buckets, name)
        self._finalizer.atexit = False
        self._reduced = False
        self._looked_around = False
        self._state_seen = False
        self._communicator = communicator
        self._sparse = False
        self._sparsity = sparsity
        self._options = options
        self._name = name
        self._laid_out = [list(group["params"]) for group in optimizer.param_groups]
        self._frozen = [p for group in self._laid_out for p in group if not p.requires_grad]
        try:
            self._lay_out(optimizer, use_scape)
        except Exception:
            self._finalizer()
            raise
        self._hooks = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
            optimizer.register_state_dict_post_hook(self._save),
            optimizer.register_load_state_dict_pre_hook(self._load),
        ]

    def _lay_out(self, optimizer, use_scape):
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
                    self._communicator = distributed.shared_from_env(device)
                self._sparse = choose_sparse(self._communicator, use_scape, "the wrapped optimizer")
            check_alike(self._communicator, index, group)
            for kind, flat in layout:
                self._communicator.broadcast(flat.param, root=0)
                bucket = Bucket(index, f"{self._name}.{index}.{kind}", kind, flat)
                bucket.before = torch.empty_like(flat.param) if self._sparse else None
                if self._sparse:
                    self._register(bucket, group)
                self._buckets.append(bucket)

    def _register(self, bucket, group):
        bucket.register("hooked", group, group.get("sparsity", self._sparsity), self._options)

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
        if not self._looked_around:
            self._looked_around = True
            parameters = [p for group in self._laid_out for p in group]
            warn_of_data_parallel(parameters, "the wrapped optimizer")
        check_frozen(self._frozen)
        for bucket in self._buckets:
            bucket.flat.check_parameters()
            bucket.flat.gather_gradients()
        all_reduce(self._buckets, self._communicator)
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
        groups = optimizer.param_groups
        if [list(map(id, group["params"])) for group in groups] != [
            list(map(id, parameters)) for parameters in self._laid_out
        ]:
            raise lib.ScapeError(
                lib.Status.USAGE,
                "the optimizer's parameters are not those that were wrapped: add every group before"
                " wrap()",
            )
        for bucket in self._buckets:
            if bucket.registration is not None:
                check_unchanged(bucket.name, groups[bucket.group_index], bucket.registered)
        if not self._reduced:
            self.all_reduce()
        for bucket in self._buckets:
            if bucket.before is not None:
                bucket.before.copy_(bucket.flat.param)

    @torch.no_grad()
    def _after_step(self, optimizer, args, kwargs):
        self._reduced = False
        if self._sparse and not self._state_seen:
            self._state_seen = True
            if any("exp_avg_sq" in state for state in optimizer.state.values()):
                lib.warn_once(
                    f"the wrapped {type(optimizer).__name__} keeps exp_avg_sq, a second moment of"
                    " its own: AdamS has none, and sparse exchange under Adam or AdamW costs"
                    " quality; use scape.AdamS"
                )
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
            library = _saved.save({bucket.name for bucket in self._buckets})
        state_dict["scape"] = {
            "rank": self._communicator.rank,
            "size": self._communicator.size,
            "name": self._name,
            "library": library,
        }

    def _load(self, optimizer, state_dict):
        saved = state_dict.get("scape")
        library = None
        if saved is not None:
            fields = ("rank", "size", "name", "library")
            _saved.check_entry(saved, fields, self._communicator, self._name, self._sparse)
            library = saved["library"]
        _saved.check_groups(optimizer, state_dict)
        if not self._sparse:
            return
        # First, since it may refuse: nothing has changed then.
        if library is not None:
            _saved.load(library)
        dropped = False
        for bucket in self._buckets:
            group = {
                **optimizer.param_groups[bucket.group_index],
                **state_dict["param_groups"][bucket.group_index],
            }
            if library is None or registered_values(group) != bucket.registered:
                self._register(bucket, group)
                dropped = True
        if library is None:
            lib.warn_once("the state was saved without Scape: residuals start from zero")
        elif dropped:
            _saved.load(library)  # what waited for a registration went with it
