"""`edgetailor export`: export submodels as bundles that devices can train."""

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import click

from exporters.programs.garbage_collection import rare_collections
from toolkit.cli.early_checks import check_model, check_specs
from toolkit.cli.options import (
    JSON_HELP,
    LIST_AS_JSON,
    ModelOptions,
    TrainingOptions,
    WithList,
    option,
    takes,
)
from toolkit.exporting.output_places import check_places
from toolkit.terminal_output import show_stages

logger = logging.getLogger(__name__)


def list_operators(context: click.Context, _: click.Parameter, asked: bool) -> None:
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


@dataclass(frozen=True, kw_only=True)
class Target(ModelOptions):
    """The submodels to export, their format and the output folder."""

    specs: tuple[str, ...] = option(
        "Submodel SPEC to export; repeatable.  [default: full]", "--submodel"
    )
    tiers_file: Path | None = option(
        "TOML file with [[tiers]] to export, each with a name and a submodel.", "--tiers"
    )
    format: Literal["onnx", "tflite"] = option(
        "onnx for ONNX Runtime, tflite for LiteRT.", default="onnx"
    )
    out: Path = option(
        "Bundle folder to write; with several submodels, the folder for their bundles.",
        required=True,
    )


@dataclass(frozen=True, kw_only=True)
class ExportOptions(TrainingOptions, Target):
    """The options of `export`."""

    data_table: Path | None = option(
        "TOML file with a table [data], such as a federation's: how pictures or CSV files become "
        "samples."
    )
    save_weights: Path | None = option(
        "Also write the global model that the bundle is cut from, for `aggregate`."
    )
    verify: bool | None = option(
        "Compare all graphs with PyTorch, or none.  [default: graphs that are not verified yet]",
        "--verify/--no-verify",
    )
    no_cache: bool = option("Build the graphs again; ignore the cache.")
    force: bool = option("Replace existing files.")
    dry_run: bool = option("Check the output folder and show sizes; write nothing.")
    as_json: bool = option(JSON_HELP, "--json")
    list_operators: bool = option(
        "Print the operators that a model may use, and exit.",
        is_eager=True,
        callback=list_operators,
    )


@click.command(cls=WithList)
@takes(ExportOptions)
def export(options: ExportOptions) -> None:
    """Export a submodel with its training step as a bundle.

    A device trains the bundle with `edgetailor-agent train`. Each bundle is compared with PyTorch
    on random inputs; if the results differ, the exit code is 4. With several submodels or --tiers,
    each bundle gets a folder under --out. If a bundle fails, the command still exports the others,
    and exits with the highest code of all bundles.

    \b
        edgetailor export toolkit.models:resnet20 --input-shape 3,32,32 \\
            --submodel low-rank:0.25 --out bundles/phone \\
            --save-weights global.safetensors
    """
    # These modules import pydantic, which would slow down the help of every command.
    from toolkit.data_table import read_data_table
    from toolkit.exporting.tier_files import read_tiers, tiers_of

    training = options.training(options.batch)
    if options.specs and options.tiers_file is not None:
        raise click.UsageError("Give --submodel or --tiers, not both.")
    submodels = check_specs(options.specs)
    if options.tiers_file is None:
        wanted = tiers_of(submodels or ["full"])
    else:
        wanted = read_tiers(options.tiers_file)
    several = options.tiers_file is not None or len(submodels) > 1
    for tier in wanted:
        out = options.out / tier.name if several else options.out
        check_places(out, options.save_weights, options.force)
    check_model(options.model, options.weights)
    shape, inputs = options.inputs()
    preprocessing = None if options.data_table is None else read_data_table(options.data_table)

    show_stages()
    logger.info("loading PyTorch")

    with rare_collections():
        from toolkit.cli.printed import export_table
        from toolkit.exporting import model_export, tiers

    request = model_export.Request(
        model=options.model,
        sample_shape=shape,
        spec=submodels[0] if submodels else "full",
        out=options.out,
        weights=options.weights,
        seed=options.seed,
        format=options.format,
        training=training,
        save_weights=options.save_weights,
        verify=options.verify,
        cache=not options.no_cache,
        force=options.force,
        dry_run=options.dry_run,
        preprocessing=preprocessing,
        inputs=inputs,
    )
    if not several:
        result = model_export.export_bundle(request)
        if options.as_json:
            click.echo(json.dumps(model_export.as_json(result), indent=1))
        else:
            export_table.show_export(result, options.batch)
        return
    results = tiers.export_tiers(request, wanted)
    if options.as_json:
        click.echo(json.dumps(tiers.tiers_as_json(results), indent=1))
    else:
        export_table.show_tiers(results)
    raise click.exceptions.Exit(tiers.exit_code(results))
