"""That a device which asks to join has the private key it speaks of, and the right time."""

import base64
from datetime import UTC, datetime

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from device_agent.formats.protocol import JoinRequest, join_text
from toolkit.coordinator.refusals import RefusalError, forbidden

CLOCK_SKEW_S = 300
"""How far a device's clock may be off; a copied request is good for as long."""
KEY_BYTES = 32


def check_possession(token: str, request: JoinRequest, now: float) -> None:
    """Raise RefusalError unless `request` was signed with its own key, for `token`, around `now`.

    `now` is in seconds since 1970. 422 for a key that is none, 403 for the rest.
    """
    key = _decoded(request.public_key)
    if len(key) != KEY_BYTES:
        raise RefusalError(
            422, "bad-key", f"public_key is {KEY_BYTES} bytes in base64; {len(key)} came."
        )
    text = join_text(token, request.public_key, request.timestamp)
    try:
        Ed25519PublicKey.from_public_bytes(key).verify(_decoded(request.signature), text)
    except InvalidSignature:
        raise forbidden(
            "The signature is not this key's over this token and time: sign the text that "
            "join_text describes.",
            "bad-signature",
        ) from None
    if abs(now - request.timestamp) > CLOCK_SKEW_S:
        raise forbidden(_skewed(request.timestamp, now), "skewed-clock")


def _decoded(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except ValueError:  # what is no base64, and what is not ASCII
        return b""


def _skewed(theirs: int, ours: float) -> str:
    return (
        f"The device's clock says {_shown(theirs)}, here it is {_shown(ours)}; more than "
        f"{CLOCK_SKEW_S // 60} minutes apart is refused. Set the device's clock (`timedatectl "
        "set-ntp true`), then join again."
    )


def _shown(seconds: float) -> str:
    try:
        return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M:%S} UTC"
    except (ValueError, OverflowError, OSError):
        return f"{seconds} s"
