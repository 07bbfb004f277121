"""scape.AdamS, dense, in one process: equations, layout of gradients, errors, saving."""

import copy
import io
import pickle

import numpy as np
import pytest
import torch

import scape
from adams_reference import ReferenceAdamS, Simulation


def make_model(seed=0):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(12, 9), torch.nn.Tanh(), torch.nn.Linear(9, 4))


def batches(count, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(7, 12, generator=generator) for _ in range(count)]


def run(model, optimizer, data):
    for x in data:
        model(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_equals_an_independent_reference():
    ours, theirs = make_model(), make_model()
    options = dict(lr=0.01, betas=(0.8, 0.97), eps=1e-6, weight_decay=0.05)
    optimizers = [
        scape.AdamS(ours.parameters(), **options),
        ReferenceAdamS(theirs.parameters(), **options),
    ]
    # Both get the gradients of ours: each with its own, differences of rounding would grow.
    for x in batches(30):
        ours(x).square().sum().backward()
        for a, b in zip(ours.parameters(), theirs.parameters()):
            b.grad = a.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for a, b in zip(ours.parameters(), theirs.parameters()):
        torch.testing.assert_close(a, b, rtol=2e-5, atol=1e-6)


def test_equals_the_simulation_of_one_rank():
    theta = np.random.default_rng(0).normal(size=(20, 10)).astype(np.float32)
    parameter = torch.nn.Parameter(torch.from_numpy(theta.copy()))
    optimizer = scape.AdamS([parameter], lr=0.02, weight_decay=0.1)
    simulation = Simulation(
        theta.ravel(),
        1,
        sparsity=0.9,
        beta1=0.9,
        beta2=0.95,
        eps=1e-8,
        age_cap=100,
        dense=1,
        ramp=1,
        ramp_sparsity=0.9,
    )
    for gradient in np.random.default_rng(1).normal(size=(20, 20, 10)).astype(np.float32):
        (parameter * torch.from_numpy(gradient)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        simulation.step([gradient.ravel()], 0.02, 0.1)
    np.testing.assert_allclose(
        parameter.detach().numpy().ravel(), simulation.theta, rtol=1e-5, atol=1e-6
    )


def test_large_buffers_are_stepped_whole():
    # More than one pass, and a last one that is not full.
    parameter = torch.nn.Parameter(torch.zeros(3, 100_001))
    optimizer = scape.AdamS([parameter], lr=0.5)
    parameter.grad.fill_(1.0)
    optimizer.step()
    expected = -0.5 * 0.1 / np.sqrt(0.05)
    torch.testing.assert_close(parameter.detach(), torch.full_like(parameter, expected))


def test_gradients_are_views_of_one_buffer_and_accumulate():
    model = make_model()
    optimizer = scape.AdamS(model.parameters())
    buffers = dict(optimizer.buckets)
    assert sorted(buffers) == ["adams.0.matrices", "adams.0.vectors"]
    assert buffers["adams.0.matrices"].numel() == 12 * 9 + 9 * 4
    x = batches(1)[0]
    model(x).sum().backward()
    once = buffers["adams.0.matrices"].clone()
    model(x).sum().backward()
    torch.testing.assert_close(buffers["adams.0.matrices"], 2 * once)
    assert once.abs().sum() > 0


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_clears_and_keeps_the_views(set_to_none):
    model = make_model()
    optimizer = scape.AdamS(model.parameters(), residual="in_place")
    model(batches(1)[0]).sum().backward()
    views = [p.grad for p in model.parameters()]
    optimizer.zero_grad(set_to_none=set_to_none)
    assert all(p.grad is view and not view.any() for p, view in zip(model.parameters(), views))


def test_a_replaced_gradient_is_an_error_that_names_the_way_out():
    model = make_model()
    optimizer = scape.AdamS(model.parameters(), residual="in_place")
    model(batches(1)[0]).sum().backward()
    model.zero_grad()
    with pytest.raises(RuntimeError, match=r"p\.grad .* is None.*optimizer\.zero_grad\(\)"):
        optimizer.step()
    model[0].weight.grad = torch.ones_like(model[0].weight)
    with pytest.raises(RuntimeError, match=r"shape \(9, 12\) was replaced"):
        optimizer.step()


def test_the_default_takes_gradients_from_anywhere():
    ours, theirs = make_model(), make_model()
    optimizer = scape.AdamS(ours.parameters())
    reference = ReferenceAdamS(theirs.parameters())
    for x in batches(5):
        for model, opt in ((ours, optimizer), (theirs, reference)):
            model.zero_grad(set_to_none=True)
            model(x).square().sum().backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            opt.step()
    for a, b in zip(ours.parameters(), theirs.parameters()):
        torch.testing.assert_close(a, b, rtol=2e-5, atol=1e-6)
    optimizer.zero_grad()
    assert all(p.grad is None for p in ours.parameters())


def test_a_moved_parameter_is_an_error():
    model = make_model()
    optimizer = scape.AdamS(model.parameters())
    model[0].weight.data = model[0].weight.data.clone()
    with pytest.raises(RuntimeError, match="moved out of the optimizer's flat buffer"):
        optimizer.step()


def test_parameters_must_be_fp32():
    with pytest.raises(ValueError, match="bfloat16"):
        scape.AdamS(make_model().bfloat16().parameters())


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(lr=-1), "lr is -1: must be at least 0"),
        (dict(lr=float("nan")), "lr is nan"),
        (dict(betas=(1.0, 0.9)), r"betas\[0\] is 1.0: must be at least 0 and below 1"),
        (dict(betas=(0.9, -0.1)), r"betas\[1\] is -0.1"),
        (dict(betas=0.9), "must be a pair"),
        (dict(eps=0), "eps is 0: must be above 0"),
        (dict(weight_decay=-0.1), "weight_decay is -0.1"),
        (dict(sparsity=1.0), "sparsity is 1.0: must be at least 0 and below 1"),
        (dict(sparsity="much"), "sparsity is 'much': must be a number"),
        (dict(residual="gone"), "residual is 'gone': must be one of internal, in_place, host"),
        (dict(residual=["internal"]), r"residual is \['internal'\]: must be one of"),
        (dict(payload="fp16"), "payload is 'fp16': must be one of fp32, bf16"),
        (dict(rule=None, age_cap=0.5), "age_cap is 0.5: must be at least 1"),
        (dict(sparsity=1 - 1e-16), "sparsity is 0.9999.* the most is 0.999999999"),
        (dict(ramp_sparsity=1.5), "ramp_sparsity is 1.5: must be at least 0 and below 1"),
        (dict(total_steps="a"), "total_steps is 'a': must be a whole number"),
        (dict(ramp_steps=float("inf")), "ramp_steps is inf: must be a whole number"),
        (dict(dense_steps=2**64 - 1), r"dense_steps is 18446744073709551615: .*sparsity=0"),
        (dict(communicator=5), "communicator is 5: must be a scape.nccl.Communicator"),
        (dict(communicator="gloo"), "communicator is 'gloo': .*TorchCommunicator"),
        (dict(use_scape="yes"), "use_scape is 'yes': must be None, False or True"),
        (dict(name="a\0b"), r"name is 'a\\x00b': .*zero byte"),
        (dict(name=None), "name is None: must be a string"),
    ],
)
def test_bad_hyperparameters_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        scape.AdamS(make_model().parameters(), **options)


def test_schedulers_closures_and_groups():
    model = make_model()
    optimizer = scape.AdamS(
        [
            {"params": model[0].parameters(), "lr": 0.1},
            {"params": model[2].parameters(), "weight_decay": 0.5},
        ],
        lr=0.01,
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    mirror = make_model()
    reference = ReferenceAdamS(
        [
            {"params": mirror[0].parameters(), "lr": 0.1},
            {"params": mirror[2].parameters(), "weight_decay": 0.5},
        ],
        lr=0.01,
    )
    reference_scheduler = torch.optim.lr_scheduler.LambdaLR(reference, lambda step: 0.5**step)
    for x in batches(4):

        def closure():
            optimizer.zero_grad()
            loss = model(x).square().sum()
            loss.backward()
            return loss

        loss = optimizer.step(closure)
        reference.zero_grad()
        expected = mirror(x).square().sum()
        expected.backward()
        reference.step()
        torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-5)
        scheduler.step()
        reference_scheduler.step()
    for a, b in zip(model.parameters(), mirror.parameters()):
        torch.testing.assert_close(a, b, rtol=2e-5, atol=1e-6)


def test_order_of_calls_is_checked():
    model = make_model()
    optimizer = scape.AdamS(model.parameters())
    optimizer.all_reduce()
    for call in (
        optimizer.all_reduce,
        optimizer.flush,
        optimizer.state_dict,
        lambda: optimizer.step(lambda: None),
        lambda: optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2, 2))]}),
    ):
        with pytest.raises(scape.ScapeError, match=r"all_reduce\(\)") as caught:
            call()
        assert caught.value.status == scape.Status.USAGE
    optimizer.step()
    assert len(optimizer.param_groups) == 1


def test_frozen_parameters_stay():
    model = make_model()
    model[0].weight.requires_grad_(False)
    before = model[0].weight.clone()
    optimizer = scape.AdamS(model.parameters(), weight_decay=0.5)
    run(model, optimizer, batches(2))
    assert torch.equal(model[0].weight, before)
    assert sum(grad.numel() for _, grad in optimizer.buckets) == 9 + 9 * 4 + 4


@pytest.mark.parametrize(
    "make",
    [scape.AdamS, lambda parameters: scape.wrap(ReferenceAdamS(parameters))],
    ids=["AdamS", "wrap"],
)
def test_freezing_and_unfreezing_later_are_errors(make):
    model = make_model()
    model[0].weight.requires_grad_(False)
    optimizer = make(model.parameters())
    run(model, optimizer, batches(1))
    before = [parameter.clone() for parameter in model.parameters()]
    model[0].weight.requires_grad_(True)
    with pytest.raises(scape.ScapeError, match=r"shape \(9, 12\) was frozen when"):
        run(model, optimizer, batches(1))
    model[0].weight.requires_grad_(False)
    model[2].bias.requires_grad_(False)
    with pytest.raises(RuntimeError, match=r"shape \(4,\) was frozen after"):
        run(model, optimizer, batches(1))
    assert all(map(torch.equal, model.parameters(), before))
    model[2].bias.requires_grad_(True)
    run(model, optimizer, batches(1))


def test_state_dict_round_trip_is_bit_exact():
    data = batches(12)
    model = make_model()
    optimizer = scape.AdamS(model.parameters(), lr=0.02, weight_decay=0.1)
    run(model, optimizer, data[:6])
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    run(model, optimizer, data[6:])

    file.seek(0)
    saved = torch.load(file, weights_only=True)
    resumed = make_model(seed=9)
    again = scape.AdamS(resumed.parameters())
    resumed.load_state_dict(saved["model"])
    again.load_state_dict(saved["optimizer"])
    assert again.param_groups[0]["lr"] == 0.02
    run(resumed, again, data[6:])
    for a, b in zip(model.parameters(), resumed.parameters()):
        assert torch.equal(a, b)
    assert again.state_dict()["scape"]["step"] == 12


def test_state_of_another_optimizer_is_refused():
    model = make_model()
    other = torch.optim.AdamW(model.parameters())
    optimizer = scape.AdamS(model.parameters())
    with pytest.raises(scape.ScapeError, match="not one of scape.AdamS") as caught:
        optimizer.load_state_dict(other.state_dict())
    assert caught.value.status == scape.Status.DATA


def test_wrapped_reference_is_untouched_when_dense():
    ours, theirs = make_model(), make_model()
    optimizer = scape.wrap(ReferenceAdamS(ours.parameters(), lr=0.01))
    assert not optimizer.scape.is_sparse
    reference = ReferenceAdamS(theirs.parameters(), lr=0.01)
    run(ours, optimizer, batches(5))
    run(theirs, reference, batches(5))
    for a, b in zip(ours.parameters(), theirs.parameters()):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)
    with pytest.raises(scape.ScapeError, match="closure"):
        optimizer.step(lambda: None)
    with pytest.raises(ValueError, match="wrapped already"):
        scape.wrap(optimizer)
    optimizer.scape.unwrap()
    assert optimizer.scape is None


def test_wrap_refuses_what_is_no_adams():
    class Maximum(ReferenceAdamS):
        def __init__(self, params):
            super().__init__(params)
            self.param_groups[0]["amsgrad"] = True

    parameters = list(make_model().parameters())
    before = [p.data_ptr() for p in parameters]
    for optimizer, message in (
        (5, "optimizer is 5: must be a torch.optim.Optimizer"),
        (torch.optim.AdamW(parameters, amsgrad=True), "torch's AdamW, not AdamS"),
        (torch.optim.Adam(parameters), "torch's Adam, not AdamS"),
        (Maximum(parameters), "amsgrad of parameter group 0 is True"),
    ):
        with pytest.raises(ValueError, match=message):
            scape.wrap(optimizer)
    assert before == [p.data_ptr() for p in parameters]
    with pytest.raises(ValueError, match="exchanges its gradients itself"):
        scape.wrap(scape.AdamS(parameters))
    for options, message in (
        (dict(dense_steps=-1), "dense_steps is -1"),
        (dict(communicator=5), "communicator is 5"),
        (dict(age_cap=0), "age_cap is 0"),
        (dict(name=""), "name is ''"),
    ):
        with pytest.raises(ValueError, match=message):
            scape.wrap(ReferenceAdamS(parameters), **options)


def test_groups_added_to_a_wrapped_optimizer_are_refused():
    model = make_model()
    optimizer = scape.wrap(ReferenceAdamS(model[0].parameters()))
    optimizer.add_param_group({"params": list(model[2].parameters())})
    with pytest.raises(scape.ScapeError, match="add every group before wrap"):
        optimizer.step()


def test_a_wrapped_optimizer_refuses_a_state_that_does_not_fit():
    optimizer = scape.wrap(ReferenceAdamS(make_model().parameters()))
    state = optimizer.state_dict()
    with pytest.raises(scape.ScapeError, match="should hold rank, size, name, library"):
        optimizer.load_state_dict({**state, "scape": {}})
    other = scape.wrap(ReferenceAdamS(make_model()[0].parameters()))
    with pytest.raises(scape.ScapeError, match=r"groups have \[2\] parameters"):
        optimizer.load_state_dict(other.state_dict())


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
def test_copies_are_refused_with_the_way_out(duplicate):
    with pytest.raises(scape.ScapeError, match=r"cannot be copied .* load state_dict\(\)"):
        duplicate(scape.AdamS(make_model().parameters()))


def test_parameters_without_elements_are_left_alone():
    empty, full = torch.nn.Parameter(torch.ones(0, 3)), torch.nn.Parameter(torch.ones(2, 3))
    optimizer = scape.AdamS([empty, full])
    for _ in range(2):
        (empty.sum() + full.sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert (full < 1).all()
    assert [grad.numel() for _, grad in optimizer.buckets] == [6]
    assert not scape.AdamS([torch.nn.Parameter(torch.ones(0, 3))]).buckets


def test_wrap_needs_the_hyperparameters_of_adams():
    class Descent(torch.optim.SGD):
        pass

    with pytest.raises(ValueError, match="no betas, eps"):
        scape.wrap(Descent(make_model().parameters(), lr=0.1))
