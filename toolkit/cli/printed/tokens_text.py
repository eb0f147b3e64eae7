"""What `edgetailor tokens` prints."""

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
"""Colours of a QR code, so that it is the same on a terminal with a light background."""


def show_tokens(tokens: Iterable[JoinToken], with_codes: bool) -> None:
    """Print each token with its link, and with the QR code of the link if `with_codes`."""
    for one in tokens:
        if one.count is None:
            taken = f"{counted(one.joined, 'place')} taken, any number free"
        else:
            taken = f"{one.joined} of {counted(one.count, 'place')} taken"
        click.echo(f"{one.kind}: {one.submodel}, {taken}, until {one.expires}")
        click.echo(f"  {shown(one.file)}")
        click.echo(f"  {one.link}")
        if with_codes:
            click.echo(qr_code(one.link, colours=sys.stdout.isatty() and not os.getenv("NO_COLOR")))


def qr_code(text: str, colours: bool = False) -> str:
    """`text` as a QR code of half blocks: light modules are drawn, dark ones are the background."""
    drawn = io.StringIO()
    segno.make_qr(text, error="l").terminal(drawn, compact=True)
    lines = drawn.getvalue().splitlines()
    return "\n".join(WHITE_ON_BLACK.format(line) if colours else line for line in lines)
