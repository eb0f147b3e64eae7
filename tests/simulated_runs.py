"""Files of fleets, what two simulations have in common, and an engine elsewhere."""

import logging
import pickle
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np
import torch
from safetensors.torch import load_file

from bundles import write_data
from models_for_tests import CLASSES, INPUT_SHAPE
from toolkit.aggregation.aggregate import Received
from toolkit.simulation.chunks import Chunk, TrainedChunk
from toolkit.simulation.engines.engine import Worker, WorkerSetup
from toolkit.simulation.results import RoundResult, RunFolder
from toolkit.simulation.rounds import Simulation
from toolkit.simulation.simulate import prepare, simulate
from toolkit.simulation.simulation_config import load_simulation


def fleet_file(
    folder: Path, seed: int, specs: Sequence[str], each: int, top: str, simulation: str
) -> Path:
    """The file of a fleet with `each` clients of each spec, which share 100 samples.

    `top` has keys of the file and tables before `[simulation]`; `simulation` has keys of this one.
    """
    draw = np.random.default_rng(seed)
    y = draw.integers(CLASSES, size=100)
    x = draw.normal(size=(100, *INPUT_SHAPE)) + 2 * y[:, None, None, None]
    np.savez(folder / "data.npz", x=x.astype(np.float32), y=y)
    (folder / "fleet.toml").write_text(
        f"""
        model = "models_for_tests:smooth_cnn"
        input_shape = {list(INPUT_SHAPE)}
        {top}
        [simulation]
        data = "data.npz"
        seed = {seed % 1000}
        {simulation}
        {kinds_of(specs, each)}"""
    )
    return folder / "fleet.toml"


def kinds_of(specs: Iterable[str], each: int = 1) -> str:
    """The tables of kinds with `each` clients, one for each spec."""
    return "".join(
        f'[[devices]]\nname = "kind-{number}"\nsubmodel = "{spec}"\ncount = {each}\n'
        for number, spec in enumerate(specs)
    )


TINY_FLEET = """
model = "bundles:tiny_cnn"
input_shape = [1, 6, 6]
rounds = 2

[training]
batch_size = 8
learning_rate = 0.05

[[devices]]
name = "phone"
submodel = "full"
count = 4

[[devices]]
name = "board"
submodel = "slice:classifier"
count = 2
"""
"""The file of six clients; its table `[simulation]` has the data `local.npz`."""
Models = list[Mapping[str, torch.Tensor]]


def run_tiny_fleet(folder: Path, text: str) -> tuple[list[RoundResult], Models, Simulation]:
    """The results of the file `text`, the models from the first one on, and the start."""
    write_data(folder / "local.npz", 240, 3)
    (folder / "fleet.toml").write_text(text)
    start = prepare(load_simulation(folder / "fleet.toml"), RunFolder(folder / "other"))
    models: Models = [dict(start.federation.model.tensors)]

    def keep(result: RoundResult) -> None:
        models.append(load_file(folder / "out" / "state" / f"model-{result.round}"))

    return simulate(folder / "fleet.toml", folder / "out", on_round=keep), models, start


Sent = dict[tuple[int, int], Received]
"""Updates by round and client, in the order in which they are sent."""


def without_times(history: Iterable[RoundResult]) -> list[dict[str, object]]:
    """The results without the seconds that they took."""
    return [
        {key: value for key, value in msgspec.structs.asdict(result).items() if key != "seconds"}
        for result in history
    ]


def outcome(history: list[RoundResult], folder: Path) -> dict[str, object]:
    """All that must not depend on who trains: the history without times, and every other file."""
    files = {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name != "history.jsonl"
    }
    rounds = [{name: getattr(entry, name) for name in entry.__struct_fields__} for entry in history]
    return files | {str(entry.pop("round")): entry for entry in rounds if entry.pop("seconds")}


class Elsewhere:
    """An engine whose one worker sees and returns nothing but bytes, without its own process."""

    def __init__(self, setup: WorkerSetup) -> None:
        self.worker: Worker = Worker(pickle.loads(pickle.dumps(setup)))

    def map(self, round_: int, model: bytes, chunks: Iterable[Chunk]) -> Iterator[TrainedChunk]:
        for chunk in chunks:
            done = self.worker.train(round_, model, pickle.loads(pickle.dumps(chunk)))
            yield pickle.loads(pickle.dumps(done))

    def close(self) -> None:
        logging.disable(logging.NOTSET)
