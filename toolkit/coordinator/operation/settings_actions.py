"""The operator's action on the settings: take over the changes in the federation's file."""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from profiles.errors import EdgeTailorError
from toolkit.coordinator.database.operator_log import Action
from toolkit.coordinator.database.settings_log import Change
from toolkit.coordinator.federation_file.federation_config import CoordinatorConfig
from toolkit.coordinator.federation_file.load_config import load_config
from toolkit.coordinator.federation_source import FILE
from toolkit.coordinator.federation_state import FederationState
from toolkit.coordinator.operation.messages import SettingsChanges
from toolkit.coordinator.refusals import RefusalError, conflict
from toolkit.coordinator.settings_check import changes_while_running, check_judged

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class NewSettings:
    """Settings that take effect when round `round` is about to open, with the model for them."""

    round: int
    config: CoordinatorConfig
    changes: list[Change]
    model: Any


class SettingsActions(FederationState):
    """Changes settings of the running federation for the operator."""

    def settings_changes(self) -> SettingsChanges:
        """The changes in the federation's file, and the round in which they would take effect.

        Raises RefusalError (409) for a change that is not possible.
        """
        return self._compared()[1]

    def apply_settings(self, reason: str, who: str) -> SettingsChanges:
        """Take over the federation's file from the next round on.

        Before anything changes, the model is loaded again and split for all submodels. So an
        unusable file is refused.

        Raises RefusalError (409) for a change that is not possible, or after the last round.
        """
        with self.settings_lock:
            return self._apply(reason, who)

    def _apply(self, reason: str, who: str) -> SettingsChanges:
        config, shown = self._compared()
        waiting: NewSettings | None = self.new_settings
        if shown.changes == ([] if waiting is None else waiting.changes):
            return shown
        if not shown.changes:
            return self._keep_settings(shown, reason, who)
        self._check_not_over()
        assert self.make_model is not None
        try:
            model = self.make_model(config)
        except EdgeTailorError as error:
            raise _refused(error) from None
        with self.lock:
            # Rounds may have closed while the model was made.
            self._check_not_over()
            self._check_rounds(config)
            round_ = self._next_round()
            actions = [
                Action(f"set {change.text()}", f"round {round_}", who, reason)
                for change in shown.changes
            ]
            self.store.operator_log.record_all(
                actions, lambda db: self.store.settings.schedule(db, shown.changes)
            )
            self.new_settings = NewSettings(round_, config, shown.changes, model)
        for change in shown.changes:
            logger.info("From round %d on: %s", round_, change.text())
        self.changed.set()
        return SettingsChanges(round=round_, changes=shown.changes)

    def _keep_settings(self, shown: SettingsChanges, reason: str, who: str) -> SettingsChanges:
        """Drop the changes that wait: the file again has the settings in effect."""
        action = Action("keep the settings", f"round {shown.round}", who, reason)
        with self.lock:
            self.store.operator_log.record(action, lambda db: self.store.settings.schedule(db, []))
            self.new_settings = None
        return shown

    def _compared(self) -> tuple[CoordinatorConfig, SettingsChanges]:
        """The settings of the federation's file, and what differs from the settings in effect."""
        try:
            new = load_config(Path(self.store.value(FILE) or ""))
            check_judged(new)
            changes = changes_while_running(self.config, new)
        except EdgeTailorError as error:
            raise _refused(error) from None
        with self.lock:
            round_ = self._next_round()
            self._check_rounds(new)
        return new, SettingsChanges(round=round_, changes=changes)

    def _check_not_over(self) -> None:
        """Raise RefusalError (409) if no round follows, or if this process makes no models."""
        if self.make_model is None or self.rounds.phase in ("judging", "finished"):
            raise conflict(
                "The settings of this federation cannot change now. Start `edgetailor serve` again "
                "with the changed file.",
                code="settings.needs-restart",
            )

    def _check_rounds(self, new: CoordinatorConfig) -> None:
        """Raise RefusalError (409) if the last round would be before the next one."""
        round_ = self._next_round()
        if new.last_round is not None and new.last_round < round_:
            raise conflict(
                "`rounds` is {rounds}, but the changes hold from round {round} on. Set `rounds` to "
                "at least {round}.",
                code="settings.too-few-rounds",
                rounds=new.last_round,
                round=round_,
            )

    def _next_round(self) -> int:
        """The number of the next round that opens, after the round that is open or being closed."""
        is_open = self.rounds.round > self.rounds.done
        return self.rounds.done + (2 if is_open else 1)


def _refused(error: EdgeTailorError) -> RefusalError:
    return RefusalError(error.template, status=409, code=error.code, **error.values)
