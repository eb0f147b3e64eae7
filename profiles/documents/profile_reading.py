"""Reading profile documents, and telling whether two are of one kind."""

from collections.abc import Callable
from pathlib import Path

import msgspec

from profiles.documents.bundle_profile import PROFILE_VERSION, Machine, Profile
from profiles.errors import InputError
from profiles.json_decoding import decode_json

AGAIN = "Measure the bundle again with `edgetailor-agent profile BUNDLE --out FILE`."
HARDWARE = ("architecture", "processor", "cpu_count", "model")
"""What stays when a machine's software is brought up to date. The kernel's count of its memory
does not."""


def encode_profile(profile: Profile) -> bytes:
    """The document, indented for reading."""
    return msgspec.json.format(msgspec.json.encode(profile), indent=1) + b"\n"


def read_profile(path: Path) -> Profile:
    """The profile in the file at `path`. Raises InputError where it holds none that can be read."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise InputError(
            f"{path} cannot be read ({error.strerror}): give a file that `edgetailor-agent profile "
            "BUNDLE --out FILE` wrote."
        ) from None
    return decode_profile(data, str(path))


def decode_profile(data: bytes, origin: str) -> Profile:
    """The profile in `data`. Raises InputError for a damaged, newer or older document."""
    try:
        version = decode_json(data, dict[str, object]).get("version")
        if not isinstance(version, int):
            raise InputError(f"{origin} has no profile version: it is no profile. {AGAIN}")
        if version > PROFILE_VERSION:
            raise InputError(
                f"{origin} has profile version {version}; this program reads {PROFILE_VERSION}. "
                "Install the version of edgetailor that wrote it, or a later one."
            )
        if version < PROFILE_VERSION:
            raise InputError(
                f"{origin} has profile version {version}, from an earlier edgetailor; this program "
                f"reads {PROFILE_VERSION}. {AGAIN}"
            )
        return decode_json(data, Profile)
    except msgspec.MsgspecError as error:
        raise InputError(f"{origin} is damaged or no profile: {error}. {AGAIN}") from None


def machine_differences(one: Machine, other: Machine) -> list[str]:
    """What tells two machines, or their software, apart; empty where nothing does."""
    return _differences(one, other, one.__struct_fields__)


def same_hardware(one: Machine, other: Machine) -> bool:
    """Whether both may be the same machine, before and after an update of its software."""
    return not _differences(one, other, HARDWARE)


def method_differences(one: Profile, other: Profile) -> list[str]:
    """Settings that make the figures of two profiles unlike; empty where nothing does."""
    getters: dict[str, Callable[[Profile], object]] = {
        "batch size": lambda profile: profile.batch_size,
        "threads": lambda profile: profile.method.threads,
        "arena": lambda profile: profile.method.arena,
        "source": lambda profile: profile.method.source,
    }
    return [
        _difference(name, get(one), get(other))
        for name, get in getters.items()
        if get(one) != get(other)
    ]


def _differences(one: Machine, other: Machine, names: tuple[str, ...]) -> list[str]:
    pairs = [(name.replace("_", " "), getattr(one, name), getattr(other, name)) for name in names]
    return [_difference(name, a, b) for name, a, b in pairs if a != b]


def _difference(name: str, one: object, other: object) -> str:
    return f"{name} ({one} and {other})"
