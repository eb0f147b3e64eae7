"""Messages of secure aggregation: devices add up masked updates, and the masks cancel in the sum.

keys      each device sends two new public keys
shares    each device sends shares of its secrets, encrypted for its neighbours
input     each device sends its masked update
confirm   each device signs the list of devices whose update has come
unmask    each device sends shares with which the masks of the sum can be removed
"""

import hashlib
from dataclasses import dataclass, field
from typing import Annotated, Literal

from msgspec import Meta

Base64 = Annotated[str, Meta(max_length=400)]
Identifier = Annotated[str, Meta(max_length=100, pattern=r"^\S+$")]
"""A device's id. It has no spaces and line breaks, which separate ids in texts that are signed."""
Step = Literal["wait", "shares", "input", "confirm", "unmask", "over", "again"]
FEWEST = 3
"""No device takes part in a smaller sum: two devices would know each other's updates."""

MOST_SAMPLES = 10**6
"""The largest `most_samples`, so that the sums of counts fit in 64 bits."""


@dataclass(frozen=True, kw_only=True)
class SumPrivacy:
    """Differential privacy of a sum. Each device clips its change and adds noise to it.

    Attributes:
        clip: The largest L2 norm of a device's change.
        noise_multiplier: The least standard deviation of the noise in the sum, divided by `clip`.
    """

    clip: Annotated[float, Meta(ge=1e-6, le=1e6)]
    noise_multiplier: Annotated[float, Meta(ge=1e-6, le=1e6)]


@dataclass(frozen=True, kw_only=True)
class SecureTerms:
    """How the devices of a round add up their updates. The coordinator signs this with the work.

    Attributes:
        fewest: The smallest number of devices in a sum.
        most_change: The most by which a number of an update may change; larger changes are clipped.
        most_samples: The most samples that count for a device. A device with more samples has the
            same weight.
        privacy: Differential privacy of the sum, or None. If `privacy` is set, `most_change` is not
            used, all devices have equal weight, and a sum has no losses and steps.
    """

    fewest: Annotated[int, Meta(ge=FEWEST)]
    most_change: Annotated[float, Meta(ge=1e-6, le=1e6)]
    most_samples: Annotated[int, Meta(ge=1, le=MOST_SAMPLES)]
    privacy: SumPrivacy | None = None


@dataclass(frozen=True, kw_only=True)
class SecureKeys:
    """A device has trained, and offers new keys for one attempt at the sum.

    `mask_key` and `share_key` are public keys of X25519, 32 raw bytes in base64. `bundle` is the
    SHA-256 of the manifest of the trained bundle. `signature` is the device's signature of
    `keys_text`, with the key of the device's join.
    """

    bundle: Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
    mask_key: Base64
    share_key: Base64
    signature: Base64


@dataclass(frozen=True, kw_only=True)
class SecureMember:
    """A device of the group: its id, its key of the join (in base64), and its keys for the sum."""

    device: Identifier
    key: Base64
    keys: SecureKeys


@dataclass(frozen=True, kw_only=True)
class SecureStep:
    """What a device does next in the sum of `round`.

    - `shares`: send shares for the group of `members`. `signature` is the coordinator's signature
      of `group_text`.
    - `input`: send the masked update. `shares` are the shares that the neighbours have sent, by
      sender.
    - `confirm`: sign `present_text` of `present`, the devices whose update has come.
    - `unmask`: send shares for `present`. `confirmations` are the signatures, by device.
    - `over`: the device's part is over. The sum contains its update, or is completed without it.
    - `again`: send new keys for another attempt, because the coordinator knows no keys of this
      device.
    """

    step: Step
    round: int
    ask_again_s: float = 0.0
    members: list[SecureMember] = field(default_factory=list)
    signature: str = ""
    shares: dict[str, str] = field(default_factory=dict)
    present: list[str] = field(default_factory=list)
    confirmations: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class SecureShares:
    """The encrypted shares of a device's secrets, in base64, by receiver."""

    shares: Annotated[dict[Identifier, Base64], Meta(max_length=300)]


@dataclass(frozen=True, kw_only=True)
class SecureInput:
    """The masked update has been sent as tensors with this SHA-256."""

    sha256: Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]


@dataclass(frozen=True, kw_only=True)
class SecureConfirmation:
    """A device's signature of `present_text`, in base64."""

    signature: Base64


@dataclass(frozen=True, kw_only=True)
class SecureUnmasking:
    """Shares in base64, by the device whose secret is shared.

    `seeds` has the shares of devices whose update has arrived. `keys` has the shares of devices
    whose update is missing.
    """

    seeds: Annotated[dict[Identifier, Base64], Meta(max_length=300)]
    keys: Annotated[dict[Identifier, Base64], Meta(max_length=300)]


SecureMessage = SecureKeys | SecureShares | SecureInput | SecureConfirmation | SecureUnmasking
SUM_ROUTES: dict[type[SecureMessage], str] = {
    SecureKeys: "keys",
    SecureShares: "shares",
    SecureInput: "input",
    SecureConfirmation: "confirmation",
    SecureUnmasking: "unmasking",
}
"""The last part of the route of each message, below /rounds/{round}/sum."""


def terms_line(terms: SecureTerms) -> str:
    """The line of `terms` in texts that are signed.

    Examples:
        >>> terms_line(SecureTerms(fewest=5, most_change=8.0, most_samples=100))
        'secure 5 8000000 100'
        >>> privacy = SumPrivacy(clip=0.5, noise_multiplier=2.0)
        >>> terms_line(SecureTerms(fewest=5, most_change=8.0, most_samples=1, privacy=privacy))
        'secure 5 8000000 1 500000 2000000'
    """
    # In millionths: programs in other languages format a fraction differently.
    line = f"secure {terms.fewest} {round(terms.most_change * 1e6)} {terms.most_samples}"
    if (privacy := terms.privacy) is None:
        return line
    return f"{line} {round(privacy.clip * 1e6)} {round(privacy.noise_multiplier * 1e6)}"


def keys_text(
    round_: int, bundle: str, terms: SecureTerms, apart: float, mask_key: str, share_key: str
) -> bytes:
    """The text that a device signs in its SecureKeys.

    The text contains the terms, because a coordinator could tell each device different terms. If a
    device has a huge `most_change` or `most_samples`, its update is almost zero in the sum. If all
    other devices had such terms, the sum would be the update of a single device. For the same
    reason the text contains `apart`, the share of samples that devices use only to judge models.
    """
    lines = ["edgetailor-secure-keys-1", str(round_), bundle, terms_line(terms)]
    lines += [f"evaluation {round(apart * 1e6)}", mask_key, share_key]
    return "".join(f"{line}\n" for line in lines).encode()


def group_text(round_: int, members: list[SecureMember]) -> bytes:
    """The text that the coordinator signs for a group, in the order of the devices' ids."""
    lines = ["edgetailor-secure-group-1", str(round_)]
    for member in sorted(members, key=lambda member: member.device):
        keys = member.keys
        lines.append(
            " ".join((member.device, member.key, keys.bundle, keys.mask_key, keys.share_key))
        )
    return "".join(f"{line}\n" for line in lines).encode()


def present_text(context: bytes, present: list[str]) -> bytes:
    """The text that a device signs to confirm which devices of a group have sent an update."""
    digest = hashlib.sha256("".join(f"{device}\n" for device in sorted(present)).encode())
    return f"edgetailor-secure-present-1\n{context.hex()}\n{digest.hexdigest()}\n".encode()
