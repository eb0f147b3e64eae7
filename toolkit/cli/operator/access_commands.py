"""Commands that say who may operate a running federation, and who may join it."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from toolkit.cli.operator.operator_options import (
    as_days,
    client_of,
    federation_option,
    json_option,
    print_json,
    reason_option,
    say_done,
    show_answer,
)

if TYPE_CHECKING:
    from toolkit.coordinator.database.operator_tokens import Role


@click.command()
@federation_option
@json_option
def operators(federation: str | None, as_json: bool) -> None:
    """List who has a token to operate a federation.

    The holder of operator.token in the state folder is not listed.
    """
    from toolkit.cli.printed.operator_tables import show_operators

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
    federation: str | None,
    as_json: bool,
) -> None:
    """Make a token for the person or program NAME.

    The audit log then shows NAME for what is done with this token. The coordinator keeps only the
    hash of the token.
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
def revoke_operator(name: str, reason: str, federation: str | None, as_json: bool) -> None:
    """Revoke the token of an operator.

    The token no longer gives access.
    """
    client_of(federation).revoke_operator(name, reason)
    say_done(f"The token of {name} is revoked.", as_json, name=name)


@click.command()
@click.argument("kind")
@click.option(
    "--count", type=click.IntRange(1, 2**31 - 1), help="How many devices may join with the token."
)
@click.option(
    "--days",
    type=click.FloatRange(0, 36500, min_open=True),
    help="Lifetime in days. Default: token_days of the federation's file.",
)
@click.option("--out", type=click.Path(path_type=Path), help="File for the token, for agents.")
@click.option("--force", is_flag=True, help="Replace the file of --out.")
@click.option("--qr", is_flag=True, help="Show the link as a QR code.")
@reason_option
@federation_option
@json_option
def make_token(
    kind: str,
    count: int | None,
    days: float | None,
    out: Path | None,
    force: bool,
    qr: bool,
    reason: str,
    federation: str | None,
    as_json: bool,
) -> None:
    """Make a join token for devices of KIND.

    The command prints the link by which phones join. The coordinator keeps only the token's hash,
    so the link is not shown again.
    """
    from device_agent.formats.atomic_files import check_file_place, write_file
    from toolkit.cli.printed.tokens_text import show_link, show_states
    from toolkit.coordinator.join_links import join_link

    if qr and as_json:
        raise click.UsageError("Give --qr or --json, not both.")
    if out is not None:
        check_file_place(out, force)
    client = client_of(federation)
    made = client.make_join_token(kind, reason, count, days)
    link = join_link(client.url, made.token)
    if out is not None:
        write_file(out, f"{made.token}\n".encode(), mode=0o600)
    if as_json:
        print_json({**asdict(made), "link": link, "file": None if out is None else str(out)})
        return
    show_states([made.state])
    show_link(link, qr)


@click.command()
@click.argument("number", type=click.IntRange(min=1))
@reason_option
@federation_option
@json_option
def revoke_token(number: int, reason: str, federation: str | None, as_json: bool) -> None:
    """Revoke a join token that `make-token` made.

    `edgetailor tokens` lists the numbers. Devices that have joined with the token stay
    members.
    """
    client_of(federation).revoke_join_token(number, reason)
    say_done(f"Join token {number} is revoked.", as_json, number=number)


@click.command()
@click.option(
    "--valid",
    "days",
    default="30d",
    show_default=True,
    callback=as_days,
    help="How long the old key of devices and join tokens stays valid, such as 12h or 30d.",
)
@reason_option
@federation_option
@json_option
def rotate_key(days: float, reason: str, federation: str | None, as_json: bool) -> None:
    """Replace the key with which the coordinator signs work.

    The old key signs the new one, so devices that ask for work within the time of --valid trust the
    new key. A device that was away for longer joins again with a new token. If somebody else has
    the key, use `edgetailor serve --new-key` instead.
    """
    from device_agent.system.clock import time_text

    client = client_of(federation)
    made = client.rotate_key(client.key_state().fingerprint, days, reason)
    until = time_text(made.earlier[-1].until)
    sentence = f"The new key has the fingerprint {made.fingerprint}. Devices follow until {until}."
    say_done(sentence, as_json, key=made.fingerprint, until=made.earlier[-1].until)


COMMANDS: tuple[click.Command, ...] = (
    *(operators, add_operator, revoke_operator),
    *(make_token, revoke_token, rotate_key),
)
