"""Checks that a joining device has its private key and that its clock is right."""

from datetime import UTC, datetime

from device_agent.formats.protocol.joining import JoinRequest, join_text
from device_agent.formats.protocol.problems import SKEWED_CLOCK, USED_JOIN
from device_agent.formats.signed_work import from_base64, is_signed
from toolkit.coordinator.refusals import RefusalError, forbidden, unusable

CLOCK_SKEW_S = 300
"""How far a device's clock may be off, in seconds."""
VALID_S = 2 * CLOCK_SKEW_S
"""How long a request is accepted, and how long used requests are remembered, in seconds."""
KEY_BYTES = 32


def check_possession(token: str, request: JoinRequest, now: float) -> bytes:
    """Check that `request` for `token` was signed around `now`, with the key in the request.

    Returns the signed text.

    Args:
        token: The join token that came with the request.
        request: The request to check.
        now: The coordinator's time, in seconds since 1970.

    Raises:
        RefusalError: 422 for a malformed key, 403 for a wrong signature or clock.
    """
    key = from_base64(request.public_key)
    if len(key) != KEY_BYTES:
        raise unusable(
            "The field `public_key` must be {expected_bytes} bytes in base64; it has {bytes}.",
            code="join.bad-key",
            bytes=len(key),
            expected_bytes=KEY_BYTES,
        )
    text = join_text(token, request.public_key, request.timestamp)
    if not is_signed(request.public_key, request.signature, text):
        raise forbidden(
            "The signature does not match the key, the token and the time: sign the text that "
            "`join_text` describes.",
            code="join.bad-signature",
        )
    # After the signature, so that only the holder of the key learns this machine's time.
    if abs(now - request.timestamp) > CLOCK_SKEW_S:
        raise forbidden(
            "The device's clock says {device_time}, the coordinator's {coordinator_time}; they "
            "may differ by at most {minutes} minutes. Set the device's clock (`timedatectl set-ntp "
            "true`), then join again.",
            code=SKEWED_CLOCK,
            limit_s=CLOCK_SKEW_S,
            device_time=_time_text(request.timestamp),
            coordinator_time=_time_text(now),
            minutes=CLOCK_SKEW_S // 60,
        )
    return text


def used_join() -> RefusalError:
    """The refusal of a join request that was used before: somebody may have copied the request."""
    return forbidden(
        "This join request was used before. Wait a second, and sign a new one.", code=USED_JOIN
    )


def _time_text(seconds: float) -> str:
    """A time for people; a timestamp beyond any calendar is shown as a number."""
    try:
        return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M:%S} UTC"
    except (ValueError, OverflowError, OSError):
        return f"{seconds} s"
