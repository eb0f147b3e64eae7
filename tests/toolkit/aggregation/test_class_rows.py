"""Masked losses: each row of the classifier is averaged over the devices that have its class."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from edgetailor import GlobalModel, TrainingConfig, split
from models_for_tests import INPUT_SHAPE, smooth_cnn
from parameters import long_one
from refusals import refused
from toolkit.aggregation.aggregate import Aggregation, Received, aggregate
from toolkit.aggregation.aggregation_policy import AggregationPolicy
from toolkit.aggregation.recover import recover
from toolkit.submodels.tensor_slices import Ranges
from updates import Array, entry, numbers, record_of

CLASSES, INPUTS, RANK = 4, 3, 2
SHAPES = {"w": (CLASSES, INPUTS), "b": (CLASSES,), "c": (5, INPUTS)}
OLD = GlobalModel(
    {n: torch.from_numpy(numbers(s, 90 + i)) for i, (n, s) in enumerate(SHAPES.items())}
)
"""A classifier `w` and `b`, and another layer `c`."""


def full(seed: int, samples: int, classes: Sequence[int] | None, width: int = INPUTS) -> Received:
    """An update of all of `b` and `c` and the first `width` columns of `w`."""
    part: Ranges | None = None if width == INPUTS else (((0, CLASSES),), ((0, width),))
    table = (
        replace(entry("w", (CLASSES, width), "w", part=part), by_class=True),
        replace(entry("b", SHAPES["b"], "b"), by_class=True),
        entry("c", SHAPES["c"], "c"),
    )
    arrays = {e.name: numbers(e.shape, seed + i) for i, e in enumerate(table)}
    record = record_of("full" if part is None else "width:0.5", samples, table)
    return replace(record, classes=None if classes is None else tuple(classes)), arrays


def cp(seed: int, samples: int, classes: Sequence[int]) -> Received:
    """CP factors of `w` and `c`, and all of `b`."""
    table = (
        replace(entry("w#0", (CLASSES, RANK), "w", "0"), by_class=True),
        entry("w#1", (INPUTS, RANK), "w", "1"),
        entry("c#0", (5, RANK), "c", "0"),
        entry("c#1", (INPUTS, RANK), "c", "1"),
        replace(entry("b", SHAPES["b"], "b"), by_class=True),
    )
    arrays = {e.name: numbers(e.shape, seed + i) for i, e in enumerate(table)}
    return replace(record_of("cp:2.0", samples, table), classes=tuple(classes)), arrays


def rows_averaged(old: Array, held: Sequence[tuple[Array, float, Sequence[int]]]) -> Array:
    """By row: np.average over the devices that have its class; `old` where none has."""
    new = old.astype(np.float64).copy()
    for row in range(len(old)):
        has = [(value[row].astype(np.float64), weight) for value, weight, own in held if row in own]
        if has:
            values, weights = zip(*has, strict=True)
            new[row] = np.average(np.stack(values), axis=0, weights=weights)
    return new


def close(came: object, expected: Array) -> None:
    np.testing.assert_allclose(np.asarray(came), expected, rtol=2e-6, atol=2e-6)


UPDATES = [full(1, 3, [0, 1]), full(20, 5, [1, 3]), full(40, 2, [1])]


def test_rows_are_averaged_over_the_devices_that_have_the_class() -> None:
    """Row 2 is nobody's and stays; other layers are averaged over all devices."""
    new = aggregate(OLD, UPDATES)
    for name in ("w", "b"):
        held = [(a[name], r.samples, r.classes or ()) for r, a in UPDATES]
        close(new.tensors[name], rows_averaged(OLD.tensors[name].numpy(), held))
        assert torch.equal(new.tensors[name][2], OLD.tensors[name][2])
    close(new.tensors["c"], np.average([a["c"] for _, a in UPDATES], axis=0, weights=[3, 5, 2]))


def test_neither_order_nor_parts_of_a_round_matter() -> None:
    whole = aggregate(OLD, reversed(UPDATES))
    left, right = (Aggregation(OLD, AggregationPolicy()) for _ in range(2))
    left.add(*UPDATES[2])
    right.add(*UPDATES[0])
    right.add(*UPDATES[1])
    left.merge(right)
    for name, value in left.result().tensors.items():
        close(value, whole.tensors[name].numpy())


def test_narrow_devices_give_their_columns_of_their_rows() -> None:
    updates = [full(1, 3, [0, 1], width=2), full(20, 5, [1, 3])]
    new, old = aggregate(OLD, updates).tensors["w"].numpy(), OLD.tensors["w"].numpy()
    (narrow, wide) = (arrays["w"] for _, arrays in updates)
    close(new[0], [*narrow[0], old[0, 2]])
    close(new[1], [*np.average([narrow[1], wide[1, :2]], axis=0, weights=[3, 5]), wide[1, 2]])
    close(new[2:], [old[2], wide[3]])


def test_updates_without_classes_hold_every_row() -> None:
    new = aggregate(OLD, [full(1, 3, None), full(20, 3, [1])])
    first, second = full(1, 3, None)[1]["w"], full(20, 3, [1])[1]["w"]
    expected = first.copy()
    expected[1] = (first[1] + second[1]) / 2
    close(new.tensors["w"], expected)


def test_recovered_updates_have_no_weight_in_other_rows() -> None:
    recovered = recover(UPDATES[1], OLD)
    for name in ("w", "b"):
        close(recovered.weights[name][[1, 3]], np.full((2, *SHAPES[name][1:]), 5.0))
        assert not recovered.weights[name][[0, 2]].any()
        close(recovered.tensors[name][[0, 2]], OLD.tensors[name][[0, 2]].numpy())


KEPT = {e.name: numbers(e.shape, 60 + i) for i, e in enumerate(cp(0, 1, [0])[0].tensors)}
CP = [cp(1, 3, [0, 1]), cp(20, 5, [1, 3])]


@pytest.mark.parametrize("beta", [1.0, 1.8])
def test_rows_of_averaged_factors(beta: float) -> None:
    kept = {n: torch.from_numpy(v) for n, v in KEPT.items() if n != "b"}
    model = GlobalModel(OLD.tensors, {"cp:2.0": kept})
    new = aggregate(model, CP, AggregationPolicy(beta=beta))
    factors = {}
    for name in kept:
        rows = range(len(KEPT[name]))
        own = [r.classes or () if name == "w#0" else rows for r, _ in CP]
        held = [(a[name], r.samples, c) for (r, a), c in zip(CP, own, strict=True)]
        mean = rows_averaged(KEPT[name], held)
        factors[name] = (1 - beta) * KEPT[name] + beta * mean
        close(new.kept["cp:2.0"][name], factors[name])
    close(new.tensors["w"], factors["w#0"] @ factors["w#1"].T)
    old = OLD.tensors["b"].numpy()
    mean = rows_averaged(old, [(a["b"], r.samples, r.classes or ()) for r, a in CP])
    close(new.tensors["b"], (1 - beta) * old + beta * mean)


@pytest.mark.parametrize("factors", ["afm", "act"])
def test_rows_of_factors_beside_whole_weights(factors: str) -> None:
    kept = {n: torch.from_numpy(v) for n, v in KEPT.items() if n != "b"}
    model = GlobalModel(OLD.tensors, {"cp:2.0": kept})
    other = full(40, 2, [2, 3])
    new = aggregate(model, [CP[0], other, CP[1]], AggregationPolicy(factors=factors))  # type: ignore[arg-type]
    composed = [a["w#0"].astype(np.float64) @ a["w#1"].T for _, a in CP]
    if factors == "afm":
        held = [(a["w#0"], r.samples, r.classes or ()) for r, a in CP]
        first = rows_averaged(KEPT["w#0"], held)
        second = np.average([a["w#1"] for _, a in CP], axis=0, weights=[3, 5])
        composed = [first @ second.T] * 2
    held = [(w, r.samples, r.classes or ()) for w, (r, _) in zip(composed, CP, strict=True)]
    held.append((other[1]["w"], 2, (2, 3)))
    close(new.tensors["w"], rows_averaged(OLD.tensors["w"].numpy(), held))


@pytest.mark.parametrize("classes", [(), (4,), (1, 0), (1, 1)])
def test_classes_that_cannot_be_are_refused(classes: tuple[int, ...]) -> None:
    record, arrays = full(1, 3, [0])
    with refused("update.wrong-classes", classes=CLASSES):
        aggregate(OLD, [(replace(record, classes=classes), arrays)])


@pytest.mark.parametrize(
    ("spec", "marked"),
    [
        ("full", {"classifier.weight", "classifier.bias"}),
        long_one(("width:0.5", {"classifier.weight", "classifier.bias"})),
        long_one(("low-rank:0.25", {"classifier.weight", "classifier.bias"})),
        ("slice:hidden", {"classifier.weight", "classifier.bias"}),
        long_one(("pfedme", {"classifier.weight", "classifier.bias"})),
        ("cp:2.0", {"classifier.weight#0", "classifier.bias"}),
    ],
)
def test_the_classifiers_tensors_have_a_row_for_every_class(spec: str, marked: set[str]) -> None:
    submodel = split(smooth_cnn(), spec, INPUT_SHAPE, TrainingConfig(masked=True))
    assert {e.name for e in submodel.program.tensors if e.by_class} == marked


def test_without_a_masked_loss_no_tensor_has_rows_for_classes() -> None:
    submodel = split(smooth_cnn(), "full", INPUT_SHAPE)
    assert not any(e.by_class for e in submodel.program.tensors)
