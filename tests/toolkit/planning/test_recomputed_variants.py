"""Plans that try a submodel with `recompute=yes` where memory alone excludes it."""

import re

import pytest
from msgspec.structs import replace
from torch import nn

import edgetailor as et
from made_calibration import DEVICE
from profiles.cost_model.submodel_choice import Budgets, Candidate, Figure
from profiles.cost_model.submodel_choice import plan as choose
from toolkit.planning.plan import Planned
from toolkit.planning.recomputed_variants import saves, trades

SHAPE = (3, 32, 32)
MB = 10**6


@pytest.fixture(scope="module")
def deep() -> nn.Module:
    layers = [nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.Tanh()) for _ in range(8)]
    end = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), *layers, *end)


def planned(model: nn.Module, memory: float) -> Planned:
    return et.plan(model, SHAPE, DEVICE, memory=round(memory), specs=["full"])


def test_what_fits_only_with_recomputation_is_chosen_with_its_price(deep: nn.Module) -> None:
    plenty = planned(deep, 1000 * MB)
    assert [row.candidate.submodel for row in plenty.plan.rows] == ["full"]
    full = plenty.plan.rows[0].candidate
    recomputed = planned(deep, full.memory.upper - 1)
    assert recomputed.plan.chosen is not None
    assert recomputed.plan.chosen.submodel == "full,recompute=yes"
    assert [row.candidate.submodel for row in recomputed.plan.rows] == [
        "full,recompute=yes",
        "full",
    ]
    assert recomputed.plan.chosen.strength == 1
    note = re.fullmatch(
        r"full,recompute=yes trains what full trains, with ([\d.]+) MB less memory and "
        r"(\d+)% more time",
        recomputed.notes[0],
    )
    assert note is not None
    saved = full.memory.value - recomputed.plan.chosen.memory.value
    assert saved / MB == pytest.approx(float(note[1]), abs=0.06)
    assert full.step is not None
    assert recomputed.plan.chosen.step is not None
    share = recomputed.plan.chosen.step.value / full.step.value - 1
    assert 100 * share == pytest.approx(float(note[2]), abs=0.6)
    assert 0 < share < 1 / 3
    # Far below, it is not even tried.
    assert [row.candidate.submodel for row in planned(deep, 30 * MB).plan.rows] == ["full"]
    # If it is asked for, it has one row.
    specs = ["full", "full,recompute=yes"]
    memory = round(recomputed.plan.chosen.memory.upper - 1)
    both = et.plan(deep, SHAPE, DEVICE, memory=memory, specs=specs).plan
    assert both.chosen is None
    assert sorted(row.candidate.submodel for row in both.rows) == specs


def candidate(submodel: str, strength: float, memory: float, traffic: int = 1) -> Candidate:
    figure = Figure(memory, memory)
    return Candidate(
        submodel=submodel, strength=strength, memory=figure, step=None, traffic=traffic
    )


def test_a_variant_that_needs_less_saves() -> None:
    plain = [candidate("full", 1.0, 190), candidate("low-rank:0.6", 0.6, 110)]
    variants = [
        candidate("full,recompute=yes", 1.0, 190),
        candidate("low-rank:0.6,recompute=yes", 0.6, 100),
    ]
    assert [saves(variant, plain) for variant in variants] == [False, True]


def test_a_variant_that_saves_nothing_says_so() -> None:
    """Its bound may be lower all the same, so that it is in the plan."""
    step, same = Figure(2.0, 2.0), Figure(100, 120)
    full = replace(candidate("full", 1.0, 0), memory=same, step=step)
    variant = replace(full, submodel="full,recompute=yes", memory=Figure(100, 110))
    [note] = trades(choose([full, variant], Budgets(memory=115)))
    assert note == (
        "full,recompute=yes trains what full trains, with no less memory and no more time"
    )
