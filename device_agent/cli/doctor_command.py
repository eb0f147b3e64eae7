"""The command `edgetailor-agent doctor`."""

from pathlib import Path

import click

from device_agent.cli.console import print_json
from device_agent.cli.options import json_option, state_option
from device_agent.cli.token_file import read_token

FAILED = 2


@click.command()
@click.argument("url", required=False)
@click.option("--token-file", type=click.Path(path_type=Path), help="Also check this join token.")
@state_option
@json_option
def doctor(url: str | None, token_file: Path | None, state: Path | None, as_json: bool) -> None:
    """Check everything that this device needs.

    Each check ends with PASS, FAIL or SKIP and names the remedy. If a check fails, the exit code
    is 2. Without URL the command checks the coordinator that this device has joined.
    """
    import json
    from dataclasses import asdict

    from device_agent.doctor.doctor import lines, run_checks
    from device_agent.federation.default_state import default_state

    token = None if token_file is None else read_token(token_file)
    findings = []
    for finding in run_checks(url, state or default_state(), token):
        findings.append(finding)
        if not as_json:
            click.echo("\n".join(lines(finding)))
    if as_json:
        print_json(json.dumps({"version": 1, "checks": [*map(asdict, findings)]}, indent=1))
    if any(finding.result == "FAIL" for finding in findings):
        raise click.exceptions.Exit(FAILED)
