"""Updates that nobody should believe."""

import re

import msgspec
import numpy as np
import pytest
import torch

from device_agent.formats.manifest import Role
from profiles.errors import UpdateError
from toolkit.aggregation.aggregate import Aggregation, Received, aggregate
from toolkit.aggregation.aggregation_policy import AggregationPolicy, Factors, Weights
from toolkit.submodels.global_model import GlobalModel
from updates import (
    CONV,
    KINDS,
    OLD,
    cp_update,
    entry,
    full_update,
    low_rank_update,
    numbers,
    record_of,
    refused,
)


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
    refused(
        (record_of("full", 10**13, (w,)), value),
        "trained on 1 to .* samples, not on 10,000,000,000,000",
    )
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
