"""Reading TOML files into typed tables; every mistake is one sentence with file and key."""

import tomllib
from collections.abc import Callable
from datetime import date, time
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator
from pydantic_core import ErrorDetails

from profiles.errors import InputError, SpecError
from toolkit.families import family_named
from toolkit.submodels.spec import parse_spec

UNKNOWN = ("extra_forbidden", "unexpected_keyword_argument")
"""What pydantic calls a key that is not known, in a table and in a dataclass."""

WANTED = {
    **dict.fromkeys(("int_type", "int_parsing", "int_from_float"), "a whole number"),
    **dict.fromkeys(("float_type", "float_parsing"), "a number"),
    **dict.fromkeys(("bool_type", "bool_parsing"), "true or false"),
    **dict.fromkeys(("string_type", "path_type"), "a text in quotes"),
    **dict.fromkeys(("model_type", "model_attributes_type", "dataclass_type"), "a table"),
    **dict.fromkeys(("tuple_type", "too_short"), "a list of one or more"),
}
"""What a key of the wrong type must be, by pydantic's names of its complaints."""
LONGEST = 80
"""So many characters of a value are repeated in a sentence."""

Place = tuple[int | str, ...]
"""Where in a file a key is."""


class Table(BaseModel):
    """A table without keys beyond its fields."""

    model_config = ConfigDict(extra="forbid", frozen=True)


Kind = TypeVar("Kind", bound=Table)


class Tier(Table):
    """A name for a submodel."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9-]+$", max_length=40)]
    submodel: str

    @field_validator("submodel")
    @classmethod
    def _is_spec(cls, text: str) -> str:
        return checked_spec(text)


def checked_spec(text: str) -> str:
    """The submodel spec `text` in its usual form. Raises ValueError where it is none."""
    try:
        spec = parse_spec(text)
        family_named(spec.family)
        return str(spec)
    except SpecError as error:
        raise ValueError(str(error)) from None


def repeated(names: list[str]) -> str:
    """Those of `names` that are there more than once, for a person."""
    return ", ".join(sorted({name for name in names if names.count(name) > 1}))


def read_table(path: Path, kind: type[Kind], keys: Callable[[Place], list[str]]) -> Kind:
    """The file at `path` as a `kind`; `keys` are those known at a place.

    Raises InputError, one sentence that names file, key, what came and what is allowed.
    """
    content = _read(path)
    try:
        return kind.model_validate(content)
    except ValidationError as error:
        raise InputError(_sentence(path, _first(error), keys)) from None
    except InputError as error:
        raise InputError(f"{path}: {error}") from None


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise InputError(f"{path} is no TOML file: it is not UTF-8 text.") from None
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"{path} is no TOML file: {error}.") from None


def _first(error: ValidationError) -> ErrorDetails:
    """The mistake to name; a key that is not known explains one that is missing."""
    return min(error.errors(), key=lambda mistake: mistake["type"] not in UNKNOWN)


def _sentence(path: Path, error: ErrorDetails, keys: Callable[[Place], list[str]]) -> str:
    key = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in error["loc"])
    key = key.removeprefix(".")
    known = f"the keys here are {', '.join(keys(error['loc']))}"
    if error["type"] in UNKNOWN:
        return f"{path}: there is no key `{key}`; {known}."
    if error["type"] == "missing":
        return f"{path}: the key `{key}` is missing; {known}."
    if error["type"] in WANTED:
        return f"{path}: `{key}` is {_shown(error['input'])}; it must be {WANTED[error['type']]}."
    problem = error["msg"].removeprefix("Value error, ").rstrip(".")
    if not key:
        return f"{path}: {problem}."
    return f"{path}: `{key}` is {_shown(error['input'])}: {problem}."


def _shown(value: object) -> str:
    """`value` for a person, as TOML has it where Python writes it otherwise."""
    if isinstance(value, dict):
        return "a table"
    text = str(value).lower() if isinstance(value, bool | date | time) else repr(value)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."
