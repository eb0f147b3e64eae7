"""The rounds as a state machine. It uses no HTTP, no storage and no clock.

    enrolling --enough devices enrolled--> aggregating --open--> training --close--> aggregating ...
    ... --folded after the last round--> judging --end_judging--> finished

If no devices judge the last model, `finished` follows immediately. While a round is aggregated, a
committee of devices may judge the new model.

A device may leave at any time. Another device may take its place and trains from the next round on.
A device that has stopped keeps its place, and no round waits for it until it asks for work again.
If the conditions of its owner forbid a device to begin a round, the device is treated in the same
way. A device that the operator has paused also keeps its place, and gets no work until the pause
ends. A round may be opened for some devices only, with a goal: the number of updates that closes
it. The other devices wait. If too few updates have come at the deadline, the round opens again for
other devices.

In asynchronous rounds, if a round closes without the update of a device, the device goes on
training. The update counts in the round that is open when the update comes. Then the device waits
for the next round.

Times are seconds of a monotonic clock that the caller passes in. A refused call changes nothing.
"""

from collections.abc import Collection, Mapping
from typing import Literal, NamedTuple

from device_agent.formats.protocol.problems import ALREADY_SENT, OTHER_BUNDLE, ROUND_CLOSED
from profiles.text_formatting import counted, round_of
from toolkit.coordinator.refusals import RefusalError, conflict

Phase = Literal["enrolling", "training", "aggregating", "judging", "finished"]
Task = Literal["train", "wait", "judge", "finished"]


def fewest_updates(
    waited_for: int, members: int, min_updates: int | None, quorum: int | None
) -> int:
    """The fewest updates that a round may close with.

    Args:
        waited_for: The number of devices that have sent an update or may still send one.
        members: The devices that were members when the round opened, and still are members.
        min_updates: The value in the federation's file. The default is half of `waited_for`, and at
            least two if more than two devices are members.
        quorum: The number of updates that closes the round early. The default of `min_updates` is
            never above `quorum`.
    """
    if min_updates is not None:
        return min_updates
    half = max(-(-waited_for // 2), 2 if members > 2 else 1)
    return half if quorum is None else min(half, quorum)


class Flight(NamedTuple):
    """A device that trains the model of an earlier round, and the hash of its bundle's manifest."""

    round: int
    bundle: str


class Goal(NamedTuple):
    """The limits of a round that asks some devices only. They do not change if it opens again.

    Attributes:
        updates: The number of updates that closes the round.
        needed: The fewest updates with which the round may close; at most `updates`.
    """

    updates: int
    needed: int


class Rounds:
    """The state of the rounds; `done` rounds are over.

    The first round waits for `expected` devices. The last round is number `total`; with None the
    rounds go on until they are `stopped_early`.

    A round closes when every device that it was opened for has sent its update or left, or when
    `quorum` updates have come. A round also closes `deadline_s` seconds after it opened. With fewer
    than `needed` updates, a round never closes: at its deadline it opens again, and old updates
    still count. A round that was opened with a `Goal` has its own limits.

    With `max_staleness` the rounds are asynchronous: a device may train the model of a round that
    opened at most `max_staleness` rounds before the open round.

    `enough_in` is the last round that closed because it had reached its goal.
    """

    def __init__(
        self,
        total: int | None,
        expected: int,
        deadline_s: float,
        done: int = 0,
        quorum: int | None = None,
        min_updates: int | None = None,
        stopped_early: bool = False,
        max_staleness: int | None = None,
    ) -> None:
        self.total = total
        self.expected = expected
        self.deadline_s = deadline_s
        self.quorum = quorum
        self.goal: Goal | None = None
        self.min_updates = min_updates
        self.max_staleness = max_staleness
        self.flights: dict[str, Flight] = {}
        self.enough_in: int | None = None
        self.done = done
        self.stopped_early = stopped_early
        self.phase: Phase = "enrolling"
        self.devices: set[str] = set()
        self.stopped: set[str] = set()
        self.left_out: set[str] = set()
        self.paused: set[str] = set()
        self.updates: dict[str, str] = {}
        self.diverged: set[str] = set()
        self.judges: set[str] = set()
        self._judging_ends_at: float | None = None
        self._members: frozenset[str] = frozenset()
        self._opened: frozenset[str] = frozenset()
        self._offers: dict[str, str] = {}
        self._started: set[str] = set()
        self._closes_at = 0.0

    @property
    def round(self) -> int:
        """Number, from 1, of the round that is open or being aggregated; 0 before the first."""
        return self.done + (1 if self._offers else 0)

    @property
    def over(self) -> bool:
        """Whether the last round is over."""
        return self.stopped_early or self.is_last(self.done)

    def is_last(self, round_: int) -> bool:
        """Whether no round follows `round_`, because it is number `total`."""
        return self.total is not None and round_ >= self.total

    @property
    def places(self) -> tuple[int, int]:
        """How many devices have joined, and how many are expected; (0, 0) after enrolment."""
        return (len(self.devices), self.expected) if self.phase == "enrolling" else (0, 0)

    def enrol(self, device: str) -> None:
        """Add `device`. Enrolment ends when `expected` devices have been added."""
        self.devices.add(device)
        if self.phase == "enrolling" and len(self.devices) >= self.expected:
            self.begin()

    def begin(self) -> None:
        """End enrolment. Enrolment does not begin again if devices leave later."""
        self.phase = "finished" if self.over else "aggregating"

    def judge_again(self, judges: Collection[str]) -> None:
        """After a restart, let `judges`, which have not answered yet, judge the last model."""
        self._expect(self.phase == "finished", "judge again")
        self.judges, self.phase = self.present & set(judges), "judging"

    def leave(self, device: str) -> None:
        """Remove `device`. Its update for the open round still counts."""
        self.devices.discard(device)
        self.stopped.discard(device)
        self.paused.discard(device)
        self.excuse(device)

    @property
    def present(self) -> set[str]:
        """The devices that take part in rounds: they have not stopped and are not excluded."""
        return self.devices - self.stopped - self.left_out - self.paused

    def _is_present(self, device: str) -> bool:
        absent = device in self.stopped or device in self.left_out or device in self.paused
        return device in self.devices and not absent

    def stop(self, device: str) -> None:
        """Stop waiting for `device`, in this round and in later rounds."""
        self.stopped.add(device)
        self.excuse(device)

    def resume(self, device: str, offer: str | None) -> None:
        """Wait for `device` again. The device takes part in the open round if `offer` is given.

        `offer` is the hash of the manifest of the device's bundle; None if the device has no bundle
        in the open round.
        """
        self.stopped.discard(device)
        self._take_part(device, offer)

    def pause(self, device: str) -> None:
        """Leave `device` out until `unpause`. Its update for the open round still counts."""
        self.paused.add(device)
        self.excuse(device)

    def unpause(self, device: str, offer: str | None) -> None:
        """End a pause. The device takes part in the open round if `offer` is given."""
        self.paused.discard(device)
        self._take_part(device, offer)

    def _take_part(self, device: str, offer: str | None) -> None:
        """Wait for `device` in the open round if it is present and `offer` is given."""
        asked = self.goal is None or device in self._opened
        if self.phase == "training" and offer is not None and asked and device in self.present:
            self._offers.setdefault(device, offer)
            # The device counts as present at the opening. Otherwise, if all devices had stopped,
            # the first device to come back would decide for all.
            self._opened |= {device}
            self._members |= {device}

    def excuse(self, device: str) -> None:
        """Stop waiting for `device` in the open round, unless its update has come."""
        self.judges.discard(device)
        self.flights.pop(device, None)
        self._started.discard(device)
        if device not in self.updates:
            self._offers.pop(device, None)
        if self.phase == "training" and not self._offers:
            self.phase = "aggregating"  # no device is left to wait for: the round opens again

    def retract(self, device: str) -> None:
        """Drop the update of `device`. The open round waits for no other update of this device."""
        self.updates.pop(device, None)
        self.excuse(device)

    def note_diverged(self, device: str) -> None:
        """Record that the training of `device` in the open round diverged."""
        if self.waits_for(device):
            self.diverged.add(device)

    def model_is_at_fault(self, suspect: str | None) -> bool:
        """Whether so many trainings diverged that the model of the open round must be at fault.

        Two conditions must hold. First, training diverged on more than half of the devices for
        which the round was opened. Second, the number of devices whose training diverged is at
        least three times the number of devices that sent an update. The second condition also holds
        if the round can never close, because it has too few updates and waits for no more devices.
        `suspect`, the device whose update may have spoilt the model, is not counted.
        """
        voters = self._opened - {suspect}
        diverged, trained = len(self.diverged & voters), len(self.updates.keys() & voters)
        stuck = len(self._offers) == len(self.updates) < self.needed
        return 2 * diverged > len(voters) and (diverged >= 3 * trained or stuck)

    def open(
        self,
        offers: Mapping[str, str],
        now: float,
        remaining_s: float | None = None,
        goal: Goal | None = None,
    ) -> None:
        """Start the next round, or continue a round that was open before a restart.

        Args:
            offers: For every device that is present, the hash of its bundle's manifest. The hash is
                empty for a device without a bundle; the caller then excuses this device. With a
                `goal`, the round asks only the devices in `offers`.
            now: The current time.
            remaining_s: Seconds to the deadline; by default all of `deadline_s`.
            goal: The limits of a round that asks some devices; None for `quorum` and `min_updates`.
        """
        self._expect(self.phase == "aggregating" and not self._offers, "open")
        # A device that stopped after it sent its update has an offer, too.
        fitting = (goal is not None or self.present <= set(offers)) and set(offers) <= self.devices
        self._expect(fitting and bool(offers), "open with offers for other devices")
        self.goal = goal
        self._members = frozenset(self.present & set(offers))
        self._offers = dict(offers)
        self._opened = frozenset(device for device, bundle in offers.items() if bundle)
        oldest = self.round - (self.max_staleness or 0)
        self.flights = {
            device: flight
            for device, flight in self.flights.items()
            if device in offers and flight.round >= oldest
        }
        self.diverged = set()
        self._closes_at = now + (self.deadline_s if remaining_s is None else remaining_s)
        self.phase = "training"

    def task(self, device: str) -> Task:
        """What `device` should do now."""
        if device in self.judges:
            return "wait" if self._judging_ends_at is None else "judge"
        if self.phase in ("judging", "finished"):
            return "finished"
        if self._goes_on(device):
            return "train"
        return "train" if self.waits_for(device) else "wait"

    def waits_for(self, device: str) -> bool:
        """Whether `device` was offered work in the open round, and its update is still needed."""
        asked = self.phase == "training" and device in self._offers
        return asked and device not in self.updates and not self.has_reached_goal

    def trained_round(self, device: str) -> int:
        """The round whose model `device` trains; only in asynchronous rounds an earlier round."""
        return self.flights[device].round if device in self.flights else self.round

    def going_on(self) -> dict[str, int]:
        """The round that each device trains, for devices that have begun and not sent an update."""
        devices = self.flights.keys() | (self._started & self._offers.keys())
        return {device: self.trained_round(device) for device in devices - self.updates.keys()}

    def note_started(self, device: str) -> None:
        """Record that `device` has got work of the open round.

        In asynchronous rounds, this device may go on training after the round has closed. A device
        that has not asked for work gets the work of the next round.
        """
        if self.phase == "training":
            self._started.add(device)

    def has_begun(self, device: str) -> bool:
        """Whether `device` has got the work of a round and has not sent its update."""
        begun = device in self.flights or device in self._started
        return begun and device not in self.updates

    def started_before(self, devices: Collection[str]) -> None:
        """Record that, before a restart, `devices` began to train in the round that opens next."""
        self._started |= set(devices)

    def _goes_on(self, device: str) -> bool:
        """Whether `device` trains while no round is open, because rounds are asynchronous.

        If the update of a device would be too old for the next round, the device waits for the
        model of the next round.
        """
        if self.max_staleness is None or self.phase != "aggregating" or device in self.updates:
            return False
        if self.trained_round(device) < self.round + 1 - self.max_staleness:
            return False
        return device in self.flights or (device in self._offers and device in self._started)

    def is_too_old(self, round_: int) -> bool:
        """Whether the model of `round_` is too old: asynchronous rounds refuse its updates."""
        if self.max_staleness is None or self.phase not in ("training", "aggregating"):
            return False
        following = self.round if self.phase == "training" else self.round + 1
        return round_ < following - self.max_staleness

    def late(self) -> list[str]:
        """The devices of the open round that have not sent their updates."""
        if self.phase != "training":
            return []
        return [device for device in self._offers if device not in self.updates]

    @property
    def asked(self) -> int:
        """The number of devices for which the open round was opened, or else the last round."""
        return len(self._opened)

    @property
    def has_reached_goal(self) -> bool:
        """Whether the round has as many updates as its goal, so that it needs no more devices."""
        return self.goal is not None and len(self.updates) >= self.goal.updates

    def check_round(self, device: str, round_: int) -> None:
        """Raise RefusalError unless `device` may send something for `round_` now."""
        trained = self.trained_round(device)
        if round_ == trained and self._goes_on(device):
            raise RefusalError(
                "No round is open at the moment: send the update again soon. It counts in the "
                "round that opens after round {round}.",
                status=503,
                code="round.closing",
                round=self.round,
            )
        open_to_it = self.waits_for(device) or device in self.updates
        if round_ != trained or not open_to_it:
            raise conflict(
                "Round {round} takes no updates now: {reason}.",
                code=ROUND_CLOSED,
                phase=self.phase,
                round=round_,
                reason=self._reason(round_),
            )

    def check(self, device: str, round_: int, bundle: str, update: str) -> bool:
        """Return True if `update`, given by its hash, is new, and False if it was counted before.

        Raises RefusalError for another round, a bundle that was not offered, or a second update.
        """
        self.check_round(device, round_)
        flight = self.flights.get(device)
        offered = self._offers[device] if flight is None else flight.bundle
        if bundle != offered:
            raise conflict(
                "Round {round} offered {device} the bundle {offered}; this update was trained "
                "from {trained}. Fetch the bundle again and train it.",
                code=OTHER_BUNDLE,
                device=device,
                round=round_,
                offered=offered[:12],
                trained=bundle[:12],
            )
        if self.updates.get(device, update) != update:
            raise conflict(
                "{device} has already sent another update for round {round}. The earlier one "
                "counts.",
                code=ALREADY_SENT,
                device=device,
                round=round_,
            )
        return device not in self.updates

    def take(self, device: str, round_: int, bundle: str, update: str) -> None:
        """Count `update` towards the round. Repeating the same call changes nothing."""
        self.check(device, round_, bundle, update)
        self.updates[device] = update

    def count_left(self, device: str, update: str) -> None:
        """Count the update of a `device` that sent it for the open round and left afterwards."""
        self._expect(self.phase == "training" and device not in self.devices, "count")
        self._offers[device], self.updates[device] = "", update

    def take_again(self, device: str, update: str) -> None:
        """Count an update that came before the coordinator restarted or the round opened again."""
        self._expect(self.phase == "training" and device in self._offers, "count")
        self.updates[device] = update

    def due(self, now: float) -> bool:
        """Whether the open round should close."""
        if self.phase != "training":
            return False
        late = self.remaining_s(now) <= 0
        enough = self._quorum is not None and len(self.updates) >= self._quorum
        # Every device that sent an update has an offer, so equal numbers mean that none is missing.
        ending = late or enough or len(self._offers) == len(self.updates)
        # `needed` is computed last, because it looks at all devices.
        return ending and len(self.updates) >= self.needed

    def failed(self, now: float) -> bool:
        """Whether the open round is at its deadline with too few updates."""
        late = self.phase == "training" and self.remaining_s(now) <= 0
        return late and len(self.updates) < self.needed

    @property
    def needed(self) -> int:
        """The fewest updates that the open round may close with."""
        if self.goal is not None:
            return self.goal.needed
        members = sum(map(self._is_present, self._members))  # a set of thousands takes a megabyte
        return fewest_updates(len(self._offers), members, self.min_updates, self.quorum)

    @property
    def _quorum(self) -> int | None:
        """The number of updates that closes the open round early."""
        return self.quorum if self.goal is None else self.goal.updates

    def remaining_s(self, now: float) -> float:
        """Seconds to the deadline of the open round; negative after the deadline."""
        return self._closes_at - now

    def set_deadline(self, now: float, remaining_s: float) -> None:
        """Let the open round end `remaining_s` seconds from `now`."""
        self._expect(self.phase == "training", "set the deadline")
        self._closes_at = now + remaining_s

    def reopen(self) -> None:
        """End the open round without a result, so that it opens again for all members."""
        self._expect(self.phase in ("training", "aggregating"), "reopen")
        for device in self.updates:
            self.flights.pop(device, None)
        self._offers, self.updates, self.diverged = {}, {}, set()
        self.phase = "aggregating"

    def close(self) -> None:
        """Take no more updates, so that they can be aggregated."""
        self._expect(self.phase == "training" and bool(self.updates), "close")
        if self.has_reached_goal:
            self.enough_in = self.round
        self.phase = "aggregating"

    def folded(self, judges: Collection[str] = (), stop_early: bool = False) -> None:
        """Record that the updates of the closed round are in the model; the next round may open.

        After the last round, `judges` are asked to judge the model. With `stop_early` this round
        was the last.
        """
        self._expect(self.phase == "aggregating" and bool(self._offers), "fold")
        self._keep_flights()
        self.done += 1
        self.stopped_early = stop_early
        # `diverged` is about the previous model. It must not be used against the new model.
        self._offers, self.updates, self.diverged = {}, {}, set()
        if self.over:
            self.flights.clear()
            self.judges = self.present & set(judges)
            self.phase = "judging" if self.judges else "finished"

    def _keep_flights(self) -> None:
        """Let devices go on if they have begun, and their update is not in the closed round."""
        for device in self.updates:
            self.flights.pop(device, None)
        if self.max_staleness is not None:
            for device in (self._started & self._offers.keys()) - self.updates.keys():
                self.flights.setdefault(device, Flight(self.round, self._offers[device]))
        self._started.clear()

    def ask_committee(self, devices: Collection[str], until: float) -> None:
        """Let `devices` judge a new model of the closed round. Judging ends at the time `until`.

        During the judging, all other devices wait.
        """
        self._expect(self.phase == "aggregating" and bool(self._offers), "ask a committee")
        self.judges, self._judging_ends_at = self.present & set(devices), until

    def open_judging(self, now: float) -> None:
        """Let the devices in `judges` judge the last model, for at most `deadline_s` seconds."""
        self._expect(self.phase == "judging" and self._judging_ends_at is None, "open judging")
        self._judging_ends_at = now + self.deadline_s

    @property
    def is_judging(self) -> bool:
        """Whether devices may send their judgement now."""
        return self._judging_ends_at is not None

    def judging_is_over(self, now: float) -> bool:
        """Whether every device has judged the model or left, or the time is over."""
        ends = self._judging_ends_at
        return not self.judges or (ends is not None and ends <= now)

    def end_judging(self) -> None:
        """Wait for no more judgements."""
        self.judges, self._judging_ends_at = set(), None
        if self.phase == "judging":
            self.phase = "finished"

    def _reason(self, asked: int) -> str:
        """Why round `asked` takes no update now."""
        if self.is_too_old(asked):
            return f"the update is too old, because {round_of(self.round, self.total)} takes " + (
                f"updates of models that are at most {counted(self.max_staleness or 0, 'round')} "
                "old"
            )
        if asked == self.enough_in or (asked == self.round and self.has_reached_goal):
            return "the update is not needed, because enough updates had come"
        if self.phase == "training" and asked == self.round:
            return "it continues without this device"
        this = round_of(self.round, self.total)
        return {
            "enrolling": "devices are still joining",
            "training": f"{this} is being trained",
            "aggregating": f"{this} is closed",
            "judging": f"{this} was the last",
            "finished": f"{this} was the last",
        }[self.phase]

    def _expect(self, fine: bool, what: str) -> None:
        if not fine:
            raise RuntimeError(f"cannot {what}: round {self.round} is {self.phase}")
