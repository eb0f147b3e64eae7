"""`edgetailor plan`: choose the submodel for a device."""

import json
import logging
import math
import shlex
from dataclasses import dataclass
from typing import Any

import click

from device_agent.cli.console import print_json
from device_agent.cli.options import Size
from toolkit.cli.early_checks import check_model, check_specs
from toolkit.cli.options import (
    HYPERPARAMETERS,
    JSON_HELP,
    LIST_AS_JSON,
    ModelOptions,
    TrainingOptions,
    WithList,
    option,
    repeated,
    takes,
)
from toolkit.terminal_output import show_stages

logger = logging.getLogger(__name__)


class StepTime(click.FloatRange):
    """A time like 5ms, 0.5s or 0.5, in seconds."""

    name = "time"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Read a time with or without a unit."""
        text = str(value).strip().lower()
        scale = 1e-3 if text.endswith("ms") else 1.0
        try:
            seconds = float(text.removesuffix("ms").removesuffix("s")) * scale
        except ValueError:
            seconds = math.nan
        if not math.isfinite(seconds):
            self.fail(
                f"Invalid time {value!r}: write for example 5ms, 0.5s or 0.5 (seconds).",
                param,
                ctx,
            )
        return float(super().convert(seconds, param, ctx))


def list_profiles(context: click.Context, _: click.Parameter, asked: bool) -> None:
    """Print the built-in profiles and exit."""
    if not asked:
        return
    from toolkit.planning.built_in_profiles import profiles_as_json, show_profiles

    if context.meta[LIST_AS_JSON]:
        click.echo(json.dumps(profiles_as_json(), indent=1))
    else:
        show_profiles()
    context.exit()


@dataclass(frozen=True, kw_only=True)
class PlanOptions(TrainingOptions, ModelOptions):
    """The options of `plan`."""

    profile: str = option(
        "Device profile: a FILE from `edgetailor-agent calibrate --out`, or a built-in NAME.",
        required=True,
    )
    list_profiles: bool = option(
        "Print the built-in profiles and exit.", is_eager=True, callback=list_profiles
    )
    memory: int | None = option(
        "Memory budget of the agent's process, like 256MB.  [default: 80% of the available memory]",
        type=Size(),
    )
    step_time: float | None = option(
        "Time budget for one batch, like 5ms; without a unit in seconds.",
        type=StepTime(0, min_open=True),
    )
    bandwidth: int | None = option(
        "Traffic budget of a round, sent and received together, like 20MB.", type=Size()
    )
    specs: tuple[str, ...] = option(
        "Submodel SPEC to choose from; repeatable.  [default: all families and sizes]",
        "--submodel",
    )
    no_cache: bool = option("Build the graphs again; ignore the cache.")
    as_json: bool = option(JSON_HELP, "--json")


@click.command(cls=WithList)
@takes(PlanOptions)
def plan(options: PlanOptions) -> None:
    """Choose the strongest submodel that fits a device.

    Memory and time are predicted from the exported graphs and from the device's calibration. A
    submodel fits if the upper bounds of its predictions are within all budgets. The search begins
    with the strongest submodel, and exports only the submodels that it has to compare. If no
    submodel fits, the exit code is 5.
    The figures of each graph are kept in ~/.cache/edgetailor.

    \b
        edgetailor plan toolkit.models:resnet20 --input-shape 3,32,32 \\
            --profile device.json --memory 120MB --step-time 500ms
    """
    from profiles.documents.device_profile import load_device

    training = options.training(options.batch)
    device = load_device(options.profile)
    submodels = check_specs(options.specs)
    check_model(options.model, options.weights)
    shape, inputs = options.inputs()

    show_stages()
    logger.info("loading PyTorch")

    from toolkit.cli.printed import plan_table
    from toolkit.planning import model_plan
    from toolkit.planning.plan_reasons import check_fits
    from toolkit.submodels.model_loading import load_model

    logger.info("loading the model")
    planned = model_plan.plan(
        load_model(options.model, options.weights, options.seed, inputs),
        shape,
        device,
        memory=options.memory,
        step_s=options.step_time,
        bandwidth=options.bandwidth,
        specs=submodels,
        training=training,
        cache=not options.no_cache,
        progress=logger.info,
    )
    if options.as_json:
        print_json(json.dumps(plan_table.as_json(planned), indent=1))
    else:
        plan_table.show_plan(planned)
    check_fits(planned)
    if planned.plan.chosen is not None and not options.as_json:
        click.echo(f"next: {export_of(planned.plan.chosen.submodel, options.model)}")


def export_of(submodel: str, model: str) -> str:
    """The command that exports the chosen submodel with the training options of the plan."""
    own = ("input_shape", "input_texts", "range_text", "example", "batch", "weights", "seed")
    given = repeated(*own, *HYPERPARAMETERS)
    words = ["edgetailor", "export", model, *given, "--submodel", submodel, "--out", "bundle"]
    return shlex.join(words)
