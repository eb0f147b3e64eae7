"""`edgetailor-agent profile`."""

from pathlib import Path

import click
import msgspec

from device_agent.cli.options import json_option, threads_option


@click.command()
@click.argument("bundle", type=click.Path(path_type=Path))
@threads_option
@json_option
def profile(bundle: Path, threads: int, as_json: bool) -> None:
    """Measure BUNDLE's forward and backprop time per step and its memory on this device."""
    from device_agent.profiler import profile_bundle, summary

    found = profile_bundle(bundle, threads)
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(found), indent=1))
    else:
        click.echo("\n".join(summary(found)))
