"""What the owner sets for `run`, on the command line or in the service's file."""

import json
import tomllib
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from device_agent.federation.owner_limits import OwnerLimits, QuietHours
from profiles.errors import InputError

TEXTS = {"data", "state", "quiet_hours"}
SWITCHES = {"only_when_charging", "log_json"}
MOST = 2**63
"""Numbers of an options file are below this."""


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """The options of `run` by their names; None, 0 and False are not set.

    `max_memory` is in bytes, `max_temperature` in degrees Celsius.
    """

    data: str
    state: Path | None = None
    threads: int = 0
    seed: int = 0
    validation: float = 0.0
    max_memory: int | None = None
    max_temperature: float | None = None
    nice: int = 0
    only_when_charging: bool = False
    quiet_hours: QuietHours | None = None
    log_json: bool = False

    @property
    def limits(self) -> OwnerLimits:
        """When to pause."""
        return OwnerLimits(self.max_temperature, self.only_when_charging, self.quiet_hours)

    def toml(self) -> str:
        """Those that are set, as the file that `read_options` reads."""
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        return "".join(f"{key} = {_toml(value)}\n" for key, value in given.items() if value)


def _toml(value: Any) -> str:
    return json.dumps(value if isinstance(value, bool | int | float) else str(value))


def read_options(path: Path) -> dict[str, Any]:
    """The options in the TOML file `path`, as they would be given on the command line.

    Raises InputError for a file that is none and a key that is no option.
    """
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}.") from None
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise InputError(f"{path} is no TOML file: {error}.") from None
    known = [field.name for field in fields(RunOptions)]
    strange = sorted(found.keys() - set(known))
    if strange:
        raise InputError(
            f"{path}: there is no option `{strange[0]}`; the options are {', '.join(known)}."
        )
    for key, value in found.items():
        _check(path, key, value)
    return found


def _check(path: Path, key: str, value: Any) -> None:
    """Raise InputError unless `value` is of the kind that the option `key` takes."""
    if key in TEXTS:
        fine, kind = isinstance(value, str) and "\0" not in value, "a text"
    elif key in SWITCHES:
        fine, kind = isinstance(value, bool), "true or false"
    else:
        numeric = isinstance(value, int | float) and not isinstance(value, bool)
        fine, kind = numeric and abs(value) < MOST, "a number"
        if key == "max_memory":
            fine, kind = fine or isinstance(value, str), "bytes, or a size like 256MB"
    if not fine:
        raise InputError(f"{path}: `{key}` is {value!r}; it must be {kind}.")
