"""The command `edgetailor-agent install-service`."""

from typing import Any

import click

from device_agent.cli.console import say
from device_agent.cli.options import run_options, user_option


@click.command()
@run_options
@user_option
@click.option("--dry-run", is_flag=True, help="Print the unit and the options; write nothing.")
def install_service(user: bool, dry_run: bool, **given: Any) -> None:
    """Run the agent as a systemd service.

    The service starts with the machine and restarts after a failure. It runs as the owner of the
    state folder. Its options are in a file that you can edit: /etc/edgetailor-agent.toml, or
    ~/.config/edgetailor-agent.toml with --user.
    """
    from device_agent.federation.run_options import RunOptions
    from device_agent.service import systemd_service, systemd_units

    options = systemd_service.with_absolute_paths(RunOptions.from_flat(**given))
    assert options.state is not None
    note = systemd_service.missing_data_note(options)
    if dry_run:
        service = systemd_service.agent_service(user)
        version = systemd_units.systemd_version(service.start)
        unit = systemd_service.unit_text(options, service, version)
        click.echo(f"# {service.options}\n{options.toml()}\n# {service.unit}\n{unit}", nl=False)
        if note is not None:
            say(note)
        return
    from device_agent.federation.start_checks import check_start

    # Check before anything is written: nobody would look for the service's errors in the journal.
    check_start(options, data=note is None)
    systemd_service.install(options, user)
    if note is not None:
        say(note)
    if user:
        say(
            "The service runs only while you are logged in. To keep it running after you log out: "
            "`loginctl enable-linger`."
        )
    command = "systemctl --user" if user else "systemctl"
    click.echo(f"{systemd_service.NAME} is running: {command} status {systemd_service.NAME}")
