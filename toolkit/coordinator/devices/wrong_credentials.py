"""Refusals of credentials that are good for something else: they say for what."""

from collections.abc import Sequence

from device_agent.formats.protocol import JOIN_TOKEN, NOT_AUTHORISED
from profiles.text_formatting import counted
from toolkit.coordinator.federation_config import DeviceKind
from toolkit.coordinator.refusals import RefusalError, forbidden
from toolkit.coordinator.storage.device_registry import TOKEN_UNKNOWN, Registry


def operator_joins(kinds: Sequence[DeviceKind]) -> RefusalError:
    """The refusal of the operator's token at a join. It names the tokens of `kinds`."""
    tokens = " or ".join(f"tokens/{kind.name}.token" for kind in kinds)
    return forbidden(
        "This is the operator's token, which only reads the status. Join with a join token: "
        "{tokens} in the coordinator's state folder.",
        code="join.operator-token",
        tokens=tokens,
    )


def unknown_secret(secret: str, registry: Registry) -> RefusalError:
    """Why no device has `secret`. If it is a join token, the answer says what it is for."""
    try:
        kind, places = registry.free_places(secret)
    except RefusalError as refusal:
        if refusal.code != TOKEN_UNKNOWN:
            return refusal
        return RefusalError(
            "No device here has this secret: join again with a token of this coordinator "
            "(`edgetailor-agent join URL --token-file FILE --replace`).",
            status=401,
            code=NOT_AUTHORISED,
        )
    devices = "any number of devices" if places is None else counted(places, "device")
    return RefusalError(
        "This is a join token, good for {devices} of kind {kind!r}.",
        status=401,
        code=JOIN_TOKEN,
        kind=kind,
        places=places,
        devices=devices,
    )
