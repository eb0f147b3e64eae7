"""The state machine of the rounds, alone: whatever happens in whatever order."""

import random

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from refusals import refused
from toolkit.coordinator.refusals import RefusalError
from toolkit.coordinator.rounds.round_state import Goal, Rounds

DEADLINE_S = 60.0


def fleet(rounds: int = 2, done: int = 0) -> Rounds:
    machine = Rounds(rounds, 2, DEADLINE_S, done)
    machine.enrol("a")
    machine.enrol("b")
    return machine


def opened(rounds: int = 2, done: int = 0) -> Rounds:
    machine = fleet(rounds, done)
    machine.open({"a": "bundle-a", "b": "bundle-b"}, now=0.0)
    return machine


def state(machine: Rounds) -> tuple[object, ...]:
    return machine.phase, machine.round, dict(machine.updates), set(machine.devices)


def test_enrolment_ends_with_the_last_device() -> None:
    machine = Rounds(1, 2, DEADLINE_S)
    machine.enrol("a")
    assert (machine.phase, machine.round) == ("enrolling", 0)
    machine.enrol("b")
    assert machine.phase == "aggregating"


def test_a_quorum_closes_a_round_and_the_others_train_in_the_next() -> None:
    machine = Rounds(2, 2, DEADLINE_S, quorum=2)
    for name in "abc":
        machine.enrol(name)
    machine.open({name: f"bundle-{name}" for name in "abc"}, now=0.0)
    machine.take("a", 1, "bundle-a", "u")
    assert not machine.due(0.0)
    machine.take("c", 1, "bundle-c", "v")
    assert machine.due(0.0)
    assert machine.late() == ["b"]
    machine.close()
    with refused("round.closed"):
        machine.take("b", 1, "bundle-b", "w")
    machine.folded()
    machine.open({name: f"bundle-{name}" for name in "abc"}, now=0.0)
    assert machine.task("b") == "train"


def test_a_round_of_fewer_devices_than_its_quorum_waits_for_all_of_them() -> None:
    machine = Rounds(1, 2, DEADLINE_S, quorum=5)
    for name in "ab":
        machine.enrol(name)
    machine.open({"a": "x", "b": "y"}, now=0.0)
    machine.take("a", 1, "x", "u")
    assert not machine.due(0.0)
    machine.take("b", 1, "y", "v")
    assert machine.due(0.0)


def test_a_device_waits_after_its_update_until_the_round_is_over() -> None:
    machine = opened()
    machine.take("a", 1, "bundle-a", "u")
    assert (machine.task("a"), machine.task("b")) == ("wait", "train")
    assert not machine.due(DEADLINE_S - 1)
    machine.take("b", 1, "bundle-b", "v")
    assert machine.due(0.0)


def test_deadline_closes_a_round_that_has_an_update_and_waits_for_the_first() -> None:
    machine = opened()
    assert not machine.due(10 * DEADLINE_S)
    machine.take("a", 1, "bundle-a", "u")
    assert machine.due(10 * DEADLINE_S)


@pytest.mark.parametrize(
    ("round_", "bundle", "update", "code"),
    [
        (2, "bundle-a", "u", "round.closed"),
        (1, "bundle-b", "u", "round.other-bundle"),
        (1, "bundle-a", "other", "round.already-sent"),
    ],
)
def test_refusals(round_: int, bundle: str, update: str, code: str) -> None:
    machine = opened()
    machine.take("a", 1, "bundle-a", "u")
    before = state(machine)
    with refused(code) as caught:
        machine.take("a", round_, bundle, update)
    assert isinstance(caught.value, RefusalError)
    assert (caught.value.status, caught.value.problem.code) == (409, code)
    assert state(machine) == before


def test_late_update_is_told_that_the_round_is_over() -> None:
    machine = opened()
    machine.take("a", 1, "bundle-a", "u")
    machine.close()
    machine.take("a", 1, "bundle-a", "u")  # its receipt was lost: the very same again is fine
    with refused("round.closed", phase="aggregating"):
        machine.take("b", 1, "bundle-b", "v")


def test_restored_after_the_last_round_is_finished() -> None:
    assert fleet(rounds=2, done=2).phase == "finished"
    assert opened(rounds=2, done=1).round == 2


class RoundsMachine(RuleBasedStateMachine):
    """Devices send in any order, the clock runs, rounds close and open."""

    @initialize(rounds=st.integers(1, 3), devices=st.integers(1, 4))
    def start(self, rounds: int, devices: int) -> None:
        self.now, self.highest, self.opened_at = 0.0, 0, 0.0
        self.names = [f"device-{i}" for i in range(devices)]
        self.machine = Rounds(rounds, devices, DEADLINE_S)
        for name in self.names:
            self.machine.enrol(name)

    @rule(seconds=st.floats(0, 2 * DEADLINE_S))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @precondition(lambda self: self.machine.phase == "aggregating")
    @rule()
    def fold_or_open(self) -> None:
        if self.machine.updates:
            folded = self.machine.done + 1
            self.machine.folded()
            assert self.machine.done == folded
        else:
            self.machine.open({name: f"for {name}" for name in self.names}, self.now)
            self.opened_at = self.now

    @rule(
        index=st.integers(0, 3),
        back=st.integers(-1, 1),
        right=st.booleans(),
        update=st.sampled_from("uv"),
    )
    def send(self, index: int, back: int, right: bool, update: str) -> None:
        name = self.names[index % len(self.names)]
        before, task = state(self.machine), self.machine.task(name)
        bundle = f"for {name}" if right else "for somebody else"
        refused = False
        try:
            self.machine.take(name, self.machine.round - back, bundle, update)
        except RefusalError:
            refused = True
        welcome = task == "train" and back == 0 and right
        if refused:
            assert state(self.machine) == before
            assert not welcome
        else:
            assert back == 0
            assert right
            assert self.machine.updates[name] == update

    @precondition(lambda self: self.machine.phase == "training")
    @rule()
    def close_if_due(self) -> None:
        late = self.now >= self.opened_at + DEADLINE_S
        sent, everyone = dict(self.machine.updates), len(self.names)
        fewest = {1: 1, 2: 1, 3: 2, 4: 2}[everyone]
        enough = len(sent) >= fewest
        assert self.machine.due(self.now) == (enough and (late or len(sent) == everyone))
        assert self.machine.failed(self.now) == (late and not enough)
        if self.machine.due(self.now):
            self.machine.close()
        elif self.machine.failed(self.now):
            self.machine.reopen()
            self.machine.open({name: f"for {name}" for name in self.names}, self.now)
            self.opened_at = self.now
            for name, update in sent.items():
                self.machine.take(name, self.machine.round, f"for {name}", update)

    @invariant()
    def rounds_only_go_up(self) -> None:
        machine = self.machine
        assert self.highest <= machine.round <= machine.total
        self.highest = machine.round
        assert (machine.phase == "finished") == (machine.done == machine.total)

    @invariant()
    def only_training_devices_without_an_update_train(self) -> None:
        for name in self.names:
            trains = self.machine.phase == "training" and name not in self.machine.updates
            assert (self.machine.task(name) == "train") == trains


TestRoundsMachine = RoundsMachine.TestCase


class ChangingFleet(RuleBasedStateMachine):
    """Devices come, leave and are excused at any time; who is waited for is kept beside."""

    @initialize(devices=st.integers(1, 4), quorum=st.none() | st.integers(1, 5))
    def start(self, devices: int, quorum: int | None) -> None:
        self.machine = Rounds(3, devices, DEADLINE_S, quorum=quorum)
        self.quorum, self.made = quorum, 0
        self.members: set[str] = set()
        self.awaited: set[str] = set()
        self.sent: set[str] = set()
        self.opened_for: set[str] = set()
        self.paused: set[str] = set()
        for _ in range(devices):
            self.come()

    @rule()
    def come(self) -> None:
        self.made += 1
        self.machine.enrol(f"device-{self.made}")
        self.members.add(f"device-{self.made}")

    @precondition(lambda self: self.members)
    @rule(index=st.integers(0, 3), leaves=st.booleans())
    def go(self, index: int, leaves: bool) -> None:
        name = sorted(self.members)[index % len(self.members)]
        training = self.machine.phase == "training"
        if leaves:
            self.machine.leave(name)
            self.members.remove(name)
            self.paused.discard(name)
        else:
            self.machine.excuse(name)
        self.awaited.discard(name)
        if training:
            assert self.machine.phase == ("training" if self.awaited | self.sent else "aggregating")

    @precondition(lambda self: self.members)
    @rule(index=st.integers(0, 3))
    def pause(self, index: int) -> None:
        name = sorted(self.members)[index % len(self.members)]
        training = self.machine.phase == "training"
        self.machine.pause(name)
        self.paused.add(name)
        self.awaited.discard(name)
        if training:
            assert self.machine.phase == ("training" if self.awaited | self.sent else "aggregating")

    @precondition(lambda self: self.paused)
    @rule(index=st.integers(0, 3), has_bundle=st.booleans())
    def end_pause(self, index: int, has_bundle: bool) -> None:
        name = sorted(self.paused)[index % len(self.paused)]
        self.machine.unpause(name, f"for {name}" if has_bundle else None)
        self.paused.remove(name)
        if self.machine.phase == "training" and has_bundle:
            self.opened_for.add(name)
            self.awaited |= {name} - self.sent

    @precondition(lambda self: self.machine.phase == "training" and self.awaited)
    @rule(index=st.integers(0, 3))
    def send(self, index: int) -> None:
        name = sorted(self.awaited)[index % len(self.awaited)]
        self.machine.take(name, self.machine.round, f"for {name}", "u")
        self.awaited.remove(name)
        self.sent.add(name)

    @precondition(lambda self: self.machine.phase != "finished")
    @rule()
    def turn(self) -> None:
        machine = self.machine
        if machine.phase == "training":
            quorum = len(self.sent) + 9 if self.quorum is None else self.quorum
            half = -(-len(self.sent | self.awaited) // 2)
            least = 2 if len((self.opened_for & self.members) - self.paused) > 2 else 1
            enough = len(self.sent) >= min(max(half, least), quorum)
            complete = len(self.sent) >= quorum or not self.awaited
            assert machine.due(0.0) == (enough and complete)
            if machine.due(0.0):
                machine.close()
                machine.folded()
                self.sent.clear()
                self.awaited.clear()
        elif present := self.members - self.paused:
            machine.open({name: f"for {name}" for name in present}, 0.0)
            self.awaited, self.opened_for = set(present), set(present)

    @invariant()
    def exactly_those_train_that_are_waited_for(self) -> None:
        training = self.machine.phase == "training"
        assert self.machine.devices == self.members
        assert {n for n in self.members if self.machine.task(n) == "train"} == (
            self.awaited if training else set()
        )
        assert set(self.machine.updates) == self.sent


TestChangingFleet = ChangingFleet.TestCase


class SelectedRounds(RuleBasedStateMachine):
    """Each round asks a few of the devices, and has a goal. Who is asked is kept beside.

    A round that opens again asks others. It needs as many updates as when it opened first, also if
    fewer devices are there.
    """

    @initialize(
        devices=st.integers(1, 9),
        goal=st.integers(1, 4),
        more=st.integers(0, 2),
        least=st.none() | st.integers(1, 4),
    )
    def start(self, devices: int, goal: int, more: int, least: int | None) -> None:
        self.least = min(least or 0, goal)
        self.machine = Rounds(None, devices, DEADLINE_S, min_updates=self.least or None)
        self.goal, self.most = goal, goal + more
        self.names = [f"device-{number}" for number in range(devices)]
        self.asked: set[str] = set()
        self.awaited: set[str] = set()
        self.sent: set[str] = set()
        self.earlier: set[str] = set()
        self.needed = 0
        self.now, self.closes_at, self.done = 0.0, 0.0, 0
        for name in self.names:
            self.machine.enrol(name)

    @precondition(lambda self: self.machine.phase == "aggregating")
    @rule(draw=st.randoms(use_true_random=False))
    def open(self, draw: random.Random) -> None:
        free = sorted(self.machine.present - self.earlier)
        count = min(self.most - len(self.earlier), draw.randint(0, len(free)))
        self.asked = self.earlier | set(draw.sample(free, count))
        if not self.asked:
            return
        if not self.needed:  # half of those that it asks, two if there are three; at most the goal
            half = -(-len(self.asked) // 2)
            self.needed = self.least or min(max(half, 2 if len(self.asked) > 2 else 1), self.goal)
        offers = {name: f"for {name}" for name in self.asked}
        self.machine.open(offers, self.now, goal=Goal(self.goal, self.needed))
        for name in self.earlier:
            self.machine.take_again(name, "u")
        self.awaited, self.closes_at = self.asked - self.earlier, self.now + DEADLINE_S
        self.sent, self.earlier = self.earlier, set()

    @rule(index=st.integers(0, 8), back=st.integers(0, 1))
    def send(self, index: int, back: int) -> None:
        """Any device sends: one that is asked, is not asked, was not needed, or is too late."""
        name, before = self.names[index % len(self.names)], state(self.machine)
        round_ = self.machine.round - back
        if back == 0 and name in self.awaited:
            self.machine.take(name, round_, f"for {name}", "u")
            self.awaited.remove(name)
            self.sent.add(name)
            if len(self.sent) == self.goal:
                self.awaited.clear()
        elif name not in self.sent or back:
            with pytest.raises(RefusalError) as refusal:
                self.machine.take(name, round_, f"for {name}", "u")
            assert refusal.value.code == "round.closed"
            assert state(self.machine) == before

    @rule(index=st.integers(0, 8), how=st.sampled_from(["pause", "stop"]))
    def go(self, index: int, how: str) -> None:
        name = self.names[index % len(self.names)]
        getattr(self.machine, how)(name)
        self.awaited.discard(name)
        self._reopened()

    @rule(index=st.integers(0, 8), how=st.sampled_from(["unpause", "resume"]))
    def come_back(self, index: int, how: str) -> None:
        name = self.names[index % len(self.names)]
        getattr(self.machine, how)(name, f"for {name}")
        here = self.machine.phase == "training" and name in self.machine.present
        needed = len(self.sent) < self.goal and name in self.asked
        if here and needed and name not in self.sent:
            self.awaited.add(name)

    @rule(seconds=st.floats(0, 2 * DEADLINE_S))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @precondition(lambda self: self.machine.phase == "training")
    @rule()
    def turn(self) -> None:
        late, reached = self.now >= self.closes_at, len(self.sent) >= self.goal
        closes = reached or late or not self.awaited
        enough = len(self.sent) >= self.needed
        assert self.machine.due(self.now) == (closes and enough)
        assert self.machine.failed(self.now) == (late and not enough)
        assert self.machine.has_reached_goal == reached
        if self.machine.due(self.now):
            self.machine.close()
            self.machine.folded()
            self.done, self.needed = self.done + 1, 0
        elif self.machine.failed(self.now):
            self.machine.reopen()
            self.earlier = self.sent
        self._reopened()

    def _reopened(self) -> None:
        """Forget a round that has ended, or that nobody is left in."""
        if self.machine.phase != "training":
            self.asked, self.awaited, self.sent = set(), set(), set()

    @invariant()
    def only_the_devices_that_are_asked_and_needed_train(self) -> None:
        training = {name for name in self.names if self.machine.task(name) == "train"}
        assert training == self.awaited
        if len(self.sent) < self.goal:
            assert set(self.machine.late()) == self.awaited
        assert len(self.sent) <= self.goal
        assert set(self.machine.updates) == self.sent <= self.asked
        assert len(self.asked) <= self.most
        assert self.machine.done == self.done
        if self.machine.phase == "training":
            assert self.machine.asked == len(self.asked)


TestSelectedRounds = SelectedRounds.TestCase


class AsynchronousFleet(RuleBasedStateMachine):
    """Devices begin, go on after their round, send, and leave; what each trains is kept beside."""

    @initialize(devices=st.integers(1, 5), buffer=st.integers(1, 5), oldest=st.integers(0, 3))
    def start(self, devices: int, buffer: int, oldest: int) -> None:
        self.machine = Rounds(12, devices, DEADLINE_S, quorum=buffer, max_staleness=oldest)
        self.oldest = oldest
        self.members = {f"device-{n}" for n in range(devices)}
        for name in self.members:
            self.machine.enrol(name)
        self.begun: dict[str, int] = {}
        self.too_old: dict[str, int] = {}
        self.sent: set[str] = set()
        self.closed = False

    def chosen(self, index: int, names: set[str]) -> str:
        return sorted(names)[index % len(names)]

    @precondition(lambda self: self.members)
    @rule(index=st.integers(0, 4))
    def ask(self, index: int) -> None:
        name = self.chosen(index, self.members)
        if self.machine.task(name) == "train" and self.machine.phase == "training":
            self.machine.note_started(name)
            self.begun.setdefault(name, self.machine.round)

    @precondition(lambda self: self.begun)
    @rule(index=st.integers(0, 4), other=st.integers(-2, 2))
    def send(self, index: int, other: int) -> None:
        name = self.chosen(index, set(self.begun))
        round_ = self.begun[name] + other
        before = state(self.machine)
        if other or self.machine.phase != "training":
            closing = not other and self.machine.phase == "aggregating"
            with refused("round.closing" if closing else "round.closed"):
                self.machine.take(name, round_, f"bundle {round_}", "u")
            assert state(self.machine) == before
            return
        with refused("round.other-bundle"):
            self.machine.take(name, round_, "bundle 0", "u")
        self.machine.take(name, round_, f"bundle {round_}", f"update {round_}")
        self.machine.take(name, round_, f"bundle {round_}", f"update {round_}")
        del self.begun[name]
        self.sent.add(name)

    @precondition(lambda self: self.too_old.keys() & self.members)
    @rule(index=st.integers(0, 4))
    def send_too_old(self, index: int) -> None:
        name = self.chosen(index, self.too_old.keys() & self.members)
        round_, before = self.too_old[name], state(self.machine)
        with refused("round.closed"):
            self.machine.take(name, round_, f"bundle {round_}", "u")
        assert state(self.machine) == before

    @precondition(lambda self: len(self.members) > 1)
    @rule(index=st.integers(0, 4))
    def leave(self, index: int) -> None:
        name = self.chosen(index, self.members)
        self.machine.leave(name)
        self.members.remove(name)
        self.begun.pop(name, None)

    @precondition(lambda self: self.machine.phase in ("training", "aggregating"))
    @rule()
    def turn(self) -> None:
        machine = self.machine
        if machine.phase == "training":
            if machine.due(0.0):
                machine.close()
                self.closed = True
                # The others could not count in the next round: they wait for its model.
                young = {n: r for n, r in self.begun.items() if r > machine.round - self.oldest}
                self.too_old |= {n: r for n, r in self.begun.items() if n not in young}
                self.begun = young
        elif self.closed:
            machine.folded()
            self.sent.clear()
            self.closed = False
            if machine.phase == "finished":
                self.begun.clear()
        elif self.members:
            round_ = machine.done + 1
            machine.open(dict.fromkeys(self.members, f"bundle {round_}"), 0.0)
            assert all(started >= round_ - self.oldest for started in self.begun.values())

    @invariant()
    def everybody_goes_on_with_its_own_round(self) -> None:
        machine = self.machine
        assert set(machine.updates) == self.sent
        for name, round_ in self.begun.items():
            assert (machine.trained_round(name), machine.task(name)) == (round_, "train")
        for name in self.members - self.begun.keys():
            waits = machine.phase != "training" or name in self.sent
            assert machine.task(name) == (
                "finished" if machine.over else "wait" if waits else "train"
            )


TestAsynchronousFleet = AsynchronousFleet.TestCase
