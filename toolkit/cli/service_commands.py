"""`edgetailor install-service` and `uninstall-service`: `serve` as a systemd service."""

from pathlib import Path

import click

from device_agent.cli.console import say
from device_agent.cli.options import user_option


@click.command()
@click.argument("config", type=click.Path(path_type=Path))
@user_option
@click.option("--dry-run", is_flag=True, help="Print the unit; write nothing.")
def install_service(config: Path, user: bool, dry_run: bool) -> None:
    """Run `serve` as a systemd service.

    CONFIG is the federation's file. The service starts with the machine and restarts
    after a failure. It runs in the current folder, as the owner of CONFIG.
    """
    from toolkit.coordinator import coordinator_service

    service = coordinator_service.coordinator_service(user)
    if dry_run:
        unit = coordinator_service.unit_text(config, service)
        click.echo(f"# {service.unit}\n{unit}", nl=False)
        return
    coordinator_service.install(config, user)
    if user:
        say(
            "The service runs only while you are logged in. To keep it running after you log out: "
            "`loginctl enable-linger`."
        )
    command = " ".join(service.systemctl)
    click.echo(f"{service.name} is running: {command} status {service.name}")


@click.command()
@user_option
def uninstall_service(user: bool) -> None:
    """Stop and remove the service of `install-service`. The state folder stays."""
    from toolkit.coordinator.coordinator_service import coordinator_service

    service = coordinator_service(user)
    removed = service.uninstall()
    if not removed:
        click.echo(f"There is no service {service.name} here.")
        return
    click.echo("Removed " + " and ".join(map(str, removed)))


COMMANDS = (install_service, uninstall_service)
