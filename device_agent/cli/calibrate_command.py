"""The command `edgetailor-agent calibrate`."""

import platform
from pathlib import Path

import click

from device_agent.cli.console import print_json
from device_agent.cli.options import json_option, threads_option


@click.command()
@click.option(
    "--out", type=click.Path(path_type=Path), help="Write the device's profile to this JSON file."
)
@click.option("--name", help="Name of the device in its profile.  [default: the host name]")
@click.option("--force", is_flag=True, help="Replace the file at --out if it exists.")
@threads_option
@json_option
def calibrate(out: Path | None, name: str | None, force: bool, threads: int, as_json: bool) -> None:
    """Measure the speed of this device, in about a minute.

    The command times small graphs of the operators that training steps consist of. No bundle is
    needed, and the result is valid for any model: `edgetailor plan --profile FILE` uses it. While
    the command runs, do not use the device for anything else.
    """
    import msgspec

    from device_agent.formats.atomic_files import check_file_place, write_file
    from device_agent.profiling.calibration import measured_device
    from device_agent.profiling.calibration_summary import summary

    if out is not None:
        check_file_place(out, force)
    device = measured_device(name or platform.node(), Path.cwd(), threads)
    content = msgspec.json.format(msgspec.json.encode(device), indent=1)
    if out is not None:
        write_file(out, content)
    if as_json:
        print_json(content)
    else:
        click.echo("\n".join(summary(device, out)))
