"""`edgetailor export`: export submodels as bundles that devices can train."""

import json
import logging
from pathlib import Path
from typing import Literal

import click

from toolkit.cli.early_checks import check_model, check_specs
from toolkit.cli.options import LIST_AS_JSON, Choice, WithList, model_options, training_options
from toolkit.exporting.output_places import check_places
from toolkit.submodels.hyperparameters import TrainingConfig
from toolkit.terminal_output import show_stages

logger = logging.getLogger(__name__)


def list_operators(context: click.Context, option: click.Parameter, asked: bool) -> None:
    """Print the table of operators and exit."""
    if not asked:
        return
    from exporters.programs import operator_support
    from exporters.programs.operator_support import document

    if context.meta[LIST_AS_JSON]:
        click.echo(json.dumps(operator_support.as_json(), indent=1))
    else:
        click.echo(document())
    context.exit()


@click.command(cls=WithList)
@model_options
@click.option(
    "--submodel",
    "specs",
    multiple=True,
    help="Submodel SPEC to export; repeatable.  [default: full]",
)
@click.option(
    "--tiers",
    "tiers_file",
    type=click.Path(path_type=Path),
    help="TOML file with [[tiers]] to export, each with a name and a submodel.",
)
@click.option(
    "--format",
    "format_",
    type=Choice(["onnx", "tflite"]),
    default="onnx",
    show_default=True,
    help="onnx for ONNX Runtime, tflite for LiteRT.",
)
@click.option(
    "--out",
    required=True,
    type=click.Path(path_type=Path),
    help="Bundle folder to write; with several submodels, the folder for their bundles.",
)
@training_options
@click.option(
    "--data-table",
    type=click.Path(path_type=Path),
    help="TOML file with a table [data], such as a federation's: how pictures or CSV files become "
    "samples.",
)
@click.option(
    "--save-weights",
    type=click.Path(path_type=Path),
    help="Also write the global model that the bundle is cut from, for `aggregate`.",
)
@click.option(
    "--verify/--no-verify",
    default=None,
    help="Compare all graphs with PyTorch, or none.  [default: those not verified earlier]",
)
@click.option("--no-cache", is_flag=True, help="Build the graphs again; ignore the cache.")
@click.option("--force", is_flag=True, help="Replace existing files.")
@click.option(
    "--dry-run", is_flag=True, help="Check the output folder and show sizes; write nothing."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option(
    "--list-operators",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=list_operators,
    help="Print the operators that a model may use, and exit.",
)
def export(
    model: str,
    input_shape: tuple[int, ...],
    batch: int,
    weights: Path | None,
    seed: int,
    specs: tuple[str, ...],
    tiers_file: Path | None,
    format_: Literal["onnx", "tflite"],
    out: Path,
    training: TrainingConfig,
    data_table: Path | None,
    save_weights: Path | None,
    verify: bool | None,
    no_cache: bool,
    force: bool,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Export a submodel with its training step as a bundle.

    A device trains the bundle with `edgetailor-agent train`. Each bundle is compared with PyTorch
    on random inputs; if they differ, the exit code is 4. With several submodels or --tiers, each
    bundle gets a folder under --out. If one fails, the others are still exported, and the exit code
    is the highest of all.

    \b
        edgetailor export toolkit.models:resnet20 --input-shape 3,32,32 \\
            --submodel low-rank:0.25 --out bundles/phone \\
            --save-weights global.safetensors
    """
    # Need pydantic, which would slow down the help of every command.
    from toolkit.data_table import read_data_table
    from toolkit.exporting.tier_files import read_tiers, tiers_of

    if specs and tiers_file is not None:
        raise click.UsageError("Give --submodel or --tiers, not both.")
    submodels = check_specs(specs)
    several = tiers_file is not None or len(submodels) > 1
    wanted = tiers_of(submodels or ["full"]) if tiers_file is None else read_tiers(tiers_file)
    for tier in wanted:
        check_places(out / tier.name if several else out, save_weights, force)
    check_model(model, weights)
    preprocessing = None if data_table is None else read_data_table(data_table)

    show_stages()
    logger.info("loading PyTorch")

    from toolkit.cli.printed import export_table
    from toolkit.exporting import model_export, tiers

    request = model_export.Request(
        model=model,
        sample_shape=input_shape,
        spec=submodels[0] if submodels else "full",
        out=out,
        weights=weights,
        seed=seed,
        format=format_,
        training=training,
        save_weights=save_weights,
        verify=verify,
        cache=not no_cache,
        force=force,
        dry_run=dry_run,
        preprocessing=preprocessing,
    )
    if not several:
        result = model_export.export_bundle(request)
        if as_json:
            click.echo(json.dumps(model_export.as_json(result), indent=1))
        else:
            export_table.show_export(result, batch)
        return
    results = tiers.export_tiers(request, wanted)
    if as_json:
        click.echo(json.dumps(tiers.tiers_as_json(results), indent=1))
    else:
        export_table.show_tiers(results)
    raise click.exceptions.Exit(tiers.exit_code(results))
