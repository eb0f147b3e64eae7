"""Statistics of batch norm stay near the medians of their round."""

import math
from collections.abc import Mapping, Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import updates as made
from models_for_tests import INPUT_SHAPE
from toolkit.aggregation.aggregate import Received, aggregate
from toolkit.aggregation.aggregation_policy import AggregationPolicy
from toolkit.aggregation.federation import Federation
from toolkit.aggregation.limits.norm_statistics import central_means
from toolkit.aggregation.limits.reference import Reference, RoundLimits
from toolkit.aggregation.limits.update_limits import figures
from toolkit.aggregation.stale_updates import StaleUpdates
from toolkit.aggregation.update_validation import is_statistic
from toolkit.submodels.hyperparameters import TrainingConfig
from updates import Array

MEAN, VARIANCE = "bn.running_mean", "bn.running_var"
RECEIVED = {MEAN: np.array([0.0, 1.0], np.float32), VARIANCE: np.array([1.0, 4.0], np.float32)}
SPECS = ("full", "full", "low-rank:0.5,keep=0", "cp:2.0", "cp:2.0", "width:0.5", "width:0.5")


def expected(
    values: Sequence[float],
    weights: Sequence[float],
    old: float,
    log: bool,
    shares: Sequence[float] = (),
) -> float:
    """One element, by the formula: lists and numpy's median in float64."""
    counted = shares or [1.0] * len(values)
    held = [row for row in zip(values, weights, counted, strict=True) if not math.isnan(row[0])]
    if not held:
        return math.nan
    known = [v for v, _, _ in held] + [old] * (len(held) < 3)
    known = [math.log(v + 1e-5) for v in known] if log else known
    center = float(np.median(known))
    spread = float(np.median([abs(v - center) for v in known]))
    near = [min(max(v, center - spread), center + spread) for v in known[: len(held)]]
    near = [math.exp(v) - 1e-5 for v in near] if log else near
    moved = [old + share * (v - old) for v, (_, _, share) in zip(near, held, strict=True)]
    return float(np.average(moved, weights=[w for _, w, _ in held]))


def test_the_means_are_those_of_the_formula(seed: int) -> None:
    draw = np.random.default_rng(seed)
    count, size = int(draw.integers(1, 9)), 40
    received = {n: draw.uniform(0.1, 3, size).astype(np.float32) for n in (MEAN, VARIANCE)}
    sent = [
        {n: np.exp(draw.normal(0, 3, size)).astype(np.float32) for n in (MEAN, VARIANCE)}
        for _ in range(count)
    ]
    for own in sent:
        for value in own.values():
            value[draw.random(size) < 0.4] = np.nan
    weights = draw.uniform(1, 100, count).tolist()
    shares = (1 / np.sqrt(draw.integers(1, 9, count))).tolist()
    found = central_means(sent, weights, shares, received)
    assert count < 3 or found.means.keys() == {MEAN, VARIANCE}
    for name, means in found.means.items():
        for at in range(size):
            values = [float(own[name][at]) for own in sent]
            if sum(map(math.isfinite, values)) == 1:
                continue  # compared with the model: a test below
            want = expected(values, weights, float(received[name][at]), name == VARIANCE, shares)
            assert means[at] == pytest.approx(want, rel=1e-5, nan_ok=True), (name, at)


@given(
    st.lists(st.floats(0.5, 2.0), min_size=3, max_size=6),
    st.lists(st.floats(0.0, 1e30), min_size=1, max_size=2),
    st.floats(1.0, 3.0),
)
def test_a_minority_does_not_move_the_mean_out_of_the_honest_range(
    honest: list[float], hostile: list[float], weight: float
) -> None:
    """With c and d inside the honest range, [c - d, c + d] is at most three times as wide."""
    sent = [{VARIANCE: np.full(2, v, np.float32)} for v in (*honest, *hostile)]
    weights = [1.0] * len(honest) + [weight] * len(hostile)
    plain = np.average([own[VARIANCE] for own in sent], axis=0, weights=weights)
    means = central_means(sent, weights, [1.0] * len(sent), RECEIVED).means.get(VARIANCE, plain)
    logs = np.log(honest)
    width = logs.max() - logs.min()
    assert (np.log(means) >= logs.min() - width - 1e-3).all()
    assert (np.log(means) <= logs.max() + width + 1e-3).all()


@pytest.mark.parametrize("count", [2, 3, 4])
def test_equal_updates_are_not_moved(count: int, seed: int) -> None:
    draw = np.random.default_rng(seed)
    own = {n: draw.uniform(0.01, 90, 2).astype(np.float32) for n in (MEAN, VARIANCE)}
    found = central_means([own] * count, [1.0] * count, [1.0] * count, RECEIVED)
    assert not found.means
    assert not any(found.times)


@pytest.mark.parametrize(
    ("old", "others", "most"),
    [
        # The model's mean and variance, those of three other updates in another element, and how
        # far a mean and the logarithm of a variance may move.
        ((3.0, 4.0), None, (8 * 2.0, math.log(16))),
        ((0.0, 1.0), None, (8 + 1e4, math.log(16) + math.log(1e8))),
        ((0.0, 1.0), (5.0, 60.0), (8 + 5.0, math.log(16) + math.log(60))),
    ],
    ids=["measured", "first", "beside others"],
)
def test_what_one_update_alone_holds_stays_near_the_model(
    old: tuple[float, float], others: tuple[float, float] | None, most: tuple[float, float]
) -> None:
    received = {n: np.full(2, v, np.float32) for n, v in zip((MEAN, VARIANCE), old, strict=True)}
    for far in (1e20, 0.0):
        values = zip((MEAN, VARIANCE), others or (np.nan, np.nan), strict=True)
        known = {n: np.array([v, np.nan], np.float32) for n, v in values}
        sent = [{n: np.array([np.nan, far], np.float32) for n in (MEAN, VARIANCE)}]
        sent += [known] * 3 if others else []
        found = central_means(sent, [1.0] * len(sent), [1.0] * len(sent), received)
        near = {n: found.means.get(n, sent[0][n])[1] for n in (MEAN, VARIANCE)}
        mean = min(max(far, old[0] - most[0]), old[0] + most[0])
        log = min(max(math.log(far + 1e-5), math.log(old[1]) - most[1]), math.log(old[1]) + most[1])
        assert near[MEAN] == pytest.approx(mean, rel=1e-4)
        assert near[VARIANCE] == pytest.approx(math.exp(log) - 1e-5, rel=1e-3, abs=1e-9)
        times = {
            MEAN: abs(far - old[0]) / most[0],
            VARIANCE: abs(math.log((far + 1e-5) / old[1])) / most[1],
        }
        told = {name: value for name, value in times.items() if value > 1}
        assert found.times[0] == pytest.approx(told, rel=1e-3)
        assert not any(found.times[1:])


def test_who_is_far_is_told() -> None:
    """Spreads are 0, so the limits are 4 deviations of the received model and a factor of 4."""
    own = {n: np.array([1.0, 1.0], np.float32) for n in (MEAN, VARIANCE)}
    far = {
        MEAN: np.array([9.0, 1.0], np.float32),
        VARIANCE: np.array([1.0, 64.0], np.float32),
    }
    near = {MEAN: np.array([4.0, 1.0], np.float32), VARIANCE: np.array([1.0, 3.0], np.float32)}
    sent = [own, own, far, own, near, own, own]
    found = central_means(sent, [1.0] * 7, [1.0] * 7, RECEIVED)
    assert found.times[2] == pytest.approx({MEAN: 2.0, VARIANCE: 3.0}, rel=1e-4)
    assert not any(times for row, times in enumerate(found.times) if row != 2)
    limits = RoundLimits(Reference())
    for values in sent:
        limits.note(made.figures_of(statistics=values), None)
    limits.statistics(RECEIVED)
    told = limits.limited[2]
    assert told is not None
    assert (told.tensor, told.tensors) == (VARIANCE, 2)
    assert [limited is None for limited in limits.limited].count(False) == 1


def round_of(seed: int) -> tuple[Federation, list[Received]]:
    federation = Federation("models_for_tests:smooth_cnn", INPUT_SHAPE, TrainingConfig(), seed=seed)
    return federation, made.drawn_updates(federation, SPECS, seed)


def limits_of(federation: Federation, updates: Sequence[Received]) -> RoundLimits:
    known = [figures(u, federation.model, federation.policy) for u in updates]
    return RoundLimits(Reference().completed(known))


def with_statistics(update: Received, factor: float) -> Received:
    record, arrays = update
    poisoned = {e.name: factor for e in record.tensors if is_statistic(e.stands_for or "")}
    return record, {name: array * poisoned.get(name, 1.0) for name, array in arrays.items()}


def whole_statistics(
    federation: Federation, updates: Sequence[Received]
) -> list[Mapping[str, Array]]:
    return [dict(figures(u, federation.model, federation.policy).statistics) for u in updates]


def test_a_round_of_all_families_has_the_central_means(seed: int) -> None:
    federation, updates = round_of(seed)
    updates[1], updates[4] = (with_statistics(updates[n], 1e3) for n in (1, 4))
    limits = limits_of(federation, updates)
    new = aggregate(federation.model, updates, AggregationPolicy(), limits=limits)
    weights = [own.weight for own in limits.figures]
    sent = whole_statistics(federation, updates)
    names = [name for name in federation.model.tensors if is_statistic(name)]
    assert names
    for name in names:
        old = federation.model.tensors[name].numpy()
        for at in range(len(old)):
            values = [float(own[name][at]) if name in own else math.nan for own in sent]
            want = expected(values, weights, float(old[at]), name.endswith("var"))
            assert float(new.tensors[name][at]) == pytest.approx(want, rel=1e-4, abs=1e-6)
    assert all(limits.limited[n] is not None for n in (1, 4))


def test_stale_updates_move_the_model_less_where_a_value_was_moved(seed: int) -> None:
    """Four equal updates and an outlier, which moves to their value: its spread is 0."""
    federation, (_, own, *_) = round_of(seed)
    staleness = [0, 0, 3, 3, 8]
    updates = [own] * 4 + [with_statistics(own, 1e3)]
    limits, first = limits_of(federation, updates), federation.model
    later = [StaleUpdates(3, first, updates[2:4]), StaleUpdates(8, first, updates[4:])]
    federation.fold_stale(updates[:2], later, limits)
    sent = whole_statistics(federation, updates)[0]
    for name, value in sent.items():
        old = first.tensors[name].double().numpy()
        shares = [1 / np.sqrt(1 + tau) for tau in staleness]
        want = np.average([old + share * (value - old) for share in shares], axis=0)
        np.testing.assert_allclose(federation.model.tensors[name].numpy(), want, rtol=1e-5)
    assert [one is not None for one in limits.limited] == [False] * 4 + [True]


def test_other_rules_have_their_own_statistics(seed: int) -> None:
    federation, updates = round_of(seed)
    policy = AggregationPolicy(rule="median")
    names = [name for name in federation.model.tensors if is_statistic(name)]
    limits = limits_of(federation, updates)
    new = aggregate(federation.model, updates, policy, limits=limits)
    plain = aggregate(federation.model, updates, policy)
    assert all(torch.equal(new.tensors[name], plain.tensors[name]) for name in names)
