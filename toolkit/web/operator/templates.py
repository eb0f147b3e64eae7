"""Fills the templates of the operator's page. Every value is escaped."""

from datetime import UTC, datetime
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from profiles.text_formatting import (
    counted,
    format_bytes,
    format_duration,
    format_seconds,
    visible,
)

FOLDER = Path(__file__).parent / "templates"


def _moment(at: float) -> str:
    return f"{datetime.fromtimestamp(at, UTC):%Y-%m-%d %H:%M}"


def _finished(value: object) -> object:
    """A value as a page shows it."""
    return visible(value) if type(value) is str else value


_environment = Environment(
    loader=FileSystemLoader(FOLDER),
    autoescape=True,
    undefined=StrictUndefined,
    finalize=_finished,
    trim_blocks=True,
    lstrip_blocks=True,
)
_environment.filters |= {
    "bytes": format_bytes,
    "counted": counted,
    "duration": format_duration,
    "moment": _moment,
    "seconds": format_seconds,
}


def filled(template: str, **values: object) -> str:
    """The template of this name with `values`.

    Raises jinja2.UndefinedError if a value is missing.

    Examples:
        >>> "&lt;b&gt;" in filled("not_built.html", how_to_build="<b>")
        True
    """
    return _environment.get_template(template).render(values)
