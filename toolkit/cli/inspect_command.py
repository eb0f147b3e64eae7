"""`edgetailor inspect`: sizes of submodels, and the places where a model can be cut."""

import json
import logging
from dataclasses import dataclass
from typing import Literal

import click

from exporters.programs.garbage_collection import rare_collections
from profiles.errors import SpecError
from toolkit.cli.early_checks import check_model, check_some_spec
from toolkit.cli.options import JSON_HELP, LOSS_HELP, ModelOptions, option, takes
from toolkit.submodels.hyperparameters import Loss, TrainingConfig
from toolkit.terminal_output import show_stages

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class InspectOptions(ModelOptions):
    """The options of `inspect`."""

    specs: tuple[str, ...] = option(
        "Submodel SPEC; repeatable.", "--submodel", default=["full"], show_default=False
    )
    format: Literal["onnx", "tflite"] = option(
        "Check that the submodels can be exported in this format. tflite takes longer.",
        default="onnx",
    )
    loss: Loss = option(LOSS_HELP, default=TrainingConfig.loss)
    cut_points: bool = option("Also list the places where `slice` can cut the model.")
    as_json: bool = option(JSON_HELP, "--json")


@click.command()
@takes(InspectOptions)
def inspect(options: InspectOptions) -> None:
    """Show sizes of submodels, and which layers they change.

    Capacity is as in EmbracingFL: trained parameters plus activations of one batch, divided by
    those of the full model.

    \b
        edgetailor inspect toolkit.models:resnet20 --input-shape 3,32,32 \\
            --submodel full --submodel slice:blocks.3
    """
    check_some_spec(options.specs)
    check_model(options.model, options.weights)
    shape, inputs = options.inputs()

    show_stages()
    logger.info("loading PyTorch")

    with rare_collections():
        from exporters.objectives.loss_text import is_own
        from exporters.recording.capture import SharedRecording, capture
        from toolkit import inspection
        from toolkit.cli.printed import inspect_table
        from toolkit.submodels.model_loading import load_model
        from toolkit.trained_outputs import trained_outputs

    logger.info("loading the model")
    model = load_model(options.model, options.weights, options.seed, inputs)
    with SharedRecording(model, shape):
        inspections = inspection.inspect_each(
            model, shape, options.specs, options.batch, options.loss, options.format
        )
        failed = [result for result in inspections if isinstance(result, inspection.NotPossible)]
        if len(options.specs) == len(failed) == 1 and not options.cut_points:
            raise failed[0].cause
        captured = capture(model, shape, is_own(options.loss))
        places = inspection.cut_places(captured, options.batch) if options.cut_points else None
        trained = trained_outputs(captured, options.loss)
    if options.as_json:
        click.echo(json.dumps(inspection.as_json(captured, inspections, places, trained), indent=1))
    else:
        inspect_table.show_inspections(captured, inspections, options.batch, trained)
        if places is not None:
            inspect_table.show_cut_places(places)
    if failed:
        click.get_current_context().exit(SpecError.exit_code)
