"""The judge finds the updates without which a model is good, in few aggregations."""

import math
from collections.abc import Collection

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from device_agent.formats.protocol.fleet import Limited
from toolkit.aggregation.model_judge import Bar, Quality, harmful, search_order

names = st.integers(3, 60).flatmap(
    lambda count: st.tuples(
        st.just([f"device-{n}" for n in range(count)]),
        st.sets(st.integers(0, count - 1), min_size=1, max_size=count),
    )
)


@given(names)
def test_exactly_the_harmful_updates_are_found(fleet: tuple[list[str], set[int]]) -> None:
    """If each harmful update alone spoils the model, all are found and no other."""
    devices, bad = fleet
    culprits, calls = {devices[n] for n in bad}, 0

    def is_good(out: Collection[str]) -> bool:
        nonlocal calls
        calls += 1
        return culprits <= set(out)

    found = harmful(devices, is_good)
    few = 2 * len(culprits) <= len(devices)
    assert sorted(found) == (sorted(culprits) if few else [])
    # Two tests for each of the at most log2(n) + 1 halvings on the way to each of the k updates.
    # And one for each size of a group at the beginning: 1, 2, 4 and so on.
    steps = math.ceil(math.log2(len(devices)))
    assert calls <= 2 * len(culprits) * (steps + 1) + 1 + steps


@given(st.integers(0, 40))
def test_nobody_is_left_out_if_that_does_not_help(count: int) -> None:
    devices = [f"device-{n}" for n in range(count)]
    assert harmful(devices, lambda out: False) == []
    if count < 3:
        assert harmful(devices, lambda out: True) == []


def test_a_stall_that_nobody_explains_is_noticed_soon() -> None:
    calls: list[frozenset[str]] = []

    def never(out: frozenset[str]) -> bool:
        calls.append(out)
        return False

    assert harmful([f"device-{n}" for n in range(40)], never, stalled=True) == []
    assert [len(out) for out in calls] == [1, 2, 4, 8, 20, 20]
    calls.clear()
    assert harmful(["one", "two", "three"], never, stalled=True) == []
    assert not calls  # 30% of three updates is less than one


@given(st.integers(4, 60), st.integers(1, 30))
def test_the_most_limited_that_explain_a_stall_are_found(count: int, most: int) -> None:
    devices = [f"device-{n}" for n in range(count)]
    culprits = {*devices[: min(most, count // 2)]}
    found = set(harmful(devices, lambda out: culprits <= out, stalled=True))
    assert found == (culprits if 10 * len(culprits) <= 3 * count else set())


def test_a_search_ends_when_too_many_are_needed() -> None:
    devices, calls = [f"device-{n}" for n in range(1000)], 0

    def is_good(out: frozenset[str]) -> bool:
        nonlocal calls
        calls += 1
        return out.issuperset(devices[500:])

    assert harmful(devices, is_good, stalled=True) == []
    assert calls < 2 * 300 + 20  # two for each of the 30%; all 500 would take 1,009


def test_the_search_begins_with_the_most_limited() -> None:
    updates = [None, Limited(times=2.0), Limited(samples=900, counted=300), None]
    keys = [search_order(limited, "full") for limited in updates]
    assert sorted(range(4), key=lambda n: keys[n]) == [2, 1, 0, 3]


def test_when_a_stall_is_judged() -> None:
    """0.12 is not clearly above 0.1, and 0.15 is: 2 sqrt(2 * 0.1 * 0.9 / 360) = 0.045."""
    start = Quality(0.1, 2.3)
    same = Quality(0.12, 2.3)
    for stalled in range(9):
        bar = Bar.of(start, [start] + [same] * stalled, samples=360)
        aim = bar.aim(same)
        assert (aim is not None) == (stalled + 1 in (1, 2, 4, 8))
        assert aim is None or aim.stalled
        assert bar.aim(Quality(0.2, 2.2)) is None
    aim = Bar.of(start, [start], samples=360).aim(same)
    assert aim is not None
    assert aim.is_reached(Quality(0.146, 2.3))
    assert not aim.is_reached(Quality(0.144, 2.3))
    assert not aim.is_reached(Quality(0.9, math.nan))
    risen = Bar.of(start, [start, same, same, Quality(0.5, 1.0)], samples=360)
    assert (risen.best, risen.age) == (0.5, 1)
    assert Bar.of(start, [start], samples=199).aim(same) is None
    assert Bar.of(start, [Quality(0.98, 0.1)], samples=360).aim(Quality(0.98, 0.1)) is None
    assert Bar.of(Quality(None, 1.0), [Quality(None, 1.0)], 360).aim(Quality(None, 1.0)) is None


def test_what_misses_the_bar() -> None:
    first, last = Quality(0.1, 2.3), [Quality(0.90, 0.3), Quality(0.88, 0.2)]
    bar = Bar.of(first, last, samples=360)
    # Two standard errors of a difference: 2 sqrt(2 * 0.9 * 0.1 / 360).
    margin = 2 * float(np.sqrt(2 * 0.9 * 0.1 / 360))
    assert margin > 0.03
    assert not bar.is_missed(Quality(0.9 - 0.99 * margin, 1.0))
    assert bar.is_missed(Quality(0.9 - 1.01 * margin, 1.0))
    assert bar.is_missed(Quality(0.9 - 0.6 * margin, 1.0), share=0.5)
    assert not bar.is_missed(Quality(0.9 - 0.4 * margin, 1.0), share=0.5)
    # From a random start the accuracy cannot fall, but the loss rises above that of the start.
    assert not bar.is_missed(Quality(0.9, 1.49 * 2.3))
    assert bar.is_missed(Quality(0.9, 1.51 * 2.3))
    assert bar.is_missed(Quality(0.9, math.nan))
    assert bar.is_missed(Quality(0.9, math.inf))
    many = Bar.of(first, last, samples=10**6)
    assert not many.is_missed(Quality(0.871, 0.2))
    assert many.is_missed(Quality(0.869, 0.2))


def test_a_regression_is_judged_by_its_loss() -> None:
    bar = Bar.of(Quality(None, 50.0), [Quality(None, 2.0), Quality(None, 3.0)], samples=100)
    assert not bar.is_missed(Quality(None, 2.99))
    assert bar.is_missed(Quality(None, 3.01))


def test_a_loss_below_0_has_no_scale() -> None:
    for accuracy in (None, 0.5):
        bar = Bar.of(Quality(accuracy, -1.0), [Quality(accuracy, -2.0)], samples=100)
        assert not bar.is_missed(Quality(accuracy, 5.0))
