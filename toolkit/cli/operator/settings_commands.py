"""`edgetailor apply`: new settings for a running federation."""

from pathlib import Path

import click

from toolkit.cli.operator.operator_options import (
    check_reason,
    client_of,
    is_url,
    json_option,
    show_answer,
)


@click.command()
@click.argument("federation", required=False)
@click.option("--dry-run", is_flag=True, help="Only show the changes.")
@click.option(
    "--carry",
    is_flag=True,
    help="Also apply a new `model`. Tensors that fit by name and shape keep their numbers.",
)
@click.option(
    "--reason",
    callback=check_reason,
    help="Reason for the changes. It stays in the audit log. Required without --dry-run.",
)
@json_option
def apply(
    federation: str | None, dry_run: bool, carry: bool, reason: str | None, as_json: bool
) -> None:
    """Apply the changed file of a running federation.

    The command shows the changes. They take effect from the next round on. FEDERATION is the file
    or the state folder of a federation that `edgetailor serve` runs on this machine, or the URL of
    a coordinator that `edgetailor login` saved. The default is the coordinator of the last login.
    The coordinator reads the file on its own machine. Changes that would result in a different
    model are refused. --carry allows a new `model`, and says which tensors keep their numbers,
    wholly or in part, and which begin with initial numbers.
    """
    from toolkit.coordinator.federation_source import check_served
    from toolkit.coordinator.operation.messages import SettingsChanges

    if reason is None and not dry_run:
        raise click.UsageError("Give a --reason, or --dry-run to only show the changes.")
    client = client_of(federation)
    if federation is not None and not is_url(federation):
        check_served(Path(federation))
    only_show = dry_run or reason is None
    answer = (
        client.settings_changes(carry) if only_show else client.apply_settings(str(reason), carry)
    )

    def show(answer: SettingsChanges) -> None:
        for change in answer.changes:
            click.echo(change.text())
        take = "would take" if dry_run else "take"
        said = f"These changes {take} effect from round {answer.round} on."
        click.echo(said if answer.changes else "The file has no changes.", err=True)

    show_answer(answer, show, as_json)
