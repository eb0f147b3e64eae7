"""The operator's actions on who may operate the federation: list, add and revoke tokens."""

import logging
from functools import partial
from secrets import token_urlsafe

from profiles.text_formatting import did_you_mean
from toolkit.coordinator.database.operator_log import Action
from toolkit.coordinator.database.operator_tokens import OPERATOR, Operator, Role
from toolkit.coordinator.federation_state import FederationState
from toolkit.coordinator.operation.messages import MadeOperator, OperatorList
from toolkit.coordinator.refusals import RefusalError, conflict

logger = logging.getLogger(__name__)


class OperatorAccess(FederationState):
    """Manages the tokens of people and programs that operate the federation."""

    def operator_list(self) -> OperatorList:
        """All tokens that were made, also revoked ones, the oldest first."""
        return OperatorList(operators=list(self.store.operators.operators.values()))

    def add_operator(self, name: str, role: Role, reason: str, who: str) -> MadeOperator:
        """Make a token for `name`. Only the answer has its text: the coordinator keeps a hash.

        Raises RefusalError (409) if the name was given before.
        """
        tokens, made = self.store.operators, token_urlsafe(32)
        with self.lock:
            if name in tokens.operators or name == OPERATOR:
                raise conflict(
                    "The name {name!r} was given before. The audit log shows the name, so it stays "
                    "with its first token: choose another name.",
                    code="operator.used-name",
                    name=name,
                )
            action = Action(f"add {role}", f"operator {name}", who, reason)
            add = partial(tokens.add, name=name, role=role, token=made)
            self.store.operator_log.record(action, add)
            tokens.read()
        logger.info("%s makes a token for %s (%s).", who, name, role)
        return MadeOperator(name=name, role=role, token=made)

    def revoke_operator(self, name: str, reason: str, who: str) -> Operator:
        """Revoke the token of `name`. It is no longer valid.

        Raises RefusalError: 404 if there is no such token, 409 for the token in operator.token.
        """
        tokens = self.store.operators
        with self.lock:
            if name == OPERATOR:
                raise conflict(
                    "The token in operator.token cannot be revoked here. To replace it, remove "
                    "this file from the state folder and start `edgetailor serve` again.",
                    code="operator.own-token",
                )
            if name not in tokens.operators:
                raise RefusalError(
                    "There is no operator {name!r}{hint} `edgetailor operators` lists all "
                    "operators.",
                    status=404,
                    code="operator.unknown-operator",
                    name=name[:64],
                    hint=did_you_mean(name, list(tokens.operators)),
                )
            if tokens.operators[name].revoked is None:
                action = Action("revoke", f"operator {name}", who, reason)
                self.store.operator_log.record(action, partial(tokens.revoke, name=name))
                tokens.read()
                logger.info("%s revokes the token of %s.", who, name)
            return tokens.operators[name]
