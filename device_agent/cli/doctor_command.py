"""`edgetailor-agent doctor`."""

from pathlib import Path

import click
import msgspec

from device_agent.cli.options import json_option, read_token, state_option

FAILED = 2


@click.command()
@click.argument("url", required=False)
@click.option("--token-file", type=click.Path(path_type=Path), help="Check this join token too.")
@state_option
@json_option
def doctor(url: str | None, token_file: Path | None, state: Path | None, as_json: bool) -> None:
    """Check all that this device needs.

    Each check is PASS, FAIL or SKIP, with the remedy. It ends with 2 where one failed, whichever
    it was: --json tells which. The coordinator is that at URL, or the one that was joined.
    """
    from device_agent.doctor.doctor import examine, lines
    from device_agent.federation.device_state import default_state

    token = None if token_file is None else read_token(token_file)
    found = []
    for finding in examine(url, state or default_state(), token):
        found.append(finding)
        if not as_json:
            click.echo("\n".join(lines(finding)))
    if as_json:
        document = {"version": 1, "checks": found}
        click.echo(msgspec.json.format(msgspec.json.encode(document), indent=1))
    if any(finding.result == "FAIL" for finding in found):
        raise click.exceptions.Exit(FAILED)
