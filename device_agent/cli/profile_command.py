"""The command `edgetailor-agent profile`."""

import logging
import sys
from pathlib import Path

import click

from device_agent.cli.console import print_json, say
from device_agent.cli.options import Duration, json_option, threads_option
from device_agent.log_format import PlainFormatter, show_logs


@click.command()
@click.argument("bundle", type=click.Path(path_type=Path))
@threads_option
@click.option(
    "--runs",
    type=click.IntRange(5),
    help="Number of measured runs for each phase.  [default: 20]",
)
@click.option(
    "--sustained",
    "sustained_s",
    type=Duration(),
    default="0s",
    help="Also train without a pause for this time, such as 10m, to find throttling by heat.",
)
@click.option(
    "--strict", is_flag=True, help="Exit with 7 if the device throttled or times vary too much."
)
@click.option("--out", type=click.Path(path_type=Path), help="Also write the document to a file.")
@click.option("--force", is_flag=True, help="Replace the file at --out.")
@json_option
def profile(
    bundle: Path,
    threads: int,
    runs: int | None,
    sustained_s: float,
    strict: bool,
    out: Path | None,
    force: bool,
    as_json: bool,
) -> None:
    """Measure BUNDLE's time per step and memory.

    Each signature runs in a separate process. docs/guides/profiling.md describes the JSON document,
    and `edgetailor report` draws charts of it.
    """
    from device_agent.formats.atomic_files import check_file_place, write_file
    from device_agent.profiling.profile_text import summary
    from device_agent.profiling.profiler import profile_bundle, require_stable
    from profiles.documents.bundle_profile import RUNS
    from profiles.documents.bundle_profile_reading import encode_profile

    if out is not None:
        check_file_place(out, force)
    # A measurement takes seconds, so a log file needs no progress lines.
    level = logging.INFO if sys.stderr.isatty() or sustained_s else logging.WARNING
    with show_logs(say, PlainFormatter(), level):
        measured = profile_bundle(bundle, threads, runs=runs or RUNS, sustained_s=sustained_s)
    document = encode_profile(measured)
    if out is not None:
        write_file(out, document)
    if as_json:
        print_json(document)
    else:
        click.echo("\n".join(summary(measured)))
    if strict:
        require_stable(measured)
