"""The command `edgetailor-agent leave`."""

from pathlib import Path

import click

from device_agent.cli.options import state_option


@click.command()
@state_option
@click.option("--keep-personal", is_flag=True, help="Keep the personal model in the state folder.")
@click.option(
    "--offline",
    is_flag=True,
    help="Remove the state without telling the coordinator. The device's place is then not freed.",
)
def leave(state: Path | None, keep_personal: bool, offline: bool) -> None:
    """Leave the federation.

    The coordinator frees the device's place. The device removes its state, including its key.
    """
    from device_agent.federation.default_state import default_state
    from device_agent.federation.membership import leave as leave_coordinator

    folder = state or default_state()
    known = leave_coordinator(folder, keep_personal=keep_personal, offline=offline)
    rest = f"; {folder} has other files and stays" if folder.exists() else ""
    if keep_personal:
        rest = f"; the personal model stays in {folder}"
    click.echo(f"{known.device} has left {known.url}{rest}")
