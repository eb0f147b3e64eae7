"""What devices say of themselves, bounded and checked before it is kept."""

from typing import Any

import msgspec

from profiles.documents.bundle_profile import Machine
from profiles.documents.device_profile import DeviceProfile, decoded
from profiles.errors import InputError
from profiles.text_formatting import one_line
from toolkit.coordinator.refusals import RefusalError

NAME_LENGTH = 64
NOTE_LENGTH = 200
TROUBLE_LENGTH = 500
MACHINE_LENGTH = 4096
PROFILE_LENGTH = 1 << 17
"""Bytes: eight times what a calibration makes. Planning takes longer the more there is in one."""


def checked_name(given: str) -> str:
    """The device's name. Raises RefusalError (422)."""
    name = given.strip()
    if not 1 <= len(name) <= NAME_LENGTH or not name.isprintable():
        raise RefusalError(
            422, "bad-name", f"A device's name has 1 to {NAME_LENGTH} printable characters."
        )
    return name


def checked_machine(given: dict[str, str | int | None]) -> str:
    """The device's machine as JSON. Raises RefusalError (422)."""
    try:
        machine = msgspec.json.encode(msgspec.convert(given, Machine)).decode()
    except msgspec.ValidationError as error:
        raise RefusalError(
            422, "bad-machine", f"machine is no description of a machine: {error}."
        ) from None
    if len(machine) > MACHINE_LENGTH:
        raise RefusalError(422, "bad-machine", f"machine has more than {MACHINE_LENGTH} bytes.")
    return machine


def checked_profile(given: dict[str, Any]) -> DeviceProfile:
    """What the device can do. Raises RefusalError (422)."""
    content = msgspec.json.encode(given)
    if len(content) > PROFILE_LENGTH:
        raise RefusalError(422, "bad-profile", f"profile has more than {PROFILE_LENGTH} bytes.")
    try:
        return decoded(content)
    except InputError as error:
        raise RefusalError(422, "bad-profile", str(error)) from None


def shortened(text: str, most: int = NOTE_LENGTH) -> str:
    """What a device says, as one line of at most `most` characters that ends with a word."""
    line = one_line(text, most + 1)
    if len(line) <= most:
        return line
    cut = line[: most - 3]
    words = cut.rpartition(" ")[0]
    return (words if len(words) > most // 2 else cut) + "..."
