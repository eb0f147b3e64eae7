"""The shared parts of the operator's commands: options, client and output."""

import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import click

if TYPE_CHECKING:
    from toolkit.coordinator.operation.operator_client import OperatorClient

Answer = TypeVar("Answer")
federation_option = click.option(
    "--federation",
    help="File or state folder of a federation that `edgetailor serve` runs on this machine, or "
    "URL of a coordinator that `edgetailor login` saved. Default: the coordinator of the last "
    "login.",
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")


def check_reason(context: click.Context, option: click.Parameter, given: str | None) -> str | None:
    """Check that a reason is one line of text."""
    from toolkit.coordinator.operation.messages import REASON_LENGTH

    if given is None:
        return None
    if not given.isprintable() or not 0 < len(given) <= REASON_LENGTH:
        raise click.BadParameter(f"write one line of 1 to {REASON_LENGTH} letters.")
    return given


def as_days(context: click.Context, option: click.Parameter, given: str) -> float:
    """Read a time span as days."""
    from profiles.units import parse_duration
    from toolkit.coordinator.operation.messages import MOST_DAYS

    days = parse_duration(given) / 86400
    if not 0 < days <= MOST_DAYS:
        raise click.BadParameter(f"give a time of at most {MOST_DAYS} days.")
    return days


reason_option = click.option(
    "--reason",
    required=True,
    callback=check_reason,
    help="Reason for the action. It stays in the audit log.",
)


def is_url(federation: str) -> bool:
    """Whether a federation is given by its URL, and not by a file or a folder."""
    return federation.startswith(("http://", "https://"))


def client_of(federation: str | None) -> "OperatorClient":
    """The client of a federation, which is given by its file, state folder or URL.

    Without a federation, this is the client of the last saved login.
    """
    from toolkit.coordinator.local_coordinator import local_login
    from toolkit.coordinator.operation.operator_client import OperatorClient
    from toolkit.coordinator.operation.saved_login import saved_login

    is_local = federation is not None and not is_url(federation)
    login = local_login(Path(federation or "")) if is_local else saved_login(federation)
    return OperatorClient(login.url, login.token, login.certificate)


def show_answer(document: Answer, show: Callable[[Answer], object], as_json: bool) -> None:
    """Print an answer of the coordinator: as one JSON object, or by `show`."""
    if as_json:
        print_json(dataclasses.asdict(document))  # type: ignore[call-overload]
    else:
        show(document)


def say_done(sentence: str, as_json: bool, **values: object) -> None:
    """Say on stderr what an action did. As JSON, `values` go to stdout instead."""
    if as_json:
        print_json({"version": 1, **values})
    else:
        click.echo(sentence, err=True)


def print_json(document: Mapping[str, object]) -> None:
    """Print `document` as one JSON object."""
    click.echo(json.dumps(document, indent=1))
