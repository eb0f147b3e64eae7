"""`edgetailor aggregate`: aggregate updates into the global model."""

import json
import logging
import shlex
from pathlib import Path
from typing import get_args

import click

from device_agent.formats.atomic_files import check_file_place
from device_agent.formats.update import RECORD
from profiles.errors import InputError
from toolkit.aggregation.aggregation_policy import AggregationPolicy, Factors, Weights
from toolkit.cli.early_checks import check_weights
from toolkit.cli.options import Choice, repeated
from toolkit.terminal_output import show_stages

logger = logging.getLogger(__name__)


@click.command()
@click.argument("global_file", metavar="GLOBAL", type=click.Path(path_type=Path))
@click.argument("updates", metavar="UPDATE...", nargs=-1, type=click.Path(path_type=Path))
@click.option(
    "--out", required=True, type=click.Path(path_type=Path), help="Weights file to write."
)
@click.option(
    "--weights",
    type=Choice(get_args(Weights)),
    default=AggregationPolicy.weights,
    show_default=True,
    help="Weight of an update in the mean; softmax is FedHM's, over the submodels' strengths.",
)
@click.option(
    "--temperature",
    default=AggregationPolicy.temperature,
    show_default=True,
    help="Temperature of the softmax, at least 0.05; inf gives equal weights.",
)
@click.option(
    "--factors",
    type=Choice(get_args(Factors)),
    default=AggregationPolicy.factors,
    show_default=True,
    help="For cp: average the factors (afm) or the composed tensors (act).",
)
@click.option(
    "--beta",
    default=AggregationPolicy.beta,
    show_default=True,
    help="Step from the old model (0) to the mean (1), up to 10; above 1 it goes beyond the mean.",
)
@click.option("--force", is_flag=True, help="Replace the file if it exists.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_context
def aggregate(
    context: click.Context,
    /,
    global_file: Path,
    updates: tuple[Path, ...],
    out: Path,
    weights: Weights,
    temperature: float,
    factors: Factors,
    beta: float,
    force: bool,
    as_json: bool,
) -> None:
    """Aggregate UPDATE folders into the weights file GLOBAL.

    Updates of different families can be mixed. Each number becomes the weighted mean over the
    devices that trained it. --weights sets the weights.

    \b
        edgetailor aggregate global.safetensors update-1 update-2 \\
            --out next.safetensors
    """
    if not updates:
        raise click.UsageError(
            "Give at least one UPDATE: a folder that `edgetailor-agent train` wrote."
        )
    policy = AggregationPolicy(weights, temperature, factors, beta)
    check_file_place(out, force)
    check_order(global_file, updates, context)
    check_weights(global_file)

    show_stages()
    logger.info("loading PyTorch")

    from toolkit.aggregation import aggregate_files
    from toolkit.cli.printed import aggregate_table

    done = aggregate_files.aggregate_files(
        global_file, updates, out, force, policy, progress=logger.info
    )
    if as_json:
        click.echo(json.dumps(aggregate_files.as_json(done), indent=1))
    else:
        aggregate_table.show_aggregated(done)


def check_order(global_file: Path, updates: tuple[Path, ...], context: click.Context) -> None:
    """Raise InputError with the right command line if an update stands in place of GLOBAL."""
    files = [path for path in updates if path.is_file()]
    if not (global_file / RECORD).is_file() or len(files) != 1:
        return
    folders = [global_file, *(path for path in updates if path != files[0])]
    options = repeated(
        context, "out", "weights", "temperature", "factors", "beta", "force", "as_json"
    )
    words = ["edgetailor", "aggregate", files[0], *folders, *options]
    command = shlex.join(map(str, words))
    raise InputError(
        "GLOBAL comes first, but {update} is an update and {global_file} is a file. Run: {command}",
        code="aggregate.wrong-order",
        global_file=str(files[0]),
        updates=[str(folder) for folder in folders],
        update=global_file,
        command=command,
    )
