"""`edgetailor plan`: choose the submodel for a device."""

import json
import logging
import math
from pathlib import Path
from typing import Any

import click

from device_agent.cli.console import print_json
from profiles.errors import InputError
from toolkit.cli.early_checks import check_model, check_specs
from toolkit.cli.options import (
    LIST_AS_JSON,
    WithList,
    model_options,
    training_options,
)
from toolkit.cli.printed.suggested_export import export_of
from toolkit.submodels.hyperparameters import TrainingConfig
from toolkit.terminal_output import show_stages

logger = logging.getLogger(__name__)


class Bytes(click.ParamType[int]):
    """A size like 256MB."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Read a size with its unit."""
        from profiles.units import parse_bytes

        try:
            return parse_bytes(str(value))
        except InputError as error:
            self.fail(str(error), param, ctx)


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


def list_profiles(context: click.Context, option: click.Parameter, asked: bool) -> None:
    """Print the built-in profiles and exit."""
    if not asked:
        return
    from toolkit.planning.profile_list import profiles_as_json, show_profiles

    if context.meta[LIST_AS_JSON]:
        click.echo(json.dumps(profiles_as_json(), indent=1))
    else:
        show_profiles()
    context.exit()


@click.command(cls=WithList)
@model_options
@training_options
@click.option(
    "--profile",
    required=True,
    help="Device profile: a FILE from `edgetailor-agent calibrate --out`, or a built-in NAME.",
)
@click.option(
    "--list-profiles",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=list_profiles,
    help="Print the built-in profiles and exit.",
)
@click.option(
    "--memory",
    type=Bytes(),
    help="Memory budget of the agent's process, like 256MB.  [default: 80% of the available]",
)
@click.option(
    "--step-time",
    type=StepTime(0, min_open=True),
    help="Time budget for one batch, like 5ms; without a unit in seconds.",
)
@click.option(
    "--bandwidth",
    type=Bytes(),
    help="Traffic budget of a round, sent and received together, like 20MB.",
)
@click.option(
    "--submodel",
    "specs",
    multiple=True,
    help="Submodel SPEC to choose from; repeatable.  [default: all families and sizes]",
)
@click.option("--no-cache", is_flag=True, help="Build the graphs again; ignore the cache.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_context
def plan(
    context: click.Context,
    /,
    model: str,
    input_shape: tuple[int, ...],
    batch: int,
    weights: Path | None,
    seed: int,
    training: TrainingConfig,
    profile: str,
    memory: int | None,
    step_time: float | None,
    bandwidth: int | None,
    specs: tuple[str, ...],
    no_cache: bool,
    as_json: bool,
) -> None:
    """Choose the strongest submodel that fits a device.

    Memory and time are predicted from the exported graphs and from the device's calibration. A
    submodel fits if the upper bounds of its predictions are within all budgets. If none fits, the
    exit code is 5. The figures of each graph are kept in ~/.cache/edgetailor.

    \b
        edgetailor plan toolkit.models:resnet20 --input-shape 3,32,32 \\
            --profile device.json --memory 120MB --step-time 500ms
    """
    from profiles.documents.device_profile import load_device

    device = load_device(profile)
    submodels = check_specs(specs)
    check_model(model, weights)

    show_stages()
    logger.info("loading PyTorch")

    from exporters.graph_cache import cache_folder
    from profiles.cost_model.submodel_choice import Budgets
    from toolkit.planning import plan, plan_display
    from toolkit.planning.candidate_specs import specs as all_specs
    from toolkit.planning.submodel_workloads import Workloads
    from toolkit.submodels.model_loading import load_model

    logger.info("loading the model")
    loaded = load_model(model, weights, seed)
    workloads = Workloads(loaded, input_shape, training, cache=None if no_cache else cache_folder())
    planned = plan.plan_for(
        device,
        workloads,
        submodels or all_specs(loaded, input_shape, batch),
        Budgets(memory=memory, step=step_time, traffic=bandwidth),
        progress=logger.info,
    )
    if as_json:
        print_json(json.dumps(plan_display.as_json(planned), indent=1))
    else:
        plan_display.show_plan(planned)
    plan_display.check_fits(planned)
    if planned.plan.chosen is not None and not as_json:
        click.echo(f"next: {export_of(planned.plan.chosen.submodel, model, context)}")
