"""Updates that hold a part of a tensor."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from profiles.errors import UpdateError
from toolkit.aggregation.aggregate import Aggregation, aggregate
from toolkit.aggregation.aggregation_policy import AggregationPolicy
from toolkit.submodels.global_model import GlobalModel
from toolkit.submodels.tensor_slices import Ranges
from updates import OLD, assert_model, entry, full_update, numbers, record_of

GLOBAL = (6, 5)


def runs(held: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """The ranges of consecutive numbers in `held`, which is sorted."""
    starts = [n for n in held if n - 1 not in held]
    stops = [n + 1 for n in held if n + 1 not in held]
    return tuple(zip(starts, stops, strict=True))


@st.composite
def parts(draw: st.DrawFn) -> tuple[list[list[int]] | None, int, int]:
    """The rows and columns that a device holds (None: all), its samples and a seed."""
    axes = [
        sorted(draw(st.sets(st.integers(0, size - 1), min_size=1, max_size=size)))
        for size in GLOBAL
    ]
    held = draw(st.sampled_from([None, axes]))
    return held, draw(st.integers(1, 100)), draw(st.integers(0, 1000))


@given(st.lists(parts(), min_size=1, max_size=5), st.sampled_from([1.0, 1.8]))
def test_elements_are_averaged_over_those_who_hold_them(
    devices: list[tuple[list[list[int]] | None, int, int]], beta: float
) -> None:
    old = numbers(GLOBAL, 77)
    total, weight = np.zeros(GLOBAL), np.zeros(GLOBAL)
    updates = []
    for held, samples, seed in devices:
        rows, columns = held or [list(range(size)) for size in GLOBAL]
        value = numbers((len(rows), len(columns)), seed)
        part = None if held is None else (runs(rows), runs(columns))
        table = (entry("w", value.shape, "w", part=part),)
        updates.append((record_of("full", samples, table), {"w": value}))
        for i, row in enumerate(rows):
            for j, column in enumerate(columns):
                total[row, column] += samples * float(value[i, j])
                weight[row, column] += samples
    mean = np.where(weight > 0, total / np.where(weight > 0, weight, 1), old)
    expected = np.where(weight > 0, (1 - beta) * old + beta * mean, old)
    model = GlobalModel({"w": torch.from_numpy(old)})
    new = aggregate(model, updates, AggregationPolicy(beta=beta)).tensors["w"].numpy()
    np.testing.assert_allclose(new, expected, rtol=2e-6, atol=2e-6)
    np.testing.assert_array_equal(new[weight == 0], old[weight == 0])
    if len(devices) > 1:
        halves = [Aggregation(model, AggregationPolicy(beta=beta)) for _ in range(2)]
        for number, update in enumerate(updates):
            halves[number % 2].add(*update)
        halves[0].merge(halves[1])
        merged = halves[0].result().tensors["w"].numpy()
        np.testing.assert_allclose(merged, new, rtol=2e-6, atol=2e-6)


def test_ranges_are_held_in_the_order_they_are_named() -> None:
    model = GlobalModel({"w": torch.zeros(4)})
    table = (entry("w", (3,), "w", part=(((3, 4), (0, 2)),)),)
    update = record_of("full", 1, table), {"w": np.array([7, 1, 2], np.float32)}
    assert aggregate(model, [update]).tensors["w"].tolist() == [1, 2, 0, 7]


def test_factors_of_a_part() -> None:
    """Half of the outputs of a convolution, in factors, beside a full update."""
    part = (((0, 2),), ((0, 3),), ((0, 3),), ((0, 3),))
    u, v = numbers((1, 3, 3, 1), 1), numbers((2, 1, 1, 3), 2)
    table = (
        entry("u", u.shape, "c", "u", part=part),
        entry("v", v.shape, "c", "v", part=part),
    )
    update = record_of("low-rank:0.5", 4, table), {"u": u, "v": v}
    full = full_update(3)
    expected = full[1]["c"].astype(np.float64)
    expected[:2] = (expected[:2] + np.einsum("rmho,nrpw->nmhw", u, v)) / 2
    assert_model(aggregate(OLD, [full, update]), {"c": expected})


@pytest.mark.parametrize(
    ("part", "shape", "named"),
    [
        ((((0, 1),),), (1, 3), "(2, 3)"),
        ((((0, 3),), ((0, 3),)), (3, 3), "axis 0: the range [0, 3) is not within the size 2"),
        ((((-1, 1),), ((0, 3),)), (2, 3), "[-1, 1)"),
        ((((1, 1),), ((0, 3),)), (0, 3), "[1, 1)"),
        (((), ((0, 3),)), (0, 3), "axis 0"),
        ((((0, 2),), ((0, 2), (1, 3))), (2, 4), "axis 1"),
        ((((0, 2),), ((0, 2),)), (2, 3), "(2, 2)"),
    ],
)
def test_malformed_parts_are_refused(part: Ranges, shape: tuple[int, ...], named: str) -> None:
    table = (entry("w", shape, "w", part=part),)
    with pytest.raises(UpdateError) as caught:
        aggregate(OLD, [(record_of("full", 1, table), {"w": np.zeros(shape, np.float32)})])
    whole = part == (((0, 2),), ((0, 2),))
    assert caught.value.code == ("update.wrong-shape" if whole else "update.wrong-slice")
    assert "'w'" in str(caught.value)
    assert named in str(caught.value)
