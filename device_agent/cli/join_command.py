"""`edgetailor-agent join`."""

import platform
from pathlib import Path

import click

from device_agent.cli.options import read_token, state_option


@click.command()
@click.argument("url")
@click.option(
    "--token-file", required=True, type=click.Path(path_type=Path), help="File with a join token."
)
@click.option("--name", default=platform.node, help="What to call this device.  [default: host]")
@click.option(
    "--replace",
    is_flag=True,
    help="Leave the coordinator that the state folder belongs to, once the new one has taken it.",
)
@state_option
def join(url: str, token_file: Path, name: str, replace: bool, state: Path | None) -> None:
    """Enrol this device with the coordinator at URL.

    A key pair that is made here becomes the device's identity. Joining again is safe: the same
    device comes of it, also where an answer was lost.
    """
    from device_agent.federation.device_state import default_state
    from device_agent.federation.membership import join as join_coordinator

    folder = state or default_state()
    identity = join_coordinator(url, read_token(token_file), name, folder, replace=replace)
    where = "" if state is None else f" --state {state}"
    click.echo(f"{identity.device}: now edgetailor-agent run --data FILE.npz{where}")
