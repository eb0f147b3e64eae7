"""Prints the join tokens of `edgetailor tokens`."""

import io
import os
import sys
from collections.abc import Iterable
from datetime import UTC, datetime

import click
import segno

from device_agent.formats.atomic_files import shown
from profiles.text_formatting import counted
from toolkit.coordinator.database.join_tokens import JoinTokenState
from toolkit.coordinator.join_links import JoinToken

WHITE_ON_BLACK = "\x1b[97;40m{}\x1b[0m"
"""Colours of a QR code. They are fixed, so the code is readable on a light background, too."""


def show_tokens(tokens: Iterable[JoinToken], with_codes: bool) -> None:
    """Print each token with its link, and with the QR code of the link if `with_codes`."""
    for token in tokens:
        taken = _taken(token.joined, token.count)
        click.echo(f"{token.kind}: {token.submodel}, {taken}, until {token.expires}")
        click.echo(f"  {shown(token.file)}")
        show_link(token.link, with_codes)


def show_states(tokens: Iterable[JoinTokenState]) -> None:
    """Print what each token allows, without its link."""
    for token in tokens:
        until = f"until {datetime.fromtimestamp(token.expires, UTC):%Y-%m-%d}"
        until = until if token.revoked is None else "revoked"
        if token.number is None:
            click.echo(f"{token.kind}: {_taken(token.joined, token.count)}, {until}")
            continue
        of = "" if token.count is None else f" of {token.count}"
        joined = f"{token.joined}{of} joined"
        click.echo(f"join token {token.number}: {token.kind}, {joined}, {until}")


def show_link(link: str, with_code: bool) -> None:
    """Print a link, and its QR code if `with_code`."""
    click.echo(f"  {link}")
    if with_code:
        click.echo(qr_code(link, colours=sys.stdout.isatty() and not os.getenv("NO_COLOR")))


def _taken(taken: int, places: int | None) -> str:
    if places is None:
        return f"{counted(taken, 'place')} taken, any number free"
    return f"{taken} of {counted(places, 'place')} taken"


def qr_code(text: str, colours: bool = False) -> str:
    """Write `text` as a QR code, in characters that are half a square high.

    Only the light squares are drawn.
    """
    drawn = io.StringIO()
    segno.make_qr(text, error="l").terminal(drawn, compact=True)
    lines = drawn.getvalue().splitlines()
    return "\n".join(WHITE_ON_BLACK.format(line) if colours else line for line in lines)
