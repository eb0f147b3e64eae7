"""How a coordinator tells devices that it has replaced its key."""

from dataclasses import dataclass

from device_agent.formats.manifest import Count


@dataclass(frozen=True, kw_only=True)
class KeyChange:
    """The coordinator has replaced its key `old` by `new`.

    Both are public keys: 32 raw bytes of Ed25519 in base64. `made` is the time of the change.
    Devices and join tokens with the old key may change to the new key until the time `until`. Both
    times are in seconds since 1970. `signature` is a signature of `signed_work.key_change_text`
    with the old key, in base64.
    """

    old: str
    new: str
    made: Count
    until: Count
    signature: str = ""


@dataclass(frozen=True, kw_only=True)
class KeyChanges:
    """All changes of the coordinator's key, the oldest first. Expired changes are included."""

    changes: list[KeyChange]
