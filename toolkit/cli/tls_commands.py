"""`edgetailor tls`: certificates of the coordinator."""

import re
import socket
from pathlib import Path

import click

HOST = re.compile(r"[A-Za-z0-9*]([A-Za-z0-9.-]*[A-Za-z0-9])?|[0-9a-fA-F:]+")


def _check_names(_: click.Context, __: click.Parameter, names: tuple[str, ...]) -> tuple[str, ...]:
    for name in names:
        if not HOST.fullmatch(name):
            raise click.BadParameter(
                f"Invalid name {name!r}: write a host name or an IP address, without https://."
            )
    return names


@click.group()
def tls() -> None:
    """Make a certificate, so that `serve` speaks https."""


@tls.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option(
    "--name",
    "names",
    multiple=True,
    callback=_check_names,
    help="Host name or IP address of the coordinator; may be repeated.  [default: the host name, "
    "localhost and 127.0.0.1]",
)
def new(folder: Path, names: tuple[str, ...]) -> None:
    """Write a certificate that is signed by itself to FOLDER.

    Agents accept it because they learn its fingerprint when they join. Browsers warn of it: phones
    need a certificate of an authority.
    """
    from toolkit.coordinator.http.certificates import CERTIFICATE, KEY, new_certificate

    found = names or (socket.gethostname(), "localhost", "127.0.0.1")
    fingerprint = new_certificate(folder, found)
    click.echo(f"In the federation's file, for {', '.join(found)}:", err=True)
    click.echo(f'tls_cert = "{folder / CERTIFICATE}"')
    click.echo(f'tls_key = "{folder / KEY}"')
    click.echo("Devices join with this option, as `edgetailor serve` says, too:", err=True)
    click.echo(f"--certificate {fingerprint}", err=True)
