"""FedBuff on recorded arrivals, written out in numpy, for every family and mixed fleets."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import msgspec
import numpy as np
import pytest
import torch

from models_for_tests import INPUT_SHAPE
from parameters import half_quick
from refusals import refused
from toolkit.aggregation.aggregate import Received
from toolkit.aggregation.aggregation_policy import AggregationPolicy, Factors
from toolkit.aggregation.federation import Federation
from toolkit.aggregation.partial_aggregates.partial import decode_partial, encode_partial
from toolkit.aggregation.recover import recover
from toolkit.aggregation.running_aggregation import Aggregation
from toolkit.aggregation.stale_updates import StaleUpdates, add_stale, merge_stale
from toolkit.factorization.cp_decomposition import compose
from toolkit.submodels.class_rows import FIRST_FACTOR
from toolkit.submodels.global_model import GlobalModel
from toolkit.submodels.hyperparameters import TrainingConfig
from updates import (
    KINDS,
    NARROW,
    OLD,
    PARAMETERS,
    Array,
    composed,
    cp_update,
    dense_of,
    drawn_updates,
    entry,
    narrow_update,
    numbers,
    record_of,
)

Arrival = tuple[Received, int]
"""An update and the version that it was trained from."""


def small_factors(seed: int, samples: int = 4) -> Received:
    """Factors whose products are about 1 in size, so that float32 keeps six decimals of them."""
    record, arrays = cp_update(seed, samples)
    return record, {name: value / 2 for name, value in arrays.items()}


FACTORS = {name: torch.from_numpy(value) for name, value in small_factors(70)[1].items()}
FIRST = replace(OLD, kept={"cp:2.0": FACTORS})
FLEETS = [[kind] for kind in KINDS] + [["width"], ["full", "cp"], [*KINDS, "width"]]
TRAINING = TrainingConfig()


@dataclass
class Version:
    """A version of the model in float64."""

    tensors: dict[str, Array]
    factors: dict[str, Array]


def version_of(model: GlobalModel) -> Version:
    kept = model.kept.get("cp:2.0", {})
    return Version(
        {name: value.double().numpy() for name, value in model.tensors.items()},
        {name: value.double().numpy() for name, value in kept.items()},
    )


def fedbuff(versions: Sequence[Version], arrivals: Sequence[Arrival], factors: Factors) -> Version:
    """The version after `versions`, of the updates in `arrivals`.

    Factors of tensors that other updates hold, too, are not in the result: they are fitted.
    """
    newest = versions[-1]
    total = {name: np.zeros(shape) for name, shape in PARAMETERS.items()}
    weight = {name: np.zeros(shape) for name, shape in PARAMETERS.items()}
    moved, joint = {name: np.zeros(value.shape) for name, value in newest.factors.items()}, 0.0
    damped = 0.0  # the sum of s n, of the updates in `joint`
    alone = set(PARAMETERS)
    for (record, arrays), version in arrivals:
        s, n = 1 / np.sqrt(len(versions) - version), record.samples
        if record.submodel == "cp:2.0" and factors == "afm":
            for name, value in arrays.items():
                moved[name] += s * n * (value.astype(np.float64) - versions[version].factors[name])
            joint, damped = joint + n, damped + s * n
            continue
        dense = arrays if record.submodel == "width:0.5" else dense_of((record, arrays))
        for name, value in dense.items():
            where = NARROW if record.submodel == "width:0.5" else ...
            total[name][where] += s * n * (value - versions[version].tensors[name][where])
            weight[name][where] += n
            alone.discard(name)
    kept = {}
    if joint:
        mean = {name: newest.factors[name] + value / joint for name, value in moved.items()}
        kept = {name: value for name, value in mean.items() if name.partition("#")[0] in alone}
        received = composed(newest.factors)
        for name, value in composed(mean).items():
            total[name] += damped * (received[name] - newest.tensors[name])
            total[name] += joint * (value - received[name])
            weight[name] += joint
    new = {
        name: newest.tensors[name] + total[name] / np.where(weight[name], weight[name], 1)
        for name in PARAMETERS
    }
    return Version(new, kept)


def folded(
    models: Sequence[GlobalModel], arrivals: Sequence[Arrival], factors: Factors
) -> GlobalModel:
    """The same by the aggregation: updates grouped by version, in any order."""
    aggregation = Aggregation(models[-1], AggregationPolicy(factors=factors))
    by_version = sorted(arrivals, key=lambda arrival: arrival[1])
    for version, group in groupby(by_version, key=lambda arrival: arrival[1]):
        updates = [update for update, _ in group]
        add_stale(aggregation, StaleUpdates(len(models) - 1 - version, models[version], updates))
    return aggregation.result()


def assert_close(came: torch.Tensor, expected: Array) -> None:
    """Within what float32 rounds: an element may be a small rest of larger terms."""
    largest = float(np.abs(expected).max(initial=1))
    np.testing.assert_allclose(came.numpy(), expected, rtol=0, atol=2e-6 * largest)


@pytest.mark.parametrize("factors", ["afm", "act"])
@pytest.mark.parametrize("fleet", FLEETS, ids="+".join)
def test_versions_are_fedbuffs(fleet: list[str], factors: Factors, seed: int) -> None:
    """Six versions, of one to five updates each, that were trained from any earlier version."""
    draw = np.random.default_rng(seed)
    makes = {**KINDS, "cp": small_factors, "width": narrow_update}
    models, versions = [FIRST], [version_of(FIRST)]
    for _ in range(6):
        arrivals = []
        for _ in range(int(draw.integers(1, 6))):
            make, samples = makes[str(draw.choice(fleet))], int(draw.integers(1, 99))
            version = int(draw.integers(len(models)))
            arrivals.append((make(int(draw.integers(10**6)), samples), version))
        models.append(folded(models, arrivals, factors))
        expected = fedbuff(versions, arrivals, factors)
        for name, value in expected.tensors.items():
            assert_close(models[-1].tensors[name], value)
        for name, value in expected.factors.items():
            assert_close(models[-1].kept["cp:2.0"][name], value)
        versions.append(
            Version(expected.tensors, {**version_of(models[-1]).factors, **expected.factors})
        )


SPECS = ["full", "width:0.5", "slice:0.6+low-rank:0.25", "cp:2.0", "depth:0.5"]


@pytest.fixture(scope="module")
def federation() -> Federation:
    policy = AggregationPolicy(factors="act")
    federation = Federation("models_for_tests:staged_cnn", INPUT_SHAPE, TRAINING, policy=policy)
    federation.keep_factors(SPECS)
    return federation


def by_elements(
    versions: Sequence[GlobalModel], arrivals: Sequence[tuple[Received, int]]
) -> Mapping[str, Array]:
    """FedBuff over recovered updates. Statistics move towards what was measured."""
    newest = versions[-1]
    new = {name: value.double().numpy() for name, value in newest.tensors.items()}
    recovered = [(recover(update, versions[v]), v) for update, v in arrivals]
    for name in {name for update, _ in recovered for name in update.tensors}:
        total = weight = np.zeros(new[name].shape)
        for update, v in recovered:
            if name in update.tensors:
                base = new if "running_" in name else versions[v].tensors
                s = 1 / np.sqrt(len(versions) - v)
                change = update.tensors[name].double().numpy() - np.asarray(base[name], np.float64)
                weights = update.weights[name].double().numpy()
                total, weight = total + s * weights * change, weight + weights
        new[name] = new[name] + total / np.where(weight, weight, 1)
    return new


@pytest.mark.long
def test_every_family_of_a_real_model(federation: Federation, seed: int) -> None:
    """In one fleet, with the statistics of batch norm; by partial aggregates, too."""
    first, versions, pool = federation.model, [federation.model], []
    policy = federation.policy
    for _ in range(3):
        pool += [(update, len(versions) - 1) for update in drawn_updates(federation, SPECS, seed)]
        arrivals, pool = pool[::2], pool[1::2]
        by_version = [[u for u, v in arrivals if v == version] for version in range(len(versions))]
        parts = Aggregation(versions[-1], policy)
        for version, updates in enumerate(by_version[:-1]):
            own = Aggregation(versions[version], policy)
            for update in updates:
                own.add(*update)
            if updates:
                own = decode_partial(encode_partial(own), versions[version], policy)
                merge_stale(parts, own, len(versions) - 1 - version)
        for update in by_version[-1]:
            parts.add(*update)
        federation.fold_stale(
            by_version[-1],
            [
                StaleUpdates(len(versions) - 1 - version, versions[version], updates)
                for version, updates in enumerate(by_version[:-1])
            ],
        )
        merged = parts.result()
        expected = by_elements(versions, arrivals)
        for name, value in federation.model.tensors.items():
            if value.is_floating_point():
                assert_close(value, np.asarray(expected[name]))
                assert_close(merged.tensors[name], np.asarray(expected[name]))
        versions.append(federation.model)
    federation.model = first


@pytest.mark.parametrize("factors", half_quick(["afm", "act"]))
def test_updates_of_the_newest_version_are_a_round(
    federation: Federation, seed: int, factors: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit."""
    first = federation.model
    updates = drawn_updates(federation, SPECS, seed)
    monkeypatch.setattr(federation, "policy", AggregationPolicy(factors=factors))
    federation.fold(updates)
    whole, federation.model = federation.save(), first
    federation.fold_stale(updates, [])
    assert federation.save() == whole
    federation.model = first


def test_factors_that_no_update_holds_follow_the_model(federation: Federation, seed: int) -> None:
    """They stay close to the tensors that other devices train."""
    first = federation.model
    before = first.kept["cp:2.0"]
    federation.fold_stale(drawn_updates(federation, ["full"], seed), [])
    after, federation.model = federation.model, first
    table = [e for e in federation.submodel("cp:2.0").program.tensors if e.name in before]
    for name in {e.stands_for or "" for e in table}:
        own = sorted((e.factor or "", e.name) for e in table if e.stands_for == name)
        target = after.tensors[name].double()
        was, now = (
            float((compose([kept[factor].double() for _, factor in own]) - target).norm())
            for kept in (before, after.kept["cp:2.0"])
        )
        assert now < was, name


def test_a_strategy_has_no_versions(federation: Federation) -> None:
    federation.strategy = lambda model, updates: {}
    with refused("option.conflict"):
        federation.fold_stale([], [])
    federation.strategy = None


def test_only_old_updates_move_the_model_less() -> None:
    table = (entry("w", (2, 3), "w"),)
    arrays = {"w": OLD.tensors["w"].numpy() + 1}
    update = record_of("full", 5, table), arrays
    aggregation = Aggregation(OLD, AggregationPolicy())
    add_stale(aggregation, StaleUpdates(3, OLD, [update]))
    assert_close(aggregation.result().tensors["w"], OLD.tensors["w"].double().numpy() + 0.5)


def test_a_variance_stays_positive() -> None:
    """As a change, 0.5 - 1 would be more than the newest variance has."""
    table = (entry("bn.running_var", (2,), "bn.running_var", role="buffer"),)
    update = record_of("full", 5, table), {"bn.running_var": np.full(2, 0.5, np.float32)}
    old, new = (GlobalModel({"bn.running_var": torch.full((2,), var)}) for var in (1.0, 0.1))
    aggregation = Aggregation(new, AggregationPolicy())
    add_stale(aggregation, StaleUpdates(3, old, [update]))
    assert_close(aggregation.result().tensors["bn.running_var"], np.full(2, 0.3))


@pytest.mark.parametrize("factored", [False, True])
def test_rows_of_classes_move_where_a_device_has_them(factored: bool, seed: int) -> None:
    """Rows 0 and 2 of `w` come from a device of these classes, from an older version."""
    table = tuple(
        msgspec.structs.replace(e, by_class=e.factor in (None, FIRST_FACTOR))
        for e in (cp_update(0)[0].tensors[:2] if factored else (entry("w", (3, 2), "w"),))
    )
    shapes = {"w": (3, 2)}
    table = tuple(
        msgspec.structs.replace(e, shape=(3 if e.name == "w#0" else 2, 2)) if factored else e
        for e in table
    )
    old, new = (
        GlobalModel(
            {"w": torch.from_numpy(numbers(shapes["w"], seed % 1000 + n))},
            {"cp:2.0": {e.name: torch.from_numpy(numbers(e.shape, n)) for e in table}},
        )
        for n in range(2)
    )
    record = record_of("cp:2.0" if factored else "full", 5, table)
    some = msgspec.structs.replace(record, classes=(0, 2))
    arrays = {e.name: numbers(e.shape, 9 + n) for n, e in enumerate(table)}
    aggregation = Aggregation(new, AggregationPolicy())
    add_stale(aggregation, StaleUpdates(3, old, [(some, arrays)]))
    result = aggregation.result()
    for e in table:
        before, now = (
            (model.kept["cp:2.0"][e.name] if factored else model.tensors["w"]).double().numpy()
            for model in (old, new)
        )
        expected = now + (arrays[e.name] - before) / 2
        if e.by_class:
            expected[1] = now[1]
        if not factored:
            assert_close(result.tensors["w"], expected)
    if factored:
        first, second = (result.kept["cp:2.0"][name].double() for name in ("w#0", "w#1"))
        was = [new.kept["cp:2.0"][name].double() for name in ("w#0", "w#1")]
        error = was[0] @ was[1].T - new.tensors["w"].double()
        rows = [0, 2]
        assert_close(result.tensors["w"][rows], (first @ second.T - error / 2)[rows].numpy())
