"""`edgetailor evaluate`: how good a global model is on held-out data."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from profiles.errors import InputError
from toolkit.cli.deploy_command import BEST, Round, refuse
from toolkit.cli.early_checks import check_data, check_model
from toolkit.cli.options import JSON_HELP, LOSS_HELP, Shape, argument, option, takes
from toolkit.submodels.hyperparameters import Loss, TrainingConfig
from toolkit.terminal_output import show_stages

if TYPE_CHECKING:
    from toolkit.report.evaluation_document import EvaluationDocument

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class EvaluateOptions:
    """The options of `evaluate`."""

    source: str = argument()
    round: int | str | None = option(
        "Round of the federation whose model is evaluated, or best.  [default: best]", type=Round()
    )
    data: str | None = option(
        "FILE.npz with x and y, or module:callable.  [default: held_out of the federation]"
    )
    weights: Path | None = option("Weights of a MODEL (.safetensors).")
    input_shape: tuple[int, ...] | None = option(
        "Shape of one sample of a MODEL, like 3,32,32.", type=Shape()
    )
    loss: Loss | None = option(f"{LOSS_HELP}  [default: {TrainingConfig.loss}]")
    as_json: bool = option(JSON_HELP, "--json")


@click.command()
@takes(EvaluateOptions)
def evaluate(options: EvaluateOptions) -> None:
    """Evaluate a trained model on held-out data.

    SOURCE is the file of a federation, or a MODEL with --weights and --input-shape.

    Prints accuracy, loss, and the accuracy of each class with the confusion matrix. For a
    regression it prints the loss, the root of the mean squared error (RMSE) and the mean absolute
    error (MAE). `edgetailor report` draws the output of --json.

    \b
        edgetailor evaluate federation.toml --round best
        edgetailor evaluate toolkit.models:resnet20 --weights next.safetensors \\
            --input-shape 3,32,32 --data held_out.npz
    """
    of_federation = Path(options.source).is_file()
    load = (federation_model if of_federation else referenced_model)(options)
    if options.data is not None:
        check_data(options.data)

    show_stages()
    logger.info("loading PyTorch")

    from toolkit.cli.printed.evaluation_table import show_evaluation
    from toolkit.report.evaluation_document import as_json

    document = load()
    if options.as_json:
        click.echo(as_json(document))
    else:
        show_evaluation(document)


def federation_model(options: EvaluateOptions) -> Callable[[], "EvaluationDocument"]:
    """A function that evaluates the model of a federation's round."""
    from toolkit.coordinator.federation_config import load_config
    from toolkit.coordinator.storage.saved_rounds import best_round, model_file, saved_rounds

    refuse(
        "A federation's file has the model: leave out {options}.",
        weights=options.weights,
        input_shape=options.input_shape,
        loss=options.loss,
    )
    config = load_config(Path(options.source))
    check_model(config.model)
    data = options.data or config.held_out
    if data is None:
        raise InputError(
            "{path} has no `held_out` samples. Give samples with --data, or see in `edgetailor "
            "rounds` how the devices judge the models.",
            code="evaluate.no-samples",
            path=options.source,
        )
    asked = options.round in (None, BEST)
    round_ = best_round(config.state) if asked else int(options.round or 0)
    weights = model_file(config.state, round_)

    def load() -> "EvaluationDocument":
        from toolkit.model_evaluation import evaluate_file
        from toolkit.report.evaluation_document import evaluation_document

        evaluation = evaluate_file(
            config.model,
            weights,
            config.input_shape,
            data,
            config.training.loss,
            logger.info,
            config.data,
            config.seed,
        )
        devices = next(s.devices for s in saved_rounds(config.state) if s.round == round_)
        names = () if config.data is None else config.data.classes
        return evaluation_document(evaluation, config.model, round_, names, devices)

    return load


def referenced_model(options: EvaluateOptions) -> Callable[[], "EvaluationDocument"]:
    """A function that evaluates a MODEL with weights from a file."""
    refuse("{options} needs a federation's file as SOURCE.", round=options.round)
    weights, shape, data = options.weights, options.input_shape, options.data
    if weights is None or shape is None or data is None:
        raise click.UsageError("A MODEL needs --weights, --input-shape and --data.")
    check_model(options.source, weights)

    def load() -> "EvaluationDocument":
        from toolkit.model_evaluation import evaluate_file
        from toolkit.report.evaluation_document import evaluation_document

        loss = options.loss or TrainingConfig.loss
        evaluation = evaluate_file(options.source, weights, shape, data, loss, logger.info)
        return evaluation_document(evaluation, options.source, weights=weights.name)

    return load
