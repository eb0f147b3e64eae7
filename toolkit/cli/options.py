"""Options that several commands take."""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import UnionType
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import click
from click.core import ParameterSource

from device_agent.formats.packing import packed_size
from exporters.recording.inputs.sample_range import Inputs, parse_inputs, parse_range, read_range
from profiles.text_formatting import did_you_mean
from toolkit.submodels.hyperparameters import Loss, Optimizer, TrainingConfig

LIST_AS_JSON = f"{__name__}.list_as_json"
"""Key in the `meta` of a click context: whether to print a list as JSON."""
Decorated = Callable[..., Any]
Options = TypeVar("Options")
SEED = click.IntRange(0, 2**31 - 1)
PATH = click.Path(path_type=Path)
JSON_HELP = "Print one JSON object."
LOSS_HELP = (
    "Loss to minimise: the name of a built-in one with its options, such as "
    "cross-entropy,smoothing=0.1; OUTPUT=LOSS for one output of several, joined with + for more; "
    "or module:function for a loss of your own. The guide to losses lists all built-in losses."
)

SHAPE_HELP = "Shape of one sample, like 3,32,32."
INPUT_HELP = (
    "One of several inputs of a model, in place of --input-shape; repeatable. image:3,32,32 are "
    "numbers, words:20:int64 are ids, user:int64 is one id. Data have an array x_NAME for each "
    "input."
)
RANGE_HELP = (
    "Range of the numbers in a sample, such as 0:4 for whole numbers or 0.0:1.0. Random samples "
    "are drawn from this range; without it, they are standard normal. Needed if the numbers are "
    "ids. With --input, it is the range of all inputs that are numbers."
)
EXAMPLE_HELP = (
    "File with a few real samples (.npz with x, or with x_NAME for each of several inputs, or "
    ".npy), which show the range of each number of a sample. Replaces --input-range."
)


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
                f"Invalid shape {value!r}: write a sample's sizes, for example 3,32,32. If the "
                "model takes several inputs, give --input NAME:SHAPE for each.",
                param,
                ctx,
            )
        return shape


class Choice(click.Choice[str]):
    """One of several words. The error for an unknown word suggests the closest one."""

    def get_invalid_choice_message(self, value: Any, ctx: click.Context | None) -> str:
        """See click."""
        message = super().get_invalid_choice_message(value, ctx)
        return message.removesuffix(".") + did_you_mean(str(value), self.choices)


def argument(**settings: Any) -> Any:
    """Declare an argument of a command as a field. `settings` are for `click.argument`."""
    return field(metadata={"name": None, **settings})


def option(help: str, name: str = "", *, default: Any = None, **settings: Any) -> Any:
    """Declare an option of a command as a field of an options class.

    Args:
        help: The text about the option in the command's help.
        name: The option's name, if it differs from the field's.
        default: The option's default, which the help shows.
        settings: Other settings of `click.option`; most follow from the type of the field.
    """
    if default is not None:
        settings = {"default": default, "show_default": True, **settings}
    return field(metadata={"name": name, "help": help, **settings})


def takes(options: type[Options]) -> Callable[[Callable[[Options], None]], Decorated]:
    """Decorate a command that takes one `options` object: its fields are the command's options.

    `options` is a dataclass whose fields are declared with `argument` and `option`.
    """

    def decorate(command: Callable[[Options], None]) -> Decorated:
        @functools.wraps(command)
        def with_options(**given: Any) -> None:
            command(options(**given))

        types, decorated = get_type_hints(options), with_options
        for own in reversed(fields(options)):  # type: ignore[arg-type]
            decorated = _parameter(own.name, types[own.name], own.metadata)(decorated)
        return decorated

    return decorate


def _parameter(field_name: str, hint: Any, metadata: Mapping[str, Any]) -> Decorated:
    """The decorator of click for a field of the type `hint`."""
    settings = dict(metadata)
    name = settings.pop("name")
    several = get_origin(hint) is tuple
    # The X of `X | None` or `tuple[X, ...]`.
    kind = get_args(hint)[0] if several or isinstance(hint, UnionType) else hint
    if get_origin(kind) is Literal:
        settings.setdefault("type", Choice(get_args(kind)))
    elif kind is Path:
        settings.setdefault("type", PATH)
    if name is None:
        return click.argument(field_name, **settings)
    if kind is bool:
        # Without `--x` and `--no-x` the value is None; a single flag is False.
        settings |= {"default": None} if "/" in name else {"is_flag": True}
    if several and not isinstance(settings.get("type"), Shape):
        settings["multiple"] = True
    return click.option(name or f"--{field_name.replace('_', '-')}", field_name, **settings)


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """MODEL and the options that build it."""

    model: str = argument()
    input_shape: tuple[int, ...] | None = option(SHAPE_HELP, type=Shape())
    input_texts: tuple[str, ...] = option(INPUT_HELP, "--input", metavar="NAME:SHAPE[:int64]")
    range_text: str | None = option(RANGE_HELP, "--input-range", metavar="LOW:HIGH")
    example: Path | None = option(EXAMPLE_HELP)
    batch: int = option("Batch size.", default=TrainingConfig.batch_size, type=click.IntRange(2))
    weights: Path | None = option("Weights file (.safetensors).")
    seed: int = option("Seed of the initial weights.", default=0, type=SEED)

    def inputs(self) -> tuple[tuple[int, ...], Inputs]:
        """The shape of a sample, and what else is known about the samples.

        Raises InputError or DataError if an option is wrong.
        """
        return inputs_of(self.input_shape, self.input_texts, self.range_text, self.example)


def inputs_of(
    shape: tuple[int, ...] | None, texts: Sequence[str], text: str | None, example: Path | None
) -> tuple[tuple[int, ...], Inputs]:
    """The samples as --input-shape or --input, and --input-range or --example describe them."""
    if (shape is None) == (not texts):
        raise click.UsageError("Give --input-shape, or --input for each of several inputs.")
    if text is not None and example is not None:
        raise click.UsageError(
            "--input-range cannot be combined with --example. Leave out one of them."
        )
    parts = parse_inputs(texts)
    sizes = (packed_size(parts),) if shape is None else shape
    if text is not None:
        return sizes, Inputs(parse_range(text), parts)
    return sizes, Inputs(() if example is None else read_range(example, sizes, parts), parts)


@dataclass(frozen=True, kw_only=True)
class TrainingOptions:
    """The options of local training."""

    epochs: int = option("Passes over the local data, at least 1.", default=TrainingConfig.epochs)
    learning_rate: float = option(
        "Learning rate, at least 0.", default=TrainingConfig.learning_rate
    )
    loss: Loss = option(LOSS_HELP, default=TrainingConfig.loss)
    masked: bool = option("Set the logit of a class to zero if the device has no samples of it.")
    optimizer: Optimizer = option(
        "Optimizer of the training step.", default=TrainingConfig.optimizer
    )
    momentum: float = option(
        "Momentum of sgd and nesterov, at least 0 and below 1.", default=TrainingConfig.momentum
    )
    weight_decay: float = option(
        "Weight decay, added to the gradient; adamw subtracts it from the parameters instead.",
        default=TrainingConfig.weight_decay,
    )
    proximal: float = option(
        "mu of FedProx, which keeps a device near the weights that it received.",
        default=TrainingConfig.proximal,
    )

    augment: tuple[str, ...] = option(
        "Random change of the samples in each training step; repeatable: flip, flip-vertical, "
        "shift:4, noise:0.1, mask:10:first. Slices train without these changes.",
        metavar="CHANGE",
    )
    sample_clip: float | None = option(
        "Differential privacy for samples: clip the gradient of each sample to this L2 norm.",
        type=float,
    )
    sample_noise: float | None = option(
        "Standard deviation of the noise in the sum of the clipped gradients, divided by "
        "--sample-clip.",
        type=float,
    )
    sample_delta: float = option(
        "The delta for which devices tell their owners epsilon.",
        default=TrainingConfig.sample_delta,
    )

    def training(self, batch: int) -> TrainingConfig:
        """Make the training config from these options, with `batch` samples in a batch.

        Raises InputError if a value is not allowed.
        """
        return TrainingConfig(batch, **{name: getattr(self, name) for name in HYPERPARAMETERS})


HYPERPARAMETERS = tuple(declared.name for declared in fields(TrainingOptions))


class WithList(click.Command):
    """A command with an option that prints a list and exits, as JSON if `--json` is given too.

    Click runs such an option before it reads the options after it. Therefore this class looks for
    `--json` in all arguments first.
    """

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """See click."""
        ctx.meta[LIST_AS_JSON] = "--json" in args
        return super().parse_args(ctx, args)


def repeated(*names: str) -> list[str]:
    """Return the options in `names` that the user gave, as words of a command line.

    Use them to print another command with the same options.
    """
    words, context = [], click.get_current_context()
    for given in context.command.params:
        source = context.get_parameter_source(given.name or "")
        if given.name in names and source == ParameterSource.COMMANDLINE:
            value = context.params[given.name]
            if isinstance(given, click.Option) and given.multiple:
                words += [word for item in value for word in (given.opts[0], str(item))]
                continue
            words.append(given.opts[0])
            if value is not True:
                text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
                words.append(text)
    return words
