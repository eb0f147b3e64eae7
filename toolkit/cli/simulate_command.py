"""`edgetailor simulate`: a federation of many clients on this machine."""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import click

from device_agent.formats.class_counts import worst_class_text
from device_agent.formats.protocol.fleet import further_text
from profiles.text_formatting import counted
from toolkit.cli.early_checks import check_data, check_model
from toolkit.cli.options import argument, option, takes
from toolkit.cli.printed.simulated_rounds import shown_rounds
from toolkit.terminal_output import show_stages

logger = logging.getLogger(__name__)

EngineName = Literal["local", "ray"]
LogName = Literal["mlflow", "tensorboard"]


@dataclass(frozen=True, kw_only=True)
class SimulateOptions:
    """The options of `simulate`. Most have the names of the library's arguments."""

    config: Path = argument(metavar="FILE")
    out: Path | None = option(
        "Folder for the results.  [default: FILE's name without its ending, in this folder]"
    )
    workers: int = option(
        "Processes that train the clients of a round; 1 trains in the process of the command.",
        default=1,
        type=click.IntRange(1),
    )
    engine: EngineName = option(
        "Where workers run: local is this machine, ray is a Ray cluster of one or more machines. "
        "ray needs edgetailor[ray].",
        default="local",
    )
    threads: int = option(
        "Threads of PyTorch in each worker. Small models are fastest with one.",
        default=1,
        type=click.IntRange(1),
    )
    device: str = option(
        "Where clients are trained: a device of PyTorch, such as cuda.", default="cpu"
    )
    seed: int | None = option(
        "Replaces both seeds of FILE: `seed` and that of [simulation].", type=click.IntRange(0)
    )
    rounds: int | None = option(
        "Replaces `rounds` of FILE; an endless federation needs it.", type=click.IntRange(1)
    )
    logs: tuple[LogName, ...] = option(
        "Log each round to MLflow, or to event files for TensorBoard in the folder; repeatable.",
        "--log",
    )
    force: bool = option("Replace an earlier simulation in the folder.")


@click.command()
@takes(SimulateOptions)
def simulate(options: SimulateOptions) -> None:
    """Simulate the federation in FILE (TOML) on this machine.

    FILE is a federation's file, as `serve` reads it, with a table [simulation]. Each client trains
    what an agent would train, without bundles and network. The folder gets history.jsonl with a
    line for each round, curves.png, config.json and global.safetensors. If the simulation is
    interrupted, the same command continues it. Results do not depend on --workers and --engine.
    """
    from toolkit.simulation.simulation_config import load_simulation

    file = load_simulation(options.config, options.seed, options.rounds)
    check_model(file.model, file.weights)
    check_data(file.simulation.data)
    console = show_stages()
    logger.info("loading PyTorch")

    from toolkit.simulation.simulate import simulate as run

    folder = options.out or Path(options.config.stem)
    others = {key: value for key, value in vars(options).items() if key not in ("config", "out")}
    with shown_rounds(console, file.last_round or 0) as show:
        history = run(options.config, folder, **others, on_round=show, progress=logger.info)
    last = history[-1]
    accuracy = "" if last.accuracy is None else f"accuracy {last.accuracy:.2%}, "
    figures = last.held_out
    click.echo(
        f"{folder}: {counted(len(history), 'round')}, {accuracy}loss {last.loss:.4f}"
        f"{further_text(figures)} on held-out samples"
    )
    worst = None if figures is None else worst_class_text(figures.classes or [])
    if worst is not None:
        click.echo(f"worst class: {worst}")
