"""Options that several commands take."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import click
from click.core import ParameterSource

from profiles.text_formatting import did_you_mean
from toolkit.submodels.hyperparameters import Loss, Optimizer, TrainingConfig

LIST_AS_JSON = f"{__name__}.list_as_json"
"""Whether a list is to be printed as JSON, in a context's `meta`."""
Decorated = Callable[..., Any]
SEED = click.IntRange(0, 2**31 - 1)


class Shape(click.ParamType[tuple[int, ...]]):
    """The shape of a sample, like 3,32,32."""

    name = "shape"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, ...]:
        """Read positive whole numbers separated by commas."""
        try:
            shape = tuple(int(part) for part in str(value).split(","))
        except ValueError:
            shape = ()
        if not shape or min(shape) < 1:
            self.fail(
                f"Invalid shape {value!r}: write a sample's sizes, for example 3,32,32.", param, ctx
            )
        return shape


class Choice(click.Choice[str]):
    """One of several words. An unknown word is refused with the closest of them."""

    def get_invalid_choice_message(self, value: Any, ctx: click.Context | None) -> str:
        """See click."""
        message = super().get_invalid_choice_message(value, ctx)
        return message.removesuffix(".") + did_you_mean(str(value), self.choices)


def model_options(command: Decorated) -> Decorated:
    """Add MODEL and the options that build it to `command`."""
    for option in (
        click.option(
            "--seed",
            default=0,
            show_default=True,
            type=SEED,
            help="Seed of the initial weights.",
        ),
        click.option(
            "--weights", type=click.Path(path_type=Path), help="Weights file (.safetensors)."
        ),
        click.option(
            "--batch",
            default=TrainingConfig.batch_size,
            show_default=True,
            type=click.IntRange(2),
            help="Batch size.",
        ),
        click.option(
            "--input-shape", type=Shape(), required=True, help="Shape of one sample, like 3,32,32."
        ),
        click.argument("model"),
    ):
        command = option(command)
    return command


loss_option = click.option(
    "--loss",
    type=Choice(get_args(Loss)),
    default=TrainingConfig.loss,
    show_default=True,
    help="Loss to minimise; ctc is for sequences whose places are not known, mse for regressions.",
)


TRAINING = (
    click.option(
        "--epochs",
        default=TrainingConfig.epochs,
        show_default=True,
        help="Passes over the local data, at least 1.",
    ),
    click.option(
        "--learning-rate",
        default=TrainingConfig.learning_rate,
        show_default=True,
        help="Learning rate, at least 0.",
    ),
    loss_option,
    click.option(
        "--masked",
        is_flag=True,
        help="Set the logits of classes that a device has no samples of to zero.",
    ),
    click.option(
        "--optimizer",
        type=Choice(get_args(Optimizer)),
        default=TrainingConfig.optimizer,
        show_default=True,
        help="Optimizer of the training step.",
    ),
    click.option(
        "--momentum",
        default=TrainingConfig.momentum,
        show_default=True,
        help="Momentum of sgd and nesterov, at least 0 and below 1.",
    ),
    click.option(
        "--weight-decay",
        default=TrainingConfig.weight_decay,
        show_default=True,
        help="Weight decay; added to the gradient, with adamw subtracted from the parameters.",
    ),
    click.option(
        "--proximal",
        default=TrainingConfig.proximal,
        show_default=True,
        help="mu of FedProx, which keeps a device near the weights that it received.",
    ),
)
HYPERPARAMETERS = (
    *("epochs", "learning_rate", "loss", "masked"),
    *("optimizer", "momentum", "weight_decay", "proximal"),
)


def training_options(command: Decorated) -> Decorated:
    """Add the options of local training to `command`.

    The command gets them, and `--batch` of the model's options, as one TrainingConfig.
    """

    @functools.wraps(command)
    def with_training(**given: Any) -> Any:
        chosen = {name: given.pop(name) for name in HYPERPARAMETERS}
        return command(training=TrainingConfig(given["batch"], **chosen), **given)

    made: Decorated = with_training
    for option in reversed(TRAINING):
        made = option(made)
    return made


class WithList(click.Command):
    """A command with an option that prints a list and exits, as JSON if `--json` is given too.

    Click runs such an option before it reads those behind it, so `--json` is looked for here.
    """

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """See click."""
        ctx.meta[LIST_AS_JSON] = "--json" in args
        return super().parse_args(ctx, args)


def repeated(context: click.Context, *names: str) -> list[str]:
    """The options `names` as the user wrote them, for the command line of another command."""
    words = []
    for option in context.command.params:
        source = context.get_parameter_source(option.name or "")
        if option.name in names and source == ParameterSource.COMMANDLINE:
            value = context.params[option.name]
            words.append(option.opts[0])
            if value is not True:
                text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
                words.append(text)
    return words
