"""The sums of a round with several groups, in memory: losses at each step, times, small groups."""

from collections.abc import Collection

import numpy as np
import pytest

from device_agent.formats.protocol.secure_sums import SecureMember, SecureTerms, Step
from secure_groups import ROUND, Group, a_fifth, drawn, plain_sum
from toolkit.coordinator.rounds.round_sums import SHORT_S, RoundSums

KINDS = {"full": 8, "width:0.5": 8, "depth:0.5": 7, "cp:2.0": 7}
STEPS: tuple[Step, ...] = ("shares", "input", "confirm", "unmask")
INPUT_S = 100.0
TERMS = SecureTerms(fewest=3, most_change=1.0, most_samples=100)


def fleet(draw: np.random.Generator) -> dict[str, Group]:
    """A group of devices for each kind; the ids of all devices differ."""
    groups = {}
    for kind, devices in KINDS.items():
        vectors = {f"{kind} {name}": own for name, own in drawn(devices, draw).items()}
        groups[kind] = Group(vectors)
    return groups


def offered(groups: dict[str, Group]) -> RoundSums:
    sums = RoundSums(TERMS)
    for kind, group in groups.items():
        assert all(sums.offer(kind, member) for member in group.members)
    return sums


def unsigned(round_: int, members: list[SecureMember]) -> str:
    return "signature"


def begun(groups: dict[str, Group]) -> RoundSums:
    sums = offered(groups)
    sums.begin(ROUND, {d for group in groups.values() for d in group.vectors}, 0.0, unsigned)
    for kind, group in groups.items():
        group.sum = sums.running[kind].sum
    return sums


def answer_all(sums: RoundSums, groups: dict[str, Group], lost: Collection[str]) -> None:
    """Let every device that is asked answer the present step of its sum, but those `lost`."""
    for group in groups.values():
        for device in sorted(group.sum.waits_for - set(lost)):
            step = sums.step_of(device, ROUND)
            assert step is not None
            assert step.signature == "signature"
            group._answer(device)


@pytest.mark.parametrize("step", STEPS)
def test_thirty_devices_of_four_kinds_with_a_fifth_lost(step: Step, seed: int) -> None:
    draw = np.random.default_rng(seed)
    groups = fleet(draw)
    sums, lost, now = begun(groups), set[str](), 0.0
    for present in STEPS:
        if present == step:
            lost = {d for group in groups.values() for d in a_fifth(group.vectors, draw)}
        answer_all(sums, groups, lost)
        limit = INPUT_S if present == "input" else SHORT_S
        if present == step:  # it waits for the lost devices, but not for longer than its time
            assert not sums.advance(now + limit / 2, INPUT_S, set())
            assert {own.sum.step for own in sums.running.values()} == {present}
            now += limit
        is_over = sums.advance(now, INPUT_S, set())
    assert is_over
    for group in groups.values():
        inside = group.vectors.keys() - (lost if step in ("shares", "input") else set())
        assert group.sum.present == sorted(inside)
        assert np.array_equal(group.total(), plain_sum(group.vectors, inside))
        gone = sorted(lost & group.vectors.keys())[0]
        assert sums.expecting(gone, step) is None


def test_devices_that_have_left_are_not_waited_for(seed: int) -> None:
    groups = fleet(np.random.default_rng(seed))
    sums = begun(groups)
    left = {sorted(group.vectors)[0] for group in groups.values()}
    for _ in STEPS:
        answer_all(sums, groups, left)
        is_over = sums.advance(0.0, INPUT_S, left)
    assert is_over


def test_one_group_fails_and_the_others_go_on(seed: int) -> None:
    groups = fleet(np.random.default_rng(seed))
    sums = begun(groups)
    lost = sorted(groups["full"].vectors)[:4]
    answer_all(sums, groups, lost)
    sums.advance(SHORT_S, INPUT_S, set())
    assert sums.running["full"].failure is not None
    assert {own.sum.step for kind, own in sums.running.items() if kind != "full"} == {"input"}
    waiting = sums.step_of(sorted(groups["full"].vectors)[5], ROUND)
    assert waiting is not None
    assert waiting.step == "wait"


def test_keys_are_taken_until_the_round_closes(seed: int) -> None:
    groups = fleet(np.random.default_rng(seed))
    sums = offered(groups)
    members = groups["full"].members
    inside = {member.device for member in members[:2]}  # an operator has dropped the others
    sums.begin(ROUND, inside, 0.0, unsigned)
    assert not sums.offer("full", members[3])
    assert not sums.running
    assert sums.too_small.keys() == {"full"}
    assert sums.step_of(members[3].device, ROUND) is None
    sums.clear()
    assert sums.offer("full", members[3])
