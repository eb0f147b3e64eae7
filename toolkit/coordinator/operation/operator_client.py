"""The operator's requests to a coordinator, for commands."""

from collections.abc import Mapping
from urllib.parse import quote, urlencode

import msgspec

from device_agent.client.coordinator_client import CoordinatorClient
from toolkit.coordinator.database.join_tokens import JoinTokenState
from toolkit.coordinator.database.operator_tokens import Operator, Role
from toolkit.coordinator.operation.messages import (
    Action,
    AuditPage,
    DeviceDetail,
    DevicePage,
    EarlierModel,
    JoinTokenList,
    KeyState,
    MadeJoinToken,
    MadeOperator,
    ModelRound,
    NewDeadline,
    NewDeviceSecret,
    NewJoinToken,
    NewKey,
    NewOperator,
    OperatorList,
    Order,
    SettingsChanges,
    SettingsOrder,
    Sort,
)


class OperatorClient(CoordinatorClient):
    """Makes the operator's requests to the coordinator at `url`, each request once.

    Args:
        url: The coordinator's URL.
        token: The operator's token.
        certificate: SHA-256 of the coordinator's self-signed certificate, if it has one.

    Raises:
        InputError: The URL or the token is malformed.
    """

    def __init__(self, url: str, token: str, certificate: str | None = None) -> None:
        super().__init__(url, token, patience_s=0, certificate=certificate)

    def devices(
        self,
        start: int = 0,
        most: int = 100,
        kind: str | None = None,
        state: str | None = None,
        search: str | None = None,
        sort: Sort = "joined",
        descending: bool = False,
    ) -> DevicePage:
        """List at most `most` of the matching devices, from position `start` on."""
        given = {"start": start, "most": most, "kind": kind, "state": state, "search": search}
        given |= {"sort": sort, "descending": str(descending).lower()}
        path = _with_query("/operator/devices", given)
        return self._with_retries(lambda: self._ask("GET", path, DevicePage))

    def device(self, name: str) -> DeviceDetail:
        """Describe one device. Raises RefusedError if there is none with this id."""
        path = f"/operator/devices/{quote(name, safe='')}"
        return self._with_retries(lambda: self._ask("GET", path, DeviceDetail))

    def act(self, action: Action, name: str, reason: str) -> DeviceDetail:
        """Act on a device. Raises RefusedError if the device is unknown, or if it has left."""
        path = f"/operator/devices/{quote(name, safe='')}/{action}"
        body = msgspec.json.encode(Order(reason=reason))
        return self._with_retries(lambda: self._ask("POST", path, DeviceDetail, body))

    def rotate_secret(self, name: str, days: float, reason: str) -> DeviceDetail:
        """Ask a device for a new secret. Raises RefusedError if it is unknown or has left.

        The old secret is valid until the device has a new one, and at most for `days`.
        """
        path = f"/operator/devices/{quote(name, safe='')}/secret"
        body = msgspec.json.encode(NewDeviceSecret(days=days, reason=reason))
        return self._with_retries(lambda: self._ask("POST", path, DeviceDetail, body))

    def close_round(self, round_: int, reason: str) -> None:
        """Close the round `round_`.

        Raises RefusedError if this round is not open, or has too few updates.
        """
        body = msgspec.json.encode(Order(reason=reason))
        self._with_retries(lambda: self._order("POST", f"/operator/rounds/{round_}/close", body))

    def end_round_after(self, round_: int, seconds: float, reason: str) -> None:
        """Let `round_` end `seconds` from now. Raises RefusedError if this round is not open."""
        body = msgspec.json.encode(NewDeadline(reason=reason, seconds=seconds))
        self._with_retries(lambda: self._order("POST", f"/operator/rounds/{round_}/deadline", body))

    def pause_rounds(self, reason: str) -> None:
        """Let no new round open. The open round ends as usual."""
        body = msgspec.json.encode(Order(reason=reason))
        self._with_retries(lambda: self._order("POST", "/operator/rounds/pause", body))

    def resume_rounds(self, reason: str) -> None:
        """Let rounds open again."""
        body = msgspec.json.encode(Order(reason=reason))
        self._with_retries(lambda: self._order("POST", "/operator/rounds/resume", body))

    def abort_round(self, round_: int, reason: str) -> None:
        """Drop all updates of `round_`. Raises RefusedError if this round is not open."""
        body = msgspec.json.encode(Order(reason=reason))
        self._with_retries(lambda: self._order("POST", f"/operator/rounds/{round_}/abort", body))

    def drop_update(self, round_: int, name: str, reason: str) -> None:
        """Take a device's update out of `round_`. Raises RefusedError if none was sent."""
        body = msgspec.json.encode(Order(reason=reason))
        path = f"/operator/rounds/{round_}/updates/{quote(name, safe='')}/drop"
        self._with_retries(lambda: self._order("POST", path, body))

    def go_back(self, round_: int | None, reason: str) -> ModelRound:
        """Go back to the model of `round_`, by default to the model before the last round.

        Raises RefusedError if this model does not exist, or if going back is not possible now.
        """
        body = msgspec.json.encode(EarlierModel(round=round_, reason=reason))
        return self._with_retries(lambda: self._ask("POST", "/operator/model", ModelRound, body))

    def audit(self, after: int = 0, most: int = 1000) -> AuditPage:
        """Read up to `most` entries of the audit log after number `after`."""
        path = _with_query("/operator/audit", {"after": after, "most": most})
        return self._with_retries(lambda: self._ask("GET", path, AuditPage))

    def operators(self) -> OperatorList:
        """List the tokens that operators have made."""
        return self._with_retries(lambda: self._ask("GET", "/operator/operators", OperatorList))

    def add_operator(self, name: str, role: Role, reason: str) -> MadeOperator:
        """Make a token for `name`. Raises RefusedError if the name was given before."""
        body = msgspec.json.encode(NewOperator(name=name, role=role, reason=reason))
        path = "/operator/operators"
        return self._with_retries(lambda: self._ask("POST", path, MadeOperator, body))

    def revoke_operator(self, name: str, reason: str) -> Operator:
        """Revoke the token of `name`. Raises RefusedError if `name` has no token."""
        body = msgspec.json.encode(Order(reason=reason))
        path = f"/operator/operators/{quote(name, safe='')}/revoke"
        return self._with_retries(lambda: self._ask("POST", path, Operator, body))

    def join_tokens(self) -> JoinTokenList:
        """List the join tokens."""
        return self._with_retries(lambda: self._ask("GET", "/operator/join-tokens", JoinTokenList))

    def make_join_token(
        self, kind: str, reason: str, count: int | None = None, days: float | None = None
    ) -> MadeJoinToken:
        """Make a join token for `count` devices of `kind`, valid for `days`.

        Raises RefusedError if there is no such kind.
        """
        body = msgspec.json.encode(NewJoinToken(kind=kind, count=count, days=days, reason=reason))
        path = "/operator/join-tokens"
        return self._with_retries(lambda: self._ask("POST", path, MadeJoinToken, body))

    def revoke_join_token(self, number: int, reason: str) -> JoinTokenState:
        """Revoke a join token. Raises RefusedError if no token has this number."""
        body = msgspec.json.encode(Order(reason=reason))
        path = f"/operator/join-tokens/{number}/revoke"
        return self._with_retries(lambda: self._ask("POST", path, JoinTokenState, body))

    def key_state(self) -> KeyState:
        """The fingerprints of the coordinator's key and of its earlier keys."""
        return self._with_retries(lambda: self._ask("GET", "/operator/key", KeyState))

    def rotate_key(self, fingerprint: str, days: float, reason: str) -> KeyState:
        """Replace the coordinator's key, which has this `fingerprint`, by a new key.

        Devices can change to the new key for `days`.

        Raises RefusedError if the coordinator has another key.
        """
        body = msgspec.json.encode(NewKey(key=fingerprint, days=days, reason=reason))
        return self._with_retries(lambda: self._ask("POST", "/operator/key", KeyState, body))

    def settings_changes(self, carry: bool = False) -> SettingsChanges:
        """The changes in the federation's file. With `carry`, `model` may have changed.

        Raises RefusedError if the file cannot be used.
        """
        path = _with_query("/operator/settings", {"carry": str(carry).lower()})
        return self._with_retries(lambda: self._ask("GET", path, SettingsChanges))

    def apply_settings(self, reason: str, carry: bool = False) -> SettingsChanges:
        """Take over the federation's file. With `carry`, `model` may have changed.

        Raises RefusedError if the file cannot be used.
        """
        body = msgspec.json.encode(SettingsOrder(reason=reason, carry=carry))
        path = "/operator/settings"
        return self._with_retries(lambda: self._ask("POST", path, SettingsChanges, body))


def _with_query(path: str, given: Mapping[str, str | int | None]) -> str:
    known = {name: value for name, value in given.items() if value is not None}
    return f"{path}?{urlencode(known)}"
