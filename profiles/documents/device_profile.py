"""A device as the planner sees it: its hardware and its calibration.

A built-in profile is a TOML file of published figures with their sources. The profile of a real
device is the JSON file that `edgetailor-agent calibrate --out` or `bench --out` writes. Owners can
contribute such a JSON file, which is then next to the TOML file. A profile leaves out figures that
are not known.
"""

import datetime
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from profiles.documents.bundle_profile import MOST, Machine, Profile, Text
from profiles.documents.calibration_record import CALIBRATION_VERSION, Bytes, Calibration, Size
from profiles.errors import InputError
from profiles.json_decoding import decode_json
from profiles.text_formatting import did_you_mean

DEVICE_VERSION = 1
BUILT_IN = Path(__file__).parents[1] / "devices"


class DeviceProfile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The known figures of a device, in bytes, bits per second and hertz.

    `load_device` returns a profile, and `plan` takes a profile. To describe your own device, run
    `edgetailor-agent calibrate` there instead of filling in the fields.

    `sources` gives the source of each figure by its name. `date` (YYYY-MM-DD) is the day of the
    measurement or look-up. Only the profile of a real device has `machine` and `calibration`.
    `bench --out` adds `versions` (of the agent and of all installed runtimes, by package) and
    `trainings`. `trainings` are the profiles of the measured bundles, one for each bundle and
    runtime.
    """

    version: int = DEVICE_VERSION
    name: Text
    date: str
    title: Text | None = None
    processor: Text | None = None
    cores: Size | None = None
    clock_hz: Size | None = None
    memory_bytes: Size | None = None
    memory_available_bytes: Size | None = None
    storage_free_bytes: Bytes | None = None
    down_bits_per_s: Size | None = None
    up_bits_per_s: Size | None = None
    machine: Machine | None = None
    calibration: Calibration | None = None
    sources: dict[Text, Text] = {}
    versions: dict[Text, Text] | UnsetType = UNSET
    trainings: Annotated[tuple[Profile, ...], Meta(max_length=MOST)] | UnsetType = UNSET

    def age_days(self, today: datetime.date) -> int:
        """Days since the measurement or look-up."""
        return (today - datetime.date.fromisoformat(self.date)).days


FIGURES = (
    *("processor", "cores", "clock_hz", "memory_bytes", "memory_available_bytes"),
    *("storage_free_bytes", "down_bits_per_s", "up_bits_per_s"),
)
"""The fields that need a source in a built-in profile."""
MEASURED = "calibration"
"""The key in `sources` with the origin of a built-in profile's measurements."""
OF_THE_KIND = ("cores", "memory_bytes", "memory_available_bytes")
"""If one of these figures is not published, it is taken from a measured device of the same kind."""


def load_device(reference: str) -> DeviceProfile:
    """Load a device profile.

    Use this to look at a device's figures, or to change figures before `plan`. For all other
    purposes, pass the name or the file to `plan`.

    Args:
        reference: A file (.json or .toml), or the name of a built-in profile.

    Returns:
        The profile.

    Raises:
        InputError: There is no such file or profile, or this version cannot read it.

    Examples:
        >>> load_device("raspberry-pi-4-2gb").cores
        4
    """
    path = Path(reference)
    # A file without these suffixes takes precedence over a built-in profile of the same name.
    if path.suffix not in (".json", ".toml") and not path.exists():
        path = BUILT_IN / f"{reference}.toml"
        if not path.exists():
            raise InputError(
                "There is no device profile {device!r}{did_you_mean} Give a file that "
                "`edgetailor-agent calibrate --out FILE` wrote, or one of {known}.",
                code="profile.unknown-device",
                device=reference,
                did_you_mean=did_you_mean(reference, built_in(), 3),
                known=list(built_in()),
            )
        return built_in_profile(path)
    return read_device(path)


def built_in_profile(path: Path) -> DeviceProfile:
    """Read the built-in profile `path` (TOML), and the measurements in the JSON file next to it."""
    published, sent = read_device(path), path.with_suffix(".json")
    if not sent.exists():
        return published
    device = read_device(sent)
    figures = {
        name: getattr(device, name)
        for name in OF_THE_KIND
        if getattr(published, name) is None and getattr(device, name) is not None
    }
    origin = dict.fromkeys(figures, published.sources[MEASURED])
    return msgspec.structs.replace(
        published,
        date=device.date,
        machine=device.machine,
        calibration=device.calibration,
        versions=device.versions,
        trainings=device.trainings,
        sources=published.sources | origin,
        **figures,
    )


def read_device(path: Path) -> DeviceProfile:
    """Read the device profile in a file. `load_device` describes the files."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise InputError(
            "{path} cannot be read: {reason}.",
            code="profile.unreadable",
            path=str(path),
            reason=error.strerror,
        ) from None
    except ValueError as error:  # a null byte in the path
        raise InputError(
            "{path!r} cannot be read: {reason}. Give the path of a file.",
            code="profile.unreadable",
            path=str(path),
            reason=str(error),
        ) from None
    return decoded(content, path, "toml" if path.suffix == ".toml" else "json")


def decoded(
    content: bytes, origin: Path | str = "The data", form: Literal["json", "toml"] = "json"
) -> DeviceProfile:
    """Decode a device profile. Raises InputError with `origin` in its message."""
    try:
        if form == "json":
            device = decode_json(content, DeviceProfile)
        else:
            device = msgspec.toml.decode(content, type=DeviceProfile)
        datetime.date.fromisoformat(device.date)  # msgspec only checks that it is text
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        deep = isinstance(error, RecursionError)
        reason = "it is nested too deeply" if deep else str(error)
        raise InputError(
            "{origin} is not a device profile: {reason}. Write one with `edgetailor-agent "
            "calibrate --out FILE`.",
            code="profile.malformed",
            origin=origin,
            reason=reason,
        ) from None
    for version, known, what in (
        (device.version, DEVICE_VERSION, "device profile"),
        (
            device.calibration.version if device.calibration else CALIBRATION_VERSION,
            CALIBRATION_VERSION,
            "calibration",
        ),
    ):
        if version != known:
            raise InputError(
                "{origin} contains a {document} of version {found}; this program reads "
                "{supported}. Calibrate the device again with the same version of edgetailor.",
                code="profile.wrong-version",
                document=what,
                found=version,
                supported=known,
                origin=origin,
            )
    return device


def built_in() -> list[str]:
    """Names of the built-in profiles, sorted."""
    return sorted(path.stem for path in BUILT_IN.glob("*.toml"))
