"""Commands that say who may operate a running federation."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from toolkit.cli.operator_options import (
    client_of,
    federation_option,
    json_option,
    reason_option,
    say_done,
    show_answer,
)

if TYPE_CHECKING:
    from toolkit.coordinator.database.operator_tokens import Role


@click.command()
@federation_option
@json_option
def operators(federation: Path | None, as_json: bool) -> None:
    """List who has a token to operate a federation.

    The holder of operator.token in the state folder is not listed.
    """
    from toolkit.cli.printed.fleet_table import show_operators

    show_answer(client_of(federation).operators(), show_operators, as_json)


@click.command()
@click.argument("name")
@click.option(
    "--role",
    type=click.Choice(["operator", "read-only"]),
    required=True,
    help="`operator` allows every action, `read-only` only shows the federation.",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    required=True,
    help="File for the token, which only you can read. Give it to NAME.",
)
@click.option("--force", is_flag=True, help="Replace the file of --out.")
@reason_option
@federation_option
@json_option
def add_operator(
    name: str,
    role: "Role",
    out: Path,
    force: bool,
    reason: str,
    federation: Path | None,
    as_json: bool,
) -> None:
    """Make a token for the person or program NAME.

    The audit log then shows NAME for what is done with this token. The coordinator keeps only its
    hash.
    """
    from device_agent.formats.atomic_files import check_file_place, write_file

    check_file_place(out, force)
    made = client_of(federation).add_operator(name, role, reason)
    write_file(out, f"{made.token}\n".encode(), mode=0o600)
    say_done(f"{out} has the token of {name}.", as_json, name=name, role=role, file=str(out))


@click.command()
@click.argument("name")
@reason_option
@federation_option
@json_option
def revoke_operator(name: str, reason: str, federation: Path | None, as_json: bool) -> None:
    """Revoke the token of an operator.

    It opens nothing from now on.
    """
    client_of(federation).revoke_operator(name, reason)
    say_done(f"The token of {name} is revoked.", as_json, name=name)
