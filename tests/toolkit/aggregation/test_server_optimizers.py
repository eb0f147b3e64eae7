"""Server optimizers against the papers' formulas in numpy, float64, over several rounds."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bundles import write_noise
from models_for_tests import CLASSES
from refusals import refused
from simulated_runs import outcome
from toolkit.aggregation.aggregate import Received, aggregate
from toolkit.aggregation.aggregation_policy import AggregationPolicy, Rule
from toolkit.simulation.simulate import simulate
from toolkit.submodels.global_model import GlobalModel, from_bytes
from updates import (
    NARROW,
    OLD,
    PARAMETERS,
    Array,
    composed,
    cp_update,
    entry,
    full_update,
    narrow_update,
    record_of,
)

OPTIMIZERS = ("fedavgm", "fedadam", "fedyogi")
ROUNDS = 4


def near(update: Received, model: GlobalModel, size: float = 0.1) -> Received:
    """The update, moved close to `model`; `size` of its numbers is the change."""
    record, arrays = update
    index = {"c": NARROW} if record.submodel.startswith("width") else {}
    return record, {
        name: (model.tensors[name].numpy()[index.get(name, ...)] + size * value).astype(np.float32)
        for name, value in arrays.items()
    }


class Oracle:
    """The formulas of Hsu et al. 2019 and of Reddi et al. 2021, algorithm 2, for one tensor."""

    def __init__(self, value: Array, optimizer: str, options: dict[str, float]) -> None:
        self.w = value.astype(np.float64)
        self.optimizer, self.options = optimizer, options
        self.m = np.zeros_like(self.w)
        self.v = np.full_like(self.w, options["tau"] ** 2)

    def step(self, mean: Array, held: Array) -> Array:
        """Take a step. Returns how much of it may be due to the rounding of `mean` to float32."""
        d, o = mean - self.w, self.options
        enlarged = o["rate"] / (1 - o["momentum"])
        if self.optimizer == "fedavgm":
            m = o["momentum"] * self.m + d
            w = self.w + o["rate"] * m
        else:
            m = o["momentum"] * self.m + (1 - o["momentum"]) * d
            if self.optimizer == "fedadam":
                v = o["beta2"] * self.v + (1 - o["beta2"]) * d**2
            else:
                v = self.v - (1 - o["beta2"]) * d**2 * np.sign(self.v - d**2)
            enlarged = o["rate"] / (np.sqrt(v) + o["tau"])
            w = self.w + enlarged * m
            self.v = np.where(held, v, self.v)
        self.m, self.w = np.where(held, m, self.m), np.where(held, w, self.w)
        return 4 * np.spacing(np.abs(mean).astype(np.float32)) * enlarged


@pytest.mark.parametrize("rule", ["mean", "median"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_rounds_are_the_oracles(seed: int, optimizer: Any, rule: Rule) -> None:
    """In a round of the narrow device alone, most elements have no update. The state is saved."""
    draw = np.random.default_rng(seed)
    options = {
        "rate": float(draw.uniform(0.05, 1.5)),
        "momentum": float(draw.uniform(0, 0.95)),
        "beta2": float(draw.uniform(0.5, 0.99)),
        "tau": float(10 ** draw.uniform(-4, -1)),
    }
    policy = AggregationPolicy(
        "uniform", rule=rule, server_optimizer=optimizer,
        **{f"server_{key}": value for key, value in options.items()},
    )  # fmt: skip
    model = OLD
    oracles = {n: Oracle(v.numpy(), optimizer, options) for n, v in OLD.tensors.items()}
    for round_ in range(ROUNDS):
        fleet = [near(full_update(int(draw.integers(2**30))), model) for _ in range(3)]
        if round_ == 2:
            fleet = [near(narrow_update(int(draw.integers(2**30))), model)]
        model = from_bytes(aggregate(model, fleet, policy).save(), "a restart")
        for name, oracle in oracles.items():
            if round_ == 2:
                held = np.zeros(PARAMETERS[name], bool)
                mean = oracle.w.copy()
                if name == "c":
                    held[NARROW] = True
                    mean[NARROW] = fleet[0][1]["c"]
            else:
                held = np.ones(PARAMETERS[name], bool)
                values = np.stack([arrays[name].astype(np.float64) for _, arrays in fleet])
                mean = (np.mean if rule == "mean" else np.median)(values, axis=0)
            rounding = oracle.step(mean, held)
            came = model.tensors[name].numpy()
            assert (abs(came - oracle.w) <= 1e-6 * (1 + abs(oracle.w)) + rounding).all()
            # The next step starts from the rounded model. The moments stay the oracle's own.
            oracle.w = came.astype(np.float64)
    assert {key.partition(".")[0] for key in model.moments} == {optimizer}


def test_statistics_take_the_plain_mean() -> None:
    model = GlobalModel({"bn.running_var": torch.full((2,), 10.0), "w": torch.full((2,), 10.0)})
    table = (
        entry("bn.running_var", (2,), "bn.running_var", role="buffer"),
        entry("w", (2,), "w"),
    )
    update = record_of("full", 1, table), {e.name: np.full(2, 4, np.float32) for e in table}
    policy = AggregationPolicy(server_optimizer="fedavgm", server_rate=0.5)
    new = aggregate(model, [update], policy)
    assert new.tensors["bn.running_var"].tolist() == [4, 4]
    assert new.tensors["w"].tolist() == [7, 7]
    assert list(new.moments["fedavgm.first"]) == ["w"]
    again = aggregate(new, [update], policy)  # w moves by 0.9 * -6 + -3, times 0.5
    torch.testing.assert_close(again.tensors["w"], torch.full((2,), 2.8))


def test_kept_factors_follow_the_new_tensors() -> None:
    """A step by 1 from the old model is the plain mean; the factors are fitted to it."""
    update = cp_update(3)
    plain = aggregate(OLD, [update])
    policy = AggregationPolicy(server_optimizer="fedavgm")
    new = aggregate(OLD, [update], policy)
    for name, value in plain.tensors.items():
        torch.testing.assert_close(new.tensors[name], value, rtol=1e-5, atol=1e-5)
    kept = {n: v.double().numpy() for n, v in new.kept["cp:2.0"].items()}
    for name, value in composed(kept).items():
        np.testing.assert_allclose(value, plain.tensors[name], rtol=1e-3, atol=1e-3)
    moved = aggregate(new, [cp_update(9)], policy)
    kept = {n: v.double().numpy() for n, v in moved.kept["cp:2.0"].items()}
    fit = composed(kept)["w"] - moved.tensors["w"].numpy()
    assert np.linalg.norm(fit) < 1e-3 * np.linalg.norm(moved.tensors["w"])  # rank 2 is exact


def test_another_optimizer_starts_anew() -> None:
    first = AggregationPolicy(server_optimizer="fedadam")
    model = aggregate(OLD, [full_update(1)], first)
    second = replace(first, server_optimizer="fedavgm")
    fleet = [full_update(2)]
    fresh = aggregate(replace(model, moments={}), fleet, second)
    came = aggregate(model, fleet, second)
    assert came.moments.keys() == {"fedavgm.first"}
    assert all(torch.equal(fresh.tensors[name], value) for name, value in came.tensors.items())
    assert aggregate(came, fleet).moments == came.moments  # without one they are not used


def test_own_aggregations_and_overflows() -> None:
    policy = AggregationPolicy(server_optimizer="fedavgm", server_rate=0.5)
    strategy = lambda model, updates: {"w": model.tensors["w"] + 2}  # noqa: E731
    new = aggregate(OLD, [full_update(1)], policy, strategy)
    torch.testing.assert_close(new.tensors["w"], OLD.tensors["w"] + 1)
    record, arrays = full_update(1)
    large = record, {name: np.full_like(value, 3e38) for name, value in arrays.items()}
    with refused("aggregate.overflow"):
        aggregate(OLD, [large], replace(policy, server_rate=5.0))


def test_default_rates() -> None:
    rates = {name: AggregationPolicy(server_optimizer=name).server_step for name in OPTIMIZERS}
    assert rates == {"fedavgm": 1.0, "fedadam": 0.01, "fedyogi": 0.01}


def test_a_simulation_continues_with_its_moments(seed: int, tmp_path: Path) -> None:
    write_noise(tmp_path / "data.npz", 60, seed, (4,), 2)
    (tmp_path / "fleet.toml").write_text(f"""
        model = "models_for_tests:four_columns"
        input_shape = [4]
        rounds = 4
        [aggregation]
        server_optimizer = "fedyogi"
        [simulation]
        data = "data.npz"
        [[devices]]
        name = "one"
        submodel = "full"
        count = {CLASSES}
    """)
    file = tmp_path / "fleet.toml"
    whole = simulate(file, tmp_path / "whole")
    simulate(file, tmp_path / "parts", rounds=2)
    parts = simulate(file, tmp_path / "parts")
    expected, came = outcome(whole, tmp_path / "whole"), outcome(parts, tmp_path / "parts")
    for files in (expected, came):
        del files["config.json"], files["curves.png"]
    assert came == expected
    saved = from_bytes((tmp_path / "whole" / "global.safetensors").read_bytes(), "the model")
    assert saved.moments.keys() == {"fedyogi.first", "fedyogi.second"}
