"""The command `edgetailor-agent status`."""

from pathlib import Path

import click

from device_agent.cli.console import print_json
from device_agent.cli.options import json_option, state_option


@click.command()
@state_option
@json_option
def status(state: Path | None, as_json: bool) -> None:
    """Show the status of the federation and of this device."""
    import msgspec

    from device_agent.federation.default_state import default_state
    from device_agent.federation.fleet_status import fleet_status, lines, own_lines
    from profiles.errors import ClientError

    folder = state or default_state()
    own = [] if as_json else own_lines(folder)
    try:
        fleet = fleet_status(folder)
    except ClientError:
        # Without the coordinator, the device's own status matters even more.
        if own:
            click.echo("\n".join(own))
        raise
    if as_json:
        print_json(msgspec.json.format(msgspec.json.encode(fleet), indent=1))
    else:
        click.echo("\n".join([*lines(fleet), *own]))
