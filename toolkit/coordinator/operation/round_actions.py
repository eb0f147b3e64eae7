"""The operator's actions on rounds: pause them, close, extend or abort one, drop an update."""

import logging
from dataclasses import replace
from functools import partial

from profiles.text_formatting import counted
from toolkit.coordinator.database.operator_log import Action
from toolkit.coordinator.federation_state import FederationState
from toolkit.coordinator.refusals import conflict

logger = logging.getLogger(__name__)

ROUNDS = "rounds"
"""The target of actions on all rounds, in the audit log."""


class RoundActions(FederationState):
    """Acts on the rounds for the operator."""

    def pause_rounds(self, reason: str, who: str) -> None:
        """Let no round open until `resume_rounds`. The round that is open ends as usual."""
        log = self.store.operator_log
        with self.lock:
            if log.pause_reason is None:
                action = Action("pause", ROUNDS, who, reason)
                log.record(action, partial(log.set_pause, reason=reason))
                logger.info("The operator pauses the rounds: %s", reason)

    def resume_rounds(self, reason: str, who: str) -> None:
        """Let rounds open again."""
        log = self.store.operator_log
        with self.lock:
            if log.pause_reason is not None:
                action = Action("resume", ROUNDS, who, reason)
                log.record(action, partial(log.set_pause, reason=None))
                logger.info("The rounds go on.")
        self.changed.set()

    def abort_round(self, round_: int, reason: str, who: str) -> None:
        """Drop all updates of the open round. Then the round opens again.

        Raises RefusalError (409) if `round_` is not open.
        """
        with self.lock:
            self._check_open(round_)
            action = Action("abort", f"round {round_}", who, reason)
            abort = partial(self.store.open_round.abort, round_=round_)
            self.store.operator_log.record(action, abort)
            self.rounds.reopen()
        logger.info("Round %d is aborted: %s", round_, reason)
        self.changed.set()

    def drop_update(self, round_: int, identifier: str, reason: str, who: str) -> None:
        """Take a device's update out of the open round. The round does not wait for a new one.

        Raises RefusalError: 404 if there is no such device, 409 if `round_` is not open or has no
        update of this device.
        """
        with self.lock:
            device = self.known_device(identifier)
            self._check_open(round_)
            if device.id not in self.rounds.updates:
                raise conflict(
                    "Round {round} has no update of {device}.",
                    code="operator.no-update",
                    round=round_,
                    device=device.id,
                )
            action = Action(f"drop update of round {round_}", device.id, who, reason)
            decided = self.store.operator_log.decisions.get(device.id)
            drop = partial(self.store.open_round.drop_update, round_=round_, device=device.id)
            self.store.operator_log.record(replace(action, then=decided), drop)
            self.rounds.retract(device.id)
            self.note_reopening()
            self.activity[device.id].note = f"update of round {round_} dropped: {reason}"
        logger.info("Round %d: the update of %s is dropped: %s", round_, device.id, reason)
        self.changed.set()

    def close_now(self, round_: int, reason: str, who: str) -> None:
        """Close the open round with the updates that have come.

        Raises:
            RefusalError: 409 if `round_` is not open, or has too few updates.
        """
        with self.lock:
            self._check_open(round_)
            updates, needed = len(self.rounds.updates), self.rounds.needed
            if updates < needed:
                raise conflict(
                    "Round {round} has {counted}, and needs {needed} (`min_updates`, `quorum`). "
                    "Wait for more updates. If neither `min_updates` nor `clients_per_round` is "
                    "set, you can also pause devices that send none: fewer updates are then "
                    "needed.",
                    code="operator.too-few-updates",
                    round=round_,
                    counted=counted(updates, "update"),
                    needed=needed,
                )
            self._end_in(round_, 0.0, Action("close", f"round {round_}", who, reason))
        self.changed.set()

    def end_after(self, round_: int, seconds: float, reason: str, who: str) -> None:
        """Let the open round end `seconds` from now, unless all updates come earlier.

        Raises RefusalError (409) if `round_` is not open.
        """
        with self.lock:
            self._check_open(round_)
            action = Action(f"end in {seconds:.0f} s", f"round {round_}", who, reason)
            self._end_in(round_, seconds, action)
        self.changed.set()

    def _end_in(self, round_: int, seconds: float, action: Action) -> None:
        deadline = partial(
            self.store.open_round.set_deadline,
            round_=round_,
            closes_at=self.wall_clock() + seconds,
            seconds=seconds,
        )
        self.store.operator_log.record(action, deadline)
        self.rounds.set_deadline(self.clock(), seconds)
        logger.info("%s: the operator lets it %s: %s", action.target, action.action, action.reason)

    def _check_open(self, round_: int) -> None:
        if self.rounds.phase != "training" or self.rounds.round != round_:
            raise conflict(
                "Round {round} is not open: the federation is at round {present} ({phase}).",
                code="operator.round-not-open",
                round=round_,
                present=self.rounds.round,
                phase=self.rounds.phase,
            )
