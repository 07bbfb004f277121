"""AdamS over flat buffers: masked where Scape is active, dense to the same equations where not."""

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

# Elements per pass of the dense step: the temporaries of one pass stay in the cache.
_CHUNK = 1 << 17


class _Bucket(Bucket):
    def __init__(self, *args):
        super().__init__(*args)
        # Of dense training; with Scape the library keeps it, and this is what was loaded until the
        # next call takes it over.
        self.moment = None
        self.called = False  # the library has met a call of this buffer
        self.loaded = False  # there is state for it that no call has taken yet
        self.version = 0  # of the gradient buffer, at the last all_reduce() or step()

    @property
    def known(self):
        """Whether the library's answers are those of this buffer's state."""
        return self.called and not self.loaded

    def taken(self):
        """By a call: the library keeps the state from here on."""
        self.called, self.loaded, self.moment = True, False, None

    def dense_moment(self):
        if self.moment is None:
            self.moment = torch.zeros_like(self.flat.param)
        return self.moment


class AdamS(torch.optim.Optimizer):
    """AdamS (arXiv 2505.16363) whose gradient exchange Scape makes sparse.

    m <- b1 m + (1 - b1) g;  v = b2 m_old^2 + (1 - b2) g^2;
    theta <- (1 - lr wd) theta - lr m / (sqrt(v) + eps),  g the mean over the ranks.

    The optimizer does the exchange itself (leave DistributedDataParallel out): step() all-reduces
    the gradients of all parameters in a few flat buffers, then updates. With the preloaded library
    active only the masked elements travel and are updated, as docs/algorithm.md says. Without it
    training is dense, to the equations above, and one line says so (SCAPE_REQUIRED=1 stops).

    Parameters become views of flat buffers: move the model to its device and type first, and
    freeze what is not to be trained. Gradients are the program's own until step(), which gathers
    them in flat buffers: clip, unscale and clear them as ever. A parameter without one counts as
    one whose gradient is zero: unlike torch's optimizers, which leave it alone then, momentum and
    decay go on.

    torch.amp.GradScaler: scaler.step(optimizer) as ever. Where a gradient overflowed on any rank no
    rank steps; scales may differ between ranks.

    residual="in_place" saves 4 bytes an element and one pass over memory a step: what was not sent
    stays in the gradient buffer. Then p.grad is more than a gradient, and
      - never clip, rescale or unscale it (no clip_grad_norm_(), no GradScaler): that scales what
        waits too, and nothing can notice;
      - clear it with this optimizer's zero_grad() alone, which clears only what was sent, whatever
        set_to_none says; model.zero_grad(set_to_none=False) and p.grad.zero_() drop what waits;
      - do not replace it: that is an error.

    Constructing it is collective over the communicator's ranks: parameters are broadcast from
    rank 0, so that all start alike. All arguments must be alike on all ranks.

    params: parameters or groups; groups may set lr, betas, eps, weight_decay and sparsity.
    lr, betas, eps, weight_decay: as in AdamW; lr and weight_decay may change from step to step.
    sparsity: the fraction of elements NOT sent per step; 0.99 sends 1 %. None: SCAPE_SPARSITY.
        One-dimensional tensors always travel whole.
    total_steps: length of the run, from which the dense warm-up (1 %) and the ramp (10 %) follow;
        dense_steps, ramp_steps and ramp_sparsity set them one by one.
    payload: "fp32" or "bf16"; None: SCAPE_PAYLOAD. rule: "lazy" or "plain".
    residual: "internal", "in_place", or "host": in page-locked memory of the host instead of the
        GPU's, at the cost of what crosses the link between them; None: SCAPE_RESIDUAL.
    age_cap: the most by which an element's step is lengthened for the steps it waited.
    communicator: a scape.nccl.Communicator, or an object with rank, size, all_reduce and broadcast;
        None: all ranks that the launcher started.
    use_scape: None: whenever it is active; False: never; True: or else ScapeError.
    name: identifies the buffers on all ranks and in saved state.
    """

    # GradScaler.step() then calls step() in any case, with its verdict in found_inf and, unless
    # unscale_() was called, its scale in grad_scale.
    _step_supports_amp_scaling = True

    def __init__(
        self,
        params,
        lr=1e-3,
        betas=(0.9, 0.95),
        eps=1e-8,
        weight_decay=0.0,
        *,
        sparsity=None,
        total_steps=0,
        dense_steps=0,
        ramp_steps=0,
        ramp_sparsity=None,
        payload=None,
        residual=None,
        rule="lazy",
        age_cap=None,
        communicator=None,
        use_scape=None,
        name="adams",
    ):
        defaults = dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, sparsity=sparsity)
        check_group(defaults)
        check_communicator(communicator, use_scape)
        self._options = dict(
            total_steps=total_steps,
            dense_steps=dense_steps,
            ramp_steps=ramp_steps,
            ramp_sparsity=ramp_sparsity,
            payload=payload,
            residual=residual,
            rule=rule,
            age_cap=age_cap,
        )
        check_options(self._options)
        if residual is None and use_scape is not False and lib.is_active():
            self._options["residual"] = lib.default_residual()
        self._buckets = []
        self._frozen = []
        self._reduced = False
        self._looked_around = False
        self._steps = 0
        self._communicator = communicator
        self._use_scape = use_scape
        self._sparse = None  # settled with the first group
        self._name = claim_name(name)
        # Not at exit: the process takes the state with it, and rank by rank.
        self._finalizer = weakref.finalize(self, close_buckets, self._buckets, self._name)
        self._finalizer.atexit = False
        super().__init__(params, defaults)

    def add_param_group(self, param_group):
        """Collective, like the constructor."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            check_group(group)
            if self._reduced:
                raise lib.ScapeError(
                    lib.Status.USAGE,
                    "add_param_group() between all_reduce() and step(): step first",
                )
            self._lay_out(len(self.param_groups) - 1)
        except Exception:
            self.param_groups.pop()
            raise

    def _lay_out(self, index):
        group = self.param_groups[index]
        layout = make_buckets(group["params"])
        if self._communicator is None:
            device = layout[0][1].param.device if layout else "cpu"
            self._communicator = distributed.shared_from_env(device)
        if self._sparse is None:
            self._sparse = choose_sparse(self._communicator, self._use_scape, "AdamS")
        check_alike(self._communicator, index, group)
        for kind, flat in layout:
            bucket = _Bucket(index, f"{self._name}.{index}.{kind}", kind, flat)
            self._communicator.broadcast(flat.param, root=0)
            if self._sparse:
                self._register(bucket)
            bucket.version = flat.grad._version
            self._buckets.append(bucket)
        self._frozen += [p for p in group["params"] if not p.requires_grad]

    def _register(self, bucket):
        group = self.param_groups[bucket.group_index]
        bucket.register("fused", group, group["sparsity"], self._options)
        bucket.called = False

    @property
    def is_sparse(self):
        """True when Scape serves the exchange."""
        return bool(self._sparse)

    @property
    def communicator(self):
        return self._communicator

    @property
    def buckets(self):
        """The flat gradient buffers, [(name, tensor)]: what scape.stats() and read_mask() take."""
        return [(bucket.name, bucket.flat.grad) for bucket in self._buckets]

    @property
    def _in_place(self):
        return self._options["residual"] == "in_place"

    @torch.no_grad()
    def all_reduce(self):
        """Exchanges the gradients; collective. step() does it unless it has been done.

        For who times it, or reads the mean gradient of dense training. Between it and step()
        gradients kept in place must not be written.
        """
        self._check_open()
        self._exchange(None)

    def _exchange(self, scale):
        if self._reduced:
            raise lib.ScapeError(
                lib.Status.USAGE, "all_reduce() was called twice without a step() in between"
            )
        if not self._looked_around:
            self._looked_around = True
            parameters = [p for group in self.param_groups for p in group["params"]]
            warn_of_data_parallel(parameters, "AdamS")
        check_frozen(self._frozen)
        for bucket in self._buckets:
            bucket.flat.check_parameters()
            if self._in_place:
                bucket.flat.check_gradients()
            else:
                bucket.flat.gather_gradients()
                if scale is not None:
                    bucket.flat.grad.div_(scale)
        all_reduce(self._buckets, self._communicator)
        for bucket in self._buckets:
            bucket.version = bucket.flat.grad._version
            if self._sparse:
                bucket.taken()
        self._reduced = True

    @torch.no_grad()
    def step(self, closure=None):
        """One step of all ranks: exchanges the gradients unless all_reduce() has, then updates."""
        self._check_open()
        loss = None
        if closure is not None:
            if self._reduced:
                raise lib.ScapeError(
                    lib.Status.USAGE,
                    "step(closure) after all_reduce(): the closure would make new gradients; call "
                    "one or the other",
                )
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            check_group(group)
        if self._sparse:
            for bucket in self._buckets:
                group = self.param_groups[bucket.group_index]
                check_unchanged(bucket.name, group, bucket.registered)
        found_inf, scale = getattr(self, "found_inf", None), getattr(self, "grad_scale", None)
        if found_inf is not None and not self._may_step(found_inf, scale):
            return loss
        if not self._reduced:
            self._exchange(scale)
        for bucket in self._buckets:
            group = self.param_groups[bucket.group_index]
            if self._sparse:
                self._masked_step(bucket, group)
            else:
                _dense_step(bucket, group)
            bucket.version = bucket.flat.grad._version
        self._reduced = False
        self._steps += 1
        return loss

    def _may_step(self, found_inf, scale):
        """What all ranks make of a loss scaler's verdict."""
        if self._in_place and scale is not None:
            raise lib.ScapeError(
                lib.Status.USAGE,
                "GradScaler.step() with the residual in place: unscaling would scale what waits as"
                ' well; make the optimizer with residual="internal"',
            )
        if self._reduced:
            raise lib.ScapeError(
                lib.Status.USAGE,
                "GradScaler.step() after all_reduce(): gradients were exchanged before they were"
                " known to be finite; leave the exchange to step()",
            )
        found = found_inf.detach().reshape(1).to(torch.float32, copy=True)
        return not self._communicator.all_reduce(found, "max").item()

    def _masked_step(self, bucket, group):
        flat = bucket.flat
        if self._in_place and flat.grad._version != bucket.version:
            raise lib.ScapeError(
                lib.Status.USAGE,
                f"gradients of {bucket.name} were written between all_reduce() and step(): with the"
                ' residual in place that loses them; use residual="internal" to clip or rescale',
            )
        _api.adams_step(flat.grad, flat.param, float(group["lr"]), float(group["weight_decay"]))

    def zero_grad(self, set_to_none=True):
        """Clears the gradients; with the residual in place only what was sent, whatever set_to_none
        says: the rest has not been sent yet.
        """
        if self._reduced and self._sparse and self._in_place:
            raise lib.ScapeError(
                lib.Status.USAGE,
                "zero_grad() between all_reduce() and step(): call it after step()",
            )
        for bucket in self._buckets:
            if not self._in_place:
                if set_to_none:
                    for parameter in bucket.flat.parameters:
                        parameter.grad = None
                else:
                    bucket.flat.grad.zero_()
                continue
            bucket.flat.check_gradients()
            grad = bucket.flat.grad
            if not bucket.known:
                grad.zero_()
            elif grad._version != bucket.version:  # else the step has cleared them already
                _api.clear_masked(grad)

    def flush(self):
        """Collective: one dense step that sends what has waited; before a last checkpoint, or
        before going on dense. Without Scape there is nothing to send. An optimizer that has loaded
        state and has not stepped at all refuses: flush before saving, or after a step.
        """
        self._check_open()
        if self._reduced:
            raise lib.ScapeError(lib.Status.USAGE, "flush() between all_reduce() and step()")
        for bucket in self._buckets:
            if bucket.called or bucket.loaded:
                group = self.param_groups[bucket.group_index]
                _api.flush(
                    bucket.flat.grad,
                    bucket.flat.param,
                    float(group["lr"]),
                    float(group["weight_decay"]),
                )
                if bucket.called:  # else nothing waited: it is always dense
                    bucket.taken()
                bucket.version = bucket.flat.grad._version

    def close(self):
        """Ends the registrations, and with them the optimizer's use. Parameters and gradients stay
        where they are. Idempotent.
        """
        self._finalizer()

    def _check_open(self):
        if not self._finalizer.alive:
            raise lib.ScapeError(lib.Status.USAGE, "the optimizer was closed: make a new one")

    def __getstate__(self):
        raise lib.ScapeError(
            lib.Status.USAGE,
            "an AdamS cannot be copied or pickled, it holds registrations and buffers that the"
            " model's parameters live in: make a new one, and load state_dict() into it",
        )

    # ---- saving and loading ----

    @torch.no_grad()
    def state_dict(self):
        """As torch's, with the first moment as `exp_avg`, and under "scape" this rank's own state:
        residual, ages, masks, step. Every rank saves its own.
        """
        self._check_open()
        if self._reduced:
            raise lib.ScapeError(lib.Status.USAGE, "state_dict() between all_reduce() and step()")
        for bucket in self._buckets:
            if bucket.known:
                moment = _api.read_moment(bucket.flat.grad).to(bucket.flat.param.device)
            else:
                moment = bucket.dense_moment()
            for parameter, view in bucket.flat.views(moment):
                self.state[parameter] = {"step": self._steps, "exp_avg": view}
        packed = super().state_dict()
        self.state.clear()
        packed["scape"] = {
            "rank": self._communicator.rank,
            "size": self._communicator.size,
            "step": self._steps,
            "name": self._name,
            "library": None,
        }
        if self._sparse:
            packed["scape"]["library"] = _saved.save({bucket.name for bucket in self._buckets})
        return packed

    @torch.no_grad()
    def load_state_dict(self, state_dict):
        """Takes what state_dict() gave on the same rank of as many ranks; on all ranks alike. The
        values of the groups, sparsity included, are then the state's, as torch has it. What is
        refused changes nothing.

        Between Scape and dense training the first moment, or the residual, is not carried over; a
        line says so.
        """
        self._check_open()
        if self._reduced:
            raise lib.ScapeError(
                lib.Status.USAGE, "load_state_dict() between all_reduce() and step()"
            )
        saved = state_dict.get("scape")
        if saved is None:
            raise lib.ScapeError(
                lib.Status.DATA, "the state is not one of scape.AdamS: it has no entry 'scape'"
            )
        fields = ("rank", "size", "step", "name", "library")
        _saved.check_entry(saved, fields, self._communicator, self._name, self._sparse)
        _saved.check_groups(self, state_dict)
        library = saved["library"] if self._sparse else None
        # First, since it may refuse: nothing has changed then.
        if library is not None:
            _saved.load(library)
        super().load_state_dict(state_dict)
        self._steps = saved["step"]
        dropped = False
        for bucket in self._buckets:
            bucket.flat.grad.zero_()
            if self._sparse:
                group = self.param_groups[bucket.group_index]
                if library is None or registered_values(group) != bucket.registered:
                    self._register(bucket)
                    dropped = True
                # The library takes the state over at the next call, residual included: until then
                # its answers, and its mask, are not those of what was loaded.
                bucket.loaded = library is not None
            for parameter, view in bucket.flat.views(bucket.dense_moment()):
                entry = self.state.get(parameter)
                if entry is None:
                    view.zero_()
                else:
                    view.copy_(entry["exp_avg"])
            bucket.version = bucket.flat.grad._version
        self.state.clear()
        if dropped and library is not None:
            _saved.load(library)  # what waited for a registration went with it
        if self._sparse and library is None:
            lib.warn_once(
                "the state was saved by dense training: the first moment starts from zero"
            )
        elif not self._sparse and saved["library"] is not None:
            lib.warn_once(
                "the state was saved with Scape active, training goes on dense: what had not been"
                " sent is dropped; flush() before saving keeps it"
            )


def _dense_step(bucket, group):
    """Dense AdamS on the flat buffers; the gradient is the mean already."""
    beta1, beta2 = map(float, group["betas"])
    lr, decay, eps = float(group["lr"]), float(group["weight_decay"]), float(group["eps"])
    grad, param, moment = bucket.flat.grad, bucket.flat.param, bucket.dense_moment()
    chunk = _CHUNK if grad.device.type == "cpu" else bucket.flat.count
    for begin in range(0, bucket.flat.count, chunk):
        g, p, m = (flat[begin : begin + chunk] for flat in (grad, param, moment))
        v = torch.mul(m, m).mul_(beta2).addcmul_(g, g, value=1 - beta2)
        m.mul_(beta1).add_(g, alpha=1 - beta1)
        p.mul_(1 - lr * decay).addcdiv_(m, v.sqrt_().add_(eps), value=-lr)
