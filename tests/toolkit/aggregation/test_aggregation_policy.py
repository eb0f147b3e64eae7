"""How an aggregation weighs, how far it goes, and what it takes for statistics."""

from typing import Any

import numpy as np
import pytest
import torch

from device_agent.formats.manifest import Role
from refusals import refused
from toolkit.aggregation.aggregate import Aggregation, Received, aggregate
from toolkit.aggregation.aggregation_policy import AggregationPolicy
from toolkit.aggregation.submodel_strength import strength
from toolkit.factorization.cp_decomposition import cp_decompose
from toolkit.submodels.global_model import GlobalModel
from updates import (
    OLD,
    PARAMETERS,
    RANK,
    assert_model,
    averaged,
    composed,
    cp_update,
    dense_of,
    entry,
    full_update,
    low_rank_update,
    numbers,
    record_of,
    slice_update,
)


def test_softmax_is_fedhms_equation_2() -> None:
    """By hand: gamma 1, 1/4, 1/2 (cp at rate 2) and 6 of 114 numbers; tau 1/2."""
    updates = [full_update(1), low_rank_update(2, ratio=0.25), cp_update(3), slice_update(4)]
    policy = AggregationPolicy(weights="softmax", temperature=0.5, factors="act")
    gammas = (1.0, 0.25, 0.5, 6 / 114)
    parts = [(dense_of(u), np.exp(g / 0.5)) for u, g in zip(updates, gammas, strict=True)]
    assert_model(aggregate(OLD, updates, policy), averaged(parts))


def test_an_infinite_temperature_is_uniform() -> None:
    updates = [full_update(1, 7), low_rank_update(2, 100), slice_update(4, 1)]
    softmax = aggregate(OLD, updates, AggregationPolicy("softmax", temperature=float("inf")))
    uniform = aggregate(OLD, updates, AggregationPolicy("uniform"))
    assert all(torch.equal(softmax.tensors[name], uniform.tensors[name]) for name in PARAMETERS)


@pytest.mark.parametrize(
    ("submodel", "gamma"),
    [
        ("full", 6 / 114),
        ("low-rank:0.25,keep=2", 0.25),
        ("width:0.5", 0.5),
        ("cp:4", 0.25),
        ("cp:0.5", 1.0),
        ("slice:0.3+low-rank:0.25", 0.25 * 6 / 114),
    ],
)
def test_strength(submodel: str, gamma: float) -> None:
    assert strength(submodel, (entry("w", (2, 3), "w"),), PARAMETERS) == pytest.approx(gamma)


@pytest.mark.parametrize("beta", [0.25, 1.0, 1.8])
def test_beta_goes_from_the_old_model_to_the_mean_or_beyond(beta: float) -> None:
    update = slice_update(3)
    new = aggregate(OLD, [update], AggregationPolicy(beta=beta))
    old = OLD.tensors["w"].double().numpy()
    assert_model(new, {"w": (1 - beta) * old + beta * update[1]["w"]})
    assert new.tensors["c"] is OLD.tensors["c"]


def test_statistics_do_not_go_beyond_the_mean() -> None:
    model = GlobalModel({"var": torch.full((2,), 10.0)})
    table = (entry("var", (2,), "var", role="buffer"),)
    update = record_of("full", 1, table), {"var": np.ones(2, np.float32)}
    for beta, expected in ((0.5, 5.5), (1.8, 1.0)):
        new = aggregate(model, [update], AggregationPolicy(beta=beta))
        assert torch.equal(new.tensors["var"], torch.full((2,), expected))


@pytest.mark.parametrize(
    ("options", "code", "values"),
    [
        (
            {"weights": "loss"},
            "aggregate.unknown-choice",
            {"option": "weights", "choices": ["samples", "uniform", "softmax"]},
        ),
        (
            {"factors": "none"},
            "aggregate.unknown-choice",
            {"option": "factors", "choices": ["afm", "act"]},
        ),
        (
            {"rule": "mode"},
            "aggregate.unknown-choice",
            {"option": "rule", "choices": ["mean", "trimmed", "median", "krum", "fltrust"]},
        ),
        (
            {"server_optimizer": "adam"},
            "aggregate.unknown-choice",
            {"option": "server_optimizer", "choices": ["fedavgm", "fedadam", "fedyogi"]},
        ),
        ({"server_rate": 0.0}, "aggregate.bad-server-option", {"option": "server_rate"}),
        ({"server_momentum": 1.0}, "aggregate.bad-server-option", {"most": 0.999}),
        ({"server_beta2": -0.1}, "aggregate.bad-server-option", {"least": 0.0}),
        ({"server_tau": float("nan")}, "aggregate.bad-server-option", {}),
        ({"temperature": 0.0}, "aggregate.bad-temperature", {"least": 0.05}),
        ({"temperature": float("nan")}, "aggregate.bad-temperature", {}),
        ({"temperature": "5"}, "aggregate.bad-temperature", {}),
        ({"temperature": 10**400}, "aggregate.bad-temperature", {}),
        ({"beta": 0.0}, "aggregate.bad-beta", {"most": 10.0}),
        ({"beta": 1e40}, "aggregate.bad-beta", {}),
        ({"beta": None}, "aggregate.bad-beta", {}),
        ({"beta": float("inf")}, "aggregate.bad-beta", {}),
    ],
)
def test_policies_that_cannot_be(
    options: dict[str, Any], code: str, values: dict[str, object]
) -> None:
    with refused(code, **values) as caught:
        AggregationPolicy(**options)
    (given,) = options.values()
    assert f"it is {given!r}" in str(caught.value)


NORM = GlobalModel({"bn.running_var": torch.full((2,), 10.0), "w": torch.full((2,), 10.0)})


def named(name: str, value: float, role: Role) -> Received:
    table = (entry(name, (2,), name, role=role),)
    return record_of("full", 1, table), {name: np.full(2, value, np.float32)}


def test_statistics_are_what_the_server_calls_so() -> None:
    """Whatever some device says: `w` is trained because an honest one says so."""
    updates = [
        named("bn.running_var", 1, "parameter"),
        named("w", 1, "buffer"),
        named("w", 1, "parameter"),
    ]
    policy = AggregationPolicy(beta=1.5)
    halves = [Aggregation(NORM, policy) for _ in range(2)]
    for number, update in enumerate(updates):
        halves[number == 2].add(*update)
    halves[0].merge(halves[1])
    for new in (aggregate(NORM, updates, policy), halves[0].result()):
        assert new.tensors["bn.running_var"].tolist() == [1, 1]
        assert new.tensors["w"].tolist() == [-3.5, -3.5]


@pytest.mark.parametrize("role", ["parameter", "buffer"])
def test_variances_below_zero(role: Role) -> None:
    with refused("update.negative-variance", parameter="bn.running_var"):
        aggregate(NORM, [named("bn.running_var", -1, role)])


@pytest.mark.parametrize("beta", [0.25, 1.0, 1.8])
def test_beta_moves_kept_factors(beta: float) -> None:
    """TDPFed eq. 20 by numpy in float64, and the tensors that the new factors compose."""
    factors = {e.name: numbers(e.shape, 70 + n) for n, e in enumerate(cp_update(0)[0].tensors)}
    kept = {name: torch.from_numpy(value) for name, value in factors.items()}
    model = GlobalModel(OLD.tensors, {"cp:2.0": kept})
    updates = [cp_update(1, 1), cp_update(50, 3)]
    new = aggregate(model, updates, AggregationPolicy(beta=beta))
    expected = {
        name: (1 - beta) * old.astype(np.float64)
        + beta * np.average([a[name].astype(np.float64) for _, a in updates], 0, [1, 3])
        for name, old in factors.items()
    }
    for name, value in expected.items():
        np.testing.assert_allclose(new.kept["cp:2.0"][name], value, rtol=1e-6, atol=1e-6)
    assert_model(new, composed(expected))


def test_beta_moves_the_first_factors_from_those_that_devices_received() -> None:
    beta, update = 1.8, cp_update(1)
    new = aggregate(OLD, [update], AggregationPolicy(beta=beta))
    for name, tensor in OLD.tensors.items():
        for mode, old in enumerate(cp_decompose(tensor, RANK)):
            value = (1 - beta) * old.double().numpy() + beta * update[1][f"{name}#{mode}"]
            came = new.kept["cp:2.0"][f"{name}#{mode}"]
            np.testing.assert_allclose(came, value, rtol=1e-6, atol=1e-6)


def test_beta_moves_tensors_that_other_updates_hold_too() -> None:
    """Eq. 20 is of factors alone. Beside weights, the tensors move, and the factors follow."""
    beta, cp, full = 1.8, cp_update(1), full_update(9)
    new = aggregate(OLD, [cp, full], AggregationPolicy(beta=beta))
    mean = averaged([(dense_of(cp), 4.0), (dense_of(full), 4.0)])
    expected = {n: (1 - beta) * OLD.tensors[n].numpy() + beta * v for n, v in mean.items()}
    assert_model(new, expected)
    kept = {name: value.double().numpy() for name, value in new.kept["cp:2.0"].items()}
    w = np.linalg.norm(composed(kept)["w"] - expected["w"])
    assert w < 1e-3 * np.linalg.norm(
        expected["w"]
    )  # a matrix of rank 2 has exact factors of rank 2


def test_updates_have_the_factors_that_the_model_keeps() -> None:
    kept = {e.name: torch.zeros(e.shape[0], RANK + 1) for e in cp_update(0)[0].tensors}
    with refused("update.different-factors", submodel="cp:2.0"):
        aggregate(
            GlobalModel(OLD.tensors, {"cp:2.0": kept}), [cp_update(1)], AggregationPolicy(beta=1.8)
        )
