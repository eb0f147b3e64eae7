"""`edgetailor tokens`: the join tokens of a federation, as links and QR codes for phones."""

import json
from dataclasses import asdict
from pathlib import Path

import click

from profiles.text_formatting import did_you_mean

ALL = "*"
"""The value of `--qr` without a kind. No kind has this name."""


@click.command()
@click.argument("federation", type=click.Path(path_type=Path))
@click.option("--url", help="Address of the coordinator for phones, such as that of a proxy.")
@click.option(
    "--qr",
    metavar="[KIND]",
    is_flag=False,
    flag_value=ALL,
    help="Show the link as a QR code: of KIND, or of every kind.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def tokens(federation: Path, url: str | None, qr: str | None, as_json: bool) -> None:
    """Show join tokens and the links by which phones join.

    FEDERATION is the federation's file or its state folder; `edgetailor serve` may run on it. Who
    has a link can enrol a device: keep it private.
    """
    from device_agent.client.addresses import check_url
    from toolkit.coordinator.federation_config import load_config
    from toolkit.coordinator.join_links import address, join_tokens, notes

    if qr and as_json:
        raise click.UsageError("--qr and --json exclude each other.")
    state = federation if federation.is_dir() else load_config(federation).state
    url = check_url(url or address(state))
    found = join_tokens(state, url)
    if qr not in (None, ALL, *(one.kind for one in found)):
        kinds = [one.kind for one in found]
        raise click.BadParameter(
            f"No kind is called {qr!r}{did_you_mean(str(qr), kinds)} The kinds are "
            f"{', '.join(kinds)}.",
            param_hint="--qr",
        )
    if as_json:
        document = {
            "version": 1,
            "url": url,
            "notes": notes(url),
            "tokens": [asdict(one) for one in found],
        }
        click.echo(json.dumps(document, indent=1, default=str))
        return
    from toolkit.cli.tokens_text import show_tokens

    show_tokens(found if qr in (None, ALL) else [one for one in found if one.kind == qr], bool(qr))
    for note in notes(url):
        click.echo(note, err=True)
