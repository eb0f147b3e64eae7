"""What agent and coordinator say to each other, version 1, as plain dataclasses.

The coordinator's OpenAPI page is made from these very classes and the agent decodes into them, so
the two sides cannot drift. All of it is JSON over HTTP, usable from a browser's `fetch`.

    POST /v1/devices                 join token   JoinRequest -> JoinReply
    GET  /v1/work                    secret       -> Work
    GET  /v1/files/{sha256}          secret       -> bytes of one file of the offered bundle
    POST /v1/progress                secret       Progress ->
    PUT  /v1/rounds/{round}/tensors  secret       bytes of update.safetensors ->
    POST /v1/rounds/{round}/update   secret       update.json -> Receipt
    POST /v1/problems                secret       SubmodelFailure -> Fallback
    POST /v1/leave                   secret       ->
    GET  /v1/status                  secret or operator token -> Status

Tokens and secrets travel as `Authorization: Bearer ...`. Every refusal is a Problem. While a
coordinator starts, it answers 503 with the code PREPARING to every request; while it still looks
at submodels, to joins of devices that it plans for. It has done nothing then: ask again.

A device is known by the Ed25519 key pair that it made, and a join is signed with it. What follows
is not: a secret of the device's own serves a streamed upload as well as a small request, while a
signature would need the whole body read twice.
"""

import hashlib
from dataclasses import dataclass, field
from typing import Any, Literal

API = "/v1"
JOIN_TOKEN = "client.join-token"
"""Code of the Problem (401) for a valid join token where a device's secret is needed."""
NOT_AUTHORISED = "client.not-authorised"
"""Code of the Problem (401) for an unknown token or secret."""
UNKNOWN_TOKEN = (
    "This join token is unknown here: give the content of one of the .token files that "
    "`edgetailor serve` names when it starts."
)
NEEDS_PROFILE = "join.needs-profile"
"""Code of the Problem for a join without `profile` if the coordinator plans for the device."""
NOTHING_FITS = "plan.nothing-fits"
"""Code of the Problem for a join if no submodel is within the device's budgets."""
PREPARING = "federation.preparing"
"""Code of the Problem (503, with Retry-After) for a request that the coordinator is not ready for.
"""
ROUND_CLOSED = "round.closed"
"""Code of the Problem for an update of a round that takes none from this device now."""
OTHER_BUNDLE = "round.other-bundle"
"""Code of the Problem for an update that was not trained from the offered bundle."""
ALREADY_SENT = "round.already-sent"
"""Code of the Problem for a second, different update for one round."""
NO_SUCH_FILE = "round.no-such-file"
"""Code of the Problem (404) for a file that this device is not offered now."""


@dataclass(frozen=True, kw_only=True)
class JoinRequest:
    """A device asks to join under a name that its owner will recognise.

    `public_key` and `signature` are the raw 32 and 64 bytes of Ed25519 in base64, over `join_text`.
    `timestamp` is the device's clock, in seconds since 1970; a join that is far from the
    coordinator's own clock is refused. `machine` has the fields of `bundle_profile.Machine`,
    `profile` those of `device_profile.DeviceProfile`: it says what the device can do, and is needed
    where the coordinator plans by it. Joining again with the same key gives the same device and a
    new secret.
    """

    name: str
    public_key: str
    machine: dict[str, str | int | None]
    timestamp: int
    signature: str
    profile: dict[str, Any] | None = None


def join_text(token: str, public_key: str, timestamp: int) -> bytes:
    """What the signature of a JoinRequest made with the join token `token` covers."""
    digest = hashlib.sha256(token.encode()).hexdigest()
    return f"edgetailor-join-1\n{digest}\n{public_key}\n{timestamp}\n".encode()


@dataclass(frozen=True, kw_only=True)
class JoinReply:
    """The device's id, the secret it authenticates with from now on, and its submodel."""

    device: str
    secret: str
    submodel: str


@dataclass(frozen=True, kw_only=True)
class FileOffer:
    """One file of the bundle, fetched from /v1/files/{sha256}; `size` in bytes."""

    name: str
    size: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Work:
    """What to do now: `train` the offered files for `round`, `wait` and ask again, or stop.

    No round opens before `expected` devices have joined; `joined` have. Both are 0 from then on.
    """

    state: Literal["train", "wait", "finished"]
    round: int
    files: list[FileOffer] = field(default_factory=list)
    joined: int = 0
    expected: int = 0


@dataclass(frozen=True, kw_only=True)
class Progress:
    """What the device is doing, for whoever watches the fleet; `note` says why it is paused."""

    state: Literal["downloading", "training", "uploading", "waiting", "paused"]
    loss: float | None = None
    note: str | None = None


@dataclass(frozen=True, kw_only=True)
class Receipt:
    """The update for `round` was taken."""

    round: int


@dataclass(frozen=True, kw_only=True)
class SubmodelFailure:
    """Training `submodel` failed on this device `failures` times on end, last for `reason`."""

    submodel: str
    failures: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class Fallback:
    """The smaller `submodel` that the device gets from `round` on; None where there is none."""

    submodel: str | None
    round: int


@dataclass(frozen=True, kw_only=True)
class DeviceStatus:
    """One device as the coordinator sees it; bytes count bodies over all rounds so far.

    `round` is the one that it works for, while it does; `note` is why it is paused, which round's
    deadline it missed, or what it reported of its submodel.
    """

    device: str
    name: str
    submodel: str
    state: str
    loss: float | None
    rounds_trained: int
    bytes_down: int
    bytes_up: int
    idle_s: float
    note: str | None = None
    round: int | None = None


@dataclass(frozen=True, kw_only=True)
class RoundResult:
    """The global model after `round` (0: before any training) on the held-out data.

    A regression has no accuracy.
    """

    round: int
    accuracy: float | None
    loss: float
    updates: int

    def quality(self) -> str:
        """How good the model is, for a person."""
        accuracy = "" if self.accuracy is None else f"accuracy {self.accuracy:.4f}, "
        return f"{accuracy}loss {self.loss:.4f}"


@dataclass(frozen=True, kw_only=True)
class Preparation:
    """The coordinator works on `submodel`, the `number`-th (from 1) of `total`.

    `task` is what it makes: bundles of the next round, or the workloads that it plans with.
    """

    task: Literal["bundles", "plan"]
    submodel: str
    number: int
    total: int

    def __str__(self) -> str:
        verb = "preparing" if self.task == "bundles" else "planning"
        return f"{verb} {self.number} of {self.total}: {self.submodel}"


@dataclass(frozen=True, kw_only=True)
class Status:
    """The whole fleet. `round` counts from 1; 0 while devices are still enrolling.

    `kinds_ready` of the `kinds` of devices have their bundle of the next or present round.
    `preparing` is what the coordinator is making now, if anything.
    """

    version: int = 1
    state: Literal["enrolling", "training", "aggregating", "finished"]
    round: int
    rounds: int
    expected_devices: int
    devices: list[DeviceStatus]
    history: list[RoundResult]
    kinds: int = 0
    kinds_ready: int = 0
    preparing: list[Preparation] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A refusal: a code for programs (see the reference of errors) and a sentence for people."""

    code: str
    message: str
