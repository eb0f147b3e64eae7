"""`edgetailor-agent bench`."""

import json
import logging
import sys
from pathlib import Path

import click

from device_agent.cli.console import say
from device_agent.cli.options import json_option, runtime_option, threads_option
from device_agent.log_format import PlainFormatter, show_logs


@click.command()
@click.argument("places", nargs=-1, required=True, type=click.Path(path_type=Path))
@runtime_option
@threads_option
@click.option(
    "--runs",
    default=5,
    show_default=True,
    type=click.IntRange(5),
    help="Measured training steps of each bundle.",
)
@json_option
def bench(
    places: tuple[Path, ...], runtime: str | None, threads: int, runs: int, as_json: bool
) -> None:
    """Compare training with several bundles.

    PLACES are bundles or folders of bundles. The table has the seconds for a batch and the peak
    memory of the process that trains, one line for each bundle. A bundle that cannot be measured
    does not end the others.

    \b
        edgetailor-agent bench bundles/
    """
    from device_agent.profiling.bundle_benchmark import as_document, bench_table, measure_each

    level = logging.INFO if sys.stderr.isatty() else logging.WARNING
    with show_logs(say, PlainFormatter(), level):
        rows = measure_each(places, threads, runs, runtime)
    if as_json:
        click.echo(json.dumps(as_document(rows), indent=1))
    else:
        click.echo("\n".join(bench_table(rows)))
    failed = [row.error for row in rows if row.error is not None]
    if failed:
        click.get_current_context().exit(max(error.exit_code for error in failed))
