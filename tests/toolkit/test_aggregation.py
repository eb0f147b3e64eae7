"""The streaming mean's laws, and what aggregation refuses."""

import re
from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from device_agent.manifest import FileEntry, Role, TensorEntry
from device_agent.update import UpdateRecord
from profiles.errors import InputError, UpdateError
from toolkit.aggregation import Aggregation, Received, aggregate
from toolkit.mean import Mean
from toolkit.parts import Part
from toolkit.policy import AggregationPolicy, Factors, Weights
from toolkit.strength import strength
from toolkit.weights import GlobalModel

Array = np.ndarray
NAMES = "abc"
Updates = list[tuple[frozenset[str], float, int]]

updates = st.lists(
    st.tuples(
        st.frozensets(st.sampled_from(NAMES), min_size=1),
        st.integers(1, 10_000).map(float),
        st.integers(0, 2**32 - 1),
    ),
    min_size=1,
    max_size=6,
)


def tensors(names: frozenset[str], seed: int) -> dict[str, torch.Tensor]:
    draw = np.random.default_rng(seed)
    values = {name: draw.normal(size=(3, 2)).astype(np.float32) for name in NAMES}
    return {name: torch.from_numpy(values[name]) for name in names}


def mean_of(parts: Sequence[tuple[frozenset[str], float, int]]) -> Mean:
    mean = Mean()
    for names, weight, seed in parts:
        mean.add(tensors(names, seed), weight)
    return mean


def assert_same(one: Mean, other: Mean) -> None:
    left, right = one.result(), other.result()
    assert left.keys() == right.keys()
    for name, value in left.items():
        torch.testing.assert_close(value, right[name], rtol=1e-6, atol=1e-6)


@given(updates)
def test_mean_is_numpys_weighted_average(parts: Updates) -> None:
    result = mean_of(parts).result()
    for name in NAMES:
        held = [(tensors(own, seed)[name].numpy(), w) for own, w, seed in parts if name in own]
        assert (name in result) == bool(held)
        if held:
            values, weights = zip(*held, strict=True)
            expected = np.average(np.stack(values).astype(np.float64), axis=0, weights=weights)
            np.testing.assert_allclose(result[name].numpy(), expected, rtol=1e-6, atol=1e-6)


@given(updates, st.randoms(use_true_random=False))
def test_order_does_not_matter(parts: Updates, random: Random) -> None:
    shuffled = list(parts)
    random.shuffle(shuffled)
    assert_same(mean_of(parts), mean_of(shuffled))


@given(updates, st.integers(0, 6))
def test_merging_two_means_equals_adding_everything_to_one(parts: Updates, cut: int) -> None:
    left, right = mean_of(parts[:cut]), mean_of(parts[cut:])
    untouched = mean_of(parts[cut:])
    left.merge(right)
    assert_same(left, mean_of(parts))
    left.add(tensors(frozenset(NAMES), 1), 5.0)
    assert_same(right, untouched)


@given(updates)
def test_adding_leaves_what_was_added_alone(parts: Updates) -> None:
    given_tensors = tensors(frozenset(NAMES), 7)
    mean = Mean()
    mean.add(given_tensors, 1.0)
    for names, weight, seed in parts:
        mean.add(tensors(names, seed), weight)
    for name, value in tensors(frozenset(NAMES), 7).items():
        assert torch.equal(given_tensors[name], value)


def entry(
    name: str,
    shape: tuple[int, ...],
    stands_for: str | None,
    factor: str | None = None,
    part: Part | None = None,
    role: Role = "parameter",
) -> TensorEntry:
    return TensorEntry(
        name=name,
        role=role,
        dtype="float32",
        shape=shape,
        stands_for=stands_for,
        factor=factor,
        part=part,
    )


def record_of(submodel: str, samples: int, table: tuple[TensorEntry, ...]) -> UpdateRecord:
    return UpdateRecord(
        bundle="b",
        base="g",
        submodel=submodel,
        samples=samples,
        steps=1,
        loss_first=1.0,
        loss_last=1.0,
        tensors=table,
        file=FileEntry(size=0, sha256=""),
    )


def numbers(shape: tuple[int, ...], seed: int) -> Array:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def received(stands_for: str, value: Array, samples: int = 4) -> Received:
    table = (entry(stands_for, value.shape, stands_for),)
    return record_of("full", samples, table), {stands_for: value}


MODEL = GlobalModel({"w": torch.zeros(2, 3), "v": torch.ones(4)}, {"cp:9": {"f": torch.ones(1)}})


def test_nobodys_tensors_and_other_families_factors_stay() -> None:
    new = aggregate(MODEL, [received("w", np.full((2, 3), 2, np.float32))])
    assert torch.equal(new.tensors["w"], torch.full((2, 3), 2.0))
    assert new.tensors["v"] is MODEL.tensors["v"]
    assert new.kept == MODEL.kept


def test_weights_are_samples() -> None:
    zeros, fours = np.zeros((2, 3), np.float32), np.full((2, 3), 4, np.float32)
    new = aggregate(MODEL, [received("w", zeros, 3), received("w", fours, 1)])
    assert torch.equal(new.tensors["w"], torch.ones(2, 3))


@pytest.mark.parametrize(
    ("update", "words"),
    [
        (received("x", np.zeros(2, np.float32)), "trains 'x', which the global"),
        (received("w", np.zeros((3, 2), np.float32)), r"gives 'w' the shape \(3, 2\)"),
        (received("w", np.zeros((2, 3), np.float32), samples=0), "0 samples has no weight"),
    ],
)
def test_updates_that_do_not_fit_are_refused(update: Received, words: str) -> None:
    with pytest.raises(UpdateError, match=words):
        aggregate(MODEL, [received("w", np.ones((2, 3), np.float32)), update])
    assert torch.equal(MODEL.tensors["w"], torch.zeros(2, 3))


def test_nothing_to_aggregate_is_refused() -> None:
    with pytest.raises(UpdateError, match="no update to aggregate"):
        aggregate(MODEL, [])


# policies

RANK = 2
CONV = (4, 3, 3, 3)
PARAMETERS = {"w": (2, 3), "c": CONV}
OLD = GlobalModel(
    {name: torch.from_numpy(numbers(shape, 99)) for name, shape in PARAMETERS.items()}
)


def low_rank_update(seed: int, samples: int = 4, ratio: float = 0.5) -> Received:
    """Factors of `c` and a dense `w`."""
    shapes = {"c.u": (RANK, 3, 3, 1), "c.v": (4, RANK, 1, 3), "w": (2, 3)}
    table = (entry("c.u", shapes["c.u"], "c", "u"), entry("c.v", shapes["c.v"], "c", "v"))
    arrays = {name: numbers(shape, seed + n) for n, (name, shape) in enumerate(shapes.items())}
    record = record_of(f"low-rank:{ratio}", samples, (*table, entry("w", (2, 3), "w")))
    return record, arrays


def cp_update(seed: int, samples: int = 4, rate: float = 2.0) -> Received:
    """CP factors of `w` and `c`."""
    table = tuple(
        entry(f"{name}#{mode}", (size, RANK), name, str(mode))
        for name, shape in PARAMETERS.items()
        for mode, size in enumerate(shape)
    )
    arrays = {e.name: numbers(e.shape, seed + n) for n, e in enumerate(table)}
    return record_of(f"cp:{rate}", samples, table), arrays


def full_update(seed: int, samples: int = 4) -> Received:
    table = tuple(entry(name, shape, name) for name, shape in PARAMETERS.items())
    arrays = {name: numbers(shape, seed + n) for n, (name, shape) in enumerate(PARAMETERS.items())}
    return record_of("full", samples, table), arrays


def slice_update(seed: int, samples: int = 4) -> Received:
    table = (entry("w", (2, 3), "w"),)
    return record_of("slice:w", samples, table), {"w": numbers((2, 3), seed)}


KINDS = {"full": full_update, "low-rank": low_rank_update, "cp": cp_update, "slice": slice_update}


def dense_of(update: Received) -> dict[str, Array]:
    """What an update says of the global tensors, by numpy's einsum in float64."""
    record, arrays = update
    big = {name: array.astype(np.float64) for name, array in arrays.items()}
    match record.submodel.partition(":")[0]:
        case "low-rank":
            c = np.einsum("rmho,nrpw->nmhw", big["c.u"], big["c.v"])
            return {"c": c, "w": big["w"]}
        case "cp":
            return composed(big)
    return big


def composed(factors: dict[str, Array]) -> dict[str, Array]:
    w = np.einsum("ar,br->ab", *(factors[f"w#{mode}"] for mode in range(2)))
    c = np.einsum("ar,br,cr,dr->abcd", *(factors[f"c#{mode}"] for mode in range(4)))
    return {"w": w, "c": c}


def averaged(parts: Sequence[tuple[dict[str, Array], float]]) -> dict[str, Array]:
    """np.average of each tensor over those who have it; the old model's where nobody has."""
    means = {name: value.double().numpy() for name, value in OLD.tensors.items()}
    for name in PARAMETERS:
        held = [(tensors[name], weight) for tensors, weight in parts if name in tensors]
        if held:
            values, weights = zip(*held, strict=True)
            means[name] = np.average(np.stack(values), axis=0, weights=weights)
    return means


def assert_model(model: GlobalModel, expected: Mapping[str, Array]) -> None:
    for name, value in expected.items():
        assert model.tensors[name].dtype == torch.float32
        np.testing.assert_allclose(model.tensors[name].numpy(), value, rtol=2e-6, atol=2e-6)


mixtures = st.lists(
    st.tuples(st.sampled_from(sorted(KINDS)), st.integers(0, 10_000), st.integers(1, 500)),
    min_size=1,
    max_size=6,
)
Mixture = list[tuple[str, int, int]]


def drawn(mixture: Mixture) -> list[Received]:
    return [KINDS[kind](seed, samples) for kind, seed, samples in mixture]


@given(mixtures, st.sampled_from(["samples", "uniform"]))
def test_mixed_families_are_averaged_tensor_by_tensor(mixture: Mixture, weights: Weights) -> None:
    updates = drawn(mixture)
    by_samples = weights == "samples"
    parts = [(dense_of(u), float(u[0].samples if by_samples else 1)) for u in updates]
    policy = AggregationPolicy(weights=weights, factors="act")
    assert_model(aggregate(OLD, updates, policy), averaged(parts))


@given(mixtures, st.integers(0, 6), st.sampled_from(["afm", "act"]))
def test_aggregations_merge_in_any_order(mixture: Mixture, cut: int, factors: Factors) -> None:
    policy = AggregationPolicy(factors=factors, beta=1.5)
    updates = drawn(mixture)
    whole = aggregate(OLD, reversed(updates), policy)
    left, right = Aggregation(OLD, policy), Aggregation(OLD, policy)
    for number, update in enumerate(updates):
        (left if number < cut else right).add(*update)
    left.merge(right)
    merged = left.result()
    assert_model(merged, {name: value.numpy() for name, value in whole.tensors.items()})
    assert merged.kept.keys() == whole.kept.keys()


def test_factors_are_averaged_first_or_composed_first() -> None:
    updates = [cp_update(1, 1), cp_update(50, 3)]
    table = updates[0][1]
    factors = {
        name: np.average([a[name].astype(np.float64) for _, a in updates], axis=0, weights=[1, 3])
        for name in table
    }
    first = aggregate(OLD, updates)
    assert_model(first, composed(factors))
    then = aggregate(OLD, updates, AggregationPolicy(factors="act"))
    assert_model(then, averaged([(dense_of(updates[0]), 1.0), (dense_of(updates[1]), 3.0)]))
    assert not torch.allclose(first.tensors["c"], then.tensors["c"], atol=1e-2)
    for model in (first, then):
        assert model.kept["cp:2.0"].keys() == table.keys()


def test_averaged_factors_enter_with_their_devices_joint_weight() -> None:
    updates = [cp_update(1, 2), full_update(9, 5), cp_update(1, 3)]
    same = dense_of(updates[0])
    assert_model(aggregate(OLD, updates), averaged([(same, 5.0), (dense_of(updates[1]), 5.0)]))


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
    ("options", "words"),
    [
        ({"weights": "loss"}, "weights must be one of samples, uniform, softmax; it is 'loss'"),
        ({"factors": "none"}, "factors must be one of afm, act; it is 'none'"),
        ({"temperature": 0.0}, "temperature must be a number from 0.05 up, or inf; it is 0.0"),
        ({"temperature": float("nan")}, "temperature must be"),
        ({"temperature": "5"}, "temperature must be a number from 0.05 up, or inf; it is '5'.$"),
        ({"temperature": 10**400}, "temperature must be"),
        ({"beta": 0.0}, "beta must be a number above 0 and at most 10; it is 0.0.$"),
        ({"beta": 1e40}, r"beta must be a number above 0 and at most 10; it is 1e\+40.$"),
        ({"beta": None}, "beta must be a number above 0 and at most 10; it is None.$"),
        ({"beta": float("inf")}, "beta must be"),
    ],
)
def test_policies_that_cannot_be(options: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        AggregationPolicy(**options)


def test_a_thousand_updates_round_like_one() -> None:
    draw = np.random.default_rng(5)
    values = draw.normal(1.0, 0.1, (1000, 50)).astype(np.float32)
    mean = Mean()
    for value in values:
        mean.add({"a": torch.from_numpy(value)}, 100.0)
    expected = values.astype(np.float64).mean(0)
    # One float32 addition after the other is off by 1e-6 and more.
    np.testing.assert_allclose(mean.result()["a"].numpy(), expected, rtol=2e-7)


def test_many_updates_of_two_layouts_merge() -> None:
    """Enough of them that every sum has carried, before and after it is laid out anew."""
    updates = [full_update(seed) for seed in range(40)]
    updates += [(low_rank_update, full_update)[seed % 2](seed) for seed in range(40, 120)]
    halves = [Aggregation(OLD, AggregationPolicy()) for _ in range(2)]
    for number, update in enumerate(updates):
        halves[number % 3 == 0].add(*update)
    halves[0].merge(halves[1])
    expected = averaged([(dense_of(update), 1.0) for update in updates])
    assert_model(halves[0].result(), expected)


# parts

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
    ("part", "shape", "words"),
    [
        ((((0, 1),),), (1, 3), r"along 1 axes; 'w' in the global model has the shape \(2, 3\)"),
        ((((0, 3),), ((0, 3),)), (3, 3), r"axis 0: the range \[0, 3\) is not within the 2"),
        ((((-1, 1),), ((0, 3),)), (2, 3), r"the range \[-1, 1\) is not within"),
        ((((1, 1),), ((0, 3),)), (0, 3), r"the range \[1, 1\) is not within"),
        (((), ((0, 3),)), (0, 3), "axis 0: its part has no range"),
        ((((0, 2),), ((0, 2), (1, 3))), (2, 4), "axis 1: its ranges overlap at 1"),
        ((((0, 2),), ((0, 2),)), (2, 3), r"shape \(2, 3\); the global model has \(2, 2\) there"),
    ],
)
def test_malformed_parts_are_refused(part: Part, shape: tuple[int, ...], words: str) -> None:
    table = (entry("w", shape, "w", part=part),)
    refused((record_of("full", 1, table), {"w": np.zeros(shape, np.float32)}), words)


# updates that nobody should believe


def refused(update: Received, words: str) -> None:
    with pytest.raises(UpdateError, match=words):
        aggregate(OLD, [update])


def factored(u: tuple[int, ...], v: tuple[int, ...]) -> Received:
    table = (entry("u", u, "c", "u"), entry("v", v, "c", "v"))
    arrays = {"u": np.zeros(u, np.float32), "v": np.zeros(v, np.float32)}
    return record_of("low-rank:0.5", 1, table), arrays


@pytest.mark.parametrize(
    ("update", "words"),
    [
        (factored((2, 3, 3, 1), (4, 3, 1, 3)), "factors do not fit .* of one rank"),
        (factored((2, 3, 3, 1), (5, 2, 1, 3)), r"gives 'c' the shape \(5, 3, 3, 3\)"),
        (factored((2, 9, 3), (4, 2, 3)), "factors do not fit the global model"),
        (factored((2, 3, 3, 2), (4, 2, 1, 3)), r"are no \(r, m, kh, 1\)"),
        (factored((0, 3, 3, 1), (4, 0, 1, 3)), "factors of 0 numbers for 'c'"),
        (factored((5000, 3, 3, 1), (4, 5000, 1, 3)), r"factors of 105000 numbers .* 1 to 351"),
    ],
)
def test_factors_that_do_not_make_the_tensor(update: Received, words: str) -> None:
    refused(update, words)


def test_an_absurd_rank_is_refused_before_anything_is_composed() -> None:
    rank = 2**40
    table = tuple(entry(f"c#{m}", (size, rank), "c", str(m)) for m, size in enumerate(CONV))
    refused((record_of("cp:2.0", 1, table), {}), "factors of .* numbers for 'c'")


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_numbers_that_are_not_finite_are_refused(kind: str, bad: float) -> None:
    record, arrays = KINDS[kind](1)
    next(iter(arrays.values())).flat[0] = bad
    refused((record, arrays), "holds a number that is not finite")


def test_tables_that_contradict_themselves() -> None:
    w, value = entry("w", (2, 3), "w"), {"w": np.zeros((2, 3), np.float32)}
    other = entry("x", (2, 3), "w")
    refused((record_of("full", 1, (w, w)), value), "lists the tensor 'w' more than once")
    refused((record_of("full", 1, (w, other)), value), "stands for 'w' twice")
    refused((record_of("full", 1, (entry("w", (2, 3), None),)), value), "stands for no global")
    refused((record_of("full", 10**13, (w,)), value), "samples has no weight; it has from 1 to")
    pair = (entry("u", (1, 3), "w", "u"), entry("v", (2, 1), "w", "v", part=(((0, 2),), ((0, 1),))))
    refused((record_of("low-rank:0.5", 1, pair), {}), "factors of 'w' name different parts")


MISNAMED = {
    "full": low_rank_update,
    "width:0.5": cp_update,
    "pfedme": cp_update,
    "low-rank:0.5+full": cp_update,
}


@pytest.mark.parametrize("submodel", MISNAMED)
@pytest.mark.parametrize("factors", ["afm", "act"])
def test_factors_under_a_family_that_ignores_them(submodel: str, factors: Factors) -> None:
    record, arrays = MISNAMED[submodel](1)
    update = msgspec.structs.replace(record, submodel=submodel), arrays
    words = "lacks the factor 'u' of 'w'|gives factors of 'c', of which the family .* nothing: it"
    with pytest.raises(UpdateError, match=words):
        aggregate(OLD, [update], AggregationPolicy(factors=factors))


def test_a_single_factor_of_a_family_without_any() -> None:
    table, value = (entry("w", (2, 3), "w", "u"),), np.zeros((2, 3), np.float32)
    refused(
        (record_of("full", 1, table), {"w": value}),
        "^An update gives factors of 'w', of which the family 'full' makes nothing: it is not of "
        "the submodel that it names.$",
    )


@pytest.mark.parametrize(
    ("submodel", "words"),
    [
        ("width:abc", r"^'width:abc': the width ratio must be a number above 0 and at most 1, "),
        ("low-rank", "^'low-rank' needs a rank ratio: write it like low-rank:0.25. An update"),
        ("slice:w+low-rank:2", "^'low-rank:2': the rank ratio must .* An update calls its submo"),
        ("full:0.5", "^'full:0.5': full takes no number, write 'full'. An update calls its"),
        ("nope:1", "^There is no submodel family 'nope'; .* An update calls its submodel so.$"),
        ("full,=", "^'full,=': '=' is no option"),
    ],
)
@pytest.mark.parametrize("weights", ["samples", "softmax"])
def test_submodels_that_no_family_makes(submodel: str, words: str, weights: Weights) -> None:
    record, arrays = full_update(1)
    with pytest.raises(UpdateError, match=words):
        Aggregation(OLD, AggregationPolicy(weights)).add(
            msgspec.structs.replace(record, submodel=submodel), arrays
        )


@pytest.mark.parametrize("role", ["frozen", "personal", "optimizer"])
def test_roles_that_devices_keep(role: Role) -> None:
    table = (entry("w", (2, 3), "w", role=role),)
    refused(
        (record_of("full", 1, table), {"w": numbers((2, 3), 1)}),
        f"'w' has the role '{role}'; an update holds tensors of the roles parameter and buffer.$",
    )


def test_whole_numbers_are_not_trained() -> None:
    model = GlobalModel({"n": torch.tensor([3]), "w": torch.zeros(2, 3)})
    whole = msgspec.structs.replace(entry("w", (2, 3), "w"), dtype="int64")
    for update, words in (
        ((whole, np.ones((2, 3), np.int64)), "'w' is int64; an update holds float32 only.$"),
        ((entry("n", (1,), "n"), np.ones(1, np.float32)), "'n', which holds whole numbers in the"),
    ):
        table, value = update
        with pytest.raises(UpdateError, match=words):
            aggregate(model, [(record_of("full", 1, (table,)), {table.name: value})])


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
    words = "^The update of 'full' gives 'bn.running_var' a variance below zero.$"
    with pytest.raises(UpdateError, match=words):
        aggregate(NORM, [named("bn.running_var", -1, role)])


def test_missing_factors_are_named() -> None:
    for update, factor, name in ((low_rank_update(1), "u", "c"), (cp_update(1), "1", "c")):
        record, arrays = update
        left = tuple(e for e in record.tensors if (e.stands_for, e.factor) != (name, factor))
        altered = msgspec.structs.replace(record, tensors=left)
        kept = {e.name: arrays[e.name] for e in left}
        with pytest.raises(
            UpdateError, match=f"^An update lacks the factor '{factor}' of '{name}'"
        ):
            Aggregation(OLD, AggregationPolicy()).add(altered, kept)


@pytest.mark.parametrize("shape", [(), (4,)])
def test_what_has_no_two_axes_has_no_factors(shape: tuple[int, ...]) -> None:
    table = (entry("b", shape, "b", "0"),)
    words = rf"has factors of 'b', which has the shape {re.escape(str(shape))} in the global model;"
    with pytest.raises(UpdateError, match=words):
        aggregate(
            GlobalModel({"b": torch.zeros(shape)}),
            [(record_of("cp:2.0", 1, table), {"b": np.zeros(shape, np.float32)})],
        )


def test_a_sum_beyond_float32_is_refused() -> None:
    table, value = (entry("w", (2, 3), "w"),), np.full((2, 3), 3e38, np.float32)
    refused((record_of("full", 1000, table), {"w": value}), "add up to more than float32 holds")
