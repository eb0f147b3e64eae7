"""`edgetailor evaluate`: accuracy and loss of a global model on held-out data."""

import json
import logging
from dataclasses import dataclass
from pathlib import Path

import click

from profiles.text_formatting import counted
from toolkit.cli.early_checks import check_data, check_model
from toolkit.cli.options import JSON_HELP, LOSS_HELP, Shape, argument, option, takes
from toolkit.submodels.hyperparameters import Loss, TrainingConfig
from toolkit.terminal_output import show_stages

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class EvaluateOptions:
    """The options of `evaluate`."""

    model: str = argument()
    weights: Path = option("Weights (.safetensors).", required=True)
    input_shape: tuple[int, ...] = option(
        "Shape of one sample, like 3,32,32.", type=Shape(), required=True
    )
    data: str = option("FILE.npz with x and y, or module:callable.", required=True)
    loss: Loss = option(LOSS_HELP, default=TrainingConfig.loss)
    as_json: bool = option(JSON_HELP, "--json")


@click.command()
@takes(EvaluateOptions)
def evaluate(options: EvaluateOptions) -> None:
    """Evaluate MODEL with the weights of a file on held-out data.

    Prints the accuracy and the mean loss. A regression has no accuracy.

    \b
        edgetailor evaluate toolkit.models:resnet20 --weights next.safetensors \\
            --input-shape 3,32,32 --data held_out.npz
    """
    check_model(options.model, options.weights)
    check_data(options.data)

    show_stages()
    logger.info("loading PyTorch")

    from toolkit import model_evaluation

    evaluation = model_evaluation.evaluate_file(
        options.model,
        options.weights,
        options.input_shape,
        options.data,
        options.loss,
        progress=logger.info,
    )
    if options.as_json:
        click.echo(json.dumps(model_evaluation.as_json(evaluation), indent=1))
        return
    samples = counted(evaluation.samples, "sample")
    if evaluation.counted != evaluation.samples:
        samples = f"{counted(evaluation.counted, 'label')} of {samples}"
    accuracy = "" if evaluation.accuracy is None else f"accuracy {evaluation.accuracy:.1%}, "
    click.echo(f"{accuracy}loss {evaluation.loss:.4f} on {samples}")
