"""The operator's action on the global model: go back to the model of an earlier round."""

import threading
from dataclasses import dataclass, field

from profiles.errors import InputError
from toolkit.coordinator.database.operator_log import Action
from toolkit.coordinator.federation_state import FederationState
from toolkit.coordinator.refusals import RefusalError, conflict
from toolkit.coordinator.storage.saved_rounds import model_file

WAIT_S = 30.0
"""How long the operator waits for the thread of the rounds, which may be making bundles."""


@dataclass
class WantedModel:
    """The round whose model the next round starts from, and the entry for the audit log."""

    target: int
    action: Action
    done: threading.Event = field(default_factory=threading.Event)


class ModelActions(FederationState):
    """Goes back to earlier models for the operator."""

    def go_back(self, target: int | None, reason: str, who: str) -> int:
        """Let the next round start from the model of round `target`, and return this number.

        Without `target`, the next round starts from the same model as the last round. Updates of
        the open round are dropped, and the round opens again.

        Raises RefusalError (409) if this model was not kept, if no round follows, or if the thread
        of the rounds is busy.
        """
        if target is None:
            target = self.store.history.origin()
        if target is None or self.config.site:
            raise conflict(
                "There is no earlier model: no round is over, or the models come from Flower's "
                "server.",
                code="operator.no-earlier-model",
            )
        try:
            model_file(self.store.folder, target)
        except InputError as error:
            raise RefusalError(
                error.template, status=409, code=error.code, **error.values
            ) from None
        wanted = WantedModel(target, Action("go back", f"round {target}", who, reason))
        with self.lock:
            if self.rounds.phase not in ("training", "aggregating") or self.wanted_model:
                raise self._cannot_go_back()
            self.wanted_model = wanted
        self.changed.set()
        if not wanted.done.wait(WAIT_S):
            with self.lock:
                if self.wanted_model is wanted:
                    self.wanted_model = None
                    raise self._cannot_go_back()
        return target

    def _cannot_go_back(self) -> RefusalError:
        return conflict(
            "The model cannot be taken back now ({phase}). Try again when a round is open. After "
            "the last round, stop `edgetailor serve` and use `edgetailor rollback`.",
            code="operator.cannot-go-back",
            phase=self.rounds.phase,
        )
