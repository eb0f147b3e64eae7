"""Types of the values in the federation's file: sizes, durations, lines, addresses, choices."""

from collections.abc import Callable
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field, PlainValidator
from urllib3.exceptions import LocationParseError
from urllib3.util import parse_url

from device_agent.data.data_functions import is_reference
from profiles.errors import InputError
from profiles.units import parse_bytes, parse_duration

Positive = Annotated[int, Field(ge=1)]
Speed = Annotated[float, Field(gt=0, allow_inf_nan=False)]
SELECTIONS = ("uniform", "data-size", "oldest")
"""The values of `selection` that are not functions of the user."""


def _read_by(parse: Callable[[str], float]) -> BeforeValidator:
    """Read a number with its unit. `parse` refuses a bare number: its unit would be a guess."""

    def read(given: object) -> float:
        try:
            return parse(str(given))
        except InputError as error:
            raise ValueError(str(error)) from None

    return BeforeValidator(read)


Size = Annotated[int, Field(ge=1), _read_by(parse_bytes)]
"""Bytes, written like "256MB"."""
Span = Annotated[float, Field(gt=0), _read_by(parse_duration)]
"""Seconds, written like "7d"."""


def whole_or(*words: str) -> PlainValidator:
    """Accept a whole number from 1, or one of `words`."""
    last = f'"{words[-1]}"'
    wanted = ", ".join(["a whole number from 1", *(f'"{word}"' for word in words[:-1])])

    def check(given: object) -> object:
        whole = isinstance(given, int) and not isinstance(given, bool) and given >= 1
        if whole or given in words:
            return given
        raise ValueError(f"it must be {wanted} or {last}")

    return PlainValidator(check)


def _is_one_line(text: str) -> str:
    if not text.isprintable():
        raise ValueError("it must be one line of printable characters")
    return text


def _is_web_address(text: str) -> str:
    try:
        known = parse_url(text)
    except LocationParseError:
        known = parse_url("")
    if known.scheme not in ("http", "https") or not known.host or not text.isprintable():
        raise ValueError("it must start with https:// or http://, followed by a host")
    return text


def _is_selection(text: str) -> str:
    if text not in SELECTIONS and not is_reference(text):
        names = ", ".join(f'"{name}"' for name in SELECTIONS)
        raise ValueError(f'it must be one of {names}, or a function "module:callable"')
    return text


def _is_number_or_share(given: object) -> int | float:
    if isinstance(given, bool) or not isinstance(given, int | float):
        raise ValueError("it must be a whole number from 1, or a share of the members like 0.1")
    if not (given >= 1 if isinstance(given, int) else 0 < given <= 1):
        raise ValueError(
            "it must be a whole number from 1, or a share of the members above 0 and up to 1.0"
        )
    return given


WebAddress = Annotated[str, AfterValidator(_is_web_address)]
"""An address that starts with http:// or https://."""
Selection = Annotated[str, AfterValidator(_is_selection)]
"""A policy of selection: one of SELECTIONS, or a function "module:callable"."""
NumberOrShare = Annotated[int | float, PlainValidator(_is_number_or_share)]
"""A whole number of members from 1, or a share of them."""
Line = Annotated[str, Field(max_length=500), AfterValidator(_is_one_line)]
"""One line of text for the owners of devices."""
