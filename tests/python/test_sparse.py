"""scape.AdamS and scape.wrap() through the real, preloaded library, against the simulation."""

import numpy as np
import pytest

from adams_reference import Simulation
from conftest import assert_all_ended_well, run_ranks


def run_cases(cases, size, folder, library):
    assert_all_ended_well(run_ranks("worker_sparse.py", size, cases, folder, preload=library))


@pytest.mark.parametrize("size", [1, 2, 3])
def test_fused_steps_equal_the_simulation(size, tmp_path, library):
    run_cases("fused", size, tmp_path, library)
    ranks = [np.load(tmp_path / f"fused{rank}.npz") for rank in range(size)]
    for name in ("masks", "thetas", "moments", "ages", "vector"):
        for other in ranks[1:]:
            np.testing.assert_array_equal(ranks[0][name], other[name], err_msg=name)

    import torch

    torch.manual_seed(5)
    theta = torch.randn(37, 30).numpy().ravel()
    generator = torch.Generator().manual_seed(11)
    gradients = torch.randn(24, size, 37, 30, generator=generator) * torch.logspace(-2, 1, 30)
    simulation = Simulation(
        theta,
        size,
        sparsity=0.9,
        beta1=0.9,
        beta2=0.95,
        eps=1e-8,
        age_cap=100,
        dense=3,
        ramp=6,
        ramp_sparsity=0.5,
    )
    for step in range(24):
        mask = simulation.mask.copy()
        np.testing.assert_array_equal(ranks[0]["masks"][step], mask, err_msg=f"mask of step {step}")
        simulation.step([g.numpy().ravel() for g in gradients[step]], 0.01 / (1 + step), 0.1)
        for rank in range(size):
            np.testing.assert_allclose(
                ranks[rank]["residuals"][step], simulation.residual[rank], rtol=1e-5, atol=1e-6
            )
        np.testing.assert_allclose(
            ranks[0]["moments"][step],
            simulation.m,
            rtol=1e-4,
            atol=1e-6,
            err_msg=f"m of step {step}",
        )
        np.testing.assert_allclose(
            ranks[0]["thetas"][step].ravel(),
            simulation.theta,
            rtol=1e-4,
            atol=1e-5,
            err_msg=f"theta of step {step}",
        )
        off = ~mask
        np.testing.assert_array_equal(ranks[0]["ages"][step][off], step - simulation.last[off])


def test_where_the_environment_keeps_the_residual(tmp_path, library):
    assert_all_ended_well(
        run_ranks(
            "worker_sparse.py",
            2,
            "place_by_environment",
            tmp_path,
            preload=library,
            environment={"SCAPE_RESIDUAL": "inplace"},
        )
    )


@pytest.mark.parametrize(
    "size, cases", [(1, "resume,hooked"), (2, "internal,resume,rules,flush,hooked,hooked_resume")]
)
def test_saving_rules_and_other_roles(size, cases, tmp_path, library):
    run_cases(cases, size, tmp_path, library)
    for case in {"flush", "hooked"} & set(cases.split(",")):
        thetas = [np.load(tmp_path / f"{case}{rank}.npz")["theta"] for rank in range(size)]
        for other in thetas[1:]:
            np.testing.assert_array_equal(thetas[0], other, err_msg=case)


@pytest.mark.parametrize("preloaded", [True, False])
@pytest.mark.parametrize("unscale", ["unscale", "leave"])
def test_no_rank_steps_where_one_overflows(preloaded, unscale, tmp_path, library):
    preload = library if preloaded else None
    assert_all_ended_well(run_ranks("worker_amp.py", 2, tmp_path, unscale, preload=preload))
    assert (tmp_path / "0.bin").read_bytes() == (tmp_path / "1.bin").read_bytes()


@pytest.mark.parametrize("preloaded", [True, False])
@pytest.mark.parametrize("how", ["AdamS", "wrap"])
def test_models_that_differ_are_refused_on_all_ranks(preloaded, how, library):
    preload = library if preloaded else None
    results = run_ranks("worker_layout.py", 3, how, preload=preload)
    assert_all_ended_well(results)
    for _, out, _ in results:
        for text in (
            "transposed: parameter 0 of group 0 is (20, 30) on rank 0 and (30, 20) on rank 2",
            "order: parameter 0 of group 0 is (20, 30) on rank 0 and (20, 20) on rank 2",
            "frozen: parameter 1 of group 0 is (20, 20) frozen on rank 0 and (20, 20) on rank 2",
            "fewer: parameter 2 of group 0 is (20, 20) on rank 0 and none on rank 2",
            "alike: taken",
        ):
            assert text in out, out


@pytest.mark.parametrize("without", [0, 1])
def test_a_rank_without_the_library_is_told_of_on_all(without, library):
    results = run_ranks(
        "worker_layout.py", 2, "AdamS", preload=[None if r == without else library for r in (0, 1)]
    )
    over = ["NCCL with libscape_nccl.so", "Gloo without libscape_nccl.so"]
    first, second = over[without == 0], over[without == 1]
    for _, out, err in results:
        assert f"rank 0 is to exchange over {first}" in out + err, out + err
        assert f"rank 1 over {second}" in out + err, out + err
