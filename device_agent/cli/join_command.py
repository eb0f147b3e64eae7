"""The command `edgetailor-agent join`."""

import platform
import re
from pathlib import Path

import click

from device_agent.cli.options import state_option
from device_agent.cli.token_file import read_token


def _checked(_: click.Context, __: click.Parameter, given: str | None) -> str | None:
    digits = None if given is None else given.replace(":", "").lower()
    if digits is not None and not re.fullmatch("[0-9a-f]{64}", digits):
        raise click.BadParameter(
            f"Invalid SHA-256 {given!r}: write the 64 hexadecimal digits that `edgetailor serve` "
            "prints."
        )
    return digits


@click.command()
@click.argument("url")
@click.option(
    "--token-file", required=True, type=click.Path(path_type=Path), help="File with a join token."
)
@click.option(
    "--name", default=platform.node, help="Name of this device.  [default: the host name]"
)
@click.option(
    "--replace",
    is_flag=True,
    help="Leave the present coordinator after the new coordinator has accepted this device.",
)
@click.option(
    "--certificate",
    metavar="SHA256",
    callback=_checked,
    help="SHA-256 of the coordinator's certificate, as `edgetailor serve` prints it. The "
    "certificate then needs no signature of an authority.",
)
@state_option
def join(
    url: str,
    token_file: Path,
    name: str,
    replace: bool,
    certificate: str | None,
    state: Path | None,
) -> None:
    """Enrol this device with the coordinator at URL.

    The device generates a key pair, which is its identity. Joining again is safe, even if an
    answer was lost: the coordinator recognises the device by its key.
    """
    from device_agent.federation.default_state import default_state
    from device_agent.federation.membership import join as join_coordinator

    folder = state or default_state()
    if certificate and not url.startswith("https://"):
        raise click.UsageError(f"--certificate needs a URL that begins with https://, not {url}.")
    identity = join_coordinator(
        url, read_token(token_file), name, folder, replace=replace, certificate=certificate
    )
    where = "" if state is None else f" --state {state}"
    click.echo(f"{identity.device} has joined; next: edgetailor-agent run --data DATA{where}")
