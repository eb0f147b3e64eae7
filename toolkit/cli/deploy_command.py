"""`edgetailor deploy`: write a trained model as inference bundles."""

import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from profiles.errors import InputError
from toolkit.cli.early_checks import check_data, check_model, check_specs
from toolkit.cli.options import (
    EXAMPLE_HELP,
    INPUT_HELP,
    JSON_HELP,
    RANGE_HELP,
    SHAPE_HELP,
    Shape,
    argument,
    inputs_of,
    option,
    takes,
)
from toolkit.deployment.card_fields import Format, Precision
from toolkit.submodels.hyperparameters import Loss, TrainingConfig
from toolkit.terminal_output import show_stages

if TYPE_CHECKING:
    from profiles.documents.device_profile import DeviceProfile
    from toolkit.deployment.targets import Target
    from toolkit.deployment.trained_model import TrainedModel

logger = logging.getLogger(__name__)

BEST = "best"


class Round(click.ParamType[int | str]):
    """The number of a round, or `best`."""

    name = "round"

    def convert(
        self, value: int | str, param: click.Parameter | None, ctx: click.Context | None
    ) -> int | str:
        """Read a whole number of at least 0, or the word `best`."""
        text = str(value)
        if text == BEST:
            return BEST
        if not (text.isascii() and text.isdigit()):
            self.fail(f"Invalid round {text!r}: write its number, or {BEST}.", param, ctx)
        return int(text)


@dataclass(frozen=True, kw_only=True)
class DeployOptions:
    """The options of `deploy`."""

    source: str = argument()
    out: Path = option(
        "Folder to write. With a federation, this folder gets a bundle for each kind of devices.",
        required=True,
    )
    round: int | str | None = option(
        "Round of the federation whose model is deployed, or best.  [default: best]", type=Round()
    )
    kinds: tuple[str, ...] = option(
        "Kind of devices; repeatable.  [default: all of the federation]", "--kind"
    )
    format: Format = option("onnx for ONNX Runtime, tflite for LiteRT.", default="onnx")
    precision: Precision = option(
        "float32; float16 weights; or int8, which is calibrated on samples.", default="float32"
    )
    calibrate: str | None = option(
        "Samples for int8.  [default: statistics or held_out of the federation, or --data]"
    )
    data: str | None = option(
        "Held-out data for the accuracy in the card.  [default: held_out of the federation]"
    )
    profile: str | None = option(
        "Predict the time of a device, from the FILE that `edgetailor-agent calibrate --out` wrote "
        "on it. Only for onnx with float32 or float16."
    )
    weights: Path | None = option("Weights of a MODEL (.safetensors).")
    input_shape: tuple[int, ...] | None = option(SHAPE_HELP, type=Shape())
    input_texts: tuple[str, ...] = option(INPUT_HELP, "--input", metavar="NAME:SHAPE[:int64]")
    range_text: str | None = option(RANGE_HELP, "--input-range", metavar="LOW:HIGH")
    example: Path | None = option(EXAMPLE_HELP)
    specs: tuple[str, ...] = option(
        "Submodel SPEC of a MODEL; repeatable.  [default: full]", "--submodel"
    )
    loss: Loss | None = option(
        "Loss that a MODEL was trained with. It gives the meaning of the model's output.  "
        "[default: cross-entropy]"
    )
    data_table: Path | None = option(
        "TOML file with a table [data] for a MODEL: how pictures or CSV files become samples."
    )
    force: bool = option("Replace existing bundles.")
    as_json: bool = option(JSON_HELP, "--json")


@click.command()
@takes(DeployOptions)
def deploy(options: DeployOptions) -> None:
    """Write a trained model as inference bundles.

    Devices and other programs predict with them.

    SOURCE is the file or the state folder of a federation: each kind of devices gets a bundle with
    the global model, or with this model reduced to the kind's submodel. SOURCE may also be a MODEL
    with --weights and --input-shape.

    A bundle has a graph with the weights inside, verified against PyTorch, and a model card:
    card.json for programs, CARD.md for people. A federation's card is signed with its coordinator's
    key. If a bundle fails, the command still writes the others, and exits with the highest code of
    all bundles.

    \b
        edgetailor deploy federation.toml --out deployed
        edgetailor deploy toolkit.models:resnet20 --input-shape 3,32,32 \\
            --weights global.safetensors --submodel width:0.5 --out deployed
    """
    from toolkit.deployment.targets import check_tree, with_options

    of_federation = Path(options.source).exists()
    targets, load = (federation_model if of_federation else referenced_model)(options)
    if targets[0].out != options.out:
        check_tree(options.out)
    for source in (options.data, options.calibrate):
        if source is not None:
            check_data(source)
    profile = None if options.profile is None else calibrated_device(options)
    wanted = with_options(targets, options.format, options.precision, profile, options.force)

    show_stages()
    logger.info("loading PyTorch")

    from toolkit.cli.printed.deploy_table import show_deployed
    from toolkit.deployment import deploy_targets

    outcomes = deploy_targets.deploy_targets(load(), wanted)
    if options.as_json:
        click.echo(json.dumps(deploy_targets.as_json(outcomes), indent=1))
    else:
        show_deployed(outcomes)
    raise click.exceptions.Exit(deploy_targets.exit_code(outcomes))


def federation_model(
    options: DeployOptions,
) -> tuple[list["Target"], Callable[[], "TrainedModel"]]:
    """The targets of a federation's file, and a function that loads its model."""
    from toolkit.coordinator.federation_source import load_federation
    from toolkit.coordinator.storage.saved_rounds import best_round, model_file
    from toolkit.deployment.targets import kind_targets

    refuse(
        "A federation's file has the model: leave out {options}.",
        weights=options.weights,
        input_shape=options.input_shape,
        input=options.input_texts,
        input_range=options.range_text,
        example=options.example,
        submodel=options.specs,
        loss=options.loss,
        data_table=options.data_table,
    )
    config = load_federation(Path(options.source))
    targets = kind_targets(config, options.kinds, options.out)
    check_model(config.model)
    asked = options.round in (None, BEST)
    round_ = best_round(config.state) if asked else int(options.round or 0)
    model_file(config.state, round_)

    def load() -> "TrainedModel":
        from toolkit.deployment.trained_model import from_federation

        return from_federation(config, round_, options.data, options.calibrate)

    return targets, load


def referenced_model(
    options: DeployOptions,
) -> tuple[list["Target"], Callable[[], "TrainedModel"]]:
    """The targets for the submodels of a MODEL, and a function that loads it."""
    from toolkit.data_table import read_data_table
    from toolkit.deployment.targets import spec_targets

    refuse(
        "{options} needs a federation's file as SOURCE.", round=options.round, kind=options.kinds
    )
    weights = options.weights
    if weights is None or not (options.input_shape or options.input_texts):
        raise click.UsageError("A MODEL needs --weights, and --input-shape or --input.")
    shape, inputs = inputs_of(
        options.input_shape, options.input_texts, options.range_text, options.example
    )
    targets = spec_targets(check_specs(options.specs), options.out)
    check_model(options.source, weights)
    preprocessing = None if options.data_table is None else read_data_table(options.data_table)
    training = TrainingConfig(loss=options.loss or TrainingConfig.loss)

    def load() -> "TrainedModel":
        from toolkit.deployment.trained_model import from_reference

        return from_reference(
            options.source,
            weights,
            shape,
            training,
            preprocessing,
            options.data,
            options.calibrate,
            inputs,
        )

    return targets, load


def calibrated_device(options: DeployOptions) -> "DeviceProfile":
    """The profile of the device whose time is predicted. Raises InputError if not calibrated."""
    from profiles.documents.device_profile import load_device

    if options.format != "onnx" or options.precision == "int8":
        raise click.UsageError("--profile needs --format onnx, and float32 or float16.")
    device = load_device(str(options.profile))
    if device.calibration is None:
        raise InputError(
            "The profile {profile} has no calibration, so it predicts no time. Measure the device "
            "with `edgetailor-agent calibrate --out FILE`.",
            code="deploy.not-calibrated",
            profile=options.profile,
        )
    return device


def refuse(message: str, **values: object) -> None:
    """Raise UsageError if the user gave an option in `values`, which maps names to values."""
    given = [
        f"--{name.replace('_', '-')}" for name, value in values.items() if value not in (None, ())
    ]
    if given:
        raise click.UsageError(message.format(options=" and ".join(given)))
