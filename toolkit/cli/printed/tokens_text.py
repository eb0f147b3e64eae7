"""Prints the join tokens of `edgetailor tokens`."""

import io
import os
import sys
from collections.abc import Iterable

import click
import segno

from device_agent.formats.atomic_files import shown
from profiles.text_formatting import counted
from toolkit.coordinator.join_links import JoinToken

WHITE_ON_BLACK = "\x1b[97;40m{}\x1b[0m"
"""Colours of a QR code. They are fixed, so the code is readable on a light background, too."""


def show_tokens(tokens: Iterable[JoinToken], with_codes: bool) -> None:
    """Print each token with its link, and with the QR code of the link if `with_codes`."""
    for token in tokens:
        if token.count is None:
            taken = f"{counted(token.joined, 'place')} taken, any number free"
        else:
            taken = f"{token.joined} of {counted(token.count, 'place')} taken"
        click.echo(f"{token.kind}: {token.submodel}, {taken}, until {token.expires}")
        click.echo(f"  {shown(token.file)}")
        click.echo(f"  {token.link}")
        if with_codes:
            click.echo(
                qr_code(token.link, colours=sys.stdout.isatty() and not os.getenv("NO_COLOR"))
            )


def qr_code(text: str, colours: bool = False) -> str:
    """Write `text` as a QR code, in characters that are half a square high.

    Only the light squares are drawn.
    """
    drawn = io.StringIO()
    segno.make_qr(text, error="l").terminal(drawn, compact=True)
    lines = drawn.getvalue().splitlines()
    return "\n".join(WHITE_ON_BLACK.format(line) if colours else line for line in lines)
