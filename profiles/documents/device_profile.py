"""A device as the planner sees it: what it has, and what its calibration found.

A built-in profile is a TOML file of published figures, each with its source; a device's own is the
JSON file that `edgetailor-agent calibrate --out` writes. What neither measured nor published is
known is absent.
"""

import datetime
from pathlib import Path
from typing import Literal

import msgspec

from profiles.documents.bundle_profile import Machine, Text
from profiles.documents.calibration_record import CALIBRATION_VERSION, Bytes, Calibration, Size
from profiles.errors import InputError
from profiles.json_decoding import decode_json

DEVICE_VERSION = 1
BUILT_IN = Path(__file__).parents[1] / "devices"
STALE_DAYS = 90
"""After this a calibration is doubted: systems are updated, and dust gathers."""


class DeviceProfile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is known of a device; bytes, bits a second, hertz.

    `sources` says for each figure by its name where it is from. `date` (YYYY-MM-DD) is when it was
    measured or looked up. A built-in profile has no `machine` and no `calibration`.
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

    def age_days(self, today: datetime.date) -> int:
        """How long ago it was measured or looked up."""
        return (today - datetime.date.fromisoformat(self.date)).days


FIGURES = (
    *("processor", "cores", "clock_hz", "memory_bytes", "memory_available_bytes"),
    *("storage_free_bytes", "down_bits_per_s", "up_bits_per_s"),
)
"""Fields that need a source."""


def load_device(reference: str) -> DeviceProfile:
    """The profile in the file `reference`, or the built-in one of that name.

    Raises InputError where there is neither, or where it is no profile of this version.
    """
    path = Path(reference)
    if path.suffix not in (".json", ".toml") and not path.exists():
        path = BUILT_IN / f"{reference}.toml"
        if not path.exists():
            raise InputError(
                f"There is no device profile {reference!r}: give a file that `edgetailor-agent "
                f"calibrate --out FILE` wrote, or one of {', '.join(built_in())}."
            )
    try:
        content = path.read_bytes()
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}.") from None
    return decoded(content, path, "toml" if path.suffix == ".toml" else "json")


def decoded(
    content: bytes, origin: Path | str = "What came", form: Literal["json", "toml"] = "json"
) -> DeviceProfile:
    """The profile that `content` of `origin` is. Raises InputError where it is none."""
    try:
        if form == "json":
            found = decode_json(content, DeviceProfile)
        else:
            found = msgspec.toml.decode(content, type=DeviceProfile)
        datetime.date.fromisoformat(found.date)
    except (msgspec.MsgspecError, ValueError) as error:
        raise InputError(
            f"{origin} is no device profile: {error}. Write one with "
            "`edgetailor-agent calibrate --out FILE`."
        ) from None
    for version, known, what in (
        (found.version, DEVICE_VERSION, "device profile"),
        (
            found.calibration.version if found.calibration else CALIBRATION_VERSION,
            CALIBRATION_VERSION,
            "calibration",
        ),
    ):
        if version != known:
            raise InputError(
                f"{origin} holds a {what} of version {version}; this program reads {known}. "
                "Calibrate the device again with the same version of edgetailor."
            )
    return found


def built_in() -> list[str]:
    """Names of the built-in profiles."""
    return sorted(path.stem for path in BUILT_IN.glob("*.toml"))
