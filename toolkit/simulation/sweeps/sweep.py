"""Runs a sweep: a simulation for each combination of a grid's values.

Each simulation has a folder of its own below the folder of the sweep. If a sweep is interrupted,
the same call continues it, and does not repeat finished simulations.
"""

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from device_agent.formats.atomic_files import write_file
from profiles.errors import EdgeTailorError, InputError
from toolkit.simulation.logged_figures import Observer
from toolkit.simulation.results import CURVES, LOSS_CODE, MODEL, RunFolder
from toolkit.simulation.simulate import simulate
from toolkit.simulation.simulation_config import SimulationConfig, load_simulation
from toolkit.simulation.sweeps.grid import SEEDS, Grid, combinations, described, folder_names
from toolkit.toml_files import Values

logger = logging.getLogger(__name__)
SWEEP = "sweep.json"
"""The file that shows that a folder is of a sweep."""
Watch = Callable[[int], AbstractContextManager[Observer]]
"""Makes a context for a simulation of this many rounds, with a function that shows each round."""


@dataclass(frozen=True)
class Run:
    """A simulation of a sweep.

    Attributes:
        values: The values that replace values of the file.
        folder: The folder of the results.
        config: The federation's file with these values.
    """

    values: Values
    folder: Path
    config: SimulationConfig

    def read(self, force: bool = False) -> RunFolder:
        """Read the results of the finished rounds.

        Raises InputError if the folder has a simulation with other settings, unless `force`.
        """
        folder = RunFolder(self.folder)
        folder.read(self.config.model_dump(mode="json"), force)
        return folder

    @property
    def is_finished(self) -> bool:
        """Whether all rounds are finished.

        False if the loss is the user's own, because its code may have changed.
        """
        folder = self.read()
        written = all((self.folder / name).is_file() for name in (MODEL, CURVES))
        rounds = self.config.last_round or 0
        return written and len(folder.history) >= rounds and LOSS_CODE not in folder.settings()


class Failure(NamedTuple):
    """A simulation that failed, and its error."""

    run: Run
    error: EdgeTailorError


def runs_of(
    file: Path, out: Path, grid: Grid, seed: int | None = None, rounds: int | None = None
) -> list[Run]:
    """The simulations of a sweep in the folder `out`. Reads and checks the file for each of them.

    Raises InputError if a key or a value is wrong, or if a simulation is not possible. This does
    not check whether a submodel fits the model: the simulation finds that out.
    """
    for name, given, keys in (("seed", seed, SEEDS), ("rounds", rounds, ("rounds",))):
        if given is not None and any(key in grid for key in keys):
            raise InputError(
                "--{option} and --grid both set `{option}`; remove one of them.",
                code="simulation.bad-grid",
                option=name,
            )
    values = combinations(grid)
    return [
        Run(own, out / name, load_simulation(file, seed, rounds, own))
        for own, name in zip(values, folder_names(values), strict=True)
    ]


def sweep(
    file: Path,
    out: Path,
    runs: Sequence[Run],
    *,
    watch: Watch,
    force: bool = False,
    **options: Any,
) -> list[Failure]:
    """Simulate `runs` one after another. If one fails, the next simulations still run.

    Args:
        file: The federation's file.
        out: The folder of the sweep.
        runs: The simulations, from `runs_of`.
        watch: Shows the rounds of each simulation.
        force: Replace earlier simulations in the folders of `runs`.
        options: Other options of `simulate`, such as `workers`.

    Returns:
        The simulations that failed. All other simulations are finished.

    Raises:
        InputError: `out` is not the folder of a sweep, or the folder of a run has a simulation with
            other settings.
    """
    _check(out)
    for run in runs:
        run.read(force)
    out.mkdir(parents=True, exist_ok=True)
    content = {"version": 1, "runs": {run.folder.name: run.values for run in runs}}
    write_file(out / SWEEP, json.dumps(content, indent=1, default=str).encode() + b"\n")
    return [*_failures(file, runs, watch, force, options)]


def _failures(
    file: Path, runs: Sequence[Run], watch: Watch, force: bool, options: Mapping[str, Any]
) -> Iterator[Failure]:
    for number, run in enumerate(runs, 1):
        logger.info("Run %d of %d: %s", number, len(runs), described(run.values))
        if not force and run.is_finished:
            logger.info("it is finished already")
            continue
        arguments = {**options, "values": run.values, "force": force}
        try:
            with watch(run.config.last_round or 0) as show:
                simulate(file, run.folder, on_round=show, **arguments)
        except EdgeTailorError as error:
            logger.warning("run %d failed: %s", number, error)
            yield Failure(run, error)


def _check(out: Path) -> None:
    """Raise InputError if `out` has files, but is not the folder of a sweep."""
    unused = not any(out.iterdir()) if out.is_dir() else not out.exists()
    if not unused and not (out / SWEEP).is_file():
        raise InputError(
            "{path} exists, but is not the folder of a sweep. Give another --out.",
            code="simulation.other-folder",
            path=str(out),
        )
