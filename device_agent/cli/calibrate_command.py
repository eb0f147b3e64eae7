"""`edgetailor-agent calibrate`."""

import platform
from pathlib import Path

import click
import msgspec

from device_agent.cli.options import json_option, threads_option


@click.command()
@click.option(
    "--out", type=click.Path(path_type=Path), help="Write the device's profile to this JSON file."
)
@click.option("--name", help="Name of the device in its profile.  [default: the host's]")
@click.option("--force", is_flag=True, help="Replace FILE if it exists.")
@threads_option
@json_option
def calibrate(out: Path | None, name: str | None, force: bool, threads: int, as_json: bool) -> None:
    """Measure what this device can do, in about a minute.

    `edgetailor plan --profile FILE` goes by what it writes. Small graphs of the operators that
    training steps consist of are run and timed; no bundle is needed, and the result holds for any
    model. Leave the device alone meanwhile.
    """
    from device_agent.formats.atomic_files import check_file_place, write_file
    from device_agent.profiling.calibration import calibrate, device_profile
    from device_agent.profiling.calibration_summary import summary

    if out is not None:
        check_file_place(out, force)
    found = device_profile(name or platform.node(), calibrate(threads), Path.cwd())
    content = msgspec.json.format(msgspec.json.encode(found), indent=1)
    if out is not None:
        write_file(out, content)
    click.echo(content.decode() if as_json else "\n".join(summary(found, out)))
