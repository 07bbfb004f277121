"""What AdamS and wrap() share: flat buckets and their registrations, the exchange of gradients,
hyperparameters, the choice to be sparse.
"""

import contextlib
import gc
import hashlib
import itertools

import torch

from . import _api
from . import _library as lib
from . import nccl
from .flat import FlatBucket

_names_in_use = set()


def claim_name(base):
    """A name for an optimizer's registrations that no live one has: base, base.2, base.3 ...

    Optimizers made in the same order get the same names on all ranks and in a resumed run.
    """
    lib.text("name", base)
    for number in itertools.count(1):
        name = base if number == 1 else f"{base}.{number}"
        if name not in _names_in_use:
            _names_in_use.add(name)
            return name


class Bucket:
    """One flat bucket of one parameter group, with its registration if it has one."""

    def __init__(self, group_index, name, kind, flat):
        self.group_index = group_index
        self.name = name
        self.kind = kind
        self.flat = flat
        self.registration = None
        self.registered = None  # registered_values() of the registration

    def register(self, role, group, sparsity, options):
        """Registers the gradients, in place of an earlier registration."""
        if self.registration is not None:
            self.registration.unregister()
        self.registration = _api.register(
            self.flat.grad,
            name=self.name,
            role=role,
            sparsity=sparsity if self.kind == "matrices" else 0.0,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            eps=group["eps"],
            **options,
        )
        self.registered = registered_values(group)


def all_reduce(buckets, communicator):
    """The mean of the buckets' gradients over the ranks, launched together where that can be."""
    together = len(buckets) > 1 and isinstance(communicator, nccl.Communicator)
    with nccl.group() if together else contextlib.nullcontext():
        for bucket in buckets:
            communicator.all_reduce(bucket.flat.grad, "avg")


def close_buckets(buckets, name):
    """Ends the buckets' registrations and gives the name back. Idempotent."""
    for bucket in buckets:
        registration, bucket.registration = bucket.registration, None
        if registration is not None:
            registration.unregister()
    _names_in_use.discard(name)


def check_group(group):
    """Raises ValueError that names the first hyperparameter that is out of range."""
    lib.check_number("lr", group["lr"], 0)
    betas = group["betas"]
    if not isinstance(betas, (tuple, list)) or len(betas) != 2:
        raise ValueError(f"betas is {betas!r}: must be a pair of numbers")
    lib.check_number("betas[0]", betas[0], 0, 1)
    lib.check_number("betas[1]", betas[1], 0, 1)
    lib.check_number("eps", group["eps"], 0, open_low=True)
    lib.check_number("weight_decay", group["weight_decay"], 0)
    if group.get("sparsity") is not None:
        lib.check_sparsity("sparsity", group["sparsity"])


def check_options(options):
    """Raises ValueError that names the first option of a registration that is out of range; also
    where training is dense, so that a program is not refused only on the day that Scape is there.
    """
    for what, choices in (
        ("payload", lib.PAYLOADS),
        ("residual", lib.RESIDUALS),
        ("rule", lib.RULES),
    ):
        if options.get(what) is not None:
            lib.choice(what, options[what], choices)
    for what in ("total_steps", "dense_steps", "ramp_steps"):
        lib.steps(what, options[what])
    if options["ramp_sparsity"] is not None:
        lib.check_sparsity("ramp_sparsity", options["ramp_sparsity"])
    if options["age_cap"] is not None:
        lib.check_number("age_cap", options["age_cap"], 1)


def check_communicator(communicator, use_scape):
    """Raises ValueError unless these are what AdamS and wrap() take, and ScapeError where dense
    training is no option and Scape is absent: before other ranks are waited for.
    """
    if use_scape not in (None, False, True):
        raise ValueError(f"use_scape is {use_scape!r}: must be None, False or True")
    if use_scape or (use_scape is None and lib.is_required()):
        lib.require()
    if communicator is None:
        return
    calls = (getattr(communicator, name, None) for name in ("all_reduce", "broadcast"))
    numbers = (getattr(communicator, name, None) for name in ("rank", "size"))
    if not (all(map(callable, calls)) and all(isinstance(number, int) for number in numbers)):
        raise ValueError(
            f"communicator is {communicator!r}: must be a scape.nccl.Communicator, or an object"
            " with rank, size, all_reduce and broadcast, as scape.distributed.TorchCommunicator"
            " makes of a process group; None takes all ranks that the launcher started"
        )


def registered_values(group):
    """The values of a group that its registrations keep."""
    sparsity = group.get("sparsity")
    return {
        "betas": tuple(map(float, group["betas"])),
        "eps": float(group["eps"]),
        "sparsity": None if sparsity is None else float(sparsity),
    }


def check_unchanged(name, group, registered):
    """ScapeError when a group is not as its buffer `name` was registered."""
    for key, value in registered_values(group).items():
        if value != registered[key]:
            raise lib.ScapeError(
                lib.Status.USAGE,
                f"{key} of {name} is {value}, but it was registered with {registered[key]}: only lr"
                " and weight_decay may change during a run",
            )


def warn_of_data_parallel(parameters, what):
    """Says so where a DistributedDataParallel has one of these parameters: it would exchange their
    gradients dense in backward(), before the optimizer exchanges them again.
    """
    # Without a process group none can have been made.
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return
    ours = {id(parameter) for parameter in parameters}
    for found in gc.get_objects():
        # type(): an object may answer anything as its __class__.
        if not issubclass(type(found), torch.nn.parallel.DistributedDataParallel):
            continue
        named = found.module.named_parameters()
        ignored = getattr(found, "parameters_to_ignore", ())
        if any(id(p) in ours and name not in ignored for name, p in named):
            lib.warn_once(
                f"DistributedDataParallel exchanges the gradients of {what}'s parameters dense, and"
                f" {what} exchanges them again: nothing is saved; train the plain module (what"
                " DistributedDataParallel was given, its .module) and leave the exchange to the"
                " optimizer"
            )
            return


def make_buckets(parameters):
    """[(kind, FlatBucket)] of a parameter group: tensors of two or more dimensions together, those
    of one (norms, biases) in a bucket of their own, which stays dense. Those without elements, or
    frozen, are left out.
    """
    trained = [p for p in parameters if p.requires_grad and p.numel() > 0]
    kinds = (
        ("matrices", [p for p in trained if p.dim() > 1]),
        ("vectors", [p for p in trained if p.dim() <= 1]),
    )
    return [(kind, FlatBucket(members)) for kind, members in kinds if members]


def check_alike(communicator, index, group):
    """ScapeError on every rank where the ranks' parameters of a group differ in number, order,
    shape or being frozen: flat buffers of one length would be exchanged, and mix them up.

    Collective. Takes no more of a communicator than the optimizers do.
    """
    if communicator.size == 1:
        return
    names = group.get("param_names") or itertools.repeat("")
    mine = [
        " ".join(filter(None, (name, str(tuple(p.shape)), "" if p.requires_grad else "frozen")))
        for name, p in zip(names, group["params"])
    ]
    device = group["params"][0].device if group["params"] else "cpu"
    digest = hashlib.sha256("\n".join(mine).encode()).digest()[:16]
    own = torch.tensor(list(digest), dtype=torch.float32, device=device)
    first = communicator.broadcast(own.clone(), root=0)
    differs = torch.zeros(communicator.size, device=device)
    differs[communicator.rank] = float(not torch.equal(own, first))
    communicator.all_reduce(differs, "avg")
    if not differs.any():
        return
    rank = int(differs.nonzero()[0])
    theirs = [_lines_of(communicator, mine, root, device) for root in (0, rank)]
    place, (a, b) = next(
        (place, pair)
        for place, pair in enumerate(itertools.zip_longest(*theirs, fillvalue="none"))
        if pair[0] != pair[1]
    )
    raise lib.ScapeError(
        lib.Status.MISMATCH,
        f"parameter {place} of group {index} is {a} on rank 0 and {b} on rank {rank}: give every"
        " rank the same model, and its parameters in the same order",
    )


def _lines_of(communicator, lines, root, device):
    """The lines that rank `root` has, on every rank."""
    data = torch.tensor(list("\n".join(lines).encode()), dtype=torch.float32, device=device)
    count = communicator.broadcast(torch.tensor([float(len(data))], device=device), root=root)
    if communicator.rank != root:
        data = torch.empty(int(count), dtype=torch.float32, device=device)
    if len(data) > 0:
        communicator.broadcast(data, root=root)
    text = bytes(data.to(torch.uint8).tolist()).decode()
    return text.split("\n") if text else []


def check_frozen(left_out):
    """ScapeError when a parameter that was frozen when the buckets were made is not any more."""
    for parameter in left_out:
        if parameter.requires_grad:
            raise lib.ScapeError(
                lib.Status.USAGE,
                f"a parameter of shape {tuple(parameter.shape)} was frozen when the optimizer was"
                " made and requires a gradient now, which nobody would exchange: unfreeze before"
                " the optimizer is made, or make a new one",
            )


def choose_sparse(communicator, wanted, what):
    """True when registrations can and should be made; says why not, and stops where SCAPE_REQUIRED
    is set.

    wanted: None (whenever Scape is active), False (never), True (or else ScapeError). That it is
    active where it has to be is check_communicator()'s to see.
    """
    if wanted is False:
        return False
    if not lib.is_active():
        lib.warn_once(f"{what} trains dense: {lib.why_inactive()}")
        return False
    if not isinstance(communicator, nccl.Communicator):
        reason = (
            f"{what} trains dense: its communicator is a {type(communicator).__name__}, whose calls"
            " Scape does not see; give it a scape.nccl.Communicator"
        )
        if wanted or lib.is_required():
            raise lib.ScapeError(lib.Status.USAGE, reason)
        lib.warn_once(reason)
        return False
    return True
