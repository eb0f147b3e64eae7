"""`edgetailor backup` and `edgetailor restore`: copies of a federation's state folder."""

from pathlib import Path

import click

FOLDER = click.Path(path_type=Path)


@click.command()
@click.argument("state", type=FOLDER)
@click.argument("out", type=FOLDER)
@click.option("--force", is_flag=True, help="Replace OUT if it is a backup.")
def backup(state: Path, out: Path, force: bool) -> None:
    """Copy a federation to the new folder OUT.

    STATE is the federation's state folder or its file. The copy is consistent, also while
    `edgetailor serve` runs, and is checked once it is complete. The copy holds the join tokens:
    keep it as private as the state folder.
    """
    from toolkit.coordinator.federation_source import state_folder
    from toolkit.coordinator.storage import backup as copies

    state = state_folder(state)
    copies.backup(state, out, force)
    click.echo(f"{out} contains a backup of {state}.", err=True)


@click.command()
@click.argument("backup", type=FOLDER)
@click.argument("state", type=FOLDER)
def restore(backup: Path, state: Path) -> None:
    """Make the state folder STATE from a backup.

    STATE must be empty or not exist. Devices that joined after the backup have to join again.
    Rounds that ended after the backup are trained again.
    """
    from toolkit.coordinator.storage import backup as copies

    copies.restore(backup, state)
    click.echo(
        f"{state} is restored. Stop the coordinator that the backup was taken from, set `state` in "
        "the federation's file (a backup does not contain this file) to this folder, and start "
        "`edgetailor serve`.",
        err=True,
    )
