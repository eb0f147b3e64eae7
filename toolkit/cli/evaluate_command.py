"""`edgetailor evaluate`: accuracy and loss of a global model on held-out data."""

import json
import logging
from pathlib import Path

import click

from toolkit.cli.early_checks import check_data, check_model
from toolkit.cli.options import Shape, loss_option
from toolkit.submodels.hyperparameters import Loss
from toolkit.terminal_output import show_stages

logger = logging.getLogger(__name__)


@click.command()
@click.argument("model")
@click.option(
    "--weights", required=True, type=click.Path(path_type=Path), help="Weights (.safetensors)."
)
@click.option(
    "--input-shape", type=Shape(), required=True, help="Shape of one sample, like 3,32,32."
)
@click.option("--data", required=True, help="FILE.npz with x and y, or module:callable.")
@loss_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def evaluate(
    model: str, weights: Path, input_shape: tuple[int, ...], data: str, loss: Loss, as_json: bool
) -> None:
    """Evaluate MODEL with the weights of a file on held-out data.

    Prints the accuracy and the mean loss. A regression has no accuracy.

    \b
        edgetailor evaluate toolkit.models:resnet20 --weights next.safetensors \\
            --input-shape 3,32,32 --data held_out.npz
    """
    check_model(model, weights)
    check_data(data)

    show_stages()
    logger.info("loading PyTorch")

    from toolkit import model_evaluation
    from toolkit.cli.printed import evaluate_table

    found = model_evaluation.evaluate_file(
        model, weights, input_shape, data, loss, progress=logger.info
    )
    if as_json:
        click.echo(json.dumps(model_evaluation.as_json(found), indent=1))
    else:
        evaluate_table.show_evaluation(found)
