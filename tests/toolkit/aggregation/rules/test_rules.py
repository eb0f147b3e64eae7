"""The rules against numpy in float64: single elements, and rounds of mixed families."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays_of

from device_agent.formats.manifest import TensorEntry
from refusals import refused
from rule_rounds import FACTORS, MAKERS, MODEL, drawn_fleet, masked, received
from toolkit.aggregation.aggregate import Aggregation, Received, aggregate
from toolkit.aggregation.aggregation_policy import AggregationPolicy, Rule
from toolkit.aggregation.rules import spooled_changes
from toolkit.aggregation.rules.robust_rules import (
    Pairs,
    disagreeing,
    krum_choice,
    mean,
    trimmed_mean,
)
from toolkit.aggregation.rules.spooled_changes import SpooledChanges
from toolkit.submodels.global_model import GlobalModel
from updates import (
    OLD,
    PARAMETERS,
    Array,
    assert_model,
    composed,
    cp_update,
    entry,
    full_update,
    record_of,
    slice_update,
)

RULES: tuple[Rule, ...] = ("trimmed", "median", "krum")
ELEMENTS = 5

changes = st.integers(1, 9).flatmap(
    lambda n: arrays_of.arrays(
        np.float32,
        (n, ELEMENTS),
        elements=st.one_of(st.floats(-1e6, 1e6, width=32), st.just(math.nan)),
    )
)
combine = st.sampled_from([trimmed_mean, lambda x: trimmed_mean(x, 0.5), mean])
Combine = Callable[[Array], Array]


def middle(values: Sequence[float], share: float) -> float:
    """The mean of the sorted values without those that the rule leaves out, one by one."""
    left = sorted(values)
    for _ in range(max(1, math.floor(share * len(values) + 1e-9))):
        if len(left) > 2:
            left = left[1:-1]
    return math.fsum(left) / len(left)


@given(changes)
def test_trimmed_mean_and_median_of_each_element(given: Array) -> None:
    for share in (0.3, 0.5):
        came = trimmed_mean(given, share)
        for column, value in zip(given.T, came, strict=True):
            held = [float(one) for one in column if not math.isnan(one)]
            expected = middle(held, share) if held else math.nan
            np.testing.assert_allclose(value, expected, rtol=1e-12, atol=1e-9)
            if held and share == 0.5:
                np.testing.assert_allclose(value, np.median(held), rtol=1e-12, atol=1e-9)


@given(changes, combine, st.randoms(use_true_random=False))
def test_rules_of_elements_do_not_depend_on_the_order(
    given: Array, rule: Combine, random: Random
) -> None:
    order = [*range(len(given))]
    random.shuffle(order)
    np.testing.assert_allclose(rule(given[order]), rule(given), rtol=1e-9, atol=1e-6)


@given(changes, combine)
def test_rules_of_elements_stay_within_the_values(given: Array, rule: Combine) -> None:
    came = rule(given)
    for column, value in zip(given.T.astype(np.float64), came, strict=True):
        held = column[~np.isnan(column)]
        assert math.isnan(value) == (not len(held))
        if len(held):
            slack = 1e-12 * np.abs(held).max()
            assert held.min() - slack <= value <= held.max() + slack


@given(changes, combine)
def test_rules_of_equal_values_are_that_value(given: Array, rule: Combine) -> None:
    np.testing.assert_allclose(rule(np.repeat(given[:1], 4, axis=0)), given[0], rtol=1e-12)


def oracle(updates: Sequence[Received], rule: Rule, among: Sequence[int]) -> dict[str, Array]:
    """Formula of the module, element by element in Python."""
    new = {}
    for name, old in OLD.tensors.items():
        result = old.double().numpy().copy()
        known = [(masked(updates[n])[name], received(updates[n])[name])
                 for n in among if name in masked(updates[n])]  # fmt: skip
        for place in np.ndindex(*result.shape):
            held = [(float(v[place]), float(r[place])) for v, r in known if not np.isnan(v[place])]
            if held:
                steps = [v - r for v, r in held]
                share = {"trimmed": 0.3, "median": 0.5}.get(rule)
                step = np.mean(steps) if share is None else middle(steps, share)
                result[place] = np.mean([r for _, r in held]) + step
        new[name] = result
    return new


def krum_oracle(updates: Sequence[Received]) -> list[int]:
    """Multi-Krum by loops."""
    n, found = len(updates), {}
    steps = [{k: v - received(u)[k] for k, v in masked(u).items()} for u in updates]
    for p in range(n):
        for q in range(n):
            both = [(steps[p][k] - steps[q][k]).ravel() for k in steps[p] if k in steps[q]]
            common = np.concatenate(both) if both else np.array([math.nan])
            common = common[~np.isnan(common)]
            found[p, q] = (common**2).mean() if len(common) else math.nan
    farthest = np.nanmax([*found.values()])
    f = max(0, (n - 3) // 2)
    scores = []
    for p in range(n):
        own = [found[p, q] if found[p, q] == found[p, q] else farthest for q in range(n) if q != p]
        scores.append((sum(sorted(own)[: n - f - 2]), p))
    return sorted(p for _, p in sorted(scores)[: n - f]) if f else [*range(n)]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("count", [1, 4, 9])
def test_a_mixed_round_is_the_oracles(
    seed: int, rule: Rule, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spooled_changes, "NUMBERS", 60)  # several pieces of one tensor
    draw, dense = np.random.default_rng([seed, count]), set[str]()
    # Where only updates of `cp` are kept, their factors move; see the next test.
    while not dense >= set(OLD.tensors):
        updates = drawn_fleet(draw, count)
        among = krum_oracle(updates) if rule == "krum" else [*range(count)]
        kept = [updates[n] for n in among if not updates[n][0].submodel.startswith("cp")]
        dense = {name for update in kept for name in masked(update)}
    new = aggregate(MODEL, updates, AggregationPolicy(rule=rule))
    expected = oracle(updates, rule, among)
    for name, value in expected.items():
        np.testing.assert_allclose(new.tensors[name].numpy(), value, rtol=2e-5, atol=2e-5)
    shuffled = aggregate(MODEL, updates[::-1], AggregationPolicy(rule=rule))
    for name in expected:
        torch.testing.assert_close(shuffled.tensors[name], new.tensors[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("beta", [1.0, 1.8])
@pytest.mark.parametrize("rule", RULES)
def test_factors_alone_move_by_the_rule(seed: int, rule: Rule, beta: float) -> None:
    """TDPFed eq. 20 with the rule in place of the mean; hostile factors are not kept."""
    draw = np.random.default_rng(seed)
    updates = []
    for number in range(6):
        record, _ = cp_update(0)
        moved = {n: v + 0.01 * draw.normal(size=v.shape) for n, v in FACTORS.items()}
        wrong = {n: 1e6 * draw.normal(size=v.shape) for n, v in FACTORS.items()}
        own = wrong if number == 2 else moved
        updates.append((record, {n: v.astype(np.float32) for n, v in own.items()}))
    among = [0, 1, 3, 4, 5] if rule == "krum" else [*range(6)]
    new = aggregate(MODEL, updates, AggregationPolicy(rule=rule, beta=beta))
    expected = {}
    for name, old in FACTORS.items():
        steps = np.stack([updates[n][1][name].astype(np.float64) - old for n in among])
        flat = steps.reshape(len(among), -1).T
        share = {"trimmed": 0.3, "median": 0.5}.get(rule)
        step = [np.mean(own) if share is None else middle(list(own), share) for own in flat]
        expected[name] = old + beta * np.reshape(step, old.shape)
    for name, value in expected.items():
        came = new.kept["cp:2.0"][name]
        np.testing.assert_allclose(came, value, rtol=1e-5, atol=1e-5)
    assert_model(new, composed({n: np.asarray(v.double()) for n, v in new.kept["cp:2.0"].items()}))


def test_kept_factors_of_a_mixed_round_ignore_a_hostile_device(seed: int) -> None:
    """Beside other families the factors are fitted to the new tensors, from a clean start."""
    draw = np.random.default_rng(seed)
    record, _ = cp_update(0)
    fleet = [(record, {n: v + np.float32(0.01) * draw.normal(size=v.shape).astype(np.float32)
                       for n, v in FACTORS.items()}) for _ in range(3)]  # fmt: skip
    fleet[1] = (record, {n: np.full_like(v, 1e9) for n, v in FACTORS.items()})
    new = aggregate(MODEL, [*fleet, slice_update(3)], AggregationPolicy(rule="median"))
    for value in new.kept["cp:2.0"].values():
        assert value.abs().max() < 100


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("maker", MAKERS)
def test_equal_updates_give_the_mean(rule: Rule, maker: Any, seed: int) -> None:
    update = maker(seed % 2**30)
    new = aggregate(MODEL, [update] * 5, AggregationPolicy(rule=rule))
    expected = aggregate(MODEL, [update])
    for name, value in expected.tensors.items():
        torch.testing.assert_close(new.tensors[name], value, rtol=1e-5, atol=1e-5)
    for name, factor in expected.kept["cp:2.0"].items():
        torch.testing.assert_close(new.kept["cp:2.0"][name], factor, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rule", RULES)
def test_a_hostile_minority_is_bounded(rule: Rule, seed: int) -> None:
    """However large: the new values stay within those of the honest devices."""
    draw = np.random.default_rng(seed)
    table = tuple(entry(name, shape, name) for name, shape in PARAMETERS.items())

    def update(size: float) -> Received:
        moved = {
            n: np.clip(OLD.tensors[n].numpy() + size * draw.normal(size=s), -3e38, 3e38).astype(
                np.float32
            )
            for n, s in PARAMETERS.items()
        }
        return record_of("full", 10**12 if size > 1 else 5, table), moved

    honest = [update(0.1) for _ in range(7)]
    new = aggregate(OLD, [*honest[:3], update(1e30), *honest[3:], update(3e38)],
                    AggregationPolicy(rule=rule))  # fmt: skip
    for name in PARAMETERS:
        values = np.stack([arrays[name] for _, arrays in honest])
        came = new.tensors[name].numpy()
        assert (came >= values.min(0) - 1e-6).all()
        assert (came <= values.max(0) + 1e-6).all()


@pytest.mark.parametrize("rule", RULES)
def test_hostile_statistics_are_bounded(rule: Rule) -> None:
    """Krum keeps the update with honest parameters and a variance of 1e6, and takes the median."""
    table = (
        entry("w", (2,), "w"),
        entry("bn.running_var", (2,), "bn.running_var", role="buffer"),
    )
    model = GlobalModel({name: torch.ones(2) for name in ("w", "bn.running_var")})
    honest = [np.float32(1 + 0.1 * number) for number in range(6)]
    fleet = [
        (record_of("full", 5, table), {"w": np.full(2, v), "bn.running_var": np.full(2, v)})
        for v in honest
    ]
    fleet[2][1]["bn.running_var"] = np.full(2, 1e6, np.float32)
    new = aggregate(model, fleet, AggregationPolicy(rule=rule)).tensors["bn.running_var"]
    assert bool(((new >= 1) & (new <= 1.5)).all())


def test_rows_of_other_classes_are_not_compared(seed: int) -> None:
    """With a masked loss a device has only the rows of its classes."""
    table = (TensorEntry(name="head", role="parameter", dtype="float32", shape=(3, 2),
                         stands_for="head", by_class=True),)  # fmt: skip
    model = GlobalModel({"head": torch.zeros(3, 2)})
    owned = ((0,), (0, 1), (0, 1), (0,))
    values = np.random.default_rng(seed).normal(size=(4, 3, 2)).astype(np.float32)
    fleet = []
    for classes, value in zip(owned, values, strict=True):
        record = record_of("full", 5, table)
        fleet.append((type(record)(**{**{f: getattr(record, f) for f in record.__struct_fields__},
                                      "classes": classes}), {"head": value}))  # fmt: skip
    new = aggregate(model, fleet, AggregationPolicy(rule="median")).tensors["head"].numpy()
    np.testing.assert_allclose(new[0], np.median(values[:, 0], axis=0), rtol=1e-6)
    np.testing.assert_allclose(new[1], np.median(values[1:3, 1], axis=0), rtol=1e-6)
    np.testing.assert_array_equal(new[2], 0)


def test_krum_needs_five_updates() -> None:
    draw = np.random.default_rng(0)
    for count, kept in ((1, 1), (4, 4), (5, 4), (10, 7)):
        pairs = Pairs(count)
        pairs.add(draw.normal(size=(count, 20)), np.arange(count))
        assert len(krum_choice(pairs.distances())) == kept


def test_updates_that_point_against_the_others(seed: int) -> None:
    """Reversed changes, whatever their size; at most 40% of all, and the most reversed first."""
    draw = np.random.default_rng(seed)
    common = draw.normal(size=300)
    fleet = common + 0.5 * draw.normal(size=(10, 300))
    fleet[2:9, :100] = math.nan  # elements that some do not hold
    order = draw.permutation(10)

    def found(reversed_: Sequence[int]) -> list[int]:
        changes = fleet.copy()
        changes[reversed_] *= -20
        pairs = Pairs(10)
        for start in range(0, 300, 70):
            pairs.add(changes[order][:, start : start + 70], np.arange(10))
        held = [~np.isnan(c) for c in changes]
        cosine = pairs.cosines()[np.argsort(order)][:, np.argsort(order)]
        both = held[0] & held[5]
        one, two = changes[0][both], changes[5][both]
        expected = one @ two / np.linalg.norm(one) / np.linalg.norm(two)
        assert cosine[0, 5] == pytest.approx(expected)
        return sorted(order[disagreeing(pairs.cosines())].tolist())

    assert found([]) == []
    assert found([4, 7]) == [4, 7]
    assert found([0, 3, 8, 9]) == [0, 3, 8, 9]
    assert len(found([0, 1, 2, 3, 4])) <= 4


def test_files_of_a_round_are_deleted(monkeypatch: pytest.MonkeyPatch) -> None:
    folders = []
    close = SpooledChanges.close

    def closing(self: SpooledChanges) -> None:
        folders.append(self._folder.name)
        assert any(self._file(0).parent.iterdir())
        close(self)

    monkeypatch.setattr(SpooledChanges, "close", closing)
    aggregate(OLD, [full_update(1)], AggregationPolicy(rule="median"))
    (folder,) = folders
    assert not Path(folder).exists()


def test_a_running_aggregation_computes_means() -> None:
    policy = AggregationPolicy(rule="median")
    with refused("aggregate.rule-needs-all", rule="median"):
        Aggregation(OLD, policy)
    with refused("aggregate.no-update"):
        aggregate(OLD, [], policy)
    new = aggregate(OLD, [full_update(1)], policy, strategy=lambda model, updates: {})
    assert torch.equal(new.tensors["w"], OLD.tensors["w"])
