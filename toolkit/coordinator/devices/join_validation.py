"""Checks the data that a device sends about itself, before the coordinator stores them."""

from typing import Any

import msgspec

from profiles.documents.bundle_profile import Machine
from profiles.documents.device_profile import DeviceProfile, decoded
from profiles.errors import InputError
from profiles.text_formatting import one_line
from toolkit.coordinator.refusals import unusable

NAME_LENGTH = 64
NOTE_LENGTH = 200
TROUBLE_LENGTH = 500
MACHINE_LENGTH = 4096
PROFILE_LENGTH = 1 << 17
"""The most bytes of a profile: eight times a calibration's bytes. Large profiles slow planning."""


def check_name(name: str) -> str:
    """Strip and return the device's name. Raises RefusalError (422) if it is not allowed."""
    name = name.strip()
    if not 1 <= len(name) <= NAME_LENGTH or not name.isprintable():
        raise unusable(
            "A device's name must have 1 to {limit} printable characters.",
            code="join.bad-name",
            limit=NAME_LENGTH,
        )
    return name


def check_machine(fields: dict[str, str | int | None]) -> str:
    """Encode the device's machine as JSON. Raises RefusalError (422) if invalid or long."""
    try:
        machine = msgspec.json.encode(msgspec.convert(fields, Machine)).decode()
    except msgspec.ValidationError as error:
        raise unusable(
            "The field `machine` of the request is not valid: {reason}.",
            code="join.bad-machine",
            reason=str(error),
        ) from None
    if len(machine) > MACHINE_LENGTH:
        raise unusable(
            "The field `machine` must have at most {limit_bytes} bytes; it has {found_bytes}.",
            code="join.bad-machine",
            limit_bytes=MACHINE_LENGTH,
            found_bytes=len(machine),
        )
    return machine


def check_profile(fields: dict[str, Any]) -> DeviceProfile:
    """Decode the device's profile. Raises RefusalError (422) if it is invalid or too long."""
    content = msgspec.json.encode(fields)
    if len(content) > PROFILE_LENGTH:
        raise unusable(
            "The field `profile` must have at most {limit_bytes} bytes; it has {found_bytes}.",
            code="join.bad-profile",
            limit_bytes=PROFILE_LENGTH,
            found_bytes=len(content),
        )
    try:
        return decoded(content)
    except InputError as error:
        raise unusable("{problem}", code="join.bad-profile", problem=str(error)) from None


def shortened(text: str, most: int = NOTE_LENGTH) -> str:
    """Return `text` as one line of at most `most` characters, cut between words if possible."""
    line = one_line(text, most + 1)
    if len(line) <= most:
        return line
    cut = line[: most - 3]
    words = cut.rpartition(" ")[0]
    return (words if len(words) > most // 2 else cut) + "..."
