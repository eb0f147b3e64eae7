"""`edgetailor aggregate`: aggregate updates into the global model."""

import json
import logging
import shlex
from dataclasses import dataclass, fields
from pathlib import Path

import click
from rich.console import Console

from device_agent.formats.atomic_files import check_file_place
from device_agent.formats.update import RECORD
from profiles.errors import InputError
from toolkit.aggregation.aggregation_policy import AggregationPolicy, Factors, Rule, Weights
from toolkit.cli.early_checks import check_weights
from toolkit.cli.options import JSON_HELP, argument, option, repeated, takes
from toolkit.terminal_output import show_stages, table

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class AggregateOptions:
    """The options of `aggregate`."""

    global_file: Path = argument(metavar="GLOBAL")
    updates: tuple[Path, ...] = argument(metavar="UPDATE...", nargs=-1)
    out: Path = option("Weights file to write.", required=True)
    weights: Weights = option(
        "Weight of an update in the mean; softmax, as in FedHM, favours stronger submodels.",
        default=AggregationPolicy.weights,
    )
    temperature: float = option(
        "Temperature of the softmax, at least 0.05; inf gives equal weights.",
        default=AggregationPolicy.temperature,
    )
    factors: Factors = option(
        "For cp: average the factors (afm) or the composed tensors (act).",
        default=AggregationPolicy.factors,
    )
    beta: float = option(
        "Length of the step from the old model (0) to the mean (1), at most 10. A length above 1 "
        "goes beyond the mean.",
        default=AggregationPolicy.beta,
    )
    rule: Rule = option(
        "How updates are combined: the weighted mean, or a rule against hostile devices.",
        default=AggregationPolicy.rule,
    )
    no_bounds: bool = option("Do not limit updates that differ much from the others.")
    force: bool = option("Replace the file if it exists.")
    as_json: bool = option(JSON_HELP, "--json")


@click.command()
@takes(AggregateOptions)
def aggregate(options: AggregateOptions) -> None:
    """Aggregate UPDATE folders into the weights file GLOBAL.

    Updates of different families can be mixed. Each number becomes the weighted mean over the
    devices that trained it. --weights sets the weights.

    \b
        edgetailor aggregate global.safetensors update-1 update-2 \\
            --out next.safetensors
    """
    if not options.updates:
        raise click.UsageError(
            "Give at least one UPDATE: a folder that `edgetailor-agent train` wrote."
        )
    policy = AggregationPolicy(
        options.weights,
        options.temperature,
        options.factors,
        options.beta,
        options.rule,
        bounds=not options.no_bounds,
    )
    check_file_place(options.out, options.force)
    check_order(options.global_file, options.updates)
    check_weights(options.global_file)

    show_stages()
    logger.info("loading PyTorch")

    from toolkit.aggregation import aggregate_files

    aggregated = aggregate_files.aggregate_files(
        options.global_file,
        options.updates,
        options.out,
        options.force,
        policy,
        progress=logger.info,
    )
    if options.as_json:
        click.echo(json.dumps(aggregate_files.as_json(aggregated), indent=1))
        return
    rows = table("submodel", "samples", "steps", "loss")
    for record in aggregated.records:
        samples, steps = f"{record.samples:,}", f"{record.steps:,}"
        rows.add_row(record.submodel, samples, steps, record.losses(3))
    console = Console(highlight=False, soft_wrap=True)
    console.print(rows)
    for number, limited in enumerate(aggregated.limited, 1):
        if limited is not None:
            console.print(f"update {number} was limited: {limited.text()}", markup=False)
    console.print(f"global model: {aggregated.out}", markup=False)


def check_order(global_file: Path, updates: tuple[Path, ...]) -> None:
    """Raise InputError if GLOBAL and an UPDATE were swapped. The error shows the right command."""
    files = [path for path in updates if path.is_file()]
    if not (global_file / RECORD).is_file() or len(files) != 1:
        return
    folders = [global_file, *(path for path in updates if path != files[0])]
    names = (field.name for field in fields(AggregateOptions))
    options = repeated(*(name for name in names if name not in ("global_file", "updates")))
    words = ["edgetailor", "aggregate", files[0], *folders, *options]
    command = shlex.join(map(str, words))
    raise InputError(
        "The weights file {global_file} must come before the update {update}. Run: {command}",
        code="aggregate.wrong-order",
        global_file=str(files[0]),
        updates=[str(folder) for folder in folders],
        update=global_file,
        command=command,
    )
