"""Reads profile documents, and compares their machines and methods."""

from collections.abc import Callable
from pathlib import Path

import msgspec

from profiles.documents.bundle_profile import PROFILE_VERSION, Machine, Profile
from profiles.errors import InputError
from profiles.json_decoding import decode_json

AGAIN = "Measure the bundle again with `edgetailor-agent profile BUNDLE --out FILE`."
HARDWARE = ("architecture", "processor", "cpu_count", "model")
"""Fields that a software update does not change. The memory that Linux reports may change."""


def encode_profile(profile: Profile) -> bytes:
    """Encode the profile as indented JSON."""
    return msgspec.json.format(msgspec.json.encode(profile), indent=1) + b"\n"


def read_profile(path: Path) -> Profile:
    """Read the profile in the file at `path`. Raises InputError if this is not possible."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise InputError(
            "{path} cannot be read: {reason}. Give a file that `edgetailor-agent profile BUNDLE "
            "--out FILE` wrote.",
            code="profile.unreadable",
            path=str(path),
            reason=error.strerror,
        ) from None
    return decode_profile(data, str(path))


def decode_profile(data: bytes, origin: str) -> Profile:
    """Decode a profile. Raises InputError for a damaged, newer or older document."""
    try:
        # Read the version first: another version may have fields that this version refuses.
        document = decode_json(data, dict[str, object])
        if "calibration" in document:
            raise InputError(
                "{origin} is the profile of a device, not of a bundle. Give a file that "
                "`edgetailor-agent profile BUNDLE --out FILE` wrote.",
                code="profile.malformed",
                origin=origin,
            )
        version = document.get("version")
        if not isinstance(version, int):
            raise InputError(
                "{origin} has no profile version, so it is not a profile. {remedy}",
                code="profile.malformed",
                origin=origin,
                remedy=AGAIN,
            )
        if {"round", "rounds"} & {*document}:  # as `edgetailor rounds --json` writes
            raise InputError(
                "{origin} is neither a profile nor an evaluation. Give a file that "
                "`edgetailor-agent profile BUNDLE --out FILE` or `edgetailor evaluate SOURCE "
                "--json` wrote.",
                code="profile.malformed",
                origin=origin,
            )
        if version > PROFILE_VERSION:
            raise InputError(
                "{origin} has profile version {found}; this program reads {supported}. Install "
                "the version of edgetailor that wrote it, or a later one.",
                code="profile.wrong-version",
                document="profile",
                found=version,
                supported=PROFILE_VERSION,
                origin=origin,
            )
        if version < PROFILE_VERSION:
            raise InputError(
                "{origin} has profile version {found}, from an earlier edgetailor; this program "
                "reads {supported}. {remedy}",
                code="profile.wrong-version",
                document="profile",
                found=version,
                supported=PROFILE_VERSION,
                origin=origin,
                remedy=AGAIN,
            )
        return decode_json(data, Profile)
    except msgspec.MsgspecError as error:
        raise InputError(
            "{origin} is damaged or not a profile: {reason}. {remedy}",
            code="profile.malformed",
            origin=origin,
            reason=str(error),
            remedy=AGAIN,
        ) from None


def machine_differences(machine: Machine, other: Machine) -> list[str]:
    """The differences between two machines and their software; empty if there are none."""
    return _differences(machine, other, machine.__struct_fields__)


def same_hardware(machine: Machine, other: Machine) -> bool:
    """Whether two machines have equal values in all fields that no software update can change.

    If they agree, both may describe one machine, before and after an update.
    """
    return not _differences(machine, other, HARDWARE)


def method_differences(first: Profile, other: Profile) -> list[str]:
    """The settings in which two measurements differ; empty if they can be compared."""
    getters: dict[str, Callable[[Profile], object]] = {
        "batch size": lambda profile: profile.batch_size,
        "threads": lambda profile: profile.method.threads,
        "arena": lambda profile: profile.method.arena,
        "source": lambda profile: profile.method.source,
    }
    return [
        _difference(name, get(first), get(other))
        for name, get in getters.items()
        if get(first) != get(other)
    ]


def _differences(machine: Machine, other: Machine, names: tuple[str, ...]) -> list[str]:
    pairs = [
        (name.replace("_", " "), getattr(machine, name), getattr(other, name)) for name in names
    ]
    return [_difference(name, a, b) for name, a, b in pairs if a != b]


def _difference(name: str, value: object, other: object) -> str:
    return f"{name} ({value} and {other})"
