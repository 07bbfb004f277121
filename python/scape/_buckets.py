"""What AdamS and wrap() share: names of registrations, hyperparameters, the choice to be sparse."""

import itertools
import math

from . import _library as lib
from . import nccl
from .flat import FlatBucket

_names_in_use = set()


def claim_name(base):
    """A name for an optimizer's registrations that no live one has: base, base.2, base.3 ...

    Optimizers made in the same order get the same names on all ranks and in a resumed run.
    """
    for number in itertools.count(1):
        name = base if number == 1 else f"{base}.{number}"
        if name not in _names_in_use:
            _names_in_use.add(name)
            return name


def close_buckets(buckets, name):
    """Ends the buckets' registrations and gives the name back. Idempotent."""
    for bucket in buckets:
        registration, bucket.registration = bucket.registration, None
        if registration is not None:
            registration.unregister()
    _names_in_use.discard(name)


def check_number(what, value, low, high=math.inf, *, open_low=False):
    """Raises ValueError unless low <= value < high (low < value where open_low)."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise ValueError(f"{what} is {value!r}: must be a number") from None
    if not ((number > low if open_low else number >= low) and number < high):
        left = "above" if open_low else "at least"
        right = "finite" if high == math.inf else f"below {high:g}"
        raise ValueError(f"{what} is {value!r}: must be {left} {low:g} and {right}")


def check_group(group):
    """Raises ValueError that names the first hyperparameter that is out of range."""
    check_number("lr", group["lr"], 0)
    betas = group["betas"]
    if not isinstance(betas, (tuple, list)) or len(betas) != 2:
        raise ValueError(f"betas is {betas!r}: must be a pair of numbers")
    check_number("betas[0]", betas[0], 0, 1)
    check_number("betas[1]", betas[1], 0, 1)
    check_number("eps", group["eps"], 0, open_low=True)
    check_number("weight_decay", group["weight_decay"], 0)
    if group.get("sparsity") is not None:
        check_number("sparsity", group["sparsity"], 0, 1)


def make_buckets(parameters):
    """[(kind, FlatBucket)] of a parameter group: tensors of two or more dimensions together, those
    of one (norms, biases) in a bucket of their own, which stays dense.
    """
    trained = [p for p in parameters if p.requires_grad]
    kinds = (
        ("matrices", [p for p in trained if p.dim() > 1]),
        ("vectors", [p for p in trained if p.dim() <= 1]),
    )
    return [(kind, FlatBucket(members)) for kind, members in kinds if members]


def choose_sparse(communicator, wanted, what):
    """True when registrations can and should be made; says why not, and stops where SCAPE_REQUIRED
    is set.

    wanted: None (whenever Scape is active), False (never), True (or else ScapeError).
    """
    if wanted is False:
        return False
    if not lib.is_active():
        if wanted or lib.is_required():
            lib.require()
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
