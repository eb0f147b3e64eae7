"""Partial aggregates: merged through their files in any tree, they are the flat result."""

import itertools
import json
import random
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from safetensors.numpy import load

from device_agent.formats.manifest import uploaded
from edgetailor import (
    Aggregation,
    AggregationPolicy,
    GlobalModel,
    TrainingConfig,
    read_partial,
    recover,
    split,
    write_partial,
)
from exporters.recording.capture import SharedRecording
from models_for_tests import CLASSES, INPUT_SHAPE, smooth_cnn
from parameters import long_one
from refusals import refused
from toolkit.aggregation.aggregate import Received, aggregate
from toolkit.aggregation.partial_aggregates.partial import decode_partial, encode_partial
from toolkit.aggregation.partial_aggregates.partial_record import RECORD, TENSORS
from toolkit.submodels import global_model
from toolkit.submodels.rolling_window import in_round
from toolkit.submodels.submodel import Submodel
from updates import entry, record_of

SPECS = (
    *("full", "low-rank:0.5", "slice:residual", "slice:residual+low-rank:0.5", "width:0.5"),
    *("width:0.25", "width:0.5,window=rolling", "cp:2.0", "cp:4.0", "pfedme"),
)
POLICIES = (
    AggregationPolicy(),
    AggregationPolicy(weights="uniform", beta=1.8),
    AggregationPolicy(weights="softmax", temperature=0.05, factors="act"),
    AggregationPolicy(factors="act", beta=0.5),
)
TOLERANCE = 1e-6
"""Of the largest number of a tensor; float32 itself rounds by 6e-8."""
COMPOSED = 1e-5
"""For tensors that are composed of factors: up to four, each equal to TOLERANCE, multiply."""


@cache
def submodels(masked: bool) -> tuple[GlobalModel, dict[str, Submodel]]:
    """A small model, and its submodels by spec, in a round in which windows go around the end.

    With a masked loss there is no pfedme.
    """
    torch.manual_seed(0)
    module = smooth_cnn()
    training = TrainingConfig(batch_size=8, masked=masked)
    with SharedRecording(module, INPUT_SHAPE):
        made = {spec: split(module, spec, INPUT_SHAPE, training) for spec in SPECS}
    return global_model.from_model(module), {s: in_round(own, 7) for s, own in made.items()}


def drawn(spec: str, seed: int, masked: bool = False) -> Received:
    """An update of `spec`: what a device receives, moved at random, with variances above zero."""
    model, made = submodels(masked)
    draw = np.random.default_rng(seed)
    table = uploaded(made[spec].program.tensors)
    cut = made[spec].cut(model)
    arrays = {
        e.name: cut[e.name].numpy() + 0.1 * draw.normal(size=e.shape).astype(np.float32)
        for e in table
    }
    for e in table:
        if e.name.endswith("running_var"):
            arrays[e.name] = np.abs(arrays[e.name])
    record = record_of(spec, int(draw.integers(1, 500)), table)
    if masked and draw.random() < 0.8:
        own = draw.choice(CLASSES, size=draw.integers(1, CLASSES + 1), replace=False)
        record = replace(record, classes=tuple(sorted(own.tolist())))
    return record, arrays


def partial_of(
    updates: Sequence[Received], model: GlobalModel, policy: AggregationPolicy
) -> Aggregation:
    aggregation = Aggregation(model, policy)
    for update in updates:
        aggregation.add(*update)
    return aggregation


def by_a_tree(
    updates: Sequence[Received], model: GlobalModel, policy: AggregationPolicy, seed: int
) -> GlobalModel:
    """Sites of random updates, merged in a random tree; every edge of it is a pair of files."""
    draw = random.Random(seed)
    shuffled = draw.sample(updates, len(updates))
    sites = []
    while shuffled:
        size = draw.randint(1, len(shuffled))
        sites.append(encode_partial(partial_of(shuffled[:size], model, policy)))
        shuffled = shuffled[size:]
    while len(sites) > 1 or draw.random() < 0.3:
        above = Aggregation(model, policy)
        for _ in range(min(len(sites), draw.randint(2, 4))):
            site = sites.pop(draw.randrange(len(sites)))
            above.merge(decode_partial(site, model, policy))
        sites.append(encode_partial(above))
    return decode_partial(sites[0], model, policy).result()


def assert_same(model: GlobalModel, expected: GlobalModel, composed: float = TOLERANCE) -> None:
    """The same tensors; `composed` is the tolerance of those that have kept factors."""
    assert model.tensors.keys() == expected.tensors.keys()
    assert model.kept.keys() == expected.kept.keys()
    for name, value in expected.tensors.items():
        scale = max(float(value.abs().max()), 1e-3)
        difference = float((model.tensors[name] - value).abs().max())
        factors = any(f"{name}#0" in kept for kept in expected.kept.values())
        assert difference <= (composed if factors else TOLERANCE) * scale, (
            name,
            difference / scale,
        )


mixtures = st.lists(
    st.tuples(st.sampled_from(SPECS), st.integers(0, 10**6)), min_size=1, max_size=12
)


@pytest.mark.long
@settings(max_examples=25)
@given(mixtures, st.sampled_from(POLICIES), st.booleans(), st.integers(0, 10**6))
def test_any_order_and_tree_is_the_flat_result(
    mixture: list[tuple[str, int]], policy: AggregationPolicy, masked: bool, tree: int
) -> None:
    model, _ = submodels(masked)
    updates = [drawn(spec, seed, masked) for spec, seed in mixture]
    flat = aggregate(model, updates, policy)
    assert_same(by_a_tree(updates, model, policy, tree), flat, COMPOSED)


@pytest.mark.parametrize(
    ("masked", "number"),
    [
        one if one == (True, 0) else long_one(one)
        for one in itertools.product([False, True], range(len(POLICIES)))
    ],
)
def test_every_family_together(masked: bool, number: int, seed: int) -> None:
    policy = POLICIES[number]
    model, _ = submodels(masked)
    updates = [drawn(spec, seed + n, masked) for n, spec in enumerate(SPECS * 2)]
    flat = aggregate(model, updates, policy)
    assert_same(by_a_tree(updates, model, policy, seed), flat)


def test_numpys_average_of_recovered_updates(seed: int) -> None:
    """Composed factors (act), so that every update enters as tensors of the full shape."""
    model, _ = submodels(False)
    policy = AggregationPolicy(factors="act")
    updates = [drawn(spec, seed + n) for n, spec in enumerate(SPECS * 3)]
    new = by_a_tree(updates, model, policy, seed)
    parts = [recover(update, model, policy) for update in updates]
    for name in {name for part in parts for name in part.tensors}:
        held = [part for part in parts if name in part.tensors]
        values = np.stack([part.tensors[name].double().numpy() for part in held])
        weights = np.stack([part.weights[name].double().numpy() for part in held])
        mean = (values * weights).sum(0) / np.maximum(weights.sum(0), 1e-300)
        expected = np.where(weights.sum(0) > 0, mean, model.tensors[name].numpy())
        np.testing.assert_allclose(
            new.tensors[name], expected, rtol=0, atol=TOLERANCE * np.abs(expected).max()
        )


def test_one_partial_is_exact(seed: int) -> None:
    """Through the files every number and every weight of whole tensors stays what it was."""
    model, _ = submodels(False)
    policy = AggregationPolicy(factors="act")
    updates = [drawn(spec, seed + n) for n, spec in enumerate(SPECS * 8)]  # sums have carried
    site = partial_of(updates, model, policy)
    decoded = decode_partial(encode_partial(site), model, policy)
    new, expected = decoded.result(), site.result()
    for name, value in expected.tensors.items():
        assert torch.equal(new.tensors[name], value), name
    for key, factors in expected.kept.items():
        for name, value in factors.items():
            assert torch.equal(new.kept[key][name], value), (key, name)


def test_factors_that_only_one_submodel_has_move_alike(seed: int) -> None:
    """All devices are cp: the factors are the state (TDPFed eq. 20), kept from round to round."""
    model, _ = submodels(False)
    policy = AggregationPolicy(beta=1.8)
    first = aggregate(model, [drawn("cp:2.0", seed)])
    updates = [drawn("cp:2.0", seed + n) for n in range(1, 12)]
    flat, tree = aggregate(first, updates, policy), by_a_tree(updates, first, policy, seed)
    assert_same(tree, flat, COMPOSED)
    for name, value in flat.kept["cp:2.0"].items():
        difference = (tree.kept["cp:2.0"][name] - value).abs().max()
        assert difference <= TOLERANCE * value.abs().max()


@pytest.mark.long
@pytest.mark.parametrize("masked", [False, True])
def test_the_size_does_not_depend_on_the_number_of_devices(masked: bool, seed: int) -> None:
    model, _ = submodels(masked)
    times = 66 if masked else 12  # with half of them, each set of labels has occurred already
    updates = [drawn(spec, seed + n, masked) for n, spec in enumerate(SPECS * times)]
    few, many = (
        encode_partial(partial_of(some, model, AggregationPolicy()))
        for some in (updates[: len(updates) // 2], updates)
    )
    assert len(few[TENSORS]) == len(many[TENSORS])
    digits, hashes = re.compile(rb"[0-9.]+"), re.compile(rb"[0-9a-f]{64}")
    plain = [digits.sub(b"0", hashes.sub(b"", files[RECORD])) for files in (few, many)]
    assert len(plain[0]) == len(plain[1])


def test_a_folder(tmp_path: Path, seed: int) -> None:
    model, _ = submodels(False)
    policy = AggregationPolicy()
    updates = [drawn(spec, seed + n) for n, spec in enumerate(SPECS)]
    site = partial_of(updates, model, policy)
    write_partial(tmp_path / "site", site)
    read = read_partial(tmp_path / "site", model, policy)
    assert read.updates == len(updates)
    assert_same(read.result(), aggregate(model, updates, policy))
    with refused("file.exists"):
        write_partial(tmp_path / "site", partial_of(updates, model, policy))
    write_partial(tmp_path / "site", partial_of(updates[:1], model, policy), force=True)
    assert read_partial(tmp_path / "site", model, policy).updates == 1
    (tmp_path / "other").mkdir()
    with refused("file.not-replaceable"):
        write_partial(tmp_path / "other", partial_of(updates[:1], model, policy), force=True)


def test_nothing_is_no_partial() -> None:
    model, _ = submodels(False)
    with refused("aggregate.no-update"):
        encode_partial(Aggregation(model, AggregationPolicy()))


def test_the_files_are_plain(seed: int) -> None:
    """Any JSON and safetensors reader finds names, weights and sums; by hand for one device."""
    model = GlobalModel({"w": torch.zeros(2, 3)})
    value = np.random.default_rng(seed).normal(size=(2, 2)).astype(np.float32)
    part = (((0, 2),), ((0, 1), (2, 3)))
    update = record_of("width:0.5", 3, (entry("w", (2, 2), "w", part=part),)), {"w": value}
    files = encode_partial(partial_of([update], model, AggregationPolicy()))
    record = json.loads(files[RECORD])
    assert record["sums"] == [
        {"name": "w", "weights": [{"part": [[[0, 2]], [[0, 1], [2, 3]]], "weight": 3.0}]}
    ]
    low, high = (
        load(files[TENSORS])[f"{part}|sum|w"].astype(np.float64) for part in ("low", "high")
    )
    exact = 3 * value.astype(np.float64)
    assert ((low + high) == np.stack([exact[:, 0], [0, 0], exact[:, 1]], 1)).all()
