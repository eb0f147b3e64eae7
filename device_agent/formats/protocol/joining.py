"""Messages for joining: the description of a federation, and the join itself."""

import hashlib
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from msgspec import Meta

from device_agent.formats.evaluation_counts import EvaluationRequest
from device_agent.formats.manifest import Count
from device_agent.formats.protocol.secure_sums import SecureTerms


@dataclass(frozen=True, kw_only=True)
class Invitation:
    """The description of a federation for the holder of a join token.

    `title`, `purpose` and `contact` are lines that the operator wrote. `rounds` is the number of
    rounds. If it is 0, there is no last round. A round takes at most `round_s` seconds. A device
    receives and sends together `first_bytes` in its first round and `round_bytes` in each later
    round. Unknown values are 0. If the devices do not judge models, `evaluation` is None. If they
    do not add up their updates in secure sums, `secure` is None. `signature` is the coordinator's
    signature of `signed_work.invitation_text`. The public key `key` verifies this signature.
    """

    title: str = ""
    purpose: str = ""
    contact: str = ""
    rounds: int = 0
    round_s: float = 0
    first_bytes: int = 0
    round_bytes: int = 0
    evaluation: EvaluationRequest | None = None
    secure: SecureTerms | None = None
    key: str = ""
    signature: str = ""


@dataclass(frozen=True, kw_only=True)
class JoinRequest:
    """A device asks to join. `name` is a name that the device's owner recognises.

    `public_key` (32 bytes) and `signature` (64 bytes, over `join_text`) are raw Ed25519 values in
    base64. `timestamp` is the device's time in seconds since 1970. If it is far from the
    coordinator's time, the coordinator refuses the join. `machine` has the fields of
    `bundle_profile.Machine`. `profile` has the fields of `device_profile.DeviceProfile`. A
    coordinator that plans submodels requires `profile`. A second join with the same key returns the
    same device with a new secret. Each signature is accepted once, so a second join needs another
    `timestamp`.
    """

    name: str
    public_key: str
    machine: dict[str, str | int | None]
    timestamp: Count
    signature: str
    profile: dict[str, Any] | None = None


def join_text(token: str, public_key: str, timestamp: int) -> bytes:
    """The text that is signed in a JoinRequest with the join token `token`."""
    digest = hashlib.sha256(token.encode()).hexdigest()
    # Because of the first line, a signature of another message cannot be used for a join.
    return f"edgetailor-join-1\n{digest}\n{public_key}\n{timestamp}\n".encode()


@dataclass(frozen=True, kw_only=True)
class JoinReply:
    """The device's id, its secret for all later requests, and its submodel.

    `key` is the coordinator's public key: 32 raw bytes of Ed25519 in base64. The device stores this
    key and trains only work that the key verifies. `preprocessing`, `sample_shape` and `label_type`
    have the values of the later manifests, so that an owner can choose data before the first round.
    `arrays` are the names of the arrays in a file, if these are not `x` and `y`.
    """

    device: str
    secret: str
    submodel: str
    key: str = ""
    preprocessing: dict[str, Any] | None = None
    sample_shape: list[int] = field(default_factory=list)
    label_type: Literal["int64", "float32"] = "int64"
    arrays: list[str] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class NewSecret:
    """The answer of a device that was asked for a new secret. It has the hash of the new secret.

    `challenge` is the `new_secret` of the Work. `secret_sha256` is the SHA-256 of the new secret,
    in hexadecimal digits. `signature` is a signature of `secret_text` with the device's key of the
    join. So nobody who knows only the old secret can set a new secret. After the coordinator has
    accepted this answer, the old secret is no longer valid.
    """

    challenge: Annotated[str, Meta(max_length=100)]
    secret_sha256: Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
    signature: Annotated[str, Meta(max_length=200)]


def secret_text(challenge: str, secret_sha256: str) -> bytes:
    """The text that is signed in a NewSecret."""
    return f"edgetailor-secret-1\n{challenge}\n{secret_sha256}\n".encode()
