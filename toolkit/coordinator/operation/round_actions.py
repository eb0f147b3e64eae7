"""The operator's actions on the open round: close it now, or move its deadline."""

import logging
from functools import partial

from profiles.text_formatting import counted
from toolkit.coordinator.database.operator_log import Action
from toolkit.coordinator.federation_state import FederationState
from toolkit.coordinator.refusals import conflict

logger = logging.getLogger(__name__)


class RoundActions(FederationState):
    """Acts on the open round for the operator."""

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
                    "Wait for more updates. If `min_updates` is not set, you can also pause "
                    "devices that send none: fewer updates are then needed.",
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
