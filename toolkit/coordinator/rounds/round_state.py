"""The rounds as a state machine: no HTTP, no storage and no clock of its own.

    enrolling --last device enrolled--> aggregating --open--> training --close--> aggregating ...
    ... --folded after the last round--> finished

A device may leave at any time, and another take its place: it trains from the next round on.
Times are seconds of any steady clock, passed in. A refusal changes nothing.
"""

from collections.abc import Mapping
from typing import Literal

from profiles.text_formatting import counted
from toolkit.coordinator.refusals import conflict, forbidden

Phase = Literal["enrolling", "training", "aggregating", "finished"]
Task = Literal["train", "wait", "finished"]
ROUND_OVER = "round-over"


class Rounds:
    """`total` rounds of `expected` devices, of which `done` are over already.

    A round closes when every device that it was opened for has sent its update or left, or
    `deadline_s` seconds after it opened if at least one has sent; without any it stays open for the
    first.
    """

    def __init__(self, total: int, expected: int, deadline_s: float, done: int = 0) -> None:
        self.total = total
        self.expected = expected
        self.deadline_s = deadline_s
        self.done = done
        self.phase: Phase = "enrolling"
        self.devices: set[str] = set()
        self.updates: dict[str, str] = {}
        self._offers: dict[str, str] = {}
        self._closes_at = 0.0

    @property
    def round(self) -> int:
        """The round that is open or being folded, from 1; 0 before the first has opened."""
        return self.done + (1 if self._offers else 0)

    @property
    def places(self) -> tuple[int, int]:
        """How many devices have joined, and of how many, before the rounds begin; then 0 of 0."""
        return (len(self.devices), self.expected) if self.phase == "enrolling" else (0, 0)

    def enrol(self, device: str) -> None:
        """Add `device`; the last one ends enrolment. RefusalError where the fleet is full."""
        if len(self.devices) == self.expected or device in self.devices:
            raise forbidden(f"This fleet is full: it has {counted(self.expected, 'device')}.")
        self.devices.add(device)
        if self.phase == "enrolling" and len(self.devices) == self.expected:
            self.begin()

    def begin(self) -> None:
        """End enrolment: the rounds have begun, whoever has left since."""
        self.phase = "finished" if self.done >= self.total else "aggregating"

    def leave(self, device: str) -> None:
        """Forget `device`; the update that it sent for the open round counts."""
        self.devices.discard(device)
        self.excuse(device)

    def excuse(self, device: str) -> None:
        """Wait for `device` no longer in the open round, unless it has sent its update."""
        if device not in self.updates:
            self._offers.pop(device, None)
        if self.phase == "training" and not self._offers:
            self.phase = "aggregating"  # with nobody to wait for, the round opens anew

    def open(self, offers: Mapping[str, str], now: float) -> None:
        """Start the next round. `offers` gives, for every device, the hash of its bundle."""
        self._expect(self.phase == "aggregating" and not self._offers, "open")
        self._expect(set(offers) == self.devices != set(), "open with offers for other devices")
        self._offers = dict(offers)
        self._closes_at = now + self.deadline_s
        self.phase = "training"

    def task(self, device: str) -> Task:
        """What `device` should do now."""
        if self.phase == "finished":
            return "finished"
        return "train" if self.waits_for(device) else "wait"

    def waits_for(self, device: str) -> bool:
        """Whether the open round is one for `device`, and without its update."""
        return self.phase == "training" and device in self._offers.keys() - self.updates.keys()

    def check_round(self, device: str, round_: int) -> None:
        """Raise RefusalError unless `device` may send something for `round_` now."""
        open_to_it = self.waits_for(device) or device in self.updates
        if round_ != self.round or not open_to_it:
            raise conflict(ROUND_OVER, f"Round {round_} takes no updates now: {self._now(round_)}.")

    def check(self, device: str, round_: int, bundle: str, update: str) -> bool:
        """Whether `update` (its hash) is new; False where it was taken already.

        Raises RefusalError for another round, another bundle than the offered, or a second update.
        """
        self.check_round(device, round_)
        if bundle != self._offers[device]:
            raise conflict(
                "wrong-bundle",
                f"Round {round_} offered {device} the bundle {self._offers[device][:12]}; this "
                f"update was trained from {bundle[:12]}. Fetch the bundle again and train it.",
            )
        if self.updates.get(device, update) != update:
            raise conflict(
                "already-sent",
                f"{device} has sent another update for round {round_} already, which counts.",
            )
        return device not in self.updates

    def take(self, device: str, round_: int, bundle: str, update: str) -> None:
        """Count `update` towards the round; the very same again changes nothing."""
        self.check(device, round_, bundle, update)
        self.updates[device] = update

    def due(self, now: float) -> bool:
        """Whether the open round should close."""
        if self.phase != "training":
            return False
        late = now >= self._closes_at and bool(self.updates)
        return late or self._offers.keys() == self.updates.keys()

    def close(self) -> None:
        """Take no more updates: they are folded from here on."""
        self._expect(self.phase == "training" and bool(self.updates), "close")
        self.phase = "aggregating"

    def folded(self) -> None:
        """The closed round is in the global model: the next one may open, if there is one."""
        self._expect(self.phase == "aggregating" and bool(self._offers), "fold")
        self.done += 1
        self._offers, self.updates = {}, {}
        if self.done >= self.total:
            self.phase = "finished"

    def _now(self, asked: int) -> str:
        """How things are, for whoever comes with something for the round `asked`."""
        if self.phase == "training" and asked == self.round:
            return "it goes on without this device"
        this = f"round {self.round} of {self.total}"
        return {
            "enrolling": "devices are still joining",
            "training": f"{this} is being trained",
            "aggregating": f"{this} is closed",
            "finished": f"{this} was the last",
        }[self.phase]

    def _expect(self, fine: bool, what: str) -> None:
        if not fine:
            raise RuntimeError(f"cannot {what}: round {self.round} is {self.phase}")
