"""The command `edgetailor-agent bench`."""

import logging
import sys
from pathlib import Path

import click

from device_agent.cli.console import print_json, say
from device_agent.cli.options import json_option, threads_option
from device_agent.log_format import PlainFormatter, show_logs


@click.command()
@click.argument("places", nargs=-1, type=click.Path(path_type=Path))
@threads_option
@click.option(
    "--runs",
    default=5,
    show_default=True,
    type=click.IntRange(5),
    help="Number of measured training steps for each bundle.",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    help="Also calibrate this device, and write all figures to this JSON file.",
)
@click.option("--name", help="Name of the device in the file.  [default: its model or processor]")
@click.option("--force", is_flag=True, help="Replace the file at --out if it exists.")
@json_option
def bench(
    places: tuple[Path, ...],
    threads: int,
    runs: int,
    out: Path | None,
    name: str | None,
    force: bool,
    as_json: bool,
) -> None:
    """Compare training with several bundles.

    PLACES are bundles or folders of bundles. The table has a line for each bundle: the seconds for
    a batch, their spread, and the peak memory of the process that trains. If a bundle cannot be
    measured, the command still measures the others.

    With --out, the command also calibrates this device, in about a minute, and PLACES may be left
    out. The file then has the calibration, the versions of the runtimes and the figures of the
    bundles, but not the host name. `edgetailor plan --profile FILE` reads it.

    \b
        edgetailor-agent bench bundles/
        edgetailor-agent bench --out my-board.json
    """
    import json

    import msgspec

    from device_agent.formats.atomic_files import check_file_place, write_file
    from device_agent.profiling.bundle_benchmark import (
        as_document,
        bench_profile,
        bench_table,
        measure_each,
    )
    from device_agent.profiling.calibration import available_to_an_agent, calibrate
    from device_agent.profiling.calibration_summary import summary

    if out is None and not places:
        raise click.UsageError("Give bundles in PLACES, or --out FILE to calibrate this device.")
    if out is not None:
        check_file_place(out, force)
    level = logging.INFO if out is not None or sys.stderr.isatty() else logging.WARNING
    available = available_to_an_agent()
    with show_logs(say, PlainFormatter(), level):
        rows = measure_each(places, threads, runs)
        calibration = None if out is None else calibrate(threads)
    document = json.dumps(as_document(rows), indent=1).encode()
    lines = bench_table(rows) if places else []
    if out is not None and calibration is not None:
        device = bench_profile(name, calibration, available, rows)
        document = msgspec.json.format(msgspec.json.encode(device), indent=1)
        write_file(out, document)
        lines += summary(device, out)
    if as_json:
        print_json(document)
    else:
        click.echo("\n".join(lines))
    failed = [row.error for row in rows if row.error is not None]
    if failed:
        click.get_current_context().exit(max(error.exit_code for error in failed))
