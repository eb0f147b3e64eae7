"""The operator's first view: the open round, missing devices, the quality, and warnings."""

from collections import Counter

from toolkit.coordinator.operation.device_list import DeviceList
from toolkit.coordinator.operation.messages import Overview, RoundQuality
from toolkit.coordinator.rounds.compared_rounds import best_of, compared
from toolkit.coordinator.rounds.falling_quality import falling
from toolkit.coordinator.rounds.limited_devices import limits_warning, times_limited

MOST_MISSING = 20
"""How many of the missing devices are named."""


class Overviews(DeviceList):
    """Describes the federation as a whole."""

    def warnings(self) -> list[str]:
        """Sentences for the operator, for example that the model gets worse."""
        history = self.store.history.results()
        warnings = [warning for warning in [falling(history)] if warning is not None]
        times = times_limited(history)
        if times and (text := limits_warning(times, self.store.records.rounds_trained([*times]))):
            warnings.append(text)
        if (pause := self.store.operator_log.pause_reason) is not None:
            warnings.append(f"No round opens: paused by the operator: {pause}")
        return warnings + self.store.suspicions.spoilt(history[-1].round if history else 0)

    def states(self) -> dict[str, int]:
        """The number of devices by state, the most frequent first."""
        with self.lock:
            return dict(Counter(a.state for a in self.activity.values()).most_common())

    def overview(self) -> Overview:
        """The round that is open, and the states of the devices."""
        rounds, history = self.rounds, self.store.history.results()
        with self.lock:
            late = rounds.late() if rounds.phase == "training" else []
            named = [self.store.registry.device(device) for device in late[:MOST_MISSING]]
            joined, expected = rounds.places
            return Overview(
                state=rounds.phase,
                round=rounds.round,
                rounds=rounds.total or 0,
                remaining_s=rounds.remaining_s(self.clock())
                if rounds.phase == "training"
                else None,
                updates=len(rounds.updates),
                needed=rounds.needed,
                quorum=rounds.quorum,
                selected=self.selected_devices(),
                missing_count=len(late),
                missing=self.fleet_devices(named),
                joined=joined,
                expected=expected,
                states=self.states(),
                preparing=list(self.preparations.values()),
                paused=self.store.operator_log.pause_reason is not None,
                warnings=self.warnings(),
                privacy=history[-1].privacy if history else None,
            )

    def open_update(self, device: str) -> int | None:
        """The open round if it has an update of this device; else None."""
        with self.lock:
            has_it = self.rounds.phase == "training" and device in self.rounds.updates
            return self.rounds.round if has_it else None

    def quality(self) -> list[RoundQuality]:
        """The figures of each round, the oldest first."""
        history, current = self.store.history.results(), self.store.history.current_round()
        figures = [(result.round, figure) for result, figure in compared(history)]
        best = best_of(figures) if figures else None
        return [
            RoundQuality(result=result, best=result.round == best, current=result.round == current)
            for result in history
        ]

    def pulse(self) -> tuple[object, ...] | None:
        """A value that changes whenever the operator's view changes.

        None if the federation is busy at the moment. The method never waits, because a thread that
        many requests share calls it.
        """
        if not self.lock.acquire(blocking=False):
            return None
        try:
            rounds = self.rounds
            states = frozenset(Counter(a.state for a in self.activity.values()).items())
            counts = rounds.done, len(rounds.updates), len(rounds.devices), len(self.preparations)
            deadline = round(rounds.remaining_s(0.0))
            log = self.store.operator_log
            decisions = len(log.decisions), log.pause_reason
            return rounds.phase, rounds.round, counts, deadline, states, decisions
        finally:
            self.lock.release()
