"""The operator's actions on join tokens: list, make and revoke them."""

import logging
from functools import partial
from secrets import token_urlsafe

from profiles.text_formatting import did_you_mean
from toolkit.coordinator.database.join_tokens import JoinTokenState
from toolkit.coordinator.database.operator_log import Action
from toolkit.coordinator.federation_state import FederationState
from toolkit.coordinator.operation.messages import JoinTokenList, MadeJoinToken
from toolkit.coordinator.refusals import RefusalError

logger = logging.getLogger(__name__)


class JoinAccess(FederationState):
    """Manages the tokens with which devices join."""

    def join_token_list(self) -> JoinTokenList:
        """What each join token allows, without the secret text of the token."""
        return JoinTokenList(tokens=self.store.join_tokens.listed())

    def make_join_token(
        self, kind: str, count: int | None, days: float | None, reason: str, who: str
    ) -> MadeJoinToken:
        """Make a join token for `count` devices of `kind`. The coordinator keeps its hash.

        Args:
            kind: The kind of the devices.
            count: How many devices may join with the token; None for any number. The kind must
                also have free places.
            days: The token's lifetime in days; None for `token_days` of the federation's file.
            reason: For the audit log.
            who: The name of the operator.

        Raises RefusalError (404) if there is no such kind.
        """
        kinds, tokens = [k.name for k in self.config.devices], self.store.join_tokens
        if kind not in kinds:
            raise RefusalError(
                "This federation has no kind {kind!r}{hint} The kinds are {kinds}.",
                status=404,
                code="operator.unknown-kind",
                kind=kind[:64],
                hint=did_you_mean(kind, kinds),
                kinds=", ".join(kinds),
            )
        made = token_urlsafe(32)
        lifetime = self.config.token_days if days is None else days
        with self.lock:
            number = tokens.next_number()
            action = Action(f"make for {kind}", f"join token {number}", who, reason)
            add = partial(
                tokens.add, number=number, kind=kind, count=count, days=lifetime, token=made
            )
            self.store.operator_log.record(action, add)
            logger.info("%s makes join token %d for kind %s.", who, number, kind)
            (state,) = [known for known in tokens.listed() if known.number == number]
        return MadeJoinToken(state=state, token=f"{made}.{self.key.fingerprint}")

    def revoke_join_token(self, number: int, reason: str, who: str) -> JoinTokenState:
        """Revoke the join token with this number. Devices that have joined with it stay.

        Raises RefusalError (404) if there is no such token.
        """
        tokens = self.store.join_tokens
        with self.lock:
            known = tokens.made(number)
            if known is None:
                raise RefusalError(
                    "No join token has the number {number}: `edgetailor tokens` lists all that "
                    "were made. To replace the token of a kind, remove its file from the state "
                    "folder and start `edgetailor serve` again.",
                    status=404,
                    code="operator.unknown-join-token",
                    number=number,
                )
            if known.revoked is None:
                action = Action("revoke", f"join token {number}", who, reason)
                self.store.operator_log.record(action, partial(tokens.revoke, number=number))
                logger.info("%s revokes join token %d.", who, number)
            return tokens.made(number) or known
