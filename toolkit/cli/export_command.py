"""`edgetailor export`: bundles that devices train."""

import json
from pathlib import Path
from typing import Literal

import click

from toolkit.cli.options import model_options, training_options
from toolkit.submodels.training_config import TrainingConfig


def list_operators(context: click.Context, option: click.Parameter, asked: bool) -> None:
    """Print the coverage table and end."""
    if not asked:
        return
    from exporters.programs.coverage import document

    click.echo(document())
    context.exit()


@click.command()
@model_options
@click.option(
    "--submodel", "specs", multiple=True, help="SPEC to export; repeatable.  [default: full]"
)
@click.option(
    "--tiers",
    "tiers_file",
    type=click.Path(path_type=Path),
    help="TOML file of [[tiers]], each with a name and a submodel.",
)
@click.option(
    "--format",
    "format_",
    type=click.Choice(["onnx", "tflite"]),
    default="onnx",
    show_default=True,
    help="Graphs for onnxruntime, or one file for LiteRT.",
)
@click.option(
    "--out",
    required=True,
    type=click.Path(path_type=Path),
    help="New bundle folder; of several bundles the folder around them.",
)
@training_options
@click.option(
    "--save-weights",
    type=click.Path(path_type=Path),
    help="Also write the global model that the bundle is cut from; `aggregate` starts from it.",
)
@click.option(
    "--verify/--no-verify",
    default=None,
    help="Compare all graphs with PyTorch, or none.  [default: those not verified earlier]",
)
@click.option("--no-cache", is_flag=True, help="Make graphs again instead of reusing earlier ones.")
@click.option("--force", is_flag=True, help="Replace files that exist.")
@click.option(
    "--dry-run", is_flag=True, help="Check the places, split and show the sizes; write nothing."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option(
    "--list-operators",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=list_operators,
    help="Print which operators a model may have, and exit.",
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
    save_weights: Path | None,
    verify: bool | None,
    no_cache: bool,
    force: bool,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Export a submodel with its training step as a bundle.

    A device trains it with `edgetailor-agent train`. The bundle is checked against PyTorch on fresh
    random inputs; a miss exits 4. Several submodels, or the tiers of a file, become a folder each
    under --out; one that fails does not stop the others, and the exit code is the worst.

    \b
    edgetailor export toolkit.models:resnet20 --input-shape 3,32,32 \\
        --submodel low-rank:0.25 --out bundles/phone \\
        --save-weights global.safetensors
    """
    from toolkit.cli import result_tables
    from toolkit.exporting import model_export, tiers
    from toolkit.terminal_output import Stages

    if specs and tiers_file is not None:
        raise click.UsageError("Give --submodel or --tiers, not both.")
    request = model_export.Request(
        model=model,
        sample_shape=input_shape,
        spec=specs[0] if specs else "full",
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
    )
    if tiers_file is None and len(specs) < 2:
        result = model_export.export_bundle(request, report=Stages())
        if as_json:
            click.echo(json.dumps(model_export.as_json(result), indent=1))
        else:
            result_tables.show_export(result, batch)
        return
    wanted = tiers.read_tiers(tiers_file) if tiers_file is not None else tiers.tiers_of(specs)
    results = tiers.export_tiers(request, wanted, report=Stages())
    if as_json:
        click.echo(json.dumps(tiers.tiers_as_json(results), indent=1))
    else:
        result_tables.show_tiers(results)
    raise click.exceptions.Exit(tiers.exit_code(results))
