"""Options that several commands take."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import click

from toolkit.training import Loss, TrainingConfig

Decorated = Callable[..., Any]
SEED = click.IntRange(0, 2**31 - 1)


class Shape(click.ParamType[tuple[int, ...]]):
    """A sample's shape, like 3,32,32."""

    name = "shape"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, ...]:
        """Read a shape of positive whole numbers."""
        try:
            shape = tuple(int(part) for part in str(value).split(","))
        except ValueError:
            shape = ()
        if not shape or min(shape) < 1:
            self.fail(f"{value!r} is no shape: write a sample's sizes like 3,32,32.", param, ctx)
        return shape


def model_options(command: Decorated) -> Decorated:
    """MODEL and how to build it."""
    for option in (
        click.option(
            "--seed",
            default=0,
            show_default=True,
            type=SEED,
            help="Seed of the initial weights.",
        ),
        click.option("--weights", type=click.Path(path_type=Path), help="Weights (.safetensors)."),
        click.option(
            "--batch",
            default=TrainingConfig.batch_size,
            show_default=True,
            type=click.IntRange(2),
            help="Batch size.",
        ),
        click.option(
            "--input-shape", type=Shape(), required=True, help="One sample's shape, like 3,32,32."
        ),
        click.argument("model"),
    ):
        command = option(command)
    return command


loss_option = click.option(
    "--loss",
    type=click.Choice(get_args(Loss)),
    default=TrainingConfig.loss,
    show_default=True,
    help="What is minimised; mse is for regressions.",
)
