"""Updates that nobody should believe."""

import msgspec
import numpy as np
import pytest
import torch

from device_agent.formats.manifest import Role
from refusals import refused
from toolkit.aggregation.aggregate import Aggregation, Received, aggregate
from toolkit.aggregation.aggregation_policy import AggregationPolicy, Factors, Weights
from toolkit.submodels.global_model import GlobalModel
from updates import (
    CONV,
    KINDS,
    OLD,
    assert_refused,
    cp_update,
    entry,
    full_update,
    low_rank_update,
    numbers,
    record_of,
)


def factored(u: tuple[int, ...], v: tuple[int, ...]) -> Received:
    table = (entry("u", u, "c", "u"), entry("v", v, "c", "v"))
    arrays = {"u": np.zeros(u, np.float32), "v": np.zeros(v, np.float32)}
    return record_of("low-rank:0.5", 1, table), arrays


@pytest.mark.parametrize(
    ("update", "code", "values"),
    [
        (factored((2, 3, 3, 1), (4, 3, 1, 3)), "update.wrong-factors", {}),
        (
            factored((2, 3, 3, 1), (5, 2, 1, 3)),
            "update.wrong-shape",
            {"parameter": "c", "shape": [5, 3, 3, 3]},
        ),
        (factored((2, 9, 3), (4, 2, 3)), "update.wrong-factors", {}),
        (factored((2, 3, 3, 2), (4, 2, 1, 3)), "update.wrong-factors", {}),
        (factored((0, 3, 3, 1), (4, 0, 1, 3)), "update.wrong-rank", {"parameter": "c"}),
        (
            factored((5000, 3, 3, 1), (4, 5000, 1, 3)),
            "update.wrong-rank",
            {"parameter": "c", "most": 351},
        ),
    ],
)
def test_factors_that_do_not_make_the_tensor(
    update: Received, code: str, values: dict[str, object]
) -> None:
    assert_refused(update, code, **values)


def test_an_absurd_rank_is_refused_before_anything_is_composed() -> None:
    rank = 2**40
    table = tuple(entry(f"c#{m}", (size, rank), "c", str(m)) for m, size in enumerate(CONV))
    assert_refused((record_of("cp:2.0", 1, table), {}), "update.wrong-rank", parameter="c")


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_numbers_that_are_not_finite_are_refused(kind: str, bad: float) -> None:
    record, arrays = KINDS[kind](1)
    name, array = next(iter(arrays.items()))
    array.flat[0] = bad
    assert_refused((record, arrays), "update.not-finite", tensor=name)


def test_tables_that_contradict_themselves() -> None:
    w, value = entry("w", (2, 3), "w"), {"w": np.zeros((2, 3), np.float32)}
    other = entry("x", (2, 3), "w")
    twice = record_of("full", 1, (w, w)), value
    assert_refused(twice, "update.repeated-tensor", tensor="w")
    two = record_of("full", 1, (w, other)), value
    assert_refused(two, "update.repeated-parameter", parameter="w")
    nobody = record_of("full", 1, (entry("w", (2, 3), None),)), value
    assert_refused(nobody, "update.unnamed-parameter", tensor="w")
    many = record_of("full", 10**13, (w,)), value
    assert_refused(many, "update.unusable-samples", samples=10**12 + 1, most=10**12)
    pair = (entry("u", (1, 3), "w", "u"), entry("v", (2, 1), "w", "v", part=(((0, 2),), ((0, 1),))))
    parts = record_of("low-rank:0.5", 1, pair), {}
    assert_refused(parts, "update.different-parts", parameter="w")


MISNAMED = {
    "full": low_rank_update,
    "width:0.5": cp_update,
    "pfedme": cp_update,
    "low-rank:0.5": cp_update,
    "low-rank:0.5+full": cp_update,
}
UNEXPECTED, MISSING = "update.unexpected-factors", "update.missing-factor"
MISNAMED_CODES: dict[str, tuple[str, str | None]] = {
    "full": (UNEXPECTED, "c"),
    "width:0.5": (UNEXPECTED, "c"),
    "pfedme": (UNEXPECTED, "c"),
    "low-rank:0.5": (MISSING, "w"),
    "low-rank:0.5+full": ("update.unknown-submodel", None),
}


@pytest.mark.parametrize("submodel", MISNAMED)
@pytest.mark.parametrize("factors", ["afm", "act"])
def test_factors_under_a_family_that_ignores_them(submodel: str, factors: Factors) -> None:
    record, arrays = MISNAMED[submodel](1)
    update = msgspec.structs.replace(record, submodel=submodel), arrays
    code, parameter = MISNAMED_CODES[submodel]
    with refused(code, parameter=parameter):
        aggregate(OLD, [update], AggregationPolicy(factors=factors))


def test_a_single_factor_of_a_family_without_any() -> None:
    table, value = (entry("w", (2, 3), "w", "u"),), np.zeros((2, 3), np.float32)
    single = record_of("full", 1, table), {"w": value}
    assert_refused(single, "update.unexpected-factors", parameter="w", family="full")


@pytest.mark.parametrize(
    ("submodel", "named"),
    [
        ("width:abc", "'width:abc'"),
        ("low-rank", "low-rank:0.25"),
        ("slice:w+low-rank:2", "'low-rank:2'"),
        ("full:0.5", "'full:0.5'"),
        ("nope:1", "'nope'"),
        ("full,=", "'full,='"),
    ],
)
@pytest.mark.parametrize("weights", ["samples", "softmax"])
def test_submodels_that_no_family_makes(submodel: str, named: str, weights: Weights) -> None:
    record, arrays = full_update(1)
    with refused("update.unknown-submodel", named, submodel=submodel):
        Aggregation(OLD, AggregationPolicy(weights)).add(
            msgspec.structs.replace(record, submodel=submodel), arrays
        )


@pytest.mark.parametrize("role", ["frozen", "personal", "optimizer"])
def test_roles_that_devices_keep(role: Role) -> None:
    table = (entry("w", (2, 3), "w", role=role),)
    update = record_of("full", 1, table), {"w": numbers((2, 3), 1)}
    assert_refused(update, "update.wrong-role", tensor="w", role=role)


def test_whole_numbers_are_not_trained() -> None:
    model = GlobalModel({"n": torch.tensor([3]), "w": torch.zeros(2, 3)})
    whole = msgspec.structs.replace(entry("w", (2, 3), "w"), dtype="int64")
    counter = entry("n", (1,), "n"), np.ones(1, np.float32)
    for update, code, values in (
        ((whole, np.ones((2, 3), np.int64)), "update.wrong-type", {"tensor": "w"}),
        (counter, "update.integer-parameter", {"parameter": "n"}),
    ):
        table, value = update
        with refused(code, **values):
            aggregate(model, [(record_of("full", 1, (table,)), {table.name: value})])


def test_missing_factors_are_named() -> None:
    for update, factor, name in ((low_rank_update(1), "u", "c"), (cp_update(1), "1", "c")):
        record, arrays = update
        left = tuple(e for e in record.tensors if (e.stands_for, e.factor) != (name, factor))
        altered = msgspec.structs.replace(record, tensors=left)
        kept = {e.name: arrays[e.name] for e in left}
        with refused("update.missing-factor", factor=factor, parameter=name):
            Aggregation(OLD, AggregationPolicy()).add(altered, kept)


@pytest.mark.parametrize("shape", [(), (4,)])
def test_what_has_no_two_axes_has_no_factors(shape: tuple[int, ...]) -> None:
    table = (entry("b", shape, "b", "0"),)
    with refused("update.unexpected-factors", parameter="b", shape=list(shape)):
        aggregate(
            GlobalModel({"b": torch.zeros(shape)}),
            [(record_of("cp:2.0", 1, table), {"b": np.zeros(shape, np.float32)})],
        )


def test_a_sum_beyond_float32_is_refused() -> None:
    table, value = (entry("w", (2, 3), "w"),), np.full((2, 3), 3e38, np.float32)
    update = record_of("full", 1000, table), {"w": value}
    with refused("aggregate.overflow", parameter="w"):
        aggregate(OLD, [update], AggregationPolicy(beta=2.0))
    assert torch.equal(aggregate(OLD, [update]).tensors["w"], torch.full((2, 3), 3e38))
