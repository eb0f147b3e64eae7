"""The command `edgetailor-agent uninstall-service`."""

import click

from device_agent.cli.options import user_option


@click.command()
@user_option
def uninstall_service(user: bool) -> None:
    """Stop and remove the agent's service.

    The unit and the options file are removed. The state folder stays.
    """
    from device_agent.service import systemd_service

    removed = systemd_service.agent_service(user).uninstall()
    if not removed:
        click.echo(f"There is no service {systemd_service.NAME} here.")
        return
    click.echo("Removed " + " and ".join(map(str, removed)))
