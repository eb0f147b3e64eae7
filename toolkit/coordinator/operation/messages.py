"""The messages of the operator's routes."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from msgspec import Meta

from device_agent.formats.manifest import Struct
from device_agent.formats.protocol.fleet import (
    DeviceStatus,
    Preparation,
    RoundResult,
    SelectedDevices,
    SpentPrivacy,
)
from toolkit.coordinator.database.join_tokens import JoinTokenState
from toolkit.coordinator.database.operator_log import AuditEntry
from toolkit.coordinator.database.operator_tokens import Operator, Role
from toolkit.coordinator.database.settings_log import Change

REASON_LENGTH = 200
"""The most characters of a reason."""
ONE_LINE = "^[^\\x00-\\x1f\\x7f-\\x9f\\u2028\\u2029]*$(?!\\n)"
"""A text without control characters, which could change a terminal or forge lines of a log."""

MOST_SECONDS = 30 * 86400
"""The longest time to the end of a round."""

MOST_DAYS = 36500
"""The longest lifetime of a join token, and the longest time for following a new key, in days."""
NAME = "^[A-Za-z0-9][A-Za-z0-9._@-]{0,39}$(?!\\n)"
"""The name of an operator."""

Action = Literal["pause", "resume", "remove", "ban", "let-in"]


Sort = Literal["joined", "device", "name", "kind", "state", "loss", "trained", "seen", "traffic"]
"""The key by which a list of devices is sorted."""


class Order(Struct, frozen=True, kw_only=True):
    """The operator's reason for an action. It is kept in the audit log and shown to the device."""

    reason: Annotated[str, Meta(min_length=1, max_length=REASON_LENGTH, pattern=ONE_LINE)]


class NewDeadline(Order, frozen=True, kw_only=True):
    """A new deadline of the open round, in seconds from now."""

    seconds: Annotated[float, Meta(ge=0, le=MOST_SECONDS)]


class EarlierModel(Order, frozen=True, kw_only=True):
    """The round whose model the next round starts from. Without it, the last round is repeated."""

    round: Annotated[int, Meta(ge=0, lt=2**31)] | None = None


@dataclass(frozen=True, kw_only=True)
class ModelRound:
    """The round whose model the next round starts from."""

    version: int = 1
    round: int


class NewOperator(Order, frozen=True, kw_only=True):
    """A person or program that gets a token. A token with the role `read-only` changes nothing."""

    name: Annotated[str, Meta(pattern=NAME)]
    role: Role


@dataclass(frozen=True, kw_only=True)
class MadeOperator:
    """A new token. No other answer has it."""

    version: int = 1
    name: str
    role: Role
    token: str


class NewJoinToken(Order, frozen=True, kw_only=True):
    """A join token for at most `count` devices of `kind`, or for any number of them.

    `days` is its lifetime. Without it, the lifetime is `token_days` of the federation's file.
    """

    kind: Annotated[str, Meta(max_length=100)]
    count: Annotated[int, Meta(ge=1, lt=2**31)] | None = None
    days: Annotated[float, Meta(gt=0, le=MOST_DAYS)] | None = None


@dataclass(frozen=True, kw_only=True)
class MadeJoinToken:
    """A new join token, with the fingerprint of the coordinator's key. No other answer has it."""

    version: int = 1
    state: JoinTokenState
    token: str


@dataclass(frozen=True, kw_only=True)
class JoinTokenList:
    """What each join token allows, without the secret text of the token."""

    version: int = 1
    tokens: list[JoinTokenState]


@dataclass(frozen=True, kw_only=True)
class OperatorList:
    """Who has a token that an operator made, without the secret text of the token."""

    version: int = 1
    operators: list[Operator]


class NewKey(Order, frozen=True, kw_only=True):
    """A new key of the coordinator in place of the key with the fingerprint `key`.

    Devices can change to the new key for `days`.
    """

    key: Annotated[str, Meta(max_length=64)]
    days: Annotated[float, Meta(gt=0, le=MOST_DAYS)]


class NewDeviceSecret(Order, frozen=True, kw_only=True):
    """A request for a device's new secret. The old secret stays valid for at most `days`."""

    days: Annotated[float, Meta(gt=0, le=MOST_DAYS)]


@dataclass(frozen=True, kw_only=True)
class EarlierKey:
    """The fingerprint of an earlier key.

    Devices with this key can change to the current key until `until`, in seconds since 1970.
    """

    fingerprint: str
    until: int


@dataclass(frozen=True, kw_only=True)
class KeyState:
    """The fingerprint of the coordinator's key, and its earlier keys, the oldest first.

    Of the members (`devices`), `followed` are known to trust the current key.
    """

    version: int = 1
    fingerprint: str
    earlier: list[EarlierKey]
    followed: int
    devices: int


class SettingsOrder(Order, frozen=True, kw_only=True):
    """Apply the federation's file. With `carry`, its `model` may have changed."""

    carry: bool = False


@dataclass(frozen=True, kw_only=True)
class SettingsChanges:
    """The changes of the federation's file. They take effect from round `round` on."""

    version: int = 1
    round: int
    changes: list[Change]


@dataclass(frozen=True, kw_only=True)
class AuditPage:
    """Entries of the audit log, the oldest first. `last` is the number of the newest entry."""

    version: int = 1
    entries: list[AuditEntry]
    last: int


@dataclass(frozen=True, kw_only=True)
class FleetDevice(DeviceStatus):
    """A device with its kind, and the operator's decision about the device.

    `decision` is "paused", "removed" or "banned"; `reason` says why. `follows_key` says whether it
    is known to trust the coordinator's newest key; None if the key was never replaced.
    """

    kind: str
    decision: str | None = None
    reason: str | None = None
    follows_key: bool | None = None


@dataclass(frozen=True, kw_only=True)
class DevicePage:
    """Some devices of the fleet.

    `total` is the number of devices that match the request. `devices` has some of them, beginning
    with the one at position `start` (from 0). `states` counts the matching devices by state.
    """

    version: int = 1
    start: int
    total: int
    states: dict[str, int]
    devices: list[FleetDevice]


@dataclass(frozen=True)
class TrainedRound:
    """A device's update, which is in the global model or in the open round."""

    round: int
    samples: int
    steps: int
    loss_first: float
    loss_last: float


@dataclass(frozen=True, kw_only=True)
class DeviceDetail:
    """All that is known about a device: its machine at joining, its last updates, its audit log.

    The newest updates and entries come first. If the device was asked for a new secret and has not
    made it yet, its old secret is valid until `secret_until`, in seconds since 1970.
    """

    version: int = 1
    device: FleetDevice
    machine: dict[str, Any]
    updates: list[TrainedRound]
    audit: list[AuditEntry]
    secret_until: int | None = None


@dataclass(frozen=True, kw_only=True)
class Overview:
    """The open round and the devices of the federation.

    `remaining_s` is the time to the round's deadline in seconds, negative after it; None if no
    round is open. A round needs at least `needed` updates to close. `missing` names some of the
    `missing_count` devices that the round waits for. `joined` and `expected` count devices before
    the first round, and are 0 later. `states` counts the devices by state. While the rounds are
    `paused`, none opens. `selected` is None if the round asks all devices. `privacy` is the privacy
    budget that the rounds have spent; None without differential privacy.
    """

    state: str
    round: int
    rounds: int
    remaining_s: float | None
    updates: int
    needed: int
    quorum: int | None
    missing_count: int
    missing: list[FleetDevice]
    joined: int
    expected: int
    states: dict[str, int]
    preparing: list[Preparation]
    paused: bool
    warnings: list[str]
    selected: SelectedDevices | None = None
    privacy: SpentPrivacy | None = None


@dataclass(frozen=True, kw_only=True)
class RoundQuality:
    """The result of a round, whether it is the best round, and whether its model is in use."""

    result: RoundResult
    best: bool
    current: bool
