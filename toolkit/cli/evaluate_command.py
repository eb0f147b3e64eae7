"""`edgetailor evaluate`: how good a global model is on held-out data."""

import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from profiles.errors import InputError
from toolkit.cli.deploy_command import BEST, Round, refuse
from toolkit.cli.early_checks import check_data, check_model
from toolkit.cli.options import (
    INPUT_HELP,
    JSON_HELP,
    SHAPE_HELP,
    Shape,
    argument,
    inputs_of,
    option,
    takes,
)
from toolkit.submodels.hyperparameters import Loss, TrainingConfig
from toolkit.terminal_output import show_stages

if TYPE_CHECKING:
    from toolkit.coordinator.federation_file.federation_config import CoordinatorConfig
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
        "FILE.npz with x and y (x_NAME and y_NAME for several inputs or outputs), or "
        "module:callable.  [default: held_out of the federation]"
    )
    weights: Path | None = option("Weights of a MODEL (.safetensors).")
    input_shape: tuple[int, ...] | None = option(SHAPE_HELP, type=Shape())
    input_texts: tuple[str, ...] = option(INPUT_HELP, "--input", metavar="NAME:SHAPE[:int64]")
    loss: Loss | None = option(
        f"Loss that a MODEL was trained with.  [default: {TrainingConfig.loss}]"
    )
    leave_one_out: bool = option(
        "Aggregate the round of --round (default: the last round) again, each time without one of "
        "its devices. Needs `keep_updates` in the federation's file."
    )
    as_json: bool = option(JSON_HELP, "--json")


@click.command()
@takes(EvaluateOptions)
def evaluate(options: EvaluateOptions) -> None:
    """Evaluate a trained model on held-out data.

    SOURCE is the file or the state folder of a federation, or a MODEL with --weights and
    --input-shape.

    The command prints accuracy, loss, and the accuracy of each class with the confusion matrix. For
    the loss mse it prints the loss, the root of the mean squared error (RMSE) and the mean absolute
    error (MAE). `edgetailor report` draws the output of --json.

    With --leave-one-out it shows how good the model of a round would be without the update of each
    device.

    \b
        edgetailor evaluate federation.toml --round best
        edgetailor evaluate federation.toml --leave-one-out
        edgetailor evaluate toolkit.models:resnet20 --weights next.safetensors \\
            --input-shape 3,32,32 --data held_out.npz
    """
    of_federation = Path(options.source).exists()
    if options.leave_one_out:
        if not of_federation:
            raise click.UsageError("--leave-one-out needs a federation's file as SOURCE.")
        _leave_one_out(options)
        return
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
    from toolkit.coordinator.federation_source import load_federation
    from toolkit.coordinator.storage.saved_rounds import best_round, model_file, saved_rounds
    from toolkit.report.evaluation_document import evaluation_document

    refuse(
        "A federation's file has the model: leave out {options}.",
        weights=options.weights,
        input_shape=options.input_shape,
        input=options.input_texts,
        loss=options.loss,
    )
    config = load_federation(Path(options.source))
    asked = options.round in (None, BEST)
    round_ = best_round(config.state) if asked else int(options.round or 0)
    devices = next((s.devices for s in saved_rounds(config.state) if s.round == round_), None)
    names = () if config.data is None else config.data.classes
    if options.data is None and config.held_out is None and devices is not None:
        document = evaluation_document(devices, config.model, round_, names, devices)
        return lambda: document
    data = checked_data(options, config)
    weights = model_file(config.state, round_)

    def load() -> "EvaluationDocument":
        from toolkit.model_evaluation import evaluate_file

        evaluation = evaluate_file(
            config.model,
            weights,
            config.input_shape,
            data,
            config.training.loss,
            logger.info,
            config.data,
            config.seed,
            config.known_inputs(),
        )
        return evaluation_document(evaluation, config.model, round_, names, devices)

    return load


def checked_data(options: EvaluateOptions, config: "CoordinatorConfig") -> str | Path:
    """The file of a federation's held-out data. Raises InputError if there is none."""
    check_model(config.model)
    if options.data is not None:
        check_data(options.data)
        return options.data
    if config.held_out is None:
        raise InputError(
            "{path} has no `held_out` samples, and its devices do not judge the model of this "
            "round. Give samples with --data, or choose another --round (see `edgetailor rounds`).",
            code="evaluate.no-samples",
            path=options.source,
        )
    return config.held_out


def _leave_one_out(options: EvaluateOptions) -> None:
    """Print how good a round's model would be without each device."""
    from toolkit.coordinator.federation_source import load_federation
    from toolkit.coordinator.leave_one_out import kept_updates, leave_one_out
    from toolkit.coordinator.storage.saved_rounds import best_round, saved_rounds

    config = load_federation(Path(options.source))
    data = checked_data(options, config)
    if config.site:
        raise InputError(
            "The model of a Flower site comes from the server, so the rounds cannot be aggregated "
            "again here. Leave out --leave-one-out.",
            code="evaluate.flower-site",
        )
    if options.round == BEST:
        round_ = best_round(config.state)
    elif options.round is not None:
        round_ = int(options.round)
    else:
        round_ = max((saved.round for saved in saved_rounds(config.state)), default=0)
    kept_updates(config.state, round_)  # what can fail is checked before PyTorch is loaded

    show_stages()
    logger.info("loading PyTorch")

    from toolkit.cli.printed.leave_one_out_table import as_json, show_without_devices
    from toolkit.coordinator.federation_setup import federation
    from toolkit.model_evaluation import samples_for

    # No submodel is split: the updates are recovered from their records.
    model = federation(config.model_copy(update={"devices": ()}), logger.info)
    samples = samples_for(model.module, config.input_shape, data, config.training.loss, config.data)
    every, without = leave_one_out(model, config.state, round_, samples)
    if options.as_json:
        click.echo(json.dumps(as_json(round_, every, without), indent=1))
    else:
        show_without_devices(round_, every, without)


def referenced_model(options: EvaluateOptions) -> Callable[[], "EvaluationDocument"]:
    """A function that evaluates a MODEL with weights from a file."""
    refuse("{options} needs a federation's file as SOURCE.", round=options.round)
    weights, data = options.weights, options.data
    if weights is None or data is None or not (options.input_shape or options.input_texts):
        raise click.UsageError("A MODEL needs --weights, --input-shape or --input, and --data.")
    shape, inputs = inputs_of(options.input_shape, options.input_texts, None, None)
    check_model(options.source, weights)

    def load() -> "EvaluationDocument":
        from toolkit.model_evaluation import evaluate_file
        from toolkit.report.evaluation_document import evaluation_document

        loss = options.loss or TrainingConfig.loss
        evaluation = evaluate_file(
            options.source, weights, shape, data, loss, logger.info, inputs=inputs
        )
        return evaluation_document(evaluation, options.source, weights=weights.name)

    return load
