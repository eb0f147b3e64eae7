"""Reads TOML files into typed tables. Each error is one sentence with the file and the key."""

import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from datetime import date, time
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator
from pydantic_core import ErrorDetails

from profiles.errors import InputError, SpecError
from profiles.text_formatting import did_you_mean
from toolkit.families import check_spec
from toolkit.submodels.spec import as_number

UNKNOWN = ("extra_forbidden", "unexpected_keyword_argument")
"""Pydantic's names for an unknown key, in a table and in a dataclass."""

WANTED = {
    **dict.fromkeys(("int_type", "int_parsing", "int_from_float"), "an integer"),
    **dict.fromkeys(("float_type", "float_parsing"), "a number"),
    **dict.fromkeys(("bool_type", "bool_parsing"), "true or false"),
    **dict.fromkeys(("string_type", "path_type"), "a string in quotes"),
    **dict.fromkeys(("model_type", "model_attributes_type", "dataclass_type"), "a table"),
    **dict.fromkeys(("tuple_type", "too_short"), "a list of one or more"),
}
"""The expected value of a key, by the type of pydantic's error."""
SIMPLE: dict[type, str] = {int: "an integer", float: "a number", bool: "true or false"}
"""The expected value of a key, by the type of its field."""
LONGEST = 80
"""A message shows at most this many characters of a value."""

KeyPath = tuple[int | str, ...]
"""The path of a key in a file."""
Values = Mapping[str, object]
"""Values of keys such as `training.epochs` or `devices.board.submodel`."""


class Table(BaseModel):
    """A TOML table. Any key that is not a field is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)


Kind = TypeVar("Kind", bound=Table)


class Tier(Table):
    """The spec of a submodel, and a name that the user gives to it, such as `phone`."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9-]+$", max_length=40)]
    submodel: str

    @field_validator("submodel")
    @classmethod
    def _is_spec(cls, text: str) -> str:
        return checked_spec(text)


def checked_spec(text: str) -> str:
    """The submodel spec `text` in its canonical form. Raises ValueError if it is malformed."""
    try:
        return str(check_spec(text))
    except SpecError as error:
        raise ValueError(str(error)) from None


def repeated(names: list[str]) -> str:
    """The names that occur more than once, separated by commas."""
    return ", ".join(sorted({name for name in names if names.count(name) > 1}))


def read_table(
    path: Path,
    kind: type[Kind],
    keys: Callable[[KeyPath], list[str]],
    values: Values | None = None,
) -> Kind:
    """Read a TOML file.

    Args:
        path: The file.
        kind: The type of its content.
        keys: A function that takes the path of a key and returns the known keys of its table.
        values: Values that replace values of the file, see `with_values`.

    Returns:
        The content.

    Raises:
        InputError: The file has a mistake. The message names the key and what is allowed.
    """
    content = with_values(path, read_toml(path), values or {})
    try:
        table = kind.model_validate(content)
    except ValidationError as error:
        raise _mistake(path, _first(error), keys) from None
    except InputError as error:
        known = {**error.values, "path": str(path), "problem": str(error)}
        raise InputError("{path}: {problem}", code=error.code, **known) from None
    for key, value, wanted in _converted(content, table):
        raise _wrong_type(path, _key(key), value, wanted)
    return table


def with_values(path: Path, content: dict[str, Any], values: Values) -> dict[str, Any]:
    """Copy the content of the file `path`, and replace or add `values` in the copy.

    Parts of a key are separated by dots. For a list of tables, such as `[[devices]]`, the next part
    of the key is the `name` of a table. Tables that are missing are added.

    Raises InputError if a part of a key does not name a table, or if a whole key names a table.

    Examples:
        >>> content = {"devices": [{"name": "board", "submodel": "full"}]}
        >>> values = {"devices.board.submodel": "width:0.5", "training.epochs": 5}
        >>> with_values(Path("fleet.toml"), content, values)
        {'devices': [{'name': 'board', 'submodel': 'width:0.5'}], 'training': {'epochs': 5}}
    """
    changed = deepcopy(content)
    for key, value in values.items():
        *tables, last = key.split(".")
        place: Any = changed
        for part in tables:
            place = _inner(path, key, place, part)
        if isinstance(place, dict):
            place[last] = value
            continue
        _inner(path, key, place, last)
        raise InputError(
            "{path}: `{key}` is a table; give one of its keys, such as `{key}.submodel`.",
            code="config.wrong-type",
            path=str(path),
            key=key,
        )
    return changed


def _inner(path: Path, key: str, place: Any, part: str) -> Any:
    """The table or list that `part` of `key` names in `place`."""
    if isinstance(place, dict):
        return place.setdefault(part, {})
    for table in place if isinstance(place, list) else []:
        if isinstance(table, dict) and table.get("name") == part:
            return table
    raise _no_table(path, key, part, place)


def _no_table(path: Path, key: str, part: str, place: object) -> InputError:
    tables = place if isinstance(place, list) else []
    known = [str(own["name"]) for own in tables if isinstance(own, dict) and "name" in own]
    names = f" The names here are {', '.join(known)}." if known else ""
    return InputError(
        "{path} has no `{key}`: nothing here is called {part!r}{did_you_mean}{names}",
        code="config.unknown-key",
        path=str(path),
        key=key,
        part=part,
        names=names,
        did_you_mean=did_you_mean(part, known),
    )


def read_toml(path: Path) -> dict[str, Any]:
    """The content of a TOML file. Raises InputError if it cannot be read or is not TOML."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(
            "{path} cannot be read: {reason}.",
            code="config.not-readable",
            path=str(path),
            reason=error.strerror,
        ) from None
    except UnicodeDecodeError:
        raise InputError(
            "{path} is not a TOML file: it is not UTF-8 text.",
            code="config.not-toml",
            path=str(path),
        ) from None
    except RecursionError:
        raise InputError(
            "{path} cannot be read as TOML: it is nested too deeply.",
            code="config.not-toml",
            path=str(path),
        ) from None
    except tomllib.TOMLDecodeError as error:
        raise InputError(
            "{path} is not a TOML file: {reason}.",
            code="config.not-toml",
            path=str(path),
            reason=str(error),
        ) from None


def _first(error: ValidationError) -> ErrorDetails:
    """The mistake to report. An unknown key often explains a missing one, so it comes first."""
    return min(error.errors(), key=lambda mistake: mistake["type"] not in UNKNOWN)


def _mistake(path: Path, error: ErrorDetails, keys: Callable[[KeyPath], list[str]]) -> InputError:
    """The InputError for an error of pydantic."""
    key = _key(error["loc"])
    known = keys(error["loc"])
    if error["type"] in UNKNOWN:
        return InputError(
            "{path}: unknown key `{key}`{did_you_mean} The keys here are {keys}.",
            code="config.unknown-key",
            path=str(path),
            key=key,
            keys=known,
            did_you_mean=did_you_mean(str(error["loc"][-1]), known),
        )
    if error["type"] == "missing":
        return InputError(
            "{path}: the key `{key}` is missing. The keys here are {known}.",
            code="config.missing-key",
            path=str(path),
            key=key,
            known=", ".join(known),
        )
    if error["type"] in WANTED:
        return _wrong_type(path, key, error["input"], WANTED[error["type"]])
    problem = error["msg"].removeprefix("Value error, ").rstrip(".")
    if error["type"] == "literal_error":
        choices = re.findall(r"'([^']*)'", error["ctx"]["expected"])
        problem += did_you_mean(str(error["input"]), choices)
    # Do not show a table's values, because the problem names its keys.
    shown = "" if isinstance(error["input"], dict) else f" is {_shown(error['input'])}"
    value = f"`{key}`{shown}: " if key else ""
    return InputError(
        "{path}: {entry}{problem}",
        code="config.bad-value",
        path=str(path),
        key=key,
        entry=value,
        problem=problem if problem.endswith((".", "?")) else f"{problem}.",
    )


def _wrong_type(path: Path, key: str, value: object, wanted: str) -> InputError:
    return InputError(
        "{path}: `{key}` is {given}; it must be {wanted}.",
        code="config.wrong-type",
        path=str(path),
        key=key,
        given=_shown(value),
        wanted=wanted,
    )


def _key(path: KeyPath) -> str:
    """The path of a key as text, for example `devices[0].name`."""
    parts = (f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return "".join(parts).removeprefix(".")


def _converted(
    content: object, read: object, path: KeyPath = ()
) -> Iterator[tuple[KeyPath, object, str]]:
    """Yield each value that pydantic converted to a number or truth value, and the type expected.

    Pydantic reads "3" as 3 and true as 1. In TOML a value has a type, so these are mistakes. A size
    such as "256MB" or a time span is meant to be text, so it is not a mistake.
    """
    if isinstance(read, dict):
        return  # a table with any keys is taken as it is
    if isinstance(content, dict):
        for key, value in content.items():
            yield from _converted(value, getattr(read, key), (*path, key))
    elif isinstance(content, list) and not isinstance(read, str):  # a list may become a text
        assert isinstance(read, tuple)
        for number, (value, item) in enumerate(zip(content, read, strict=True)):
            yield from _converted(value, item, (*path, number))
    elif type(read) in SIMPLE and type(content) is not type(read):
        is_text = isinstance(content, str) and as_number(content) is None
        has_unit = is_text and not isinstance(read, bool)
        if not has_unit and (type(content), type(read)) != (int, float):
            yield path, content, SIMPLE[type(read)]


def _shown(value: object) -> str:
    """`value` in a message, in TOML's notation."""
    if isinstance(value, dict):
        return "a table"
    text = str(value).lower() if isinstance(value, bool | date | time) else repr(value)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."
