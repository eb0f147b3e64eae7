"""`edgetailor simulate`: a federation of many clients on this machine."""

import logging
from pathlib import Path
from typing import TYPE_CHECKING

import click

from profiles.text_formatting import counted
from toolkit.cli.early_checks import check_data, check_model
from toolkit.cli.options import Choice
from toolkit.cli.printed.simulated_rounds import shown_rounds
from toolkit.terminal_output import show_stages

logger = logging.getLogger(__name__)

if TYPE_CHECKING:
    from toolkit.simulation.metric_logs import LogName
    from toolkit.simulation.simulate import EngineName


@click.command()
@click.argument("config", metavar="FILE", type=click.Path(path_type=Path))
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    help="Folder for the results.  [default: FILE's name without its ending, in this folder]",
)
@click.option(
    "--workers",
    default=1,
    show_default=True,
    type=click.IntRange(1),
    help="Processes that train the clients of a round; 1 trains in the process of the command.",
)
@click.option(
    "--engine",
    default="local",
    show_default=True,
    type=click.Choice(["local", "ray"]),
    help="Where workers are: local, on this machine; ray, in Ray, also on several machines. Needs "
    "edgetailor[ray].",
)
@click.option(
    "--threads",
    default=1,
    show_default=True,
    type=click.IntRange(1),
    help="Threads of PyTorch in each worker. Small models are fastest with one.",
)
@click.option(
    "--device",
    default="cpu",
    show_default=True,
    help="Where clients are trained: a device of PyTorch, such as cuda.",
)
@click.option("--seed", type=click.IntRange(0), help="Replaces both seeds of FILE.")
@click.option(
    "--log",
    "logs",
    multiple=True,
    type=Choice(["mlflow", "tensorboard"]),
    help="Log each round to MLflow, or to event files for TensorBoard in the folder; repeatable.",
)
@click.option("--force", is_flag=True, help="Replace an earlier simulation in the folder.")
def simulate(
    config: Path,
    out: Path | None,
    workers: int,
    engine: "EngineName",
    threads: int,
    device: str,
    seed: int | None,
    logs: tuple["LogName", ...],
    force: bool,
) -> None:
    """Simulate the federation in FILE (TOML) on this machine.

    FILE is a federation's file, as `serve` reads it, with a table [simulation]. Each client trains
    what an agent would train, without bundles and network. The folder gets history.jsonl with a
    line for each round, curves.png, config.json and global.safetensors. If the simulation is
    interrupted, the same command continues it. Results do not depend on --workers and --engine.
    """
    from toolkit.simulation.simulation_config import load_simulation

    found = load_simulation(config, seed)
    check_model(found.model, found.weights)
    check_data(found.simulation.data)
    console = show_stages()
    logger.info("loading PyTorch")

    from toolkit.simulation.simulate import simulate as run

    folder = out or Path(config.stem)
    with shown_rounds(console, found.rounds) as show:
        history = run(
            *(config, folder),
            workers=workers,
            engine=engine,
            threads=threads,
            device=device,
            seed=seed,
            force=force,
            logs=logs,
            on_round=show,
            progress=logger.info,
        )
    last = history[-1]
    accuracy = "" if last.accuracy is None else f"accuracy {last.accuracy:.2%}, "
    click.echo(
        f"{folder}: {counted(len(history), 'round')}, {accuracy}loss {last.loss:.4f} on held-out "
        "samples"
    )
