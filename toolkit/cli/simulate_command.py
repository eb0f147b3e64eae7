"""`edgetailor simulate`: a federation of many clients on this machine."""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import click
import msgspec

from device_agent.cli.console import print_json
from device_agent.cli.options import Size
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
        "Replaces both seeds of FILE: `seed`, and `seed` of [simulation].", type=click.IntRange(0)
    )
    rounds: int | None = option(
        "Replaces `rounds` of FILE; an endless federation needs it.", type=click.IntRange(1)
    )
    logs: tuple[LogName, ...] = option(
        "Log each round to MLflow, or to event files for TensorBoard in the folder; repeatable.",
        "--log",
    )
    force: bool = option("Replace an earlier simulation in the folder.")
    grid: tuple[str, ...] = option(
        "Simulate each combination of the values of keys in FILE, in place of its table [sweep]; "
        "repeatable.",
        metavar="KEY=A|B",
    )
    most_traffic: int | None = option(
        "In a sweep: the most that a device may receive and send in a round, like 5MB.",
        type=Size(),
    )
    most_memory: int | None = option(
        "In a sweep: the most memory that a device may need, like 100MB. Needs profiles.",
        type=Size(),
    )
    as_json: bool = option("In a sweep: print one JSON object.", "--json")

    def for_runs(self) -> dict[str, Any]:
        """The arguments of `edgetailor.simulate` that are the same for each run."""
        shared = ("workers", "engine", "threads", "device", "seed", "rounds", "logs", "force")
        return {name: getattr(self, name) for name in shared}


@click.command()
@takes(SimulateOptions)
def simulate(options: SimulateOptions) -> None:
    """Simulate the federation in FILE (TOML) on this machine.

    FILE is a federation's file, as `serve` reads it, with a table [simulation]. Each client trains
    what an agent would train, without bundles and network. The folder gets history.jsonl with a
    line for each round, curves.png, config.json and global.safetensors. If the simulation is
    interrupted, the same command continues it. Results do not depend on --workers and --engine.

    With --grid, or with the table [sweep] in FILE, each combination of values is a run with a
    folder of its own in the folder of the sweep. A table shows the mean accuracy of the last rounds
    and the costs of each run, and trade-off.png draws them. --most-traffic and --most-memory select
    the best run within limits. A key contains the name of a kind of devices, and | separates the
    values:

    \b
        edgetailor simulate fleet.toml --most-traffic 50kB \\
            --grid "devices.board.submodel=slice:0.3|low-rank:0.25" \\
            --grid "training.learning_rate=0.05|0.1"
    """
    from toolkit.coordinator.federation_file.sweep_table import grid_of_table
    from toolkit.simulation.simulation_config import load_simulation
    from toolkit.simulation.sweeps.grid import grid_of_options

    grid = grid_of_options(options.grid)
    file = None if grid else load_simulation(options.config, options.seed, options.rounds)
    if file is None or file.sweep:
        _simulate_grid(options, grid or grid_of_table(file.sweep if file and file.sweep else {}))
        return
    if options.as_json or (options.most_traffic, options.most_memory) != (None, None):
        raise click.UsageError(
            "--most-traffic, --most-memory and --json are for sweeps: give --grid, or the table "
            "[sweep] in FILE."
        )
    check_model(file.model, file.weights)
    check_data(file.simulation.data)
    console = show_stages()
    logger.info("loading PyTorch")

    from toolkit.simulation.simulate import simulate as run

    folder = options.out or Path(options.config.stem)
    with shown_rounds(console, file.last_round or 0) as show:
        history = run(
            options.config, folder, **options.for_runs(), on_round=show, progress=logger.info
        )
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


def _simulate_grid(options: SimulateOptions, grid: dict[str, list[object]]) -> None:
    folder = options.out or Path(f"{options.config.stem}-sweep")
    console = show_stages()
    logger.info("loading PyTorch")

    from toolkit.cli.printed.sweep_table import show_sweep, sweep_object
    from toolkit.simulation.sweeps.sweep import runs_of, sweep
    from toolkit.simulation.sweeps.trade_off_plot import PLOT, draw_trade_off
    from toolkit.simulation.sweeps.trade_offs import Limits, points_of

    runs = runs_of(options.config, folder, grid, options.seed, options.rounds)
    limits = Limits(options.most_traffic, options.most_memory)
    limits.check(runs)
    for run in runs:
        check_model(run.config.model, run.config.weights)
        check_data(run.config.simulation.data)
    failures = sweep(
        options.config,
        folder,
        runs,
        watch=lambda rounds: shown_rounds(console, rounds),
        progress=logger.info,
        **options.for_runs(),
    )
    failed = [failure.run for failure in failures]
    points = points_of([run for run in runs if run not in failed])
    if not points:
        raise failures[0].error
    draw_trade_off(points, folder / PLOT)
    if options.as_json:
        print_json(msgspec.json.encode(sweep_object(points, failures, limits)))
    else:
        show_sweep(points, failures, limits, [*grid])
    if failures:
        click.get_current_context().exit(max(failure.error.exit_code for failure in failures))
