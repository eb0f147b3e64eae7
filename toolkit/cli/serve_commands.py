"""`edgetailor serve`, with `tls` for its certificate and `tokens` for join links."""

import json
import re
import socket
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from device_agent.cli.console import log_lines
from profiles.text_formatting import did_you_mean
from toolkit.cli.early_checks import check_model
from toolkit.cli.operator.operator_options import client_of, is_url, show_answer

if TYPE_CHECKING:
    from toolkit.coordinator.federation_file.federation_config import CoordinatorConfig
    from toolkit.coordinator.storage.release_folder import Release
    from toolkit.metric_logs import LogName

HOST = re.compile(r"[A-Za-z0-9*]([A-Za-z0-9.-]*[A-Za-z0-9])?|[0-9a-fA-F:]+")
ALL = "*"
"""The value of `--qr` without a kind. No kind has this name."""


@click.command()
@click.argument("config", type=click.Path(path_type=Path))
@click.option(
    "--check-models",
    is_flag=True,
    help="Read every kept model and compare it with its hash. By default, serve does this only for "
    "the newest and the best model, and checks the size of the others.",
)
@click.option(
    "--new-key",
    is_flag=True,
    help="Make a new key because the coordinator's key is lost or damaged. Every device has to "
    "join again.",
)
@click.option(
    "--log",
    "logs",
    type=click.Choice(["mlflow", "tensorboard"]),
    multiple=True,
    help="Log each round to MLflow, or to event files for TensorBoard in the state folder; "
    "repeatable.",
)
@click.option("--log-json", is_flag=True, help="Write the log as one JSON object per line.")
def serve(
    config: Path, check_models: bool, new_key: bool, logs: tuple["LogName", ...], log_json: bool
) -> None:
    """Run the coordinator of the federation in CONFIG (TOML).

    The coordinator runs until it is interrupted. It writes a join token for each kind of device to
    the state folder. Copy the token to the device and run there: edgetailor-agent join URL
    --token-file FILE. The HTTP interface is documented at URL/docs.
    """
    from toolkit.coordinator.federation_file.load_config import load_config

    with log_lines(log_json):
        federation = load_config(config)
        check_model(federation.model, federation.weights)

        from toolkit.coordinator.startup import serve as serve_config

        serve_config(config, check_models, new_key, _make_release, logs)


def _make_release(federation: "CoordinatorConfig", round_: int) -> "Release":
    from toolkit.deployment.release import make_release  # slow to import, and seldom needed

    return make_release(federation, round_)


def _check_names(_: click.Context, __: click.Parameter, names: tuple[str, ...]) -> tuple[str, ...]:
    for name in names:
        if not HOST.fullmatch(name):
            raise click.BadParameter(
                f"Invalid name {name!r}: write a host name or an IP address, without https://."
            )
    return names


@click.group()
def tls() -> None:
    """Make a certificate, so that `serve` speaks https."""


@tls.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option(
    "--name",
    "names",
    multiple=True,
    callback=_check_names,
    help="Host name or IP address of the coordinator; may be repeated.  [default: the host name, "
    "localhost and 127.0.0.1]",
)
def new(folder: Path, names: tuple[str, ...]) -> None:
    """Write a self-signed certificate to FOLDER.

    Agents accept the certificate because they learn its fingerprint when they join. Browsers warn
    about it, so phones need a certificate of an authority.
    """
    from toolkit.coordinator.http.certificates import CERTIFICATE, KEY, new_certificate

    hosts = names or (socket.gethostname(), "localhost", "127.0.0.1")
    fingerprint = new_certificate(folder, hosts)
    click.echo(f"In the federation's file, for {', '.join(hosts)}:", err=True)
    click.echo(f'tls_cert = "{folder / CERTIFICATE}"')
    click.echo(f'tls_key = "{folder / KEY}"')
    click.echo("Devices join with this option, as `edgetailor serve` says, too:", err=True)
    click.echo(f"--certificate {fingerprint}", err=True)


@click.command()
@click.argument("federation", required=False)
@click.option(
    "--url", help="Address of the coordinator for phones, such as the address of a proxy."
)
@click.option(
    "--qr",
    metavar="[KIND]",
    is_flag=False,
    flag_value=ALL,
    help="Show the link for devices of KIND, or of every kind, as a QR code.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def tokens(federation: str | None, url: str | None, qr: str | None, as_json: bool) -> None:
    """Show join tokens and the links by which phones join.

    FEDERATION is the federation's file or its state folder; `edgetailor serve` may run on it.
    FEDERATION may also be the URL of a coordinator that `edgetailor login` saved; the default is
    the URL of the last login. For a URL, the command lists the tokens without links. Anyone with a
    link can enrol a device, so keep links private.
    """
    if federation is None or is_url(federation):
        _remote_tokens(federation, url, qr, as_json)
        return
    from device_agent.client.addresses import check_url
    from toolkit.coordinator.federation_source import state_folder
    from toolkit.coordinator.join_links import address, join_tokens, made_tokens, notes

    if qr and as_json:
        raise click.UsageError("Give --qr or --json, not both.")
    state = state_folder(Path(federation))
    url = check_url(url or address(state))
    shown = join_tokens(state, url)
    if qr not in (None, ALL, *(token.kind for token in shown)):
        kinds = [token.kind for token in shown]
        raise click.BadParameter(
            f"No kind is called {qr!r}{did_you_mean(str(qr), kinds)} The kinds are "
            f"{', '.join(kinds)}.",
            param_hint="--qr",
        )
    if as_json:
        document = {
            "version": 1,
            "url": url,
            "notes": notes(url),
            "tokens": [asdict(token) for token in shown],
            "made": [asdict(token) for token in made_tokens(state)],
        }
        click.echo(json.dumps(document, indent=1, default=str))
        return
    from toolkit.cli.printed.tokens_text import show_states, show_tokens

    show_tokens(
        shown if qr in (None, ALL) else [token for token in shown if token.kind == qr], bool(qr)
    )
    if qr is None:
        show_states(made_tokens(state))
    for note in notes(url):
        click.echo(note, err=True)


def _remote_tokens(federation: str | None, url: str | None, qr: str | None, as_json: bool) -> None:
    """List the join tokens of a saved login."""
    from toolkit.cli.printed.tokens_text import show_states

    if url or qr:
        raise click.UsageError(
            "--url and --qr need the federation's file or its state folder, where the tokens are."
        )
    answer = client_of(federation).join_tokens()
    show_answer(answer, lambda answer: show_states(answer.tokens), as_json)
