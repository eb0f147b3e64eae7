"""The demo's two baselines: a fleet of full models, and devices that train alone.

Both are simulated with the samples of the demo's devices. Run this module as `python -m
toolkit.demo.baselines FOLDER ROUNDS SEED FULL_TOO`; it prints one JSON object.
"""

import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from device_agent.data.local_data import LocalData
from device_agent.training.batching import held_out as held_out_of
from profiles.errors import UpdateError
from toolkit.coordinator.federation_file.simulation_table import SimulationTable
from toolkit.coordinator.federation_setup import federation
from toolkit.demo import demo_settings
from toolkit.demo.demo_folder import DemoFolder
from toolkit.simulation.chunks import ChunkTrainer
from toolkit.simulation.engines.in_process import InProcess
from toolkit.simulation.partition import Parts
from toolkit.simulation.results import RunFolder
from toolkit.simulation.rounds import Simulation
from toolkit.simulation.simulation_config import SimulationConfig

SUBMODEL = "full"
"""Devices that train alone train the whole model, which favours them in the comparison."""


@dataclass(frozen=True)
class Baselines:
    """The accuracies of both baselines on held-out samples, from 0 to 1.

    A list has one accuracy for each round, from round 0 (before training) on.

    Attributes:
        all_full: The accuracies of the global model if every device trains the full model. None
            if the demo's own fleet already trains full models.
        alone: For each device, the accuracies of a model that it trains only on its own data.
    """

    all_full: Sequence[float] | None
    alone: Mapping[str, Sequence[float]]


def train_baselines(
    held_out: Path, data: Mapping[str, Path], rounds: int, seed: int, full_too: bool
) -> Baselines:
    """Train both baselines.

    Args:
        held_out: The `.npz` file with the samples for the accuracy.
        data: The local data of each device, by its name.
        rounds: How many rounds to train.
        seed: Seed of the initial model and of the training.
        full_too: Whether to train the fleet of full models.

    Returns:
        The accuracies of each round.
    """
    config = SimulationConfig(
        model=demo_settings.MODEL,
        input_shape=demo_settings.INPUT_SHAPE,
        training=demo_settings.TRAINING,
        devices=demo_settings.fleet(all_full=True),
        rounds=rounds,
        seed=seed,
        simulation=SimulationTable(data="", seed=seed),
    )
    model = federation(config)
    start, judges = model.save(), _arrays(held_out)
    engine = InProcess(ChunkTrainer(config, model, judges))
    parts = [_arrays(file) for file in data.values()]
    samples = LocalData(
        np.concatenate([x for x, _ in parts]), np.concatenate([y for _, y in parts])
    )
    ends = np.cumsum([len(labels) for _, labels in parts])[:-1]
    # As in the demo, no device trains on the samples that it keeps apart.
    rows = [
        np.delete(own, held_out_of(len(own), demo_settings.EVALUATION_SHARE))
        for own in np.split(np.arange(len(samples)), ends)
    ]

    def accuracies(clients: Parts) -> list[float]:
        """Train the model on `clients`, each with its rows of the samples. Returns accuracies."""
        model.load(start)
        curve = [_known(model.evaluate(*judges)[0])]
        with tempfile.TemporaryDirectory() as scratch:
            folder = RunFolder(Path(scratch))
            folder.begin({}, force=False)
            specs = [SUBMODEL] * len(clients)
            simulation = Simulation(config, folder, model, samples, judges, specs, {}, clients)
            with suppress(UpdateError):  # training diverged: the model does not change
                simulation.run(engine)
            curve += [_known(result.accuracy) for result in folder.history]
        return curve + curve[-1:] * (rounds + 1 - len(curve))

    return Baselines(
        all_full=accuracies(rows) if full_too else None,
        alone={name: accuracies([own]) for name, own in zip(data, rows, strict=True)},
    )


def _arrays(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """The samples and labels of an `.npz` file."""
    with np.load(path) as file:
        return file["x"], file["y"]


def _known(accuracy: float | None) -> float:
    assert accuracy is not None  # digits are classes
    return accuracy


def main(root: str, rounds: str, seed: str, full_too: str) -> None:
    """Train the baselines on the data in the demo's folder `root`. Print the results as JSON."""
    folder = DemoFolder(Path(root))
    members = demo_settings.members(demo_settings.FLEET)
    data = {member.name: folder.data_of(member.name) for member in members}
    trained = train_baselines(folder.held_out, data, int(rounds), int(seed), full_too == "True")
    print(json.dumps(asdict(trained)))


if __name__ == "__main__":
    main(*sys.argv[1:])
