"""The operator's action on the settings: take over the changes in the federation's file."""

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from profiles.errors import EdgeTailorError, InputError
from toolkit.coordinator.database.operator_log import Action
from toolkit.coordinator.database.settings_log import TENSORS, Change, changes_model
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

    def settings_changes(self, carry: bool = False) -> SettingsChanges:
        """The changes in the federation's file, and the round in which they would take effect.

        With `carry`, `model` may change, and one of the changes says which tensors are carried
        over.

        Raises RefusalError (409) for a change that is not possible.
        """
        config, shown = self._compared(carry)
        if not changes_model(shown.changes):
            return shown
        with self.settings_lock:
            return self._with_tensors(shown, self._made(config))

    def apply_settings(self, reason: str, who: str, carry: bool = False) -> SettingsChanges:
        """Take over the federation's file from the next round on.

        Before anything changes, the model is loaded again and split for all submodels. So an
        unusable file is refused. With `carry`, `model` may change.

        Raises RefusalError (409) for a change that is not possible, or after the last round.
        """
        with self.settings_lock:
            return self._apply(reason, who, carry)

    def _apply(self, reason: str, who: str, carry: bool) -> SettingsChanges:
        config, shown = self._compared(carry)
        waiting: NewSettings | None = self.new_settings
        model = None
        if changes_model(shown.changes):
            model = self._made(config)
            shown = self._with_tensors(shown, model)
        if shown.changes == ([] if waiting is None else waiting.changes):
            return shown
        if not shown.changes:
            return self._keep_settings(shown, reason, who)
        if model is None:
            model = self._made(config)
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

    def _made(self, config: CoordinatorConfig) -> Any:
        """The global model that `config` describes. Raises RefusalError (409) if there is none."""
        self._check_not_over()
        assert self.make_model is not None
        try:
            return self.make_model(config)
        except EdgeTailorError as error:
            raise _refused(error) from None

    def _with_tensors(self, shown: SettingsChanges, model: Any) -> SettingsChanges:
        """The changes, and one more that says what `model` takes over from the present model.

        The new model is tried with these weights. Raises RefusalError (409) if it cannot be used.
        """
        data = self.store.model()
        if data is None:
            raise conflict(
                "The federation has no model to carry over yet: apply the file again in a minute.",
                code="settings.no-model",
            )
        named = [(kind.submodel, kind.fallback) for kind in self.config.devices]
        try:
            if any(model.keeps_personal(spec) for specs in named for spec in specs if spec):
                raise InputError(
                    "Devices of this federation keep a personal model, which would not fit the new "
                    "`model`. Set `model` back, or begin another federation with another `state` "
                    "folder.",
                    code="settings.personal-models",
                )
            state, about = model.carried(data)
            model.load(state)
            self.try_model(model)
        except EdgeTailorError as error:
            raise _refused(error) from None
        change = Change(TENSORS, "null", json.dumps(about))
        return SettingsChanges(round=shown.round, changes=[*shown.changes, change])

    def _compared(self, carry: bool) -> tuple[CoordinatorConfig, SettingsChanges]:
        """The settings of the federation's file, and how they differ from those in effect."""
        try:
            new = load_config(Path(self.store.value(FILE) or ""))
            check_judged(new)
            changes = changes_while_running(self.config, new, carry)
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
                "`rounds` is {rounds}, but the changes take effect from round {round} on. Set "
                "`rounds` to at least {round}.",
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
