"""A coordinator that selects the devices of each round, in one process and without HTTP."""

from collections.abc import Iterable
from pathlib import Path

import pytest

from device_agent.formats.protocol.rounds import Progress, Stopped
from large_fleet import LargeFleet
from refusals import refused
from toolkit.coordinator.closing.device_selection import ALL_HERE_S, FEW_HERE_S, SEEN_WITHIN_S
from vector_fleet import TWO_KINDS, configured, messages_to

DEVICES, GOAL, ASKED = 20, 6, 8  # 6 * 1.3 = 7.8
KEYS = f"clients_per_round = {GOAL}\n"


class SelectingFleet(LargeFleet):
    """Its clock stands until it is moved; the devices that are there ask for work."""

    def __init__(self, folder: Path, keys: str = KEYS, devices: int = DEVICES) -> None:
        self.now, self.folder, self.made = 1.0, folder, 0
        super().__init__(folder, devices, clock=lambda: self.now, keys=keys)

    def again(self) -> None:
        self.restart(clock=lambda: self.now)

    def asked(self) -> list[int]:
        """The devices that have to train."""
        rounds = self.coordinator.rounds
        names = [self.coordinator.store.registry.device_with(s).id for s in self.secrets]
        return [number for number, name in enumerate(names) if rounds.waits_for(name)]

    def poll(self, numbers: Iterable[int] | None = None) -> list[str]:
        """What the devices have to do; those that wait are told when to ask again."""
        tasks = []
        for number in range(len(self.secrets)) if numbers is None else numbers:
            work = self.coordinator.work(self.device(number))
            assert work.state == "train" or work.ask_again_s > 0
            tasks.append(work.state)
        return tasks

    def train(self, numbers: list[int]) -> None:
        for number in numbers:
            self.made += 1
            self.send(number, self.update(self.folder / f"made {self.made}", number, 1.0))

    def turn(self) -> None:
        self.worker.turn()


def test_a_round_asks_some_closes_with_the_first_and_needs_no_others(tmp_path: Path) -> None:
    fleet = SelectingFleet(tmp_path)
    asked = fleet.asked()
    assert len(asked) == ASKED
    assert fleet.poll().count("train") == ASKED
    first, late = asked[:GOAL], asked[GOAL:]
    unsent = fleet.update(tmp_path / "late", late[0], 2.0)
    fleet.train(first[:-1])
    status = fleet.coordinator.status().selected
    assert status is not None
    assert status.text() == f"{ASKED} devices selected, {GOAL - 1} of {GOAL} updates came"
    now = fleet.coordinator.overview()
    assert (now.selected, now.missing_count) == (status, ASKED - GOAL + 1)
    fleet.turn()
    assert fleet.coordinator.rounds.phase == "training"
    fleet.train(first[-1:])
    told: list[str] = []
    with messages_to(told.append):
        fleet.turn()
    assert not any("closed before" in line for line in told)  # nobody is late
    with refused("round.closed", "the update is not needed, because enough updates had come"):
        fleet.send(late[0], unsent)
    assert fleet.poll(late) == ["wait"] * len(late)
    notes = {device.device: device.note for device in fleet.coordinator.status().devices}
    for number in late:
        assert notes[fleet.device(number).id] == "not needed in round 1: enough updates had come"
    fleet.poll()
    fleet.turn()
    result = fleet.store.history.results()[-1]
    assert (result.round, result.updates, result.asked) == (1, GOAL, ASKED)
    status = fleet.coordinator.status().selected
    assert status is not None
    assert (status.not_needed, status.last_round, status.came) == (ASKED - GOAL, 1, 0)
    for done, seen in ((1, True), (2, False)):  # a note of an earlier round is stale
        activity = fleet.coordinator.activity[fleet.device(late[0]).id]
        assert (activity.not_needed(done) is not None) is seen
    assert len(fleet.asked()) == ASKED
    assert fleet.coordinator.rounds.round == 2


def test_a_restart_continues_with_the_devices_that_were_asked(tmp_path: Path) -> None:
    fleet = SelectingFleet(tmp_path)
    asked = fleet.asked()
    fleet.train(asked[:2])
    fleet.again()
    fleet.turn()  # nobody has been seen since the restart
    assert fleet.asked() == asked[2:]
    fleet.train(asked[2:GOAL])
    fleet.turn()
    assert fleet.coordinator.rounds.done == 1


def test_the_draw_follows_from_the_seed(tmp_path: Path) -> None:
    keys = [KEYS, KEYS, f"seed = 1\n{KEYS}"]
    one, two, other = (SelectingFleet(tmp_path / str(n), k).asked() for n, k in enumerate(keys))
    assert one == two
    assert one != other  # equal once in 125,970 seeds; this one is not


def test_a_device_that_was_asked_and_is_away_is_not_asked_again(tmp_path: Path) -> None:
    fleet = SelectingFleet(tmp_path)
    asked = fleet.asked()
    away = asked[GOAL:]
    here = [number for number in range(DEVICES) if number not in away]
    for _ in range(2):
        fleet.train([number for number in fleet.asked() if number in here][:GOAL])
        fleet.turn()
        fleet.poll(here)
        fleet.turn()
        assert not set(fleet.asked()) & set(away)


def test_at_the_deadline_others_are_asked_and_what_came_counts(tmp_path: Path) -> None:
    fleet = SelectingFleet(tmp_path)
    first = fleet.asked()
    fleet.train(first[:2])  # a round with 8 devices needs 4
    fleet.now += fleet.config.deadline_s
    others = [number for number in range(DEVICES) if number not in first]
    fleet.poll([*others, *first[:2]])
    fleet.turn()
    again = fleet.asked()
    assert (fleet.coordinator.rounds.round, len(fleet.coordinator.rounds.updates)) == (1, 2)
    assert set(again) <= set(others)
    assert len(again) == ASKED - 2
    fleet.again()
    fleet.turn()
    assert fleet.asked() == again
    fleet.train(again[: GOAL - 2])
    fleet.turn()
    assert fleet.store.history.results()[-1].updates == GOAL


def test_a_round_that_opens_again_needs_as_many_as_at_first(tmp_path: Path) -> None:
    """One update came, and only its device is still there: it does not become the model."""
    fleet = SelectingFleet(tmp_path)
    first, *others = fleet.asked()
    fleet.train([first])
    fleet.now += fleet.config.deadline_s
    fleet.turn()
    for here in ([first], [first, *others[:2]]):  # with two more there could be three updates
        fleet.poll(here)
        fleet.turn()
        fleet.now += FEW_HERE_S
        fleet.poll(here)
        fleet.turn()
        assert (fleet.coordinator.rounds.phase, fleet.asked()) == ("aggregating", [])
        fleet.again()
    fleet.poll([first, *others[:3]])
    fleet.turn()
    fleet.now += FEW_HERE_S
    fleet.turn()
    assert fleet.asked() == sorted(others[:3])
    fleet.train(others[:2])
    fleet.turn()
    assert fleet.coordinator.rounds.phase == "training"
    fleet.train(others[2:3])
    fleet.turn()
    assert fleet.store.history.results()[-1].updates == 4


def test_further_devices_take_the_place_of_those_that_did_not_come(tmp_path: Path) -> None:
    """The updates that have come count, also if their devices are away now."""
    fleet = SelectingFleet(tmp_path)
    first = fleet.asked()
    fleet.train(first[:3])
    fleet.now += fleet.config.deadline_s
    others = [number for number in range(DEVICES) if number not in first][: ASKED - 3]
    fleet.poll(others)
    fleet.turn()
    assert fleet.asked() == others
    fleet.train(others[: GOAL - 3])
    fleet.turn()
    assert fleet.store.history.results()[-1].updates == GOAL


def test_an_aborted_round_begins_with_the_devices_that_are_left(tmp_path: Path) -> None:
    fleet = SelectingFleet(tmp_path)
    fleet.coordinator.abort_round(1, "the fleet is smaller now", "me")
    fleet.now += SEEN_WITHIN_S + 1
    fleet.poll([3])
    fleet.turn()
    fleet.now += FEW_HERE_S
    fleet.turn()
    assert (fleet.asked(), fleet.coordinator.rounds.needed) == ([3], 1)


@pytest.mark.parametrize("new", [f"clients_per_round = {GOAL + 2}\nmin_updates = 8\n", ""])
def test_an_open_round_keeps_its_limits_after_new_settings(tmp_path: Path, new: str) -> None:
    fleet = SelectingFleet(tmp_path)
    asked = fleet.asked()
    fleet.config = configured(tmp_path, new + TWO_KINDS.format(DEVICES - 1))
    fleet.again()
    fleet.turn()
    assert fleet.asked() == asked
    fleet.train(asked[:GOAL])
    fleet.turn()
    assert fleet.store.history.results()[-1].updates == GOAL
    fleet.poll()
    fleet.turn()
    after = fleet.coordinator.rounds
    assert (after.round, after.goal) == (2, (8, 8) if new else None)


def test_devices_that_their_owners_limits_pause_are_not_asked(tmp_path: Path) -> None:
    fleet = SelectingFleet(tmp_path)
    busy = [number for number in range(DEVICES) if number not in fleet.asked()][:5]
    for number in busy:
        note = Progress(state="paused", note="running on battery")
        fleet.coordinator.progress(fleet.device(number), note)
    fleet.train(fleet.asked()[:GOAL])
    fleet.turn()
    fleet.poll([number for number in range(DEVICES) if number not in busy])
    fleet.turn()
    assert len(fleet.asked()) == ASKED
    assert not set(fleet.asked()) & set(busy)


@pytest.mark.parametrize("goal", [True, False])
def test_nobody_waits_for_devices_whose_conditions_do_not_hold(tmp_path: Path, goal: bool) -> None:
    """Also not if their conditions end after the round has asked them and before they begin."""
    fleet = SelectingFleet(tmp_path, KEYS if goal else "")
    unmet = Progress(state="paused", note="on a metered connection")
    asked = fleet.asked()
    kept, begun, away = asked[: len(asked) // 2], asked[-2:], asked[len(asked) // 2 : -2]
    fleet.poll([*kept, *begun])
    for number in (*away, *begun):
        fleet.coordinator.progress(fleet.device(number), unmet)
    assert fleet.asked() == [*kept, *begun]  # a training that pauses keeps its place
    states = fleet.coordinator.states()
    assert (states["ineligible"], states["paused"]) == (len(away), len(begun))
    page = fleet.coordinator.device_page(0, 3, state="ineligible")
    assert (page.total, page.devices[0].note) == (len(away), "on a metered connection")
    fleet.poll(away[:1])  # its conditions hold again
    assert fleet.asked() == [*kept, away[0], *begun]
    fleet.coordinator.progress(fleet.device(away[0]), unmet)
    fleet.train(kept)
    fleet.now += fleet.config.deadline_s
    fleet.turn()
    assert fleet.store.history.results()[-1].updates == len(kept)
    fleet.poll([number for number in range(DEVICES) if number not in (*away, *begun)])
    fleet.turn()
    assert fleet.coordinator.rounds.round == 2
    assert not set(fleet.asked()) & {*away, *begun}
    fleet.coordinator.progress(fleet.device(begun[0]), Progress(state="training"))
    assert (begun[0] in fleet.asked()) is not goal  # it was not selected for this round
    assert fleet.coordinator.states()["ineligible"] == len(away) + 1


def test_a_fleet_of_which_no_device_is_eligible_opens_no_round(tmp_path: Path) -> None:
    fleet = SelectingFleet(tmp_path, "", 3)
    for number in range(3):
        note = Progress(state="paused", note="in use by somebody")
        fleet.coordinator.progress(fleet.device(number), note)
    for _ in range(3):
        fleet.now += fleet.config.deadline_s
        fleet.turn()
    assert (fleet.coordinator.rounds.phase, fleet.asked()) == ("aggregating", [])
    fleet.poll([1])
    fleet.turn()
    assert fleet.asked() == [1]


def test_a_round_waits_for_devices_but_not_for_ever(tmp_path: Path) -> None:
    fleet = SelectingFleet(tmp_path)
    fleet.train(fleet.asked()[:GOAL])
    fleet.turn()
    fleet.now += SEEN_WITHIN_S + 1
    fleet.poll(range(GOAL))
    fleet.turn()
    assert not fleet.asked()
    fleet.now += ALL_HERE_S
    fleet.turn()
    assert len(fleet.asked()) == GOAL
    fleet.train(fleet.asked())
    fleet.turn()
    fleet.now += SEEN_WITHIN_S + 1
    fleet.poll([3])
    fleet.turn()
    fleet.now += FEW_HERE_S - 1
    fleet.turn()
    assert not fleet.asked()
    fleet.now += 1
    fleet.turn()
    assert fleet.asked() == [3]


def test_a_share_is_one_of_the_members(tmp_path: Path) -> None:
    fleet = SelectingFleet(tmp_path, "clients_per_round = 0.25\nover_selection = 1.0\n")
    assert len(fleet.asked()) == 5
    assert fleet.coordinator.rounds.goal == (5, 3)


def test_the_oldest_are_asked_also_after_a_restart(tmp_path: Path) -> None:
    keys = 'clients_per_round = 10\nover_selection = 1.0\nselection = "oldest"\n'
    fleet = SelectingFleet(tmp_path, keys)
    first = fleet.asked()
    fleet.train(first)
    fleet.turn()
    fleet.again()
    fleet.poll()
    fleet.turn()
    assert sorted([*first, *fleet.asked()]) == list(range(DEVICES))
    past = fleet.store.open_round.past_selections()
    assert past[fleet.device(first[0]).id] == (1, 10)  # its update counted ten samples


def test_a_device_that_stops_takes_part_again_only_if_it_was_asked(tmp_path: Path) -> None:
    fleet = SelectingFleet(tmp_path)
    asked = fleet.asked()
    waiting = next(number for number in range(DEVICES) if number not in asked)
    for number, task in ((asked[0], "train"), (waiting, "wait")):
        fleet.coordinator.stopped(fleet.device(number), Stopped(code="x", reason="x"))
        assert number not in fleet.asked()
        assert fleet.poll([number]) == [task]


@pytest.mark.parametrize("members", [3, ASKED])
def test_a_fleet_smaller_than_a_round_is_asked_as_a_whole(tmp_path: Path, members: int) -> None:
    fleet = SelectingFleet(tmp_path, "clients_per_round = 0.9\n", members)
    assert fleet.asked() == list(range(members))
