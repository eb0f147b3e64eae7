"""`edgetailor inspect`: sizes of submodels, and the places where a model can be cut."""

import json
import logging
from pathlib import Path

import click

from profiles.errors import SpecError
from toolkit.cli.early_checks import check_model, check_some_spec
from toolkit.cli.options import model_options
from toolkit.terminal_output import show_stages

logger = logging.getLogger(__name__)


@click.command()
@model_options
@click.option(
    "--submodel", "specs", multiple=True, default=["full"], help="Submodel SPEC; repeatable."
)
@click.option(
    "--cut-points", is_flag=True, help="Also list the places where `slice` can cut the model."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def inspect(
    model: str,
    input_shape: tuple[int, ...],
    batch: int,
    weights: Path | None,
    seed: int,
    specs: tuple[str, ...],
    cut_points: bool,
    as_json: bool,
) -> None:
    """Show the sizes of submodels and the layers that they change.

    Capacity is as in EmbracingFL: trained parameters plus activations of one batch, divided by
    those of the full model.

    \b
        edgetailor inspect toolkit.models:resnet20 --input-shape 3,32,32 \\
            --submodel full --submodel slice:blocks.3
    """
    check_some_spec(specs)
    check_model(model, weights)

    show_stages()
    logger.info("loading PyTorch")

    from exporters.recording.capture import SharedRecording, capture
    from toolkit import inspection
    from toolkit.cli.printed import inspect_table
    from toolkit.submodels.model_loading import load_model

    logger.info("loading the model")
    loaded = load_model(model, weights, seed)
    with SharedRecording(loaded, input_shape):
        found = inspection.inspect_each(loaded, input_shape, specs, batch)
        failed = [f for f in found if isinstance(f, inspection.NotPossible)]
        if len(specs) == len(failed) == 1 and not cut_points:
            raise failed[0].cause
        places = inspection.cut_places(loaded, input_shape, batch) if cut_points else None
        captured = capture(loaded, input_shape)
    if as_json:
        click.echo(json.dumps(inspection.as_json(captured, found, places), indent=1))
    else:
        inspect_table.show_inspections(captured, found, batch)
        if places is not None:
            inspect_table.show_cut_places(places)
    if failed:
        click.get_current_context().exit(SpecError.exit_code)
