"""Commands of the operator of a running federation: see devices and act on them."""

import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from profiles.text_formatting import counted
from toolkit.cli.operator.operator_options import (
    as_days,
    client_of,
    federation_option,
    json_option,
    print_json,
    reason_option,
    show_answer,
)

if TYPE_CHECKING:
    from toolkit.coordinator.operation.messages import Action, Sort

MOST = click.IntRange(1, 1000)
WATCH_S = 2.0
SORTS = ("joined", "device", "name", "kind", "state", "loss", "trained", "seen", "traffic")
"""The values of `messages.Sort`, which is imported only when a command runs."""


def _named(context: click.Context, option: click.Parameter, given: Any) -> Any:
    """Check that no name is empty."""
    if "" in (given if isinstance(given, tuple) else (given,)):
        raise click.BadParameter(
            "a device's id cannot be empty; `edgetailor devices` lists all ids."
        )
    return given


@click.command()
@click.argument("url")
@click.option(
    "--token-file",
    type=click.Path(path_type=Path),
    required=True,
    help="The operator's token: a copy of operator.token in the state folder.",
)
@click.option(
    "--certificate",
    help="SHA-256 of the coordinator's certificate, if it is self-signed: `edgetailor tls` prints "
    "it.",
)
def login(url: str, token_file: Path, certificate: str | None) -> None:
    """Save the coordinator at URL for other commands.

    Other commands use the last login, or the login of the coordinator whose URL is given with
    --federation. Tokens are saved in login.json below ~/.config/edgetailor, which only you can
    read.
    """
    from device_agent.cli.token_file import read_token
    from device_agent.client.addresses import check_url
    from toolkit.coordinator.operation.operator_client import OperatorClient
    from toolkit.coordinator.operation.saved_login import Login, is_loopback, save_login

    if url.startswith("http://") and not is_loopback(url):
        click.echo(
            f"{url} is not encrypted: anyone who can read the network traffic gets the token. Use "
            "https instead.",
            err=True,
        )
    saved = Login(url=check_url(url), token=read_token(token_file), certificate=certificate)
    total = OperatorClient(saved.url, saved.token, saved.certificate).devices(most=1).total
    path = save_login(saved)
    click.echo(f"{url} has {counted(total, 'device')}. The login is in {path}.", err=True)


@click.command()
@click.option("--kind", help="Only devices of this kind.")
@click.option("--state", help="Only devices in this state, such as waiting, training or paused.")
@click.option("--search", help="Only devices with this text in their id or name.")
@click.option(
    "--sort",
    type=click.Choice(SORTS),
    default="joined",
    show_default=True,
    help="Sort the list by this key.",
)
@click.option("--descending", is_flag=True, help="Reverse the order.")
@click.option("--start", default=0, type=click.IntRange(min=0), help="Number of devices to skip.")
@click.option(
    "--most", default=50, type=MOST, show_default=True, help="Largest number of devices to list."
)
@federation_option
@json_option
def devices(
    kind: str | None,
    state: str | None,
    search: str | None,
    sort: "Sort",
    descending: bool,
    start: int,
    most: int,
    federation: str | None,
    as_json: bool,
) -> None:
    """List the devices of a running federation.

    Without --sort the devices are in the order in which they joined.
    """
    from toolkit.cli.printed.operator_tables import show_devices

    show_answer(
        client_of(federation).devices(start, most, kind, state, search, sort, descending),
        show_devices,
        as_json,
    )


@click.command()
@click.option(
    "--watch", is_flag=True, help="Print the status again every two seconds, until Ctrl-C."
)
@federation_option
@json_option
def status(watch: bool, federation: str | None, as_json: bool) -> None:
    """Show the round, the model and the first 200 devices.

    The federation must be running. `edgetailor devices` lists further devices, with --start and
    --most.
    """
    from device_agent.federation.fleet_status import lines

    client = client_of(federation)
    while True:
        now = client.status()
        if watch:
            click.clear()
        show_answer(now, lambda now: click.echo("\n".join(lines(now))), as_json)
        if not watch:
            return
        time.sleep(WATCH_S)


@click.command()
@click.argument("name", callback=_named)
@federation_option
@json_option
def device(name: str, federation: str | None, as_json: bool) -> None:
    """Show the device NAME of a running federation.

    NAME is the device's id, such as board-1. The command shows the machine of the device, its last
    updates, and what the operator did with it.
    """
    from toolkit.cli.printed.operator_tables import show_device

    show_answer(client_of(federation).device(name), show_device, as_json)


@click.command()
@click.option(
    "--after", default=0, type=click.IntRange(min=0), help="Print the entries after this number."
)
@federation_option
@json_option
def audit(after: int, federation: str | None, as_json: bool) -> None:
    """Print every action of the operator, with its reason.

    The command prints at most 1,000 entries. Use --after to print the next entries.
    """
    from toolkit.cli.printed.operator_tables import show_audit

    show_answer(client_of(federation).audit(after), show_audit, as_json)


def _action(name: "Action", text: str) -> click.Command:
    """The command that carries out the action `name`."""

    @click.command(name, help=text)
    @click.argument("names", metavar="NAME...", nargs=-1, required=True, callback=_named)
    @reason_option
    @federation_option
    @json_option
    def act(names: tuple[str, ...], reason: str, federation: str | None, as_json: bool) -> None:
        from toolkit.cli.printed.operator_tables import state_text

        client, after = client_of(federation), []
        for identifier in names:
            after.append(client.act(name, identifier, reason).device)
            if not as_json:
                click.echo(f"{identifier}: {state_text(after[-1])}")
        if as_json:
            print_json({"version": 1, "devices": [asdict(device) for device in after]})

    return act


pause = _action(
    "pause",
    "Give devices no more work.\n\n"
    "The devices keep their places. An update that has come for the open round counts.",
)
resume = _action(
    "resume", "Let paused devices take part again.\n\nThey take part in the open round, too."
)
remove = _action(
    "remove",
    "End the membership of devices: their places are free.\n\n"
    "Their updates of earlier rounds stay in the model. They can join again with a token; to "
    "prevent this, use `ban`.",
)
ban = _action(
    "ban",
    "Remove devices, and refuse their keys.\n\n"
    "Anyone who holds a join token can still join with a new key.",
)
let_in = _action(
    "let-in",
    "Lift a pause, a removal or a ban.\n\n"
    "A removed device is a member again, with its secret, if a place is free. Otherwise it may "
    "join with a token.",
)


@click.command()
@click.argument("names", metavar="NAME...", nargs=-1, required=True, callback=_named)
@click.option(
    "--valid",
    "days",
    default="7d",
    show_default=True,
    callback=as_days,
    help="How long the old secret stays valid without a new one, such as 12h or 7d.",
)
@reason_option
@federation_option
@json_option
def rotate_secret(
    names: tuple[str, ...], days: float, reason: str, federation: str | None, as_json: bool
) -> None:
    """Ask devices for new secrets.

    A device makes a new secret when it next asks for work. Then its old secret is void. A device
    that makes no new secret within the time of --valid has to join again.
    """
    client, asked = client_of(federation), {}
    for identifier in names:
        asked[identifier] = client.rotate_secret(identifier, days, reason).secret_until
        if not as_json:
            click.echo(f"{identifier}: asked for a new secret")
    if as_json:
        print_json({"version": 1, "until": asked})


COMMANDS: tuple[click.Command, ...] = (
    *(login, status, devices, device, audit),
    *(pause, resume, remove, ban, let_in, rotate_secret),
)
